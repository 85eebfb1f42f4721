"""Aligns the clocks of several machines by the times of the messages.

Every machine pairs its own clock with the time of day once. These pairs are off by milliseconds, or by hours on
machines with a wrong time. But no message arrives before it was sent. So the fastest message in one direction is an
upper bound of the difference between two clocks, and the fastest in the other direction a lower bound. The middle is
off by at most half of the round trip. NTP works alike (RFC 5905); here the existing messages suffice. Clocks that drift
apart in a long run are corrected by a line.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from .traces import Flow, Trace, TracedTransfer, match

STRETCH_SECONDS = 5.0
"""Clocks are compared in stretches of so long, where they drift."""
LEAST_STRETCHES = 3
ROUNDS = 3
"""How often the drift is estimated again, after the known part is removed."""


@dataclass(frozen=True)
class ClockFit:
    """One machine's.

    Attributes:
        host: A name of the machine.
        ahead: Nanoseconds by which its own time of day was ahead of the first machine's, in the middle of the run.
        drift: Nanoseconds that this grew by in a second.
        uncertain: Nanoseconds to either side; None if no messages went both ways, and the time of day was believed.
        messages: How many were compared.
        middle: When ``ahead`` is meant, by its own clock.
    """

    host: str
    ahead: float
    drift: float
    uncertain: float | None
    messages: int
    middle: int

    def corrected(self, at: int) -> int:
        """A time of this clock by the first machine's."""
        return at - round(self.ahead + self.drift * (at - self.middle) / 1e9)


@dataclass
class _ClockPair:
    """The bounds from messages on how far the second of two clocks is ahead of the first: upper bounds in one
    direction, lower bounds in the other. Each with its time, in seconds from the middle of the run.
    """

    no_more: list[tuple[float, float]] = field(default_factory=list)
    no_less: list[tuple[float, float]] = field(default_factory=list)

    def bounds(self, drift: float = 0.0) -> tuple[float, float]:
        """At least and at most how far, if the distance grows like that."""
        least = max(ahead - drift * at for at, ahead in self.no_less)
        return least, min(ahead - drift * at for at, ahead in self.no_more)

    def drift(self, known: float) -> float:
        """The correction to a known drift, by the line through the middles of intervals."""
        stretches: dict[int, _ClockPair] = defaultdict(_ClockPair)
        for at, ahead in self.no_more:
            stretches[int(at // STRETCH_SECONDS)].no_more.append((at, ahead))
        for at, ahead in self.no_less:
            stretches[int(at // STRETCH_SECONDS)].no_less.append((at, ahead))
        both = {number: pair for number, pair in stretches.items() if pair.no_more and pair.no_less}
        if len(both) < LEAST_STRETCHES:
            return 0.0
        middles = [(STRETCH_SECONDS * (number + 0.5), sum(pair.bounds(known)) / 2) for number, pair in both.items()]
        mean_at, mean_ahead = (fmean(middle[k] for middle in middles) for k in (0, 1))
        spread = sum((at - mean_at) ** 2 for at, _ in middles)
        return sum((at - mean_at) * (ahead - mean_ahead) for at, ahead in middles) / spread

    def line(self) -> tuple[float, float, float]:
        """How far it is ahead in the middle of the run, by how much that grows in a second, and how sure that is."""
        drift = 0.0
        least, most = self.bounds()
        if least > most:  # no one distance explains all of it
            for _ in range(ROUNDS):
                drift += self.drift(drift)
            least, most = self.bounds(drift)
        return (least + most) / 2, drift, abs(most - least) / 2


def align(traces: Sequence[Trace], flows: Sequence[Flow]) -> list[ClockFit]:
    """The clock of each trace; the reference is the machine that most agents are on."""
    numbers: dict[str, int] = {}
    of = [numbers.setdefault(trace.boot, len(numbers)) for trace in traces]
    hosts = {number: next(trace.host for trace, its in zip(traces, of, strict=True) if its == number) for number in of}
    middle = (min(trace.start for trace in traces) + max(trace.end for trace in traces)) // 2
    known: dict[int, ClockFit] = {}
    first = max(set(of), key=lambda number: (of.count(number), -number))
    known[first] = ClockFit(hosts[first], 0.0, 0.0, 0.0, 0, middle)
    edges = _compare(of, flows, middle)
    queue, done = [(0.0, first)], set[int]()
    while queue:  # along the pairs that are known best, as in a shortest path
        _, here = heapq.heappop(queue)
        if here in done:
            continue
        done.add(here)
        for there, pair in edges.get(here, {}).items():
            ahead, drift, uncertain = pair.line()
            uncertain += known[here].uncertain or 0.0
            before = known.get(there)
            if before is None or (before.uncertain or 0.0) > uncertain:
                messages = len(pair.no_more) + len(pair.no_less)
                ahead, drift = ahead + known[here].ahead, drift + known[here].drift
                known[there] = ClockFit(hosts[there], ahead, drift, uncertain, messages, middle)
                heapq.heappush(queue, (uncertain, there))
    for number in of:
        known.setdefault(number, ClockFit(hosts[number], 0.0, 0.0, None, 0, middle))
    return [known[number] for number in of]


def _compare(of: Sequence[int], flows: Sequence[Flow], middle: int) -> dict[int, dict[int, _ClockPair]]:
    """For each two machines between which messages went both ways, what these say."""
    found: dict[int, dict[int, _ClockPair]] = defaultdict(lambda: defaultdict(_ClockPair))
    for flow in flows:
        source, destination = of[flow.source], of[flow.destination]
        if source != destination:
            late = float(flow.received.at - flow.sent.at)  # as the two clocks have it
            at = (flow.received.at - middle) / 1e9
            found[source][destination].no_more.append((at, late))
            found[destination][source].no_less.append((at, -late))
    return {
        here: {there: pair for there, pair in pairs.items() if pair.no_more and pair.no_less}
        for here, pairs in found.items()
    }


def aligned(traces: Sequence[Trace]) -> tuple[list[ClockFit], list[Trace]]:
    """The clock of each trace of a run, and the traces with all times by the first machine's clock."""
    fits = align(traces, match(traces))
    return fits, [on_one_clock(trace, fit) for trace, fit in zip(traces, fits, strict=True)]


def on_one_clock(trace: Trace, clock: ClockFit) -> Trace:
    """The trace with all times by the first machine's clock."""
    to = clock.corrected
    calls = [
        replace(
            call,
            start=to(call.start),
            end=None if call.end is None else to(call.end),
            inside=[(activity, to(start), to(end)) for activity, start, end in call.inside],
            moves=[_corrected(move, clock) for move in call.moves],
        )
        for call in trace.calls
    ]
    return replace(
        trace,
        calls=calls,
        waits=[wait._replace(start=to(wait.start), end=to(wait.end)) for wait in trace.waits],
        steps=[step._replace(start=to(step.start), end=to(step.end)) for step in trace.steps],
        measured=[metric._replace(at=to(metric.at)) for metric in trace.measured],
        sent=[message._replace(at=to(message.at)) for message in trace.sent],
        received=[
            message._replace(at=to(message.at), arrived=to(message.arrived) if message.arrived else 0)
            for message in trace.received
        ],
        losses=[loss._replace(at=to(loss.at)) for loss in trace.losses],
        start=to(trace.start),
        end=to(trace.end),
    )


def _corrected(move: TracedTransfer, clock: ClockFit) -> TracedTransfer:
    ordered, moved = (None if at is None else clock.corrected(at) for at in (move.ordered, move.moved))
    return move._replace(asked=clock.corrected(move.asked), ordered=ordered, moved=moved)
