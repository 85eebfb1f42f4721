"""States on their way to the test: tensors would go through memory that ends with the agent."""

from __future__ import annotations

import io
from typing import Any

import torch


def packed(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
