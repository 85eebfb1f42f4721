"""Load the compiled kernels, and refuse them where they would not give the bits of torch's operations."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("_native.so")
VARIABLE = "SHOAL_NATIVE"
_FUSES = ("AVX2", "AVX512")
"""What torch calls CPUs of the x86 family on which its operations, like the kernels, use fused multiply-adds."""


def why_not_native() -> str | None:
    """What keeps the compiled kernels from being used in this process, as words for people; None if they are used."""
    return _loaded()[1]


def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where torch's operations are used, with the same results."""
    return _loaded()[0]


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get(VARIABLE, "1") == "0":
        return None, f"{VARIABLE} is 0"
    if not LIBRARY.exists():
        return None, "they were not compiled when Shoal was installed, for which a C++ compiler is needed"
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() == "x86_64" and capability not in _FUSES:
        return None, f"this CPU or ATEN_CPU_CAPABILITY lacks AVX2 (torch uses {capability})"
    try:
        kernels = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return None, f"they cannot be loaded: {error}"
    _declare(kernels)
    from .check import differing

    found = differing(kernels)
    if found is not None:
        return None, f"they and this torch ({torch.__version__}) round {found} differently"
    return kernels, None


def _declare(kernels: ctypes.CDLL) -> None:
    pointer, integer, size, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_double
    key = ctypes.c_uint64
    signatures: dict[str, list[type]] = {
        "shoal_weigh": [integer, pointer, pointer, pointer, integer, pointer, integer, number, size, integer],
        "shoal_copy": [pointer, pointer, size],
        "shoal_reduce": [integer, pointer, pointer, integer, integer, key, size, integer],
        "shoal_uniform": [integer, pointer, key, size],
        "shoal_quantise": [integer, pointer, size, key, pointer, size, size, number, ctypes.c_uint, pointer],
        "shoal_maxima": [integer, pointer, size, size, pointer],
        "shoal_multiples": [integer, pointer, size, pointer, size, size, pointer],
        "shoal_grid_codes": [pointer, size, size, size, pointer, pointer, pointer],
        "shoal_grid_numbers": [pointer, size, size, size, pointer, pointer, pointer],
        "shoal_signs": [pointer, size, pointer],
        "shoal_pack": [ctypes.c_uint, pointer, size, pointer],
        "shoal_unpack": [ctypes.c_uint, pointer, size, pointer],
        "shoal_largest": [pointer, size, size, pointer, pointer, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, integer
