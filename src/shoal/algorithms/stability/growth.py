"""Checks whether the steps of an algorithm shrink differences between agents, and with which learning rates.

A connected doubly stochastic mixing may not remove differences. The check is made at learning rate 0, with an
algorithm's own steps over a period of the topology. On a ring whose agents have no self weight, W has the eigenvalue
-1, and differences alternate for ever. Weights below 0 may give W eigenvalues beyond 1. Momentum that averages with the
neighbours may amplify differences that W alone would shrink.

:func:`safe_lr` finds learning rates at which the steps on quadratic objectives shrink every error.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import ClassVar

import networkx as nx
import numpy as np
import torch

from ...topology.analysis.span import DENSE_LIMIT
from ...topology.schedule import Neighbours, Schedule
from ..algorithm import Algorithm, Gradient, State
from ..mix import Mix
from ..needs import DOUBLY_STOCHASTIC, SYMMETRIC, Facts, Need
from ..schedule_weights import TOLERANCE, Form, RoundWeights, Weights
from .linear_map import Growth, Rows, growth_of, rounds_of

DIES_OUT = "differences die out"
_SLOWEST = 1e-3
"""Times ``1 / n^2``: a period that takes less from differences does not count as one that shrinks them. Connected
graphs with the usual weights take at least about ``1 / n^2``."""
_REMEMBERED = 64

Decide = Callable[[Facts], str | None]
"""Decides without eigenvalues whether differences die out: empty if they do, else the problem, or None if unknown."""


def _unknown(facts: Facts) -> None:
    return None


@dataclass(frozen=True)
class _DiesOut(Need):
    decide: Decide = _unknown
    under: str = ""


def dies_out(algorithm: Algorithm, decide: Decide = _unknown, under: str = "") -> Need:
    """The condition that without a gradient the differences between agents shrink, for any state of the algorithm.

    Args:
        algorithm: Its steps are those of :meth:`Algorithm.at_rest`.
        decide: Decides from the signs of the weights, if these suffice.
        under: The other cause of growing differences beside W, for the message.
    """

    def problem(facts: Facts) -> str:
        decided = decide(facts)
        if decided is not None:
            return decided
        found = _remembered(algorithm.at_rest(), facts)
        if math.isnan(found.logarithm) or found.logarithm < math.log1p(-_negligible(facts)):
            return ""
        of_w = _eigenvalue(found, facts)
        if found.logarithm < _ROUNDED:
            return f"without any gradient they never shrink in the steps of {algorithm!r}{of_w}"
        return f"without any gradient they grow {found.per_step:.4g} times in a step of {algorithm!r}{of_w}"

    remedy = "Take weights of 0 or more, and give every agent a self weight, as (I + W) / 2 in place of W does."
    if under:
        remedy = (
            "Exchange more often, take a topology that mixes faster or in which agents keep more weight of their own, "
            "or take Momentum(GradientDescent(lr), beta), whose momentum knows nothing of the averaging."
        )
    wanted = "the differences between agents to die out" + (under and f" under {under}")
    return _DiesOut(DIES_OUT, problem, remedy, wanted, decide=decide, under=under)


_ROUNDED = 1e-6
"""Eigenvalues as near to the unit circle as this count as on it: weights may have been rounded to float32."""


def with_wrapper(wrapper: Algorithm, needs: tuple[Need, ...]) -> tuple[Need, ...]:
    """The needs of a wrapped algorithm, for which the wrapper matters.

    A wrapper may remove a problem, as a mean of all agents does. If there is no problem without it, it does no harm.
    """

    def of_wrapper(decide: Decide) -> Decide:
        return lambda facts: "" if decide(facts) == "" else None

    return tuple(
        dies_out(wrapper, of_wrapper(need.decide), need.under) if isinstance(need, _DiesOut) else need for need in needs
    )


def _negligible(facts: Facts) -> float:
    return max(1e-13, min(_ROUNDED, _SLOWEST / facts.size**2))


def _eigenvalue(found: Growth, facts: Facts) -> str:
    if found.of_w is not None:
        whose = "W has" if facts.static else f"the product of its {rounds_of(facts)} rounds has"
        return f"; {whose} the eigenvalue {_written(found.of_w)}"
    if found.of_steps is not None:
        whose = "a step has" if found.steps == 1 else f"{found.steps} steps have"
        return f"; {whose} the eigenvalue {_written(found.of_steps)}"
    return ""


def _written(eigenvalue: complex) -> str:
    real, imaginary = (round(part, 6) + 0.0 for part in (eigenvalue.real, eigenvalue.imag))
    if not imaginary:
        return f"{real:.6g}"
    return f"{real:.6g} {'+-'[imaginary < 0]} {abs(imaginary):.6g}i" if real else f"{imaginary:.6g}i"


def _round_grows(facts: Facts) -> str:
    if all(_nonnegative(facts.rounds[number], "mix") for number in range(facts.looked_at)):
        return ""

    def problem(weights: RoundWeights) -> str:
        dense = np.full((facts.size, facts.size), -1 / facts.size)
        dense[weights.destination, weights.source] += weights.mix
        largest = float(np.linalg.norm(dense, 2))
        return "" if largest < 1 + _ROUNDED else f"weights below 0 make them grow up to {largest:.4g} times"

    return facts.first(problem)


NEVER_GROWS = Need(
    DIES_OUT, _round_grows, "Take weights of 0 or more.", "the differences between agents not to grow in any round"
)
"""The condition on single rounds if later ones are not known: no W that is doubly stochastic and without weights
below 0 lets differences grow."""


# Every agent, and every thread of a fleet, makes the same query for the same topology.

_found: OrderedDict[tuple[Algorithm, bytes], Growth] = OrderedDict()
_one_at_a_time = Lock()


def _remembered(algorithm: Algorithm, facts: Facts) -> Growth:
    """The growth, looked up by the algorithm and by all weights of the rounds that are looked at."""
    key = algorithm, _digest(facts)
    try:
        hash(algorithm)
    except TypeError:  # a field of it is a tensor, say
        return growth_of(algorithm, facts)
    with _one_at_a_time:
        if key not in _found:
            while len(_found) >= _REMEMBERED:
                _found.popitem(last=False)
            _found[key] = growth_of(algorithm, facts)
        return _found[key]


def _digest(facts: Facts) -> bytes:
    digest = hashlib.blake2b(f"{facts.size} {facts.schedule.period}".encode())
    for number in range(rounds_of(facts)):
        weights = facts.rounds[number]
        if weights.shares is not None:
            digest.update(repr(sorted(weights.shares.items())).encode())
            continue
        for array in (weights.destination, weights.source, weights.mix):
            digest.update(array.tobytes())
    return digest.digest()


# Decisions by the signs of the weights


def by_self_weights(form: Form = "mix") -> Decide:
    """Weights of 0 or more, if all agents have a self weight in every round; or in a graph, if values take paths whose
    lengths have no common divisor. Differences then vanish in averages by W, or by its row- or column-stochastic form,
    on connected rounds.
    """

    def decide(facts: Facts) -> str | None:
        rounds = range(facts.looked_at)
        if not all(_nonnegative(facts.rounds[number], form) for number in rounds):
            return None
        if all(_all_keep(facts.rounds[number], form) for number in rounds):
            return ""
        if not facts.static:
            return None
        cycle = _cycle(facts.rounds[0], form)
        if cycle is None or cycle == 1:
            return "" if cycle else None
        eigenvalue = _written(complex(math.cos(2 * math.pi / cycle), math.sin(2 * math.pi / cycle)))
        whose = {"mix": "W", "pull": "its row-stochastic form", "push": "its column-stochastic form"}[form]
        return f"values go round it in step and never settle: {whose} has the eigenvalue {eigenvalue}"

    return decide


def by_signs(facts: Facts) -> str | None:
    """One symmetric W of weights of 0 or more, if the steps average with (I + W) / 2, or shrink the eigenvalue -1."""
    if facts.static and _nonnegative(facts.rounds[0], "mix") and not SYMMETRIC.problem(facts):
        return None if DOUBLY_STOCHASTIC.problem(facts) else ""
    return None


def by_part_of_the_way(gamma: float) -> Decide:
    """Steps that go ``gamma`` of the way to the average: below 1, all agents keep a part."""

    def decide(facts: Facts) -> str | None:
        if gamma == 1:
            return by_self_weights()(facts)
        nonnegative = all(_nonnegative(facts.rounds[number], "mix") for number in range(facts.looked_at))
        return "" if nonnegative and 0 < gamma < 1 else None

    return decide


def _nonnegative(weights: RoundWeights, form: Form) -> bool:
    """All weights are 0 or more, and those between agents not so small that they might as well be 0."""
    shares = weights.shares_of(form)
    if shares is not None:
        return all(share > TOLERANCE if hop else share > -TOLERANCE for hop, share in shares.items())
    values: Weights = getattr(weights, form)
    return bool((values > np.where(weights.own, -TOLERANCE, TOLERANCE)).all())


def _all_keep(weights: RoundWeights, form: Form) -> bool:
    shares = weights.shares_of(form)
    if shares is not None:
        return shares.get(0, 0.0) > TOLERANCE
    values: Weights = getattr(weights, form)
    return bool((values[weights.own] > TOLERANCE).all())


def _cycle(weights: RoundWeights, form: Form) -> int | None:
    """The greatest common divisor of the lengths of all closed paths; None if not all agents are reached."""
    used = getattr(weights, form) > TOLERANCE
    source, destination = weights.source[used], weights.destination[used]
    hops = Neighbours(weights.size, source, destination).hops_from(0)
    if (hops < 0).any():
        return None
    return int(np.gcd.reduce(hops[source] + 1 - hops[destination]))


@dataclass(frozen=True)
class Gossip(Algorithm):
    """``x+ = x + gamma (W x - x)``, what averaging does by itself.

    Args:
        gamma: How far to go to the average.
    """

    gamma: float = 1.0
    source: ClassVar[str] = "Xiao, Boyd 2004, doi:10.1016/j.sysconle.2004.02.022"
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        return x + self.gamma * (mix(x) - x), ()


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
    ranks = torch.arange(size, device="cpu")
    drawn = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu")
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
        raise ValueError(f"the steps of {algorithm!r} are not linear, so that no matrix shows where they are stable")
    return matrix


def _matrix_and_probe(
    algorithm: Algorithm, facts: Facts, curvature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The matrix; a test vector, twice; and its image under the steps."""
    mix = _Messages(facts, rounds_of(facts))
    grad = Gradient(lambda x: curvature * x)
    cycle = min(algorithm.cycle(rounds_of(facts)), _MOST_STEPS)
    mix.begin(0)
    x = torch.zeros(facts.size, 2, dtype=torch.float64, device="cpu")
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

    unit = torch.eye(sum(heights), dtype=torch.float64, device="cpu")
    probe = 3 * torch.randn(
        sum(heights), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1), device="cpu"
    )
    found = apply(torch.cat([unit, probe], 1))
    return found[:, :-2], probe, found[:, -2:]
