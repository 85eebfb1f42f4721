"""Loads the compiled kernels, and refuses them if their results would differ from the bits of torch's operations."""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path

import torch

from ... import config
from .check import differing
from .interface import declare

LIBRARY = Path(__file__).with_name("_native.so")
_FUSES = ("AVX2", "AVX512")
"""torch's names of x86 CPU capabilities with which its operations, like the kernels, use fused multiply-adds."""


def why_not_native() -> str | None:
    """The reason why this process does not use the compiled kernels, for messages; None if it does."""
    return _loaded()[1]


def library() -> ctypes.CDLL | None:
    """The compiled kernels; None if torch's operations are used instead, with the same results."""
    return _loaded()[0]


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    if not config.read().native:
        return None, f"{config.NATIVE} is 0"
    if not LIBRARY.exists():
        return None, "they were not compiled when Shoal was installed, for which a C++ compiler is needed"
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() == "x86_64" and capability not in _FUSES:
        return None, f"this CPU or ATEN_CPU_CAPABILITY lacks AVX2 (torch uses {capability})"
    try:
        kernels = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return None, f"they cannot be loaded: {error}"
    declare(kernels)
    found = differing(kernels)
    if found is not None:
        return None, f"they and this torch ({torch.__version__}) round {found} differently"
    return kernels, None
