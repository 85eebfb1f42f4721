"""The gradients of the least squares problem in closed form: as ``per_agent(loss, ...)``, and ten times as fast."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .least_squares import SIZE, problem


def gradients(size: int = SIZE, scale: float = 1.0) -> Callable[[torch.Tensor], torch.Tensor]:
    """``A_i^T (A_i x_i - scale b_i)`` for each row of ``x``, ``[size, d]``."""
    A, b = problem(size)
    H, h = A.mT @ A, scale * (A.mT @ b.unsqueeze(-1)).squeeze(-1)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return (H @ x.unsqueeze(-1)).squeeze(-1) - h

    return gradient
