"""Momentum that averages with the neighbours may swing their differences up. Does it? By running it without a gradient.

Then a step is a linear map of what agents have and remember, and so are the steps of a whole period, with all that
wrappers make of them. Differences die out if its eigenvalues lie within the unit circle. There are three ways to find
the largest, of which the first that applies is taken: where all rounds have the same eigenvectors, as shifts, tori and
every static graph do, a small matrix for each; else the matrix of the whole period; else an iteration that applies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from ..topology.analysis.span import DENSE_LIMIT, EDGE_LIMIT, HELD_LIMIT, LONGEST_PERIOD, Span
from ..topology.analysis.symmetry import find_invariance
from .algorithm import Algorithm, Gradient
from .mix import EVERYBODY, Mix
from .needs import LOOKED_AT, Facts, Need
from .weights import RoundWeights

DIES_OUT = "differences die out"
_TOLERANCE = 1e-6
_LONGEST = 4096
"""Steps that are taken at most: of a longer period, the first so many."""
_COLUMNS, _AT_LEAST, _IN_ALL = 8, 64, 2048
"""Of the iteration: vectors, steps between two looks at them, and steps after which it gives its best answer."""

Eigenvalues = NDArray[np.complex128]


def dies_out(algorithm: Algorithm) -> Need:
    """Where there is no gradient, what the agents differ by shrinks, whatever the algorithm remembers of it."""

    def problem(facts: Facts) -> str:
        found = growth(algorithm, facts)
        if found < 1 + _TOLERANCE:
            return ""
        return f"without any gradient they grow {found:.4g} times in a step of {algorithm!r}"

    return Need(
        DIES_OUT,
        problem,
        "Exchange more often, take a topology that mixes faster or in which agents keep more weight of their own, or "
        "take Momentum(GradientDescent(lr), beta), whose momentum knows nothing of the averaging.",
        "the differences between agents to die out under its momentum",
    )


def with_wrapper(wrapper: Algorithm, needs: tuple[Need, ...]) -> tuple[Need, ...]:
    """What a wrapped algorithm needs, where it matters that it is wrapped."""
    return tuple(dies_out(wrapper) if need.name == DIES_OUT else need for need in needs)


def growth(algorithm: Algorithm, facts: Facts) -> float:
    """The factor by which differences between agents grow in a step in the long run, where there is no gradient.

    Args:
        algorithm: Its state must be tensors of the shape of x, and its steps linear in x and in them.
        facts: Of a doubly stochastic topology.
    """
    rounds = _rounds(facts)
    steps = min(algorithm.cycle(rounds), _LONGEST)
    eigenvalues = _eigenvalues(facts, rounds)
    if eigenvalues is not None:
        return _of_modes(algorithm, _Modes(facts.size - 1, eigenvalues, rounds), steps)
    mix = _Rows(facts, rounds)
    blocks = 1 + len(_state(algorithm, mix, torch.zeros(facts.size, 1, dtype=torch.float64)))
    if blocks * facts.size <= DENSE_LIMIT:
        return _of_matrix(algorithm, mix, blocks, steps)
    return _by_iteration(algorithm, mix, blocks, steps)


def _rounds(facts: Facts) -> int:
    """How many rounds to look at: a period, unless it is very long."""
    period = facts.schedule.period
    if period is None:
        return LOOKED_AT
    return period if period <= LONGEST_PERIOD and period * facts.size <= HELD_LIMIT // 4 else min(period, LOOKED_AT)


# The map


def _zero(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


def _state(algorithm: Algorithm, mix: Mix, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mix.begin(0)
    state: tuple[torch.Tensor, ...] = tuple(algorithm.init(x, Gradient(_zero), mix))
    return state


def _apply(
    algorithm: Algorithm,
    mix: Mix,
    steps: int,
    tensors: tuple[torch.Tensor, ...],
    size_of: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Some steps of x and the state, and the logarithm of what they were divided by, lest they overflow."""
    grad = Gradient(_zero)
    scaled = torch.zeros((), dtype=torch.float64)
    for step in range(steps):
        mix.begin(step)
        x, state = algorithm.step(tensors[0], tensors[1:], grad, mix)
        size = size_of(torch.stack([x, *state]).abs())
        size = torch.where(size > 0, size, 1.0)
        tensors = tuple(one / size for one in (x, *state))
        scaled = scaled + size.log()
    return tensors, scaled


def _rate(matrices: torch.Tensor, scaled: torch.Tensor, steps: int) -> float:
    """What the largest eigenvalue of any matrix grows by in a step.

    1 where there are no numbers, as with ``lr=0``, of which this condition has nothing to say.
    """
    if not bool(matrices.isfinite().all() and scaled.isfinite().all()):
        return 1.0
    radius = torch.linalg.eigvals(matrices).abs().amax(-1)
    return math.exp(float((radius.log() + scaled).max()) / steps)


def _of_modes(algorithm: Algorithm, mix: _Modes, steps: int) -> float:
    """A matrix for each eigenvector that is not agreement: of what becomes of x, and of each part of the state."""
    blocks = 1 + len(_state(algorithm, mix, torch.zeros(mix.size, 1, dtype=torch.complex128)))
    unit = torch.eye(blocks, dtype=torch.complex128)
    begin = tuple(row.expand(mix.size, blocks) for row in unit)
    found, scaled = _apply(algorithm, mix, steps, begin, lambda size: size.amax((0, 2)).unsqueeze(-1))
    return _rate(torch.stack(found, 1), scaled.view(-1), steps)


def _of_matrix(algorithm: Algorithm, mix: _Rows, blocks: int, steps: int) -> float:
    size = mix.size
    differences = torch.eye(size, dtype=torch.float64) - 1 / size
    begin = tuple(
        torch.cat([differences if one == here else torch.zeros_like(differences) for one in range(blocks)], 1)
        for here in range(blocks)
    )
    found, scaled = _apply(algorithm, mix, steps, begin, lambda largest: largest.max())
    return _rate(torch.cat(found), scaled, steps)


def _by_iteration(algorithm: Algorithm, mix: _Rows, blocks: int, steps: int) -> float:
    """Subspace iteration: the largest Ritz value that is known to be above 1, or else 1."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(blocks, mix.size, _COLUMNS, dtype=torch.float64, generator=generator)
    basis = torch.linalg.qr((start - start.mean(1, keepdim=True)).flatten(0, 1)).Q
    rate, steps = 1.0, steps * -(-_AT_LEAST // steps)
    for _ in range(max(2, _IN_ALL // steps)):
        tensors = tuple(basis.view(blocks, mix.size, _COLUMNS))
        found, scaled = _apply(algorithm, mix, steps, tensors, lambda largest: largest.max())
        image = torch.stack(found)
        image = (image - image.mean(1, keepdim=True)).flatten(0, 1)
        if not bool(image.isfinite().all()):
            return 1.0
        values, vectors = torch.linalg.eig(basis.T @ image)
        largest = int(values.abs().argmax())
        vector = vectors[:, largest]
        residual = image.to(vector.dtype) @ vector - values[largest] * (basis.to(vector.dtype) @ vector)
        radius = values[largest].abs()
        rate = math.exp(float((radius - residual.norm()).clamp(min=0).log() + scaled) / steps)
        if residual.norm() < 1e-3 * radius:
            break
        basis = torch.linalg.qr(image).Q
    return rate


# What W is


def _eigenvalues(facts: Facts, rounds: int) -> Callable[[int], Eigenvalues] | None:
    """The eigenvalues of a round but that of agreement, [n - 1], in one order for all rounds; None if there is none."""
    shares = [facts.rounds[number].shares for number in range(rounds)]
    if all(one is not None for one in shares):

        def of_shares(number: int) -> Eigenvalues:
            column = np.zeros(facts.size)
            for hop, share in (shares[number] or {}).items():
                column[hop] = share
            return np.fft.fft(column)[1:]

        return of_shares
    if facts.static and facts.size <= DENSE_LIMIT:
        found = np.linalg.eigvals(_matrix(facts.rounds[0])).astype(np.complex128)
        others = np.delete(found, int(np.abs(found - 1).argmin()))
        return lambda number: others
    if facts.rounds[0].messages > EDGE_LIMIT:
        return None
    span = Span(facts.schedule, rounds)
    invariance = find_invariance(span) if len(span) == rounds else None
    return None if invariance is None else lambda number: invariance.eigenvalues(number)[1:]


def _matrix(weights: RoundWeights) -> NDArray[np.float64]:
    dense = np.zeros((weights.size, weights.size))
    dense[weights.destination, weights.source] = weights.mix
    return dense


class _Linear(Mix):
    """W is doubly stochastic, and there are no messages of an edge's own."""

    def __init__(self, size: int) -> None:
        super().__init__(0)
        self.size = size

    def pull(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def push(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return self.spread(x)

    def whole(self, share: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.spread(x)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        raise TypeError("an algorithm whose messages differ from agent to agent has no growth of this kind")

    def gather(self, messages: torch.Tensor) -> torch.Tensor:
        return self.spread(messages)

    def edges(self, messages: torch.Tensor, *, nbytes: int | None = None) -> torch.Tensor:
        return self.spread(messages)

    def sign(self, like: torch.Tensor) -> torch.Tensor:
        return self.spread(like)

    def _agents(self, like: torch.Tensor) -> torch.Tensor:
        return self.spread(like)


class _Modes(_Linear):
    """A row for each common eigenvector of the rounds, without that of agreement, of which others have no part."""

    def __init__(self, size: int, eigenvalues: Callable[[int], Eigenvalues], rounds: int) -> None:
        super().__init__(size)
        self._of = lru_cache(LOOKED_AT)(lambda index: torch.from_numpy(eigenvalues(index)).unsqueeze(1))
        self._rounds = rounds

    def __call__(
        self, x: torch.Tensor, *, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x * self._of(self.round % self._rounds)

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        return torch.zeros_like(x)


class _Rows(_Linear):
    """A row for each agent, and W as its edges."""

    def __init__(self, facts: Facts, rounds: int) -> None:
        super().__init__(facts.size)
        self._facts, self._rounds = facts, rounds
        self._edges: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, x: torch.Tensor, *, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        destination, source, weight = self._of(self.round % self._rounds)
        return torch.zeros_like(x).index_add_(0, destination, weight * x[source])

    def _of(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if index not in self._edges:
            weights = self._facts.rounds[index]
            arrays = (weights.destination, weights.source, weights.mix[:, None])
            self._edges[index] = tuple(torch.tensor(one) for one in arrays)  # type: ignore[assignment]
        return self._edges[index]

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        return x.mean(0, keepdim=True).expand_as(x)
