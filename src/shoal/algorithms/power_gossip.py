"""PowerGossip: neighbours find the direction in which they differ most, and average along it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad

from .algorithm import Algorithm, Gradient, State
from .catalog import Entry, register
from .mix import Mix
from .needs import CONNECTED_LINKS, LINKS, STATIC, Need


@dataclass(frozen=True)
class PowerGossip(Algorithm):
    """D-PSGD (adapt, then combine) whose mixing sends the product of the parameters with a vector, not themselves.

    The parameters are a matrix X of ``rows``. On each link, with ``D = X_j - X_i`` for i < j, half an iteration takes
    the unit vector v of the right side and computes ``u = D v``, for which each end sends its ``X v``. Both ends then
    approach each other by ``w_ij u v^T``, the part of D that v sees. The other half does so from the left with
    ``u / |u|``, and its result is the v of the next iteration: power iteration, so that the vectors come to where D is
    largest (Vogels, Karimireddy, Jaggi 2020, arXiv:2008.01425). What one end gains the other loses, so the mean stays.
    v v^T is a projection: the mixing is as stable as without compression, and there is nothing to tune.

    The authors count halves: their ``num_iterations`` is twice ``iterations``, and their one message a step, of the one
    side and the other in turn, is ``iterations=0.5``.

    The weights are Metropolis-Hastings of the graph, ``w_ij = 1 / (1 + max(degree_i, degree_j))``. Where the agents'
    data differ the vectors never settle: runs that differ in one rounding take other ways within a hundred steps.

    Args:
        lr: The step.
        iterations: The number of power iterations in a step, whole ones and halves: two messages each, of ``rows`` and
            of ``d / rows`` numbers. With a half over the next step begins on the other side.
        rows: The number of rows of the matrix; the last row is filled up with zeros. By default the root of d, with the
            shortest messages.
    """

    lr: float
    iterations: float = 1
    rows: int | None = None
    source: ClassVar[str] = "Vogels, Karimireddy, Jaggi 2020, arXiv:2008.01425"
    one_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.iterations < 0.5 or self.iterations * 2 % 1:
            raise ValueError(f"iterations={self.iterations}: pass 0.5, 1, 1.5, ...")
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows={self.rows}: pass 1 or more")

    @property
    def needs(self) -> tuple[Need, ...]:
        return LINKS, STATIC, CONNECTED_LINKS

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        """Weights ``[links, 1]``, and vectors ``[links, rows]`` and ``[links, columns]`` that both ends agree on."""
        rows, columns = self._shape(x)
        degree = mix.spread(mix.gather(mix.spread(mix.ones(x))))
        drawn = mix.spread(mix.uniform(mix.ones(x).expand(*x.shape[:-1], rows + columns)) - 0.5)
        vectors = drawn + mix.edges(drawn)
        return 1 / (1 + torch.maximum(degree, mix.edges(degree))), vectors[:, :rows], vectors[:, rows:]

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        weights, left, right = state
        x = x - self.lr * grad(x)
        halves = round(2 * self.iterations)
        for half in range(mix.round * halves, (mix.round + 1) * halves):
            if half % 2 == 0:
                seen, left = self._see(self._matrices(mix.spread(x)), right, left, mix)
                x = self._approach(x, weights, seen, mix)
            else:
                seen, right = self._see(self._matrices(mix.spread(x)).mT, left, right, mix)
                x = self._approach(x, weights, seen.mT, mix)
        return x, (weights, left, right)

    @staticmethod
    def _see(X: torch.Tensor, v: torch.Tensor, last: torch.Tensor, mix: Mix) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of D that v sees, shape of X, and the next vector of the other side: the last one where D v = 0."""
        v = v / v.norm(dim=-1, keepdim=True)
        own = (X @ v.unsqueeze(-1)).squeeze(-1)
        u = mix.sign(own) * (mix.edges(own) - own)
        return u.unsqueeze(-1) * v.unsqueeze(-2), torch.where(u.norm(dim=-1, keepdim=True) > 0, u, last)

    @staticmethod
    def _approach(x: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor, mix: Mix) -> torch.Tensor:
        return x + mix.gather(mix.sign(x) * weights * seen.flatten(-2)[..., : x.shape[-1]])

    def _shape(self, x: torch.Tensor) -> tuple[int, int]:
        rows = self.rows or math.ceil(math.sqrt(x.shape[-1]))
        return rows, -(-x.shape[-1] // rows)

    def _matrices(self, x: torch.Tensor) -> torch.Tensor:
        """``[links, d]`` to ``[links, rows, columns]``."""
        rows, columns = self._shape(x)
        return pad(x, (0, rows * columns - x.shape[-1])).view(-1, rows, columns)


register(
    Entry(
        "PowerGossip",
        lambda: PowerGossip(0.05),
        64 / 1000,
        "The shortest messages with nothing to tune, where the parameters are large matrices.",
    )
)
register(
    Entry(
        "PowerGossip, one message a step",
        lambda: PowerGossip(0.05, iterations=0.5),
        32 / 1000,
        "As above for half the bytes, as its authors count an iteration.",
    )
)
