"""The clocks of several machines, laid on one: from the messages themselves.

Every machine pairs its own clock with the time of day once, and those are off by milliseconds, or by hours where nobody
sets them. But no message comes before it was sent. So of two machines the fastest message in one direction says by how
much one clock can be ahead of the other at most, and the fastest in the other direction how much at least: the truth
lies between, and the middle is off by half of the round trip at most. That is what NTP does (RFC 5905), with the
messages that are there anyway. Clocks that drift apart in a long run are laid along a line.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .flows import Flow
from .traces import Trace

WINDOW_NS = 30_000_000_000
"""The clocks are compared once in so much time, where there is enough of it to see them drift."""


@dataclass(frozen=True)
class Clock:
    """One machine's.

    Attributes:
        host: A name of the machine.
        ahead: Nanoseconds by which its own time of day was ahead of the first machine's, in the middle of the run.
        drift: Nanoseconds that this grew by in a second.
        uncertain: Nanoseconds to either side; None where no messages went both ways, and the time of day was believed.
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
class _Bounds:
    """How far ahead of one clock another is: at least, and at most."""

    least: float = float("-inf")
    most: float = float("inf")
    messages: int = 0

    @property
    def width(self) -> float:
        return self.most - self.least


_Windows = dict[int, _Bounds]


def align(traces: Sequence[Trace], flows: Sequence[Flow]) -> list[Clock]:
    """The clock of each trace; the reference is the machine that most agents are on."""
    numbers: dict[str, int] = {}
    of = [numbers.setdefault(one.boot, len(numbers)) for one in traces]
    hosts = {number: next(one.host for one, its in zip(traces, of, strict=True) if its == number) for number in of}
    middle = (min(one.start for one in traces) + max(one.end for one in traces)) // 2
    known: dict[int, Clock] = {}
    first = max(set(of), key=lambda number: (of.count(number), -number))
    known[first] = Clock(hosts[first], 0.0, 0.0, 0.0, 0, middle)
    edges = _compare(of, flows, middle)
    queue = [(0.0, first)]
    while queue:  # along the pairs that are known best, as in a shortest path
        _, here = heapq.heappop(queue)
        for there, windows in edges.get(here, {}).items():
            ahead, drift, uncertain, messages = _line(windows, middle)
            uncertain += known[here].uncertain or 0.0
            before = known.get(there)
            if before is None or (before.uncertain or 0.0) > uncertain:
                ahead, drift = ahead + known[here].ahead, drift + known[here].drift
                known[there] = Clock(hosts[there], ahead, drift, uncertain, messages, middle)
                heapq.heappush(queue, (uncertain, there))
    for number in of:
        known.setdefault(number, Clock(hosts[number], 0.0, 0.0, None, 0, middle))
    return [known[number] for number in of]


def _compare(of: Sequence[int], flows: Sequence[Flow], middle: int) -> dict[int, dict[int, _Windows]]:
    """For each two machines between which messages went both ways, and each stretch of time: how far the second may be
    ahead of the first."""
    found: dict[tuple[int, int], _Windows] = defaultdict(lambda: defaultdict(_Bounds))
    for flow in flows:
        source, destination = of[flow.source], of[flow.destination]
        if source == destination:
            continue
        late = flow.received.at - flow.sent.at  # as the two clocks have it
        window = (flow.received.at - middle) // WINDOW_NS
        forth = found[source, destination][window]  # the receiver's is ahead by less than that
        forth.most, forth.messages = min(forth.most, late), forth.messages + 1
        back = found[destination, source][window]
        back.least, back.messages = max(back.least, -late), back.messages + 1
    edges: dict[int, dict[int, _Windows]] = defaultdict(dict)
    for (here, there), windows in found.items():
        both = {number: one for number, one in windows.items() if one.width < float("inf")}
        whole = _Bounds(max(one.least for one in windows.values()), min(one.most for one in windows.values()))
        whole.messages = sum(one.messages for one in windows.values())
        if both:
            edges[here][there] = both
        elif whole.width < float("inf"):
            edges[here][there] = {0: whole}
    return edges


def _line(windows: _Windows, middle: int) -> tuple[float, float, float, int]:
    """How far ahead the second clock is in the middle of the run, by how much that grows in a second, how sure that is,
    and from how many messages."""
    messages = sum(one.messages for one in windows.values())
    least, most = max(one.least for one in windows.values()), min(one.most for one in windows.values())
    tightest = min(one.width for one in windows.values())
    if len(windows) < 3 or least <= most:  # one distance explains all of it
        if least > most:
            best = min(windows.values(), key=lambda one: one.width)
            least, most = best.least, best.most
        return (least + most) / 2, 0.0, (most - least) / 2, messages
    seconds = WINDOW_NS / 1e9
    weights = {number: 1.0 / max(one.width, 1.0) ** 2 for number, one in windows.items()}
    whole = sum(weights.values())
    at = {number: seconds * (number + 0.5) for number in windows}
    half = {number: (one.least + one.most) / 2 for number, one in windows.items()}
    mean_at = sum(weights[k] * at[k] for k in windows) / whole
    mean_half = sum(weights[k] * half[k] for k in windows) / whole
    spread = sum(weights[k] * (at[k] - mean_at) ** 2 for k in windows)
    drift = sum(weights[k] * (at[k] - mean_at) * (half[k] - mean_half) for k in windows) / spread if spread else 0.0
    return mean_half - drift * mean_at, drift, tightest / 2, messages


def on_one_clock(trace: Trace, clock: Clock) -> Trace:
    """The same with all times by the first machine's clock."""
    to = clock.corrected
    calls = [
        replace(
            one,
            start=to(one.start),
            end=None if one.end is None else to(one.end),
            inside=[(what, to(start), to(end)) for what, start, end in one.inside],
        )
        for one in trace.calls
    ]
    return replace(
        trace,
        calls=calls,
        waits=[one._replace(start=to(one.start), end=to(one.end)) for one in trace.waits],
        steps=[one._replace(start=to(one.start), end=to(one.end)) for one in trace.steps],
        sent=[one._replace(at=to(one.at)) for one in trace.sent],
        received=[one._replace(at=to(one.at), arrived=to(one.arrived) if one.arrived else 0) for one in trace.received],
        losses=[one._replace(at=to(one.at)) for one in trace.losses],
        start=to(trace.start),
        end=to(trace.end),
    )
