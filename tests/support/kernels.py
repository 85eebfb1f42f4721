"""The implementations of kernels, and where tests run them: on a CUDA device, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

import pytest
import torch

from shoal.kernels.native import why_not_native

from .reference import same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def why_no_programs() -> str | None:
    """The reason why programs in Triton cannot run in these tests."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if DEVICE == "cpu" and tuple(int(part) for part in version("triton").split(".")[:2]) < (3, 9):
        return "the interpreter of releases of Triton before 3.9 was not tried: it may round a fused multiply-add twice"
    return None


REASON = why_no_programs()
PROGRAMS = pytest.param("triton", marks=pytest.mark.skipif(REASON is not None, reason=str(REASON)))
NATIVE = pytest.param("native", marks=pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native())))
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["torch", NATIVE, PROGRAMS])
QUIET = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
"""Triton's interpreter computes with numpy, which warns of infinities and NaN."""


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits, on whatever devices, but for those inside a NaN: devices make their own, CPUs hand some on."""
    one, other = one.cpu(), other.cpu()
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if one.dtype != other.dtype or one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
        return False
    return same_bits(one.nan_to_num(0.0, torch.inf, -torch.inf), other.nan_to_num(0.0, torch.inf, -torch.inf))
