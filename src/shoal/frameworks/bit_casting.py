"""Numbers as integers with the same bits: gathered values may be NaN, even if SHOAL_CHECK_FINITE refuses to send
NaN.
"""

from __future__ import annotations

import torch

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """In the same memory, of the same shape; itself where no whole number is as long. ``view(dtype)`` makes it numbers
    again."""
    tensor = tensor.contiguous()
    return tensor.view(_WHOLE.get(tensor.element_size(), tensor.dtype))
