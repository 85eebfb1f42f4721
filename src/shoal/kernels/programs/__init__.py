"""The programs in Triton. Only who runs one imports them: they import triton.

What each operation becomes on an NVIDIA device was read in the PTX that Triton 3.9 writes for sm_90, and
``tests/kernels/test_ptx.py`` reads it again: ``tl.fma`` is ``fma.rn``, ``+`` and ``*`` are ``add.rn`` and ``mul.rn``
(each by itself: every start says ``enable_fp_fusion=False``), ``tl.div_rn`` is ``div.rn`` (``/`` of float32 would be
``div.full``, which is not rounded), a conversion is ``cvt.rn``. None has ``.ftz``, so
subnormal numbers stay. ``tl.floor`` would have: it takes small negative numbers for zeros. No program here has it.
"""

from __future__ import annotations

import torch
import triton.language as tl

_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def language_dtype(dtype: torch.dtype) -> tl.dtype:
    """What Triton calls it."""
    return _DTYPES[dtype]
