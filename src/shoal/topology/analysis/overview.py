"""A complete analysis of a topology before training on it, in one call: the speed of agreement, the age of
contributions, and the costs of a round on a given network.

:func:`analyse` collects the results of the modules beside it: `spectrum` (gaps and eigenvalues), `consensus` (rounds to
an error), `age` (the age of a contribution when it arrives) and `cost` (messages, bytes, seconds).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..families.finite_time import Ceca, CecaPairs
from ..mixing import Stochasticity
from ..schedule import AnyTopology
from . import cost
from .age import Age, age_of
from .consensus import Rounds, check_error, default_start, length_of, rounds_of
from .cost import Traffic
from .span import RoundMap, Span, Vector, is_connected
from .spectrum import Estimate, find_invariance, gap_of, smallest_of

DEFAULT_BYTES = 100_000_000
"""A model of 25 million float32 parameters, such as ResNet-50."""

DEFAULT_LATENCY = 50e-6
"""Seconds; Ethernet inside one data centre."""

DEFAULT_BANDWIDTH = 1.25e9
"""Bytes per second; 10 Gbit/s."""

_BORDER = 1e-9
_MOST_OF_IT = 1e-2


@dataclass(frozen=True)
class Analysis:
    """The result of :func:`analyse`. ``str(...)`` of `gap`, `smallest_eigenvalue`, `rounds` and `age` is made for a
    table.

    Attributes:
        name: the schedule's own description.
        size: number of agents n.
        period: rounds after which it repeats; None when it never does.
        sampled_rounds: how many of its rounds were analysed, from round 0: the period, unless that is very long.
        agents_per_machine: as given.
        nbytes, latency, bandwidth: as given: bytes of a message, seconds, bytes per second.
        error: the consensus error of `rounds`, as given.
        weights: the properties that all rounds preserve.
        connected: every agent's contributions reach every other in time.
        gap: ``1 - ||W_{p-1} ... W_0 - J||_2`` over `gap_rounds` rounds; the spectral gap of a static graph.
        gap_rounds: the period; without one, as many rounds as take the consensus error to a hundredth.
        smallest_eigenvalue: of a static symmetric W; None for other topologies.
        rounds: to bring the consensus error down to `error`.
        exact_length: rounds after which all hold the exact average; None if that never happens.
        age: rounds until a contribution arrives, on average over pairs of agents.
        traffic: messages and bytes, of all and at the busiest agent and NIC.
        round_seconds: one round under the alpha-beta model, on average.
        notes: notes for users of the topology, as sentences.
    """

    name: str
    size: int
    period: int | None
    sampled_rounds: int
    agents_per_machine: int
    nbytes: float
    latency: float
    bandwidth: float
    error: float
    weights: Stochasticity
    connected: bool
    gap: Estimate
    gap_rounds: int
    smallest_eigenvalue: Estimate | None
    rounds: Rounds
    exact_length: int | None
    age: Age
    traffic: Traffic
    round_seconds: float
    notes: tuple[str, ...]

    @property
    def gap_per_round(self) -> float:
        """The gap that, in each of `gap_rounds` rounds, would leave as much disagreement as they do together."""
        return float(1.0 - max(0.0, 1.0 - self.gap.value) ** (1.0 / self.gap_rounds))

    @property
    def consensus_seconds(self) -> float:
        """Time to `error`: rounds times seconds a round; infinite if it is never reached or no bound is known."""
        if self.rounds.at_most is None:
            return float("inf")
        return self.rounds.at_most * self.round_seconds


def analyse(
    topology: AnyTopology,
    *,
    agents_per_machine: int = 1,
    nbytes: float = DEFAULT_BYTES,
    latency: float = DEFAULT_LATENCY,
    bandwidth: float = DEFAULT_BANDWIDTH,
    error: float = 1e-6,
) -> Analysis:
    """All of :class:`Analysis` for a graph or a schedule.

    Args:
        topology: a graph with its weights, a mixing matrix, or a schedule.
        agents_per_machine: ranks 0 to m - 1 sit on the first machine, and so on; they share its NIC.
        nbytes: bytes of one message, the size of the model.
        latency: seconds before the first byte of a message arrives.
        bandwidth: bytes per second of a machine's NIC, each way.
        error: the consensus error to reach, relative to that of the start.

    Raises:
        ValueError: so many edges that they cannot be held (the message has the size), machines that the agents do not
            fill, an error that is not above 0, or a network that is not one.
    """
    check_error(error)
    cost.check_network(nbytes=nbytes, latency=latency, bandwidth=bandwidth)
    span = Span(topology)
    cost.check_machines(span.size, agents_per_machine)
    invariance = find_invariance(span)
    connected = is_connected(span)
    start = default_start(span.size)
    spanned = span if span.whole else span.head(_rounds_of_gap(span, start))
    gap = gap_of(spanned, invariance if span.whole else None)
    static_symmetric = span.whole and len(span) == 1 and span.stochasticity.symmetric
    traffic = cost.traffic_of(span, nbytes, agents_per_machine)
    found = Analysis(
        name=span.schedule.describe(),
        size=span.size,
        period=span.schedule.period,
        sampled_rounds=len(span),
        agents_per_machine=agents_per_machine,
        nbytes=nbytes,
        latency=latency,
        bandwidth=bandwidth,
        error=error,
        weights=span.stochasticity,
        connected=connected,
        gap=gap,
        gap_rounds=len(spanned),
        smallest_eigenvalue=smallest_of(span, invariance) if static_symmetric else None,
        rounds=rounds_of(span, error, start, invariance, gap),
        exact_length=length_of(span, invariance),
        age=age_of(span, invariance, connected),
        traffic=traffic,
        round_seconds=cost.seconds_of(traffic, nbytes, latency, bandwidth),
        notes=(),
    )
    return replace(found, notes=tuple(_notes(found, span)))


def _rounds_of_gap(span: Span, start: Vector) -> int:
    """Rounds that take away most of the disagreement, and not all: rounding would say what the gap is otherwise."""
    enough = rounds_of(span, _MOST_OF_IT, start, None).value
    return len(span) if enough is None else max(1, min(enough, len(span)))


def _notes(found: Analysis, span: Span) -> Iterator[str]:
    if found.size == 1:
        yield "One agent has nobody to average with."
    if not found.connected:
        yield "Not all agents hear of all others: they never agree."
    if not found.weights.row:
        yield "The weights of an agent do not sum to one in every round: agents that agree do not go on agreeing."
    elif not found.weights.column and found.exact_length is None and found.rounds.value is None:
        yield (
            "What an agent hands out does not sum to one in every round: agents agree on a weighted average. "
            "Use push-sum, or Metropolis-Hastings weights."
        )
    if not found.weights.nonnegative:
        grows = found.connected and found.rounds.never and found.gap.value < 0.0
        yield f"Some weights are negative.{' Disagreement grows with them: agents never agree.' if grows else ''}"
    smallest = found.smallest_eigenvalue
    if smallest is not None and smallest.value <= -1.0 + _BORDER and found.size > 1:
        yield "W has the eigenvalue -1: agents take turns instead of agreeing. Let each keep a share of its own."
    elif smallest is not None and smallest.value <= -1.0 / 3.0 + _BORDER:
        yield "The smallest eigenvalue of W is not above -1/3: D2 and exact diffusion need (I + W) / 2 in its place."
    if found.traffic.most_senders_on_a_nic > 1:
        yield (
            f"Up to {found.traffic.most_senders_on_a_nic} agents of one machine send to others in the same round, "
            "and wait for each other at its NIC."
        )
    if isinstance(span.schedule, (Ceca, CecaPairs)) and span.schedule.needs_second_buffer:
        alone = rounds_of(span, found.error, default_start(found.size), None, second_buffer=False)
        yield (
            "Rounds and exact length are those of CECA with its second buffer; the gap is that of its weights alone. "
            f"Training mixes by the weights alone, and takes {alone} rounds to that error."
        )
    if found.size > 2 and any(_averages_all(round) for round in span):
        yield (
            "Some rounds average all agents. Counted is one message on every edge; a ring all-reduce does it with "
            f"{2 * (found.size - 1)} messages of 1/{found.size} of the bytes each."
        )
    if not span.whole:
        yield f"Figures that depend on the rounds are from the first {len(span)}."


def _averages_all(round: RoundMap) -> bool:
    weight = round.edges.weight
    return len(weight) == round.size**2 and float(np.ptp(weight)) <= _BORDER
