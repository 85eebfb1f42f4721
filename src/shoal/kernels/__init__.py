"""Sums, reductions and copies on the tensors' device, with one read and one write per element.

Each has up to three implementations with bitwise equal results: a Triton program, a compiled kernel for CPUs
(``native``), and torch operations in the same order. :func:`implementation_of` returns the one that is used. See
docs/kernels.md.
"""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from .native import library

Implementation = Literal["triton", "native", "torch"]
_LEAST_CAPABILITY = (8, 0)
"""The compute capability of Ampere, from which on Triton supports devices fully."""


@functools.cache
def why_not_triton() -> str | None:
    """The reason why Triton cannot run on the CUDA devices of this machine, for error messages; None if it can.

    With ``torch.version.hip`` Triton is not used: the programs were compiled, and their code was read, for NVIDIA's
    devices only.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'shoal[cuda]'"
    if torch.version.hip is not None:
        return "this torch is for ROCm, for which Shoal's programs were never compiled"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not hands_over_whole_floats():
        return "this release of Triton hands floats over in 32 bits, whatever a program says: take a newer one"
    return None


def hands_over_whole_floats() -> bool:
    """Whether this release of Triton passes float64 parameters in 64 bits.

    Older releases ignore some of the declared types and round float64 weights to 32 bits without an error.
    """
    from .programs import weighted_sum

    typed = [parameter for parameter in weighted_sum.params if parameter.annotation in ("fp64", "i64")]
    return bool(typed) and all(parameter.annotation_type == parameter.annotation for parameter in typed)


def implementation_of(tensor: torch.Tensor) -> Implementation:
    """The implementation that kernels use on the device of ``tensor``, if none is given.

    ``"triton"`` on NVIDIA's devices from Ampere on, if Triton is installed; ``"native"`` on CPUs, if the compiled
    kernels are available (:func:`~shoal.kernels.native.why_not_native`).
    """
    if not tensor.is_cuda:
        return "native" if tensor.is_cpu and library() is not None else "torch"
    if why_not_triton() is not None:
        return "torch"
    return "triton" if _capability(tensor.device.index) >= _LEAST_CAPABILITY else "torch"


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: Triton starts programs there, wherever their tensors are."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
