"""The programs in Triton. They import triton, so only functions that run a program import them.

The instruction of each operation on an NVIDIA device was read in the PTX that Triton 3.9 writes for sm_90, and
``tests/kernels/test_ptx.py`` checks it: ``tl.fma`` is ``fma.rn``, ``+`` and ``*`` are ``add.rn`` and ``mul.rn`` (not
fused, because every start passes ``enable_fp_fusion=False``), ``tl.div_rn`` is ``div.rn`` (``/`` of float32 would be
``div.full``, which is not rounded), a conversion is ``cvt.rn``. None has ``.ftz``, so subnormal numbers are kept.
``tl.floor`` has ``.ftz`` and treats small negative numbers as zeros, so no program here uses it.
"""

from __future__ import annotations

import torch
import triton.language as tl

_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def language_dtype(dtype: torch.dtype) -> tl.dtype:
    """Triton's type for a dtype of torch."""
    return _DTYPES[dtype]
