"""Learning rates at which the steps of an algorithm on quadratic objectives shrink every error."""

from __future__ import annotations

import math
from collections.abc import Iterator

import networkx as nx
import torch

from ...topology.analysis.span import DENSE_LIMIT
from ...topology.schedule import Schedule
from ..algorithm import Algorithm, Gradient
from ..needs import Facts
from .linear_map import Rows, rounds_of

_LIMIT = 1 + 1e-7
"""The limit of the eigenvalues of a period's steps. Conserved quantities have the eigenvalue 1."""
_WARM_UP = 64
"""Steps from zero, in which the weights of push-sum and the counts of RelaySum settle."""
_SQUARINGS = 40
"""Squarings of a matrix, whose ``2^40``-th power shows its spectral radius."""
_MOST_STEPS = 4096
_TRIES, _BISECTIONS = 40, 2
_MARGIN = 0.7
"""The factor on the longest stable step: other curvatures than the tested ones may need a shorter one."""


def safe_lr(algorithm: Algorithm, topology: nx.Graph | Schedule, L: float) -> float:
    """A learning rate with which an algorithm converges on a topology, where gradients have the Lipschitz constant L.

    The steps of a period are written out as a matrix, for quadratic objectives whose curvatures differ between agents:
    all L, or 0 for some agents and L for others, or random. The learning rate is 0.7 of the longest one for which no
    eigenvalue of any of these matrices exceeds 1, nor for any shorter learning rate. Curvatures of agents in different
    directions, the noise of gradients, and the error of a compressor are not considered: messages count as exact.

    Args:
        algorithm: Its steps must be linear in x and in its state. Its own learning rate is not read.
        topology: A graph with its weights, or a schedule, that the algorithm accepts (:func:`check`).
        L: The largest curvature of an agent's objective, above 0.

    Returns:
        The ``lr`` for the algorithm, or for the algorithm that it wraps.

    Raises:
        ValueError: L is not above 0; the algorithm has no ``lr``, or its steps are not linear; the topology has too
            many agents for the matrix; or no learning rate is stable.
    """
    if not 0 < L < math.inf:
        raise ValueError(f"L={L}: pass the Lipschitz constant of the gradients, a number above 0")
    lr = _lr_of(algorithm)
    unit = algorithm.scaled(1 / (lr * L)) if lr else None
    if unit is None:
        raise ValueError(f"{algorithm!r} has no learning rate (lr) above 0 to choose")
    facts = Facts(topology)
    if facts.size > DENSE_LIMIT // 4:
        raise ValueError(
            f"{facts.size} agents are too many for the matrix of their steps: pass the same topology of at most "
            f"{DENSE_LIMIT // 4} agents. A larger one bears shorter steps"
        )
    curvatures = list(_curvatures(facts.size))

    def stable(factor: float) -> bool:
        scaled = unit.scaled(factor)
        assert scaled is not None
        return all(spectral_radius(step_matrix(scaled, facts, curvature * L)) <= _LIMIT for curvature in curvatures)

    shortest_unstable = 4.0
    for halvings in range(_TRIES):
        factor = 2.0 ** (1 - halvings)
        if not stable(factor):
            shortest_unstable = factor
        elif 4 * factor < shortest_unstable:  # so are twice and four times as long ones
            break
    else:
        raise ValueError(f"{algorithm!r} is stable with no learning rate on {facts.schedule.describe()}")
    longest = shortest_unstable / 2
    for _ in range(_BISECTIONS):
        middle = (longest + shortest_unstable) / 2
        longest, shortest_unstable = (middle, shortest_unstable) if stable(middle) else (longest, middle)
    return _MARGIN * longest / L


class _Messages(Rows):
    """With messages of an edge's own."""

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        return x[self._agent_of_links]

    def gather(self, messages: torch.Tensor) -> torch.Tensor:
        out = messages.new_zeros((self.size, *messages.shape[1:]))
        return out.index_add_(0, self._agent_of_links, messages)

    def edges(self, messages: torch.Tensor, *, nbytes: int | None = None) -> torch.Tensor:
        return messages[torch.from_numpy(self.weights.reverse)]

    @property
    def _agent_of_links(self) -> torch.Tensor:
        return torch.from_numpy(self.weights.neighbours[0])


def _lr_of(algorithm: Algorithm) -> float | None:
    if hasattr(algorithm, "lr"):
        return float(algorithm.lr)
    inner = getattr(algorithm, "algorithm", None)
    return _lr_of(inner) if isinstance(inner, Algorithm) else None


def _curvatures(size: int) -> Iterator[torch.Tensor]:
    """The curvatures of the agents, as shares of L, float64 ``[n, 1]``."""
    ranks = torch.arange(size)
    drawn = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for column in (ranks >= 0, ranks == 0, ranks % 2 == 0, drawn.square()):
        yield column.to(torch.float64).unsqueeze(1)


def spectral_radius(matrix: torch.Tensor) -> float:
    """The largest modulus of an eigenvalue, float64 ``[N, N]``; infinite for a matrix that is not finite."""
    if not bool(matrix.isfinite().all()):
        return math.inf
    try:
        return float(torch.linalg.eigvals(matrix).abs().max())
    except RuntimeError:  # LAPACK's iteration did not converge
        return _by_squaring(matrix)


def _by_squaring(matrix: torch.Tensor) -> float:
    """Gelfand's formula, ``|M^k|^(1/k)`` for ``k = 2^40``, of powers that are divided by their norm."""
    logarithm = 0.0
    for squarings in range(_SQUARINGS):
        norm = float(matrix.norm())
        if not norm:
            return 0.0
        logarithm += math.log(norm) / 2**squarings
        matrix = matrix / norm
        matrix = matrix @ matrix
    return math.exp(logarithm)


def step_matrix(algorithm: Algorithm, facts: Facts, curvature: torch.Tensor) -> torch.Tensor:
    """A period's steps on the objectives ``curvature_i x^2 / 2``: float64 ``[N, N]``, of x and the state of all agents.

    Raises:
        ValueError: The steps are not linear.
    """
    try:
        matrix, probe, found = _matrix_and_probe(algorithm, facts, curvature)
        expected = matrix @ probe
        scale = max(1.0, float(expected.abs().max()))
        linear = torch.allclose(found, expected, rtol=0, atol=1e-6 * scale, equal_nan=True)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # shapes that do not follow that of x, or other messages
        linear = False
    if not linear:
        raise ValueError(f"the steps of {algorithm!r} are not linear, so that no matrix tells where they are stable")
    return matrix


def _matrix_and_probe(
    algorithm: Algorithm, facts: Facts, curvature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The matrix; a test vector, twice; and its image under the steps."""
    mix = _Messages(facts, rounds_of(facts))
    grad = Gradient(lambda x: curvature * x)
    cycle = min(algorithm.cycle(rounds_of(facts)), _MOST_STEPS)
    mix.begin(0)
    x = torch.zeros(facts.size, 2, dtype=torch.float64)
    state = tuple(algorithm.init(x, grad, mix))
    of_map = [place for place, tensor in enumerate(state) if tensor.shape[-1] == 2 and tensor.dtype == x.dtype]
    # Only state outside the map has to settle: the rest of the state is replaced below.
    settling = cycle * -(-_WARM_UP // cycle) if len(of_map) < len(state) else 0
    first = settling or cycle
    for step in range(settling):
        mix.begin(step)
        x, state = algorithm.step(x, state, grad, mix)
    heights = [facts.size, *(len(state[place]) for place in of_map)]

    def apply(tensors: torch.Tensor) -> torch.Tensor:
        x, *parts = torch.split(tensors, heights)
        whole = list(state)
        for place, part in zip(of_map, parts, strict=True):
            whole[place] = part
        after = tuple(whole)
        for step in range(first, first + cycle):
            mix.begin(step)
            x, after = algorithm.step(x, after, grad, mix)
        return torch.cat([x, *(after[place] for place in of_map)])

    unit = torch.eye(sum(heights), dtype=torch.float64)
    probe = 3 * torch.randn(sum(heights), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = apply(torch.cat([unit, probe], 1))
    return found[:, :-2], probe, found[:, -2:]
