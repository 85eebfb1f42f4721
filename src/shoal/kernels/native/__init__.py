"""The kernels for CPUs, compiled when Shoal is installed: one pass over memory instead of torch's one for each term.

:func:`library` loads them, once. They are called through ctypes, which releases the interpreter lock and needs no
headers of Python to compile: one build serves all versions of Python. :mod:`~shoal.kernels.native.build` compiles them.

They are refused if their results would differ from the bits of torch's operations. The two are compared at
loading, on a few numbers of each kind. Agents with and without the kernels must compute the same bits. Whether torch
fuses a multiply-add depends on its build and on the CPU, so this module compares results instead of assuming it.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path

import torch

from ... import config

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


_NUMBERS = 96 + 5
"""A length with full tiles and a remainder; for torch, with full vectors and a remainder."""


def differing(kernels: ctypes.CDLL) -> str | None:
    """The first operation whose bits differ from torch's, for messages; None if there is none."""
    chance = torch.Generator().manual_seed(5)
    drawn = [torch.randn(_NUMBERS, generator=chance, dtype=torch.float64) for _ in range(3)]
    for dtype, code in DTYPES.items():
        inputs = [tensor.to(dtype) for tensor in drawn]
        pointers = (ctypes.c_void_p * 3)(*[tensor.data_ptr() for tensor in inputs])
        out = torch.empty(_NUMBERS, dtype=dtype)
        for scale in (NO_SCALE, MULTIPLY, DIVIDE):
            weights = (ctypes.c_double * 3)(0.3, 0.1, 0.7)
            kernels.shoal_weigh(code, out.data_ptr(), None, pointers, 3, weights, scale, 3.0, _NUMBERS, 0)
            if not torch.equal(out, _weighed(inputs, list(weights), scale)):
                return f"weighted sums of {dtype}"
        for how, number in REDUCTIONS.items():
            kernels.shoal_reduce(code, out.data_ptr(), pointers, 3, number, 0, _NUMBERS, 0)
            if not torch.equal(out, _reduced(inputs, how)):
                return f"reductions ({how}) of {dtype}"
    return None


def _weighed(inputs: list[torch.Tensor], weights: list[float], scale: int) -> torch.Tensor:
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    first, *others = [tensor.to(wide) for tensor in inputs]
    if scale == NO_SCALE:
        total = first * weights[0]
        for tensor, weight in zip(others, weights[1:], strict=True):
            total.add_(tensor, alpha=weight)
    else:
        total = first + others[0] + others[1]
        total = total * 3.0 if scale == MULTIPLY else total / 3.0
    return total.to(inputs[0].dtype)


def _reduced(inputs: list[torch.Tensor], how: str) -> torch.Tensor:
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    steps = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}
    first, *others = [tensor.to(wide) for tensor in inputs]
    for tensor in others:
        first = steps.get(how, torch.add)(first, tensor)
    return (first / 3.0 if how == "average" else first).to(inputs[0].dtype)


DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
REDUCTIONS = {"sum": 0, "average": 1, "product": 2, "min": 3, "max": 4}
NO_SCALE, MULTIPLY, DIVIDE = range(3)


def declare(kernels: ctypes.CDLL) -> None:
    """Declare the types of each function, so that ctypes checks and converts its arguments."""
    pointer, integer, size, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_double
    key = ctypes.c_uint64
    signatures: dict[str, list[type]] = {
        "shoal_weigh": [integer, pointer, pointer, pointer, integer, pointer, integer, number, size, integer],
        "shoal_copy": [pointer, pointer, size],
        "shoal_reduce": [integer, pointer, pointer, integer, integer, key, size, integer],
        "shoal_multiply_words": [integer],
        "shoal_uniform": [integer, pointer, key, size],
        "shoal_quantise": [integer, pointer, size, key, pointer, size, size, number, ctypes.c_uint, pointer],
        "shoal_maxima": [integer, pointer, size, size, pointer],
        "shoal_multiples": [integer, pointer, size, pointer, size, size, pointer],
        "shoal_grid_codes": [pointer, size, size, size, pointer, pointer, pointer],
        "shoal_grid_numbers": [pointer, size, size, size, pointer, pointer, pointer],
        "shoal_signs": [pointer, size, pointer],
        "shoal_pack": [ctypes.c_uint, pointer, size, pointer],
        "shoal_unpack": [ctypes.c_uint, pointer, size, pointer],
        "shoal_largest": [pointer, size, size, pointer, pointer],
        "shoal_drawn_largest": [integer, key, size, size, key, key, pointer, size, pointer, size],
        "shoal_write_places": [pointer, size, size, ctypes.c_uint, integer, pointer],
        "shoal_read_places": [pointer, size, size, ctypes.c_uint, integer, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, integer
