"""DeMuon: gradient tracking whose step is orthogonal in every matrix of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, Shapes, State
from .catalog import Entry, register
from .matrices import join, matrix_sizes, split
from .mix import Mix
from .momentum import check_beta
from .needs import CONNECTED, DOUBLY_STOCHASTIC, Need
from .stability.growth import Gossip, by_self_weights, dies_out

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Jordan et al. 2024: they bring singular values of 0.003 and more to between 0.68 and 1.13 in five iterations."""


@dataclass(frozen=True)
class DeMuon(Algorithm):
    """Decentralized Muon: momentum of the agents' mean gradient, tracked, and its matrix sign for the step.

    ``m+ = beta m + (1 - beta) g(x)``, ``y+ = W (y + m+ - m)``, ``x+ = W (x - lr msgn(y+))``, with ``m = y = 0`` at
    first (He, Ren, Mao, Larsson 2025, arXiv:2510.01377, as in the authors' code). ``msgn(U S V^T) = U V^T`` of every
    matrix of parameters, by Newton-Schulz iterations; of a vector ``y / |y|``. All singular values of a step are about
    ``lr``, so with a constant ``lr`` it ends at a distance of that order, and with a decreasing one at the optimum,
    however different the agents' objectives are. Sends twice the parameters in a step. State: ``m`` and ``y``, as
    ``x``.

    Args:
        lr: The step.
        beta: The part of the last step's momentum that remains, 0 <= beta < 1.
        iterations: Newton-Schulz iterations.
        shapes: The shapes of the parameters in the order in which they lie in x. An optimizer gives those of its model.
            Without them x is one vector, and the algorithm is gradient tracking with normalized momentum (GT-NSGDm).

    Raises:
        ValueError: ``beta`` or ``iterations`` is out of its range; or, at a step, the shapes are not those of x.
    """

    lr: float
    beta: float = 0.8
    iterations: int = 5
    shapes: Shapes | None = None
    source: ClassVar[str] = "He, Ren, Mao, Larsson 2025, arXiv:2510.01377"
    one_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_beta(self.beta)
        if self.iterations < 1:
            raise ValueError(f"iterations={self.iterations}: pass the number of Newton-Schulz iterations, 5 is usual")

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED, dies_out(self, by_self_weights())

    def at_rest(self) -> Algorithm:
        return Gossip()  # of x, and of y: the matrix sign of 0 is 0

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        return torch.zeros_like(x), torch.zeros_like(x)

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        m, y = state
        new = self.beta * m + (1 - self.beta) * grad(x)
        y = mix(y + new - m)
        return mix(x - self.lr * self._sign(y)), (new, y)

    def _sign(self, y: torch.Tensor) -> torch.Tensor:
        sizes = matrix_sizes(self.shapes or ((y.shape[-1],),), y.shape[-1])
        return join([msgn(matrix, self.iterations) for matrix in split(y, sizes)])


def msgn(matrices: torch.Tensor, iterations: int) -> torch.Tensor:
    """About ``U V^T`` of ``U S V^T``, by iterations of ``a X + b X X^T X + c (X X^T)^2 X``; exact for single rows and
    columns. 0 stays 0.

    Args:
        matrices: ``[..., rows, columns]``.
        iterations: The number of iterations.
    """
    norm: torch.Tensor = matrices.norm(dim=(-2, -1), keepdim=True)
    X = matrices / norm.clamp(min=torch.finfo(matrices.dtype).tiny)
    rows, columns = X.shape[-2:]
    if min(rows, columns) == 1:
        return X
    if rows > columns:
        return msgn(X.mT, iterations).mT
    for _ in range(iterations):
        gram = X @ X.mT
        X = _A * X + (_B * gram + _C * gram @ gram) @ X
    return X


register(
    Entry(
        "DeMuon",
        lambda: DeMuon(0.02),
        2,
        "Networks of large matrices, such as transformers, on data that differ between agents.",
    )
)
