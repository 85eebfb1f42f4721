"""Algorithms of matrices: DeMuon and PowerGossip, and the matrices that a vector of parameters consists of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad

from .algorithm import Algorithm, Gradient, Shapes, State
from .catalog import Entry, register
from .mix import Mix
from .momentum import check_beta
from .needs import CONNECTED, CONNECTED_LINKS, DOUBLY_STOCHASTIC, LINKS, STATIC, Need
from .stability.growth import Gossip, by_self_weights, dies_out


def matrix_sizes(shapes: Shapes, numbers: int) -> list[tuple[int, int]]:
    """Rows and columns of each parameter: its first dimension, and all others together; a vector is one column.

    Args:
        shapes: The shapes of the parameters.
        numbers: The length of the vector that they make up.

    Raises:
        ValueError: The shapes have another number of elements.
    """
    if sum(map(math.prod, shapes)) != numbers:
        raise ValueError(
            f"shapes={shapes} have {sum(map(math.prod, shapes))} numbers, and x has {numbers}: give the shapes of the "
            "parameters in the order in which they lie in x"
        )
    return [(shape[0], math.prod(shape[1:])) if shape else (1, 1) for shape in shapes]


def split(x: torch.Tensor, sizes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """``[..., d]`` to a list of ``[..., rows, columns]``."""
    parts = torch.split(x, [rows * columns for rows, columns in sizes], dim=-1)
    return [part.reshape(*part.shape[:-1], *size) for part, size in zip(parts, sizes, strict=True)]


def join(matrices: list[torch.Tensor]) -> torch.Tensor:
    """The inverse of :func:`split`."""
    return torch.cat([matrix.flatten(-2) for matrix in matrices], dim=-1)


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


@dataclass(frozen=True)
class PowerGossip(Algorithm):
    """D-PSGD (adapt, then combine) whose mixing sends products of matrices of parameters with a few vectors.

    On each link, with ``D = X_j - X_i`` of a matrix X for i < j, half an iteration takes ``rank`` orthonormal vectors V
    of the right side and computes ``U = D V``, for which each end sends its ``X V``. Both ends then approach each other
    by ``w_ij U V^T``, the part of D that V sees. The other half does so from the left with U, orthonormalized, and its
    result is the V of the next iteration: power iteration, so that the vectors come to where D is largest (Vogels,
    Karimireddy, Jaggi 2020, arXiv:2008.01425). What one end gains the other loses, so the mean stays. V V^T is a
    projection: the mixing is as stable as without compression, and there is nothing to tune.

    The authors count halves: their ``num_iterations`` is twice ``iterations``, and their one message a step, of the one
    side and the other in turn, is ``iterations=0.5``. As in their code, vectors are sent whole, once in a step, and so
    are matrices for which that is shorter.

    The weights are Metropolis-Hastings of the graph, ``w_ij = 1 / (1 + max(degree_i, degree_j))``. Where the agents'
    data differ the vectors never settle: runs that differ in one rounding take other ways within a hundred steps.

    Args:
        lr: The step.
        iterations: The number of power iterations in a step, whole ones and halves: two messages each, of ``rank``
            times the rows and of ``rank`` times the columns. With a half over the next step begins on the other side.
        rows: Take all parameters as one matrix of so many rows; the last row is filled up with zeros. If neither this
            nor ``shapes`` is given it is the root of d, with the shortest messages.
        rank: The number of vectors.
        shapes: The shapes of the parameters in the order in which they lie in x, each a matrix. An optimizer gives
            those of its model, unless there are ``rows``.
    """

    lr: float
    iterations: float = 1
    rows: int | None = None
    rank: int = 1
    shapes: Shapes | None = None
    source: ClassVar[str] = "Vogels, Karimireddy, Jaggi 2020, arXiv:2008.01425"
    one_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.iterations < 0.5 or self.iterations * 2 % 1:
            raise ValueError(f"iterations={self.iterations}: pass 0.5, 1, 1.5, ...")
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows={self.rows}: pass 1 or more")
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: pass 1 or more")
        if self.rows is not None and self.shapes is not None:
            raise ValueError("rows says that all parameters are one matrix, and shapes that they are several: pass one")

    @property
    def needs(self) -> tuple[Need, ...]:
        return LINKS, STATIC, CONNECTED_LINKS

    def shaped(self, shapes: Shapes) -> Algorithm:
        return self if self.rows else super().shaped(shapes)

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        """Weights ``[links, 1]``, and vectors of the left and of the right side, the same at both ends of a link:
        ``[links, rank * rows]`` and ``[links, rank * columns]`` of each matrix in turn.
        """
        matrices = self._matrices(x)
        left, right = (sum(matrix.rank * matrix.length(side) for matrix in matrices) for side in (0, 1))
        degree = mix.spread(mix.gather(mix.spread(mix.ones(x))))
        drawn = mix.spread(mix.uniform(mix.ones(x).expand(*x.shape[:-1], left + right)) - 0.5)
        vectors = drawn + mix.edges(drawn) if left else drawn
        return 1 / (1 + torch.maximum(degree, mix.edges(degree))), vectors[:, :left], vectors[:, left:]

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        weights, *vectors = state
        x = torch.sub(x, grad(x), alpha=self.lr)  # a new tensor, so the exchanges may change it in place
        toward_lower = mix.sign(x) * weights
        matrices = self._matrices(x)
        halves = round(2 * self.iterations)
        for half in range(mix.round * halves, (mix.round + 1) * halves):
            sent = [matrix for matrix in matrices if matrix.rank or half == mix.round * halves]
            if sent:
                side = half % 2
                found, vectors[side] = _see(mix.spread(x), sent, vectors[1 - side], vectors[side], side, mix)
                for matrix, (u, V) in zip(sent, found, strict=True):
                    matrix.add(x, toward_lower * u, V, side, mix)
        return x, (weights, *vectors)

    def _matrices(self, x: torch.Tensor) -> list[_Matrix]:
        d = x.shape[-1]
        if self.shapes is None:
            rows = self.rows or math.ceil(math.sqrt(d))
            return [_Matrix(0, d, rows, -(-d // rows), min(self.rank, rows, -(-d // rows)))]
        found, start = [], 0
        for rows, columns in matrix_sizes(self.shapes, d):
            rank = min(self.rank, rows, columns)
            shorter = rank * (rows + columns) < rows * columns
            found.append(_Matrix(start, start + rows * columns, rows, columns, rank if shorter else 0))
            start = found[-1].stop
        return found


@dataclass(frozen=True)
class _Matrix:
    """Where a matrix lies in x, and the number of vectors for it: 0 if it is sent whole."""

    start: int
    stop: int
    rows: int
    columns: int
    rank: int

    def length(self, side: int) -> int:
        """The numbers of one of its vectors: of the left side (0), or of the right one (1)."""
        return self.columns if side else self.rows

    def vectors(self, x: torch.Tensor, side: int) -> torch.Tensor:
        """``[links, rank * length]`` to ``[links, length, rank]``."""
        return x.view(len(x), self.length(side), self.rank)

    def product(self, x: torch.Tensor, V: torch.Tensor, side: int) -> torch.Tensor:
        """``X V``, or ``X^T V`` for the right side, of the matrix in ``x`` ``[links, d]``: ``[links, rank * length]``.
        The matrix itself if it is sent whole."""
        numbers = x[:, self.start : self.stop]
        if not self.rank:
            return numbers
        # Vector by vector: MKL takes 4 to 16 times as long for the product of a large matrix and a thin one.
        out = numbers.new_empty((len(numbers), self.length(side), self.rank))
        for row, vectors, result in zip(numbers, V, out, strict=True):
            full = self._full(row)[0]
            for k in range(self.rank):
                result[:, k] = torch.mv(full.mT if side else full, vectors[:, k])
        return out.flatten(1)

    def add(self, x: torch.Tensor, u: torch.Tensor, V: torch.Tensor, side: int, mix: Mix) -> None:
        """Add the sum over an agent's links of ``U V^T``, or of its transpose for the right side, to x in place."""
        numbers = x[..., self.start : self.stop]
        if not self.rank:
            numbers += mix.gather(u)
            return
        U = self.vectors(u, side)
        left, right = (mix.side_by_side(factor) for factor in ((V, U) if side else (U, V)))
        if numbers.shape[-1] == self.rows * self.columns:
            self._full(numbers).baddbmm_(left, right.mT)  # one pass over the matrix for all links
        else:
            numbers += (left @ right.mT).flatten(1)[:, : numbers.shape[-1]].view_as(numbers)

    def _full(self, numbers: torch.Tensor) -> torch.Tensor:
        """``[agents, rows, columns]`` of ``[..., stop - start]``: a view, unless the last row is filled with zeros."""
        missing = self.rows * self.columns - numbers.shape[-1]
        return (pad(numbers, (0, missing)) if missing else numbers).view(-1, self.rows, self.columns)


def _see(
    x: torch.Tensor, matrices: list[_Matrix], v: torch.Tensor, last: torch.Tensor, side: int, mix: Mix
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """The part ``U V^T`` of D that v sees, as u and V for each matrix, and the next vectors of the other side.

    Args:
        x: ``[links, d]``.
        matrices: Those that are exchanged.
        v: The vectors of the one side.
        last: Those of the other side so far.
        side: The other side: 0 for the left one.
        mix: For the messages.
    """
    given = torch.split(v, [matrix.rank * matrix.length(1 - side) for matrix in matrices], dim=-1)
    bases = [_orthonormal(matrix.vectors(part, 1 - side)) for matrix, part in zip(matrices, given, strict=True)]
    products = [matrix.product(x, basis, side) for matrix, basis in zip(matrices, bases, strict=True)]
    own = torch.cat(products, -1)
    found = torch.split(mix.sign(own) * (mix.edges(own) - own), [product.shape[-1] for product in products], dim=-1)
    before = torch.split(last, [matrix.rank * matrix.length(side) for matrix in matrices], dim=-1)
    after = [
        _kept(matrix.vectors(u, side), matrix.vectors(old, side)).flatten(1)
        for matrix, u, old in zip(matrices, found, before, strict=True)
        if matrix.rank
    ]
    return list(zip(found, bases, strict=True)), torch.cat(after, -1) if after else last


def _residual(vector: torch.Tensor, basis: list[torch.Tensor]) -> torch.Tensor:
    for direction in basis:
        vector = vector - (direction * vector).sum(-1, keepdim=True) * direction
    return vector


def _unit(vector: torch.Tensor) -> torch.Tensor:
    length: torch.Tensor = vector.norm(dim=-1, keepdim=True)
    return vector / length.clamp(min=torch.finfo(vector.dtype).tiny)


def _orthonormal(vectors: torch.Tensor) -> torch.Tensor:
    """``[links, length, rank]`` by Gram and Schmidt: in double precision, because both ends of a link must agree."""
    found: list[torch.Tensor] = []
    for vector in vectors.double().unbind(-1):
        found.append(_unit(_residual(vector, found)))
    return torch.stack(found, -1).to(vectors.dtype) if found else vectors


_DEPENDENT = 1e-6
"""A vector of which the others leave a smaller share depends on them, but for rounding."""


def _kept(new: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The new vectors; the last one in the place of each that is zero or depends on those before it. Differences of a
    low rank give such vectors, and the rank may grow again.
    """
    found: list[torch.Tensor] = []
    basis: list[torch.Tensor] = []
    for vector, old in zip(new.double().unbind(-1), last.double().unbind(-1), strict=True):
        residual = _residual(vector, basis)
        independent = residual.norm(dim=-1, keepdim=True) > _DEPENDENT * vector.norm(dim=-1, keepdim=True)
        found.append(torch.where(independent, vector, old))
        basis.append(_unit(_residual(found[-1], basis)))
    return torch.stack(found, -1).to(new.dtype)


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
