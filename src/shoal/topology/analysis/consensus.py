"""How many rounds until agents agree: to a given error, or exactly.

The consensus error of values x, float64 [n], is ``||x - mean|| / ||x_0 - mean||`` with mean the average of the start
x_0, so it is 1 at first, and 0 when every agent has the average of all initial values. The default start is
``numpy.random.default_rng(0).standard_normal(n)``: a fixed draw, because each topology has another worst start, and
because a reproducible number must not be an expectation.

Rounds are counted by running them if that is quick. Otherwise the answer comes from powers of W, by eigenvalues or by
squaring. If neither is possible, it is the interval between the rounds that were run and the bound from the spectral
gap. CECA is run with its second buffer, which it needs for exactness, unless it is requested as an ordinary schedule,
as training uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from math import ceil, floor, isfinite, log, log1p

import numpy as np
from numpy.typing import ArrayLike

from ..families.finite_time import Ceca, CecaPairs
from ..mixing import TOLERANCE
from ..schedule import AnyTopology
from .span import DENSE_LIMIT, Span, Vector, is_connected
from .spectrum import Estimate, Invariance, find_invariance, fourier_error, gap_of

WORK = 500_000_000
"""Edges that may be visited to count rounds: a few seconds."""

EXACT = 1e-12
"""A consensus error that only rounding has left."""

_MOST_ROUNDS = 100_000
_QUICK_ROUNDS = 1_000
_MOST_SQUARINGS = 45
_LONGEST_LENGTH = 4096
_NEVER = 1e-13
_DROP = 1e-4
_BEYOND = 1e100
"""Times the initial error: above it, rounding alone prevents a return."""


@dataclass(frozen=True)
class Rounds:
    """A number of rounds, or what is known of it. ``str(rounds)`` is fit for a table.

    Attributes:
        at_least: that many are needed.
        at_most: that many are enough; None if no bound is known, or it never happens.
        never: it never happens, however long one waits.
    """

    at_least: int
    at_most: int | None
    never: bool = False

    @property
    def value(self) -> int | None:
        """The exact number, None if it is not known."""
        return self.at_least if self.at_least == self.at_most else None

    def __str__(self) -> str:
        if self.never:
            return "never"
        if self.at_most is None:
            return f"more than {self.at_least - 1}"
        return f"{self.at_least}" if self.at_least == self.at_most else f"{self.at_least} to {self.at_most}"


def rounds_to(
    topology: AnyTopology, error: float = 1e-6, *, start: ArrayLike | None = None, second_buffer: bool = True
) -> Rounds:
    """Rounds, from round 0 on, until the consensus error is at most `error`.

    Args:
        topology: a graph with its weights, a mixing matrix, or a schedule.
        error: above 0; relative to the start, in the 2-norm over agents.
        start: x_0, float [n]; by default a fixed draw from the normal distribution.
        second_buffer: run CECA with its second buffer; without it, by its W alone, as training does.

    Raises:
        ValueError: `error` is not above 0, `start` is not n finite numbers, or there are too many edges.
    """
    check_error(error)
    span = Span(topology)
    invariance = find_invariance(span)
    return rounds_of(span, error, _check_start(start, span.size), invariance, second_buffer=second_buffer)


def exact_length(topology: AnyTopology, limit: int | None = None) -> int | None:
    """Rounds, from round 0 on, after which all agents hold the exact average whatever they began with.

    Rounding leaves about 1e-16 of a value. An error below 1e-12 counts as none if the last round took all of the rest,
    ten thousand times as much; agents that merely come closer and closer pass 1e-12 in smaller steps, and never arrive.

    Args:
        topology: a graph with its weights, a mixing matrix, or a schedule.
        limit: rounds to try; by default two periods, at least 64 and at most 4096.

    Returns:
        The number of rounds, or None if there is none up to `limit`.
    """
    span = Span(topology)
    return length_of(span, find_invariance(span), limit)


def default_start(size: int) -> Vector:
    """The start that rounds are counted from, float64 [size]."""
    return np.random.default_rng(0).standard_normal(size)


def rounds_of(
    span: Span,
    error: float,
    start: Vector,
    invariance: Invariance | None,
    gap: Estimate | None = None,
    *,
    second_buffer: bool = True,
) -> Rounds:
    """:func:`rounds_to` for a span whose `invariance`, and perhaps `gap`, are known."""
    target = float(start.mean())
    scale = float(np.linalg.norm(start - target))
    if scale <= EXACT * float(np.linalg.norm(start)):
        return Rounds(0, 0)
    if second_buffer and isinstance(span.schedule, (Ceca, CecaPairs)):
        return _counted(_buffered_values(span.schedule, start), error * scale, start, target, _MOST_ROUNDS)
    tame = span.whole and span.stochasticity.doubly and span.stochasticity.nonnegative
    if tame and invariance is not None:
        return _by_eigenvalues(invariance, error, (start - target) / scale)
    if span.whole and not (_keeps_the_mean(span) and is_connected(span)):
        return _counted(_values(span, start), error * scale, start, target, _MOST_ROUNDS, len(span))
    small = span.size <= DENSE_LIMIT
    most = _QUICK_ROUNDS if tame and small else _MOST_ROUNDS
    rounds = _counted(_values(span, start), error * scale, start, target, most)
    if rounds.value is not None or rounds.never or not span.whole:
        return rounds
    if tame and small:
        return _by_squaring(span, error, (start - target) / scale)
    return _by_gap(rounds.at_least, span, error, gap or gap_of(span, invariance))


def length_of(span: Span, invariance: Invariance | None, limit: int | None = None) -> int | None:
    """:func:`exact_length` for a span whose `invariance` is known."""
    if span.size == 1:
        return 0
    if limit is None:
        limit = min(max(64, 2 * (span.schedule.period or 0)), _LONGEST_LENGTH)
    before = 1.0
    start = default_start(span.size)
    if isinstance(span.schedule, (Ceca, CecaPairs)):
        errors = _errors(_buffered_values(span.schedule, start), start)
    elif invariance is not None:
        errors = _errors_by_eigenvalues(invariance)
    else:
        errors = _errors(_values(span, start), start)
    for rounds, error in zip(range(1, limit + 1), errors, strict=False):
        if error <= EXACT:
            return rounds if error <= _DROP * before else None
        if error > _BEYOND:
            return None
        before = error
    return None


def check_error(error: float) -> None:
    """Raise unless it is an error that can be reached."""
    if not (isfinite(error) and error > 0):
        raise ValueError(f"error is {error}. Pass a number above 0, such as 1e-6; exact_length asks for 0.")


def _check_start(start: ArrayLike | None, size: int) -> Vector:
    if start is None:
        return default_start(size)
    given = np.asarray(start, dtype=np.float64)
    if given.shape != (size,) or not np.isfinite(given).all():
        raise ValueError(
            f"the start has shape {given.shape}, or entries that are not finite. Pass {size} finite numbers, one for "
            "each agent."
        )
    return given


def _keeps_the_mean(span: Span) -> bool:
    """Whether the product of the rounds does; its powers cannot come close to the average otherwise."""
    ones = np.ones(span.size)
    return bool(
        np.allclose(span.apply(ones), ones, atol=TOLERANCE)
        and np.allclose(span.apply_transposed(ones), ones, atol=TOLERANCE)
    )


def _values(span: Span, x: Vector) -> Iterator[Vector]:
    """The values of the agents before the first round, after it, and so on, until the limit of work."""
    visited = 0
    for index in count():
        yield x
        if visited > WORK:
            return
        round = span[index]
        visited += len(round.edges.weight)
        x = round.apply(x)


def _buffered_values(schedule: Ceca | CecaPairs, x: Vector) -> Iterator[Vector]:
    while True:
        held = schedule.start(x)
        for round, step in enumerate(schedule.steps):
            yield held.mean
            held = step.update(held, step.message(held)[schedule.sources(round)])
        x = held.mean
        if not schedule.steps:
            yield x


def _counted(
    values: Iterator[Vector], distance: float, x: Vector, target: float, limit: int, period: int = 0
) -> Rounds:
    """Run it from `x` until all are within `distance`, in the 2-norm, of `target`; or give up.

    With a `period` it never happens if the values, compared after whole periods, are again what they were: such values
    repeat, or are at their limit.
    """
    rounds = 0
    scale = float(np.linalg.norm(x - target))
    lost, earlier, next_kept = _BEYOND * scale, x, period
    for rounds, value in zip(range(limit + 1), values, strict=False):
        error = np.linalg.norm(value - target)
        if error <= distance:
            return Rounds(rounds, rounds)
        if error > lost:
            return Rounds(rounds + 1, None, never=True)
        if period and rounds and rounds % period == 0:
            if np.linalg.norm(value - earlier) <= _NEVER * scale:
                return Rounds(rounds + 1, None, never=True)
            if rounds >= next_kept:
                earlier, next_kept = value, 2 * rounds
    return Rounds(rounds + 1, None)


def _by_eigenvalues(invariance: Invariance, error: float, start: Vector) -> Rounds:
    span = invariance.span
    energy = np.abs(invariance.transform(start)) ** 2
    energy[0] = 0.0
    shrink = np.abs(invariance.product) ** 2

    def squared_error(periods: int) -> float:
        return float(energy @ shrink ** float(periods))

    if energy[shrink >= 1.0 - _NEVER].sum() > error**2:
        return Rounds(1, None, never=True)
    periods = _last(lambda count: squared_error(count) > error**2)
    energy = energy * shrink ** float(periods)
    rounds = periods * len(span)
    for round in range(len(span)):
        if energy.sum() <= error**2:
            break
        energy = energy * np.abs(invariance.eigenvalues(round)) ** 2
        rounds += 1
    slow = shrink[(energy > 0.0) & (shrink < 1.0 - _NEVER)].max(initial=0.0)
    return _with_rounding(rounds, fourier_error(span) / (1.0 - slow))


def _last(holds: Callable[[int], bool]) -> int:
    """The last count from 0 on for which it holds, if it holds up to there and then no more; 0 if it never does."""
    ahead = 1
    while holds(ahead):
        ahead *= 2
    low, high = 0, ahead
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _by_squaring(span: Span, error: float, start: Vector) -> Rounds:
    """As P J = J P = J, powers of P - J are those of P without the common part, which is 0 here."""
    powers = [span.matrix() - 1.0 / span.size]
    while np.linalg.norm(powers[-1] @ start) > error:
        if len(powers) > _MOST_SQUARINGS:
            return Rounds(1, None, never=True)
        powers.append(powers[-1] @ powers[-1])
    x, periods = start, 0
    for exponent, power in reversed(list(enumerate(powers))):
        ahead = power @ x
        if np.linalg.norm(ahead) > error:
            x, periods = ahead, periods + 2**exponent
    rounds = periods * len(span)
    for round in span:
        if np.linalg.norm(x) <= error:
            break
        x, rounds = round.apply(x), rounds + 1
    gap = 1.0 - float(np.linalg.norm(powers[0], 2))
    return _with_rounding(rounds, 1e-16 * span.size / gap if gap > 0 else 0.0)


def _by_gap(at_least: int, span: Span, error: float, gap: Estimate) -> Rounds:
    surely = gap.value - gap.error
    if surely <= 0.0:
        return Rounds(at_least, None)
    periods = 1 if surely >= 1.0 else ceil(log(error) / log1p(-surely))
    return Rounds(at_least, max(at_least, periods * len(span)))


def _with_rounding(rounds: int, relative: float) -> Rounds:
    """`rounds`, if an error of the eigenvalues that changes it by this fraction does not change the whole number."""
    slack = rounds * relative
    return Rounds(rounds, rounds) if slack < 0.5 else Rounds(floor(rounds - slack), ceil(rounds + slack))


def _errors_by_eigenvalues(invariance: Invariance) -> Iterator[float]:
    product = np.ones(1, dtype=np.complex128)
    for round in count():
        product = product * invariance.eigenvalues(round)
        yield max(float(np.abs(product[1:]).max()), abs(product[0] - 1.0))


def _errors(values: Iterator[Vector], start: Vector) -> Iterator[float]:
    """A start drawn from the normal distribution is brought to its mean by J, and surely by no other matrix."""
    target = float(start.mean())
    scale = float(np.linalg.norm(start - target))
    for value in islice(values, 1, None):
        yield float(np.linalg.norm(value - target)) / scale
