"""A problem whose answer is known: every agent fits its own data, and the sum over all has one optimum."""

from __future__ import annotations

import torch

SIZE, DIMENSION, SAMPLES = 16, 10, 20


def problem(size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """A ``[size, samples, d]`` and b ``[size, samples]`` in float64: ``f_i(x) = |A_i x - b_i|^2 / 2``."""
    generator = torch.Generator().manual_seed(16)
    A = torch.randn(size, SAMPLES, DIMENSION, dtype=torch.float64, generator=generator) / SAMPLES**0.5
    return A, torch.randn(size, SAMPLES, dtype=torch.float64, generator=generator)


def loss(x: torch.Tensor, A: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of one agent, or of the ``A.shape[0] / SAMPLES`` part of its samples that it was given."""
    scale = SAMPLES / len(b)
    return scale * (A @ x - b).square().sum() / 2


def optimum(size: int = SIZE) -> torch.Tensor:
    """Where the sum of all agents' losses is least, ``[d]``."""
    A, b = problem(size)
    result: torch.Tensor = torch.linalg.solve((A.mT @ A).sum(0), (A.mT @ b.unsqueeze(-1)).sum(0)).squeeze(-1)
    return result
