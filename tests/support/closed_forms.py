"""The least squares of the tests as linear algebra: their gradients, and where algorithms come to rest on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.topology import Schedule
from support.least_squares import DIMENSION, problem


def matrix(topology: Schedule, round_: int = 0) -> torch.Tensor:
    """W of a round, float64 ``[n, n]``."""
    edges = topology.edges(round_)
    W = torch.zeros(topology.size, topology.size, dtype=torch.float64)
    W[torch.tensor(edges.destination), torch.tensor(edges.source)] = torch.tensor(edges.weight)
    return W


def on_all(W: torch.Tensor) -> torch.Tensor:
    """W on the vectors of all agents in a row: ``[n, n]`` to ``[n d, n d]``."""
    return torch.kron(W, torch.eye(DIMENSION, dtype=W.dtype))


def gradient_of_all(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """H ``[n d, n d]`` and c ``[n d]``: the gradients of all agents in a row are ``H x - c``."""
    A, b = problem(size)
    blocks: torch.Tensor = torch.block_diag(*(A.mT @ A))  # type: ignore[no-untyped-call]
    return blocks, (A.mT @ b.unsqueeze(-1)).flatten()


def gradients(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of all agents of a stacked fleet at once, written out: several times faster than by ``per_agent``."""
    A, b = problem(size)
    H, c = A.mT @ A, A.mT @ b.unsqueeze(-1)
    return lambda x: (H @ x.unsqueeze(-1) - c).squeeze(-1)


def rest_of_gradient_descent(W: torch.Tensor, lr: float, atc: bool) -> torch.Tensor:
    """``[n, d]`` with ``x = W (x - lr g(x))`` (ATC), or ``x = W x - lr g(x)``."""
    H, c = gradient_of_all(len(W))
    mixing, unit = on_all(W), torch.eye(len(H), dtype=W.dtype)
    after = mixing if atc else unit
    result: torch.Tensor = torch.linalg.solve(unit - mixing + lr * after @ H, lr * after @ c)
    return result.view(len(W), DIMENSION)


def rest_of_cycle(mixings: Sequence[torch.Tensor], lr: float) -> torch.Tensor:
    """``[n, d]``, where ``x+ = W (x - lr g(x))`` with one W after the other comes back to where it began."""
    size = len(mixings[0])
    H, c = gradient_of_all(size)
    unit = torch.eye(len(H), dtype=H.dtype)
    factor, offset = unit, torch.zeros_like(c)
    for W in mixings:
        mixing = on_all(W)
        factor, offset = mixing @ (factor - lr * H @ factor), mixing @ (offset - lr * (H @ offset - c))
    result: torch.Tensor = torch.linalg.solve(unit - factor, offset)
    return result.view(size, DIMENSION)
