"""Algorithms of matrices: DeMuon and PowerGossip, and the matrices that a vector of parameters consists of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad

from ..compression.quantise import power_of_two_below
from ..topology._validate import check_count
from .algorithm import Algorithm, Gradient, Shapes, State, is_number
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
        TypeError: ``iterations`` is no whole number.
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
        check_count(self, "iterations")

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
    if not matrices.numel():
        return matrices
    # The squares of tiny numbers would be 0, and the step as long as their inverse; those of huge ones infinite.
    scale = power_of_two_below(matrices.abs().amax(dim=(-2, -1), keepdim=True))
    X = matrices / torch.where(scale == 0, 1, scale)
    norm: torch.Tensor = X.norm(dim=(-2, -1), keepdim=True)
    X = X / torch.where(norm == 0, 1, norm)
    rows, columns = X.shape[-2:]
    if min(rows, columns) == 1:
        return X
    if rows > columns:
        return msgn(X.mT, iterations).mT
    for _ in range(iterations):
        gram = X @ X.mT
        X = _A * X + (_B * gram + _C * gram @ gram) @ X
    return X


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
    state_has_mean: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (is_number(self.iterations) and self.iterations >= 0.5 and self.iterations * 2 % 1 == 0):
            raise ValueError(f"iterations={self.iterations}: pass 0.5, 1, 1.5, ...")
        if self.rows is not None:
            check_count(self, "rows")
        check_count(self, "rank")
        if self.rows is not None and self.shapes is not None:
            raise ValueError("rows means one matrix of all parameters, and shapes means several: pass one of them")

    @property
    def needs(self) -> tuple[Need, ...]:
        return LINKS, STATIC, CONNECTED_LINKS

    def shaped(self, shapes: Shapes) -> Algorithm:
        return self if self.rows else super().shaped(shapes)

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        """Weights ``[links, 1]``, and orthonormal vectors of the left and of the right side, the same at both ends of a
        link: ``[links, rank * rows]`` and ``[links, rank * columns]`` of each matrix in turn.
        """
        matrices, _ = self._parts(x)
        sizes = [sum(matrix.rank * matrix.length(side) for matrix in matrices) for side in (LEFT, RIGHT)]
        degree = mix.spread(mix.gather(mix.spread(mix.ones(x))))
        drawn = mix.spread(mix.uniform(mix.ones(x).expand(*x.shape[:-1], sum(sizes))) - 0.5)
        sides = torch.split(drawn + mix.edges(drawn) if matrices else drawn, sizes, dim=-1)
        left, right = (_orthonormal(matrices, side, vectors) for side, vectors in enumerate(sides))
        return 1 / (1 + torch.maximum(degree, mix.edges(degree))), left, right

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        weights, *vectors = state
        x = grad.descent(x, self.lr)  # a new tensor, so the exchanges may change it in place
        matrices, whole = self._parts(x)
        halves = round(2 * self.iterations)
        for half in range(mix.round * halves, (mix.round + 1) * halves):
            if not matrices and not whole:
                break
            side = half % 2
            V = [mix.by_agent(rows) for rows in _split(vectors[1 - side], matrices, 1 - side)]
            products = [matrix.product(x, rows, side, mix) for matrix, rows in zip(matrices, V, strict=True)]
            own = torch.cat([*products, *(mix.spread(x[..., part]) for part in whole)], -1)
            U = mix.edges(own) - own  # of the neighbour's matrix less the agent's own
            factored = vectors[side].shape[-1]
            vectors[side] = _orthonormal(matrices, side, (mix.sign(x) * U)[:, :factored], vectors[side])
            U = weights * U
            for matrix, u, v in zip(matrices, _split(U[:, :factored], matrices, side), V, strict=True):
                matrix.add(x, mix.by_agent(u), v, side)
            gathered = torch.split(mix.gather(U[:, factored:]), [part.stop - part.start for part in whole], dim=-1)
            for part, u in zip(whole, gathered, strict=True):
                x[..., part] += u
            whole = []
        return x, (weights, *vectors)

    def _parts(self, x: torch.Tensor) -> tuple[list[_Matrix], list[slice]]:
        """The matrices that are sent as products, all with equally many vectors, and the parts of x that are sent whole
        because that is shorter."""
        d = x.shape[-1]
        if not d:
            return [], []
        if self.shapes is None:
            rows = self.rows or math.ceil(math.sqrt(d))
            return [_Matrix(slice(0, d), rows, -(-d // rows), min(self.rank, rows, -(-d // rows)))], []
        matrices, whole, stop = [], [], 0
        for rows, columns in matrix_sizes(self.shapes, d):
            part = slice(stop, stop := stop + rows * columns)
            if self.rank * (rows + columns) < rows * columns:  # so rank < rows and rank < columns
                matrices.append(_Matrix(part, rows, columns, self.rank))
            else:
                whole.append(part)
        return matrices, whole


LEFT, RIGHT = 0, 1


@dataclass(frozen=True)
class _Matrix:
    """Where a matrix lies in x, and the number of vectors for it."""

    part: slice
    rows: int
    columns: int
    rank: int

    def length(self, side: int) -> int:
        """The numbers of one of its vectors of a side."""
        return self.columns if side else self.rows

    def product(self, x: torch.Tensor, V: torch.Tensor, side: int, mix: Mix) -> torch.Tensor:
        """``X V``, or ``X^T V`` for the right side, for all links: ``V`` ``[n, vectors, length]`` to ``[links, rank *
        length]``."""
        # As V^T X^T: the thin matrix first, with its vectors in rows. MKL takes up to five times as long otherwise.
        X = self._full(x[..., self.part])
        return mix.by_link(V @ (X if side else X.mT), self.rank).flatten(1)

    def add(self, x: torch.Tensor, U: torch.Tensor, V: torch.Tensor, side: int) -> None:
        """Add the sum over an agent's links of ``U V^T``, or of its transpose for the right side, to x in place: one
        pass over the matrix for all links."""
        numbers = x[..., self.part]
        left, right = (V, U) if side else (U, V)
        if numbers.shape[-1] == self.rows * self.columns:
            self._full(numbers).baddbmm_(left.mT, right)
        else:
            numbers += (left.mT @ right).flatten(1)[:, : numbers.shape[-1]].view_as(numbers)

    def _full(self, numbers: torch.Tensor) -> torch.Tensor:
        """``[n, rows, columns]`` of the matrix's numbers: a view, unless the last row is filled with zeros."""
        missing = self.rows * self.columns - numbers.shape[-1]
        return (pad(numbers, (0, missing)) if missing else numbers).view(-1, self.rows, self.columns)


def _split(vectors: torch.Tensor, matrices: list[_Matrix], side: int) -> list[torch.Tensor]:
    """The vectors of each matrix, in rows: ``[links, numbers]`` to a list of ``[links, rank, length]``."""
    parts = torch.split(vectors, [matrix.rank * matrix.length(side) for matrix in matrices], dim=-1)
    return [
        part.view(len(part), matrix.rank, matrix.length(side)) for part, matrix in zip(parts, matrices, strict=True)
    ]


def _orthonormal(
    matrices: list[_Matrix], side: int, new: torch.Tensor, last: torch.Tensor | None = None
) -> torch.Tensor:
    """Orthonormal vectors of the span of each matrix's new ones, by Gram and Schmidt, ``[links, numbers]``.

    In the place of a new vector that is zero, or depends on those before it, the last one counts: differences of a low
    rank give such vectors, and the rank may grow again. In double precision, because both ends of a link must agree.
    """
    if not matrices:
        return new
    sources = [_split(vectors.double(), matrices, side) for vectors in (new, last) if vectors is not None]
    bases = [torch.cat(rows, 1) for rows in zip(*sources, strict=True)]
    for _ in range(2):  # what the rounding of the inner products leaves, the second time removes
        grams = torch.stack([rows @ rows.mT for rows in bases])
        factors = _gram_schmidt(grams, matrices[0].rank)
        bases = [factor @ rows for factor, rows in zip(factors, bases, strict=True)]
    return torch.cat([rows.flatten(1) for rows in bases], -1).to(new.dtype)


_DEPENDENT = 1e-6
"""A vector of which the others leave a smaller share depends on them, but for rounding."""


def _gram_schmidt(grams: torch.Tensor, rank: int) -> torch.Tensor:
    """The coefficients of orthonormal vectors, ``[..., rank, vectors]``, by the inner products of vectors alone.

    Args:
        grams: The inner products, ``[..., vectors, vectors]``.
        rank: How many of the vectors are wanted. For each that depends on those before it, the vector ``rank`` places
            later is taken, if there is one, and zero if that depends on them, too.
    """
    vectors = grams.shape[-1]
    found = grams.new_zeros((*grams.shape[:-2], rank, vectors))
    units = torch.eye(vectors, dtype=grams.dtype, device=grams.device)
    for k in range(rank):
        before = found[..., :k, :]
        for candidate in reversed(range(k, vectors, rank)):
            products = before @ grams[..., candidate, None]
            square = grams[..., candidate, candidate] - products.square().sum((-2, -1))
            residual = (units[candidate] - (products.mT @ before).squeeze(-2)) * square.rsqrt()[..., None]
            independent = square > _DEPENDENT**2 * grams[..., candidate, candidate]
            found[..., k, :] = torch.where(independent[..., None], residual, found[..., k, :])
    return found


register(
    Entry(
        "DeMuon",
        lambda: DeMuon(0.02),
        2,
        "Networks of large matrices, such as transformers, on data that differ between agents.",
    ),
    Entry(
        "PowerGossip",
        lambda: PowerGossip(0.05),
        64 / 1000,
        "The shortest messages with nothing to tune, where the parameters are large matrices.",
    ),
    Entry(
        "PowerGossip, one message a step",
        lambda: PowerGossip(0.05, iterations=0.5),
        32 / 1000,
        "As above for half the bytes, as its authors count an iteration.",
    ),
)
