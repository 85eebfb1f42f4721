"""A step as a linear map of the differences between agents and of the algorithm's state.

The steps of a whole period are taken, including the effect of wrappers. Three methods find the largest eigenvalue; the
first one that applies is used: if all rounds have the same eigenvectors, as shifts, tori and every static graph do, a
small matrix for each; else the matrix of the whole period; else an iteration that applies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from ...compression import Compressor
from ...topology._validate import EDGE_LIMIT
from ...topology.analysis.span import DENSE_LIMIT, HELD_LIMIT, LONGEST_PERIOD, Span
from ...topology.analysis.spectrum import find_invariance
from ..algorithm import Algorithm, Gradient
from ..mix import EVERYBODY, Mix
from ..needs import LOOKED_AT, Facts
from ..schedule_weights import TOLERANCE, Form, RoundWeights, Weights

_LONGEST = 4096
"""Steps that are taken at most: of a longer period, the first so many."""
_COLUMNS, _AT_LEAST, _IN_ALL = 8, 64, 2048
"""Of the iteration: vectors, steps between two looks at them, and steps after which it gives its best answer."""

Eigenvalues = NDArray[np.complex128]


@dataclass(frozen=True)
class Growth:
    """The effect of a period's steps on differences between agents.

    Attributes:
        logarithm: The logarithm of the largest modulus of an eigenvalue of a period's steps; -inf if the differences
            become 0, and NaN if the steps give NaN, as with ``lr=0`` in an algorithm that divides by it.
        steps: Steps of the period.
        of_w: The eigenvalue, of W or of the product of a period's, along whose eigenvector differences grow most; None
            if unknown.
        of_steps: The eigenvalue of a period's steps; None if unknown.
    """

    logarithm: float
    steps: int
    of_w: complex | None = None
    of_steps: complex | None = None

    @property
    def per_step(self) -> float:
        """The factor by which differences grow in a step in the long run."""
        return math.exp(self.logarithm / self.steps)


def growth_of(algorithm: Algorithm, facts: Facts) -> Growth:
    """The growth of differences between agents in the long run, without a gradient.

    Args:
        algorithm: Its steps must be linear in x and in the state tensors that have the shape of x.
        facts: The properties of the topology.
    """
    rounds = rounds_of(facts)
    steps = min(algorithm.cycle(rounds), _LONGEST)
    grad = Gradient(torch.zeros_like)
    eigenvalues = _eigenvalues(facts, rounds)
    if eigenvalues is not None:
        modes = _Modes(facts.size, eigenvalues, rounds)
        found = _by_modes(algorithm, modes, grad, steps)
        most = int(found.argmax())
        product = complex(np.prod([eigenvalues(number)[most] for number in range(rounds)]))
        return Growth(float(found[most]), steps, of_w=product)
    mix = Rows(facts, rounds)
    parts, _ = _begin(algorithm, mix, grad, torch.zeros(facts.size, 2, dtype=torch.float64, device="cpu"))
    if len(parts) * facts.size <= DENSE_LIMIT:
        return _by_matrix(algorithm, mix, grad, len(parts), steps)
    return _by_iteration(algorithm, mix, grad, len(parts), steps)


def rounds_of(facts: Facts) -> int:
    """How many rounds to look at: a period, unless it is very long."""
    period = facts.schedule.period
    if period is None:
        return LOOKED_AT
    return period if period <= LONGEST_PERIOD and period * facts.size <= HELD_LIMIT // 4 else min(period, LOOKED_AT)


# The map


def _begin(
    algorithm: Algorithm, mix: Mix, grad: Gradient, x: torch.Tensor
) -> tuple[list[int], tuple[torch.Tensor, ...]]:
    """The parts of the state that belong to the map, those of the shape of ``x``, after x itself; and a new state."""
    mix.begin(0)
    state: tuple[torch.Tensor, ...] = tuple(algorithm.init(x, grad, mix))
    alike = [place for place, tensor in enumerate(state) if tensor.shape == x.shape and tensor.dtype == x.dtype]
    return [-1, *alike], state


def _apply(
    algorithm: Algorithm,
    mix: Mix,
    grad: Gradient,
    steps: int,
    tensors: tuple[torch.Tensor, ...],
    size_of: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """A period of steps of x and the state, and the logarithm of their scaling, which prevents overflow.

    It is the second period, because some algorithms have a different first step.
    """
    parts, state = _begin(algorithm, mix, grad, torch.zeros_like(tensors[0][:, :1]).repeat(1, 2))
    scaled = torch.zeros((), dtype=torch.float64, device="cpu")
    for step in range(steps, 2 * steps):
        mix.begin(step)
        whole = list(state)
        for place, tensor in zip(parts[1:], tensors[1:], strict=True):
            whole[place] = tensor
        x, state = algorithm.step(tensors[0], tuple(whole), grad, mix)
        found = [x, *(state[place] for place in parts[1:])]
        size = size_of(torch.stack(found).abs())
        size = torch.where(size > 0, size, 1.0)
        tensors = tuple(tensor / size for tensor in found)
        scaled = scaled + size.log()
    return tensors, scaled


def _by_modes(algorithm: Algorithm, mix: _Modes, grad: Gradient, steps: int) -> torch.Tensor:
    """For each eigenvector the logarithm of the growth in a period of x and the parts of the state: float64
    ``[modes]``.
    """
    parts, _ = _begin(algorithm, mix, grad, torch.zeros(mix.modes, 2, dtype=torch.complex128, device="cpu"))
    blocks = len(parts)
    unit = torch.eye(blocks, dtype=torch.complex128, device="cpu")
    begin = tuple(row.expand(mix.modes, blocks) for row in unit)
    found, scaled = _apply(algorithm, mix, grad, steps, begin, lambda size: size.amax((0, 2)).unsqueeze(-1))
    matrices, scaled = torch.stack(found, 1), scaled.view(-1)
    if not bool(matrices.isfinite().all() and scaled.isfinite().all()):
        return torch.full_like(scaled, math.nan)
    largest: torch.Tensor = torch.linalg.eigvals(matrices).abs().amax(-1)
    return largest.log() + scaled


def _by_matrix(algorithm: Algorithm, mix: Rows, grad: Gradient, blocks: int, steps: int) -> Growth:
    size = mix.size
    differences = torch.eye(size, dtype=torch.float64, device="cpu") - 1 / size
    begin = tuple(
        torch.cat([differences if block == here else torch.zeros_like(differences) for block in range(blocks)], 1)
        for here in range(blocks)
    )
    found, scaled = _apply(algorithm, mix, grad, steps, begin, lambda largest: largest.max())
    matrix = torch.cat(found)
    if not bool(matrix.isfinite().all() and scaled.isfinite()):
        return Growth(math.nan, steps)
    values = torch.linalg.eigvals(matrix)
    largest = values[values.abs().argmax()]
    logarithm = float(largest.abs().log() + scaled)
    return Growth(logarithm, steps, of_steps=complex(largest * scaled.exp()))


def _by_iteration(algorithm: Algorithm, mix: Rows, grad: Gradient, blocks: int, steps: int) -> Growth:
    """Subspace iteration: the largest Ritz value, less its residual."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(blocks, mix.size, _COLUMNS, dtype=torch.float64, generator=generator, device="cpu")
    basis = torch.linalg.qr((start - start.mean(1, keepdim=True)).flatten(0, 1)).Q
    steps *= -(-_AT_LEAST // steps)
    logarithm = -math.inf
    for _ in range(max(2, _IN_ALL // steps)):
        tensors = tuple(basis.view(blocks, mix.size, _COLUMNS))
        found, scaled = _apply(algorithm, mix, grad, steps, tensors, lambda largest: largest.max())
        image = torch.stack(found)
        image = (image - image.mean(1, keepdim=True)).flatten(0, 1)
        if not bool(image.isfinite().all()):
            return Growth(math.nan, steps)
        values, vectors = torch.linalg.eig(basis.T @ image)
        largest = int(values.abs().argmax())
        vector = vectors[:, largest]
        residual = image.to(vector.dtype) @ vector - values[largest] * (basis.to(vector.dtype) @ vector)
        radius = values[largest].abs()
        logarithm = float((radius - residual.norm()).clamp(min=0).log() + scaled)
        if residual.norm() < 1e-3 * radius:
            break
        basis = torch.linalg.qr(image).Q
    return Growth(logarithm, steps)


# What W is


def _eigenvalues(facts: Facts, rounds: int) -> Callable[[int], Eigenvalues] | None:
    """The eigenvalues of a round but that of agreement, [n - 1], in one order for all rounds; None if there is none.

    None, too, where W is not doubly stochastic: its row- and column-stochastic forms then have other eigenvectors.
    """
    if not facts.doubly_stochastic:
        return None
    shares = [facts.rounds[number].shares for number in range(rounds)]
    if None not in shares:

        def of_shares(number: int) -> Eigenvalues:
            column = np.zeros(facts.size)
            for hop, share in (shares[number] or {}).items():
                column[hop] = share
            column[0] += 1 - column.sum()
            return np.fft.fft(column)[1:]

        return of_shares
    if facts.static and facts.size <= DENSE_LIMIT:
        others = _of_static(facts.rounds[0])
        return lambda number: others
    if facts.rounds[0].messages > EDGE_LIMIT:
        return None
    span = Span(facts.schedule, rounds)
    invariance = find_invariance(span) if len(span) == rounds else None
    if invariance is None:
        return None

    def of_invariance(number: int) -> Eigenvalues:
        found = invariance.eigenvalues(number)
        others: Eigenvalues = found[1:] + (1 - found[0])
        return others

    return of_invariance


def _of_static(weights: RoundWeights) -> Eigenvalues:
    dense = np.zeros((weights.size, weights.size))
    dense[weights.destination, weights.source] = weights.mix
    dense[np.diag_indices(weights.size)] += 1 - dense.sum(1)
    # Without the eigenvalue of agreement, which becomes 0.
    dense -= 1 / weights.size
    symmetric = np.abs(dense - dense.T).max() < 1e-12
    found = np.linalg.eigvalsh(dense) if symmetric else np.linalg.eigvals(dense)
    return np.delete(found, int(np.abs(found).argmin())).astype(np.complex128)


class _Linear(Mix):
    """W without agreement, and there are no messages of an edge's own."""

    def __init__(self, size: int) -> None:
        super().__init__(0)
        self.size = size

    def compressed(self, x: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
        return self(x), x

    def _refuse(self, verb: str) -> NoReturn:
        raise TypeError(f"an algorithm that uses mix.{verb} has no growth of this kind")

    def _agents(self, like: torch.Tensor) -> torch.Tensor:
        self._refuse("uniform")


class _Modes(_Linear):
    """A row for each common eigenvector of the rounds, without that of agreement, of which others have no part."""

    def __init__(self, size: int, eigenvalues: Callable[[int], Eigenvalues], rounds: int) -> None:
        super().__init__(size)
        self._of = lru_cache(LOOKED_AT)(lambda index: torch.from_numpy(eigenvalues(index)).unsqueeze(1))
        self._rounds = rounds
        self.modes = len(eigenvalues(0))

    def _weigh(
        self, form: Form, x: torch.Tensor, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x * self._of(self.round % self._rounds)

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        return torch.zeros_like(x)


class Rows(_Linear):
    """A row for each agent, and W as its edges.

    Args:
        facts: The properties of the topology.
        rounds: How many come in turn.
    """

    def __init__(self, facts: Facts, rounds: int) -> None:
        super().__init__(facts.size)
        self._facts, self._rounds = facts, rounds
        self._edges: dict[tuple[int, Form], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @property
    def weights(self) -> RoundWeights:
        """The weights of the round."""
        return self._facts.rounds[self.round % self._rounds]

    def _weigh(
        self, form: Form, x: torch.Tensor, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        destination, source, weight = self._of(self.round % self._rounds, form)
        return torch.zeros_like(x).index_add_(0, destination, weight * x[source])

    def _of(self, index: int, form: Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if (index, form) not in self._edges:
            weights = self._facts.rounds[index]
            arrays = (weights.destination, weights.source, _unrounded(weights, form)[:, None])
            self._edges[index, form] = tuple(torch.tensor(array, device="cpu") for array in arrays)  # type: ignore[assignment]
        return self._edges[index, form]

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        return x.mean(0, keepdim=True).expand_as(x)


def _unrounded(weights: RoundWeights, form: Form) -> Weights:
    """The weights, whose sums may have been rounded to float32, with sums of 1: self weights make up for the rest."""
    values: Weights = getattr(weights, form)
    ends = weights.source if form == "push" else weights.destination
    missing = 1 - np.bincount(ends, weights=values, minlength=weights.size)
    if not 0 < np.abs(missing).max() < TOLERANCE or not len(weights.own):
        return values
    values = values.copy()
    values[weights.own] += missing[weights.destination[weights.own]]
    return values
