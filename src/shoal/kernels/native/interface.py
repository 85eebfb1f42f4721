"""The C interface of the compiled kernels: the arguments of functions, and the codes of dtypes and reductions."""

from __future__ import annotations

import ctypes

import torch

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
