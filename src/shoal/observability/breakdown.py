"""The use of a step's time on each agent: computing, or a kind of waiting.

The time in which a thread does not wait for an operation is computing. The time of a wait is divided by its cause at
each moment:

- this agent sums, or copies, whichever operation it is for: **sums**;
- another agent has not sent a missing message: it waits for **others**, and the agent is known;
- all messages are sent, and some have not arrived: it waits for **data** in transit;
- all messages have begun to arrive, but not the last byte: **transfer**;
- all messages have arrived, or the ones in transit move no tensor: **coordination**, as when others have not confirmed
  that they expected a tensor, or have read it.

If a process group moves tensors, messages only announce them. An agent waits for others until all have requested the
transfer. The time from then until its turn is coordination, and the rest is transfer.

The traces of both sides of an edge are used: the receiver records when a message arrived, the sender when it was sent.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from .traces import Flow, MessageKey, Trace, TracedMessage, TracedTransfer, TracedWait, members

COMPUTING, SUMS, COORDINATION, DATA, OTHERS, TRANSFER = KINDS = (
    "computing",
    "local sums",
    "coordination",
    "waiting for data",
    "waiting for others",
    "transfer",
)
"""The kinds of time, in the order of drawing."""
PREPARE, WINDOW, ROUND = "prepare", "~window", "~coordination"
Span = tuple[int, int]
Members = dict[MessageKey, tuple[tuple[str, int, int], ...]]
Asked = dict[tuple[str, int, int], dict[int, int]]
"""The times at which each agent requested a transfer by a process group: by name, round and stage."""


@dataclass
class Share:
    """The use of one agent's time from ``start`` to ``end``: a step, or the whole run.

    Attributes:
        trace: The agent, as the index of its trace.
        number: The number of the step; 0 for a whole run.
        into: Nanoseconds, by kind.
        blamed: Nanoseconds of waiting for others, by the awaited rank.
    """

    trace: int
    number: int
    start: int
    end: int
    into: Counter[str] = field(default_factory=Counter)
    blamed: Counter[int] = field(default_factory=Counter)

    @property
    def length(self) -> int:
        """Nanoseconds in all."""
        return self.end - self.start


class ExpectedMessage(NamedTuple):
    """A message that an operation waits for, on one clock; ``sent`` is None if the sender has left no trace."""

    source: int
    stage: int
    sent: int | None
    came: int
    whole: int
    coordinates: bool


class TimeSlice(NamedTuple):
    """A part of an agent's waiting time, and its cause; ``source``: the awaited agent, if it waited for others."""

    start: int
    end: int
    kind: str
    source: int | None


def break_down(traces: Sequence[Trace], flows: Sequence[Flow]) -> list[Share]:
    """The shares of all agents and steps; of agents that have no steps, of the whole run. All on one clock."""
    coming = _expected_messages(traces, flows)
    begins = {(trace.rank, call.name, call.round): call.start for trace in traces for call in trace.calls}
    asked: Asked = defaultdict(dict)
    for trace in traces:
        for call in trace.calls:
            for move in call.moves:
                asked[call.name, call.round, move.stage][trace.rank] = move.asked
    agents = [_AgentBreakdown(number, trace, coming[number], begins, asked) for number, trace in enumerate(traces)]
    shares = [share for agent in agents for share in agent.shares()]
    pieces = {agent.rank: agent.pieces for agent in agents}  # the last of each rank
    for agent in agents:
        for share, of in agent.by_share:
            for piece in of:
                if piece.kind == OTHERS and piece.source is not None:
                    _blame(share, piece, pieces, len(agents))
    return shares


def _blame(share: Share, piece: TimeSlice, pieces: dict[int, list[TimeSlice]], depth: int) -> None:
    """Find the agent that kept another waiting: not one that waited itself, but the agent at the end of the chain."""
    assert piece.source is not None
    at, theirs = piece.start, pieces.get(piece.source, [])
    first = bisect_left(theirs, piece.start, key=lambda other: other.end)
    while first < len(theirs) and (other := theirs[first]).start < piece.end:
        first += 1
        start, end = max(other.start, piece.start), min(other.end, piece.end)
        if other.kind == OTHERS and other.source is not None and other.source != piece.source and depth and start < end:
            share.blamed[piece.source] += start - at
            _blame(share, other._replace(start=start, end=end), pieces, depth - 1)
            at = end
    share.blamed[piece.source] += piece.end - at


def steps_of(trace: Trace) -> list[tuple[int, int, int]]:
    """Number, start and end of each step: of the optimizer that took most of them, where there are several."""
    counts = Counter(step.optimizer for step in trace.steps)
    if not counts:
        return []
    name = min(counts, key=lambda optimizer: (-counts[optimizer], optimizer))
    return [(step.number, step.start, step.end) for step in trace.steps if step.optimizer == name]


def _expected_messages(
    traces: Sequence[Trace], flows: Sequence[Flow]
) -> list[dict[tuple[str, int], list[ExpectedMessage]]]:
    """For each agent, by the name and round of an operation, the messages that it had to wait for."""
    sent_at = {(flow.destination, id(flow.received)): flow.sent for flow in flows}
    fused = [members(trace) for trace in traces]
    by_rank = {trace.rank: number for number, trace in enumerate(traces)}
    found: list[dict[tuple[str, int], list[ExpectedMessage]]] = []
    for number, trace in enumerate(traces):
        mine: dict[tuple[str, int], list[ExpectedMessage]] = defaultdict(list)
        for message in trace.received:
            sent = sent_at.get((number, id(message)))
            went = None if sent is None else min(sent.at, message.at)
            coordinates = message.coordinates or (sent is not None and sent.coordinates)
            whole = max(message.arrived, message.at)
            expected = ExpectedMessage(message.peer, message.key.stage, went, message.at, whole, coordinates)
            for call in _calls(message.key, fused[by_rank.get(message.peer, number)], fused[number]):
                mine[call].append(expected)
        found.append(mine)
    return found


def _calls(key: MessageKey, of_sender: Members, own: Members) -> Iterable[tuple[str, int]]:
    """The calls of a message; if neither side states them, the first of them."""
    if key.calls == 1:
        return [(key.name, key.round)]
    of = of_sender.get(key) or own.get(key) or ((key.name, key.round, 1),)
    return [(name, round_) for name, first, count in of for round_ in range(first, first + count)]


class _AgentBreakdown:
    """The use of one agent's time.

    Attributes:
        rank: The rank of the agent.
        pieces: The slices of its waiting time, in order.
        by_share: The same, by step.
    """

    def __init__(
        self,
        number: int,
        trace: Trace,
        coming: dict[tuple[str, int], list[ExpectedMessage]],
        begins: dict[tuple[int, str, int], int],
        asked: Asked,
    ) -> None:
        self.rank = trace.rank
        self.pieces: list[TimeSlice] = []
        self.by_share: list[tuple[Share, list[TimeSlice]]] = []
        self._number, self._trace, self._coming, self._begins = number, trace, coming, begins
        self._asked = asked
        self._moves = {(call.name, call.round): call.moves for call in trace.calls if call.moves}
        self._failed = {(call.name, call.round) for call in trace.calls if call.error}
        self._to: dict[tuple[str, int], list[TracedMessage]] = defaultdict(list)
        for message in trace.sent:
            self._to[message.key.name, message.key.round].append(message)
        inside = [interval for call in trace.calls if call.name != ROUND for interval in call.inside]
        self._sums = union((start, end) for _, start, end in inside)
        self._prepares = union((start, end) for activity, start, end in inside if activity == PREPARE)

    def shares(self) -> list[Share]:
        """The shares of its steps, or of the whole run."""
        trace = self._trace
        shares = [Share(self._number, *part) for part in steps_of(trace) or [(0, trace.start, trace.end)]]
        thread = self._thread()
        waits = disjoint(wait for wait in trace.waits if wait.thread == thread)
        starts = [wait.start for wait in waits]
        for share in shares:
            self._fill(share, waits[max(0, bisect_left(starts, share.start) - 1) : bisect_right(starts, share.end)])
        return shares

    def _thread(self) -> str:
        """The training thread: the one that waits most."""
        waited: Counter[str] = Counter()
        for wait in self._trace.waits:
            waited[wait.thread] += wait.end - wait.start
        return max(waited, key=lambda name: waited[name], default="")

    def _fill(self, share: Share, waits: Sequence[TracedWait]) -> None:
        mine: list[TimeSlice] = []
        spans = []
        for wait in waits:
            start, end = max(wait.start, share.start), min(wait.end, share.end)
            if start < end:
                spans.append((start, end))
                mine += self._pieces_of(wait, start, end)
        for piece in mine:
            share.into[piece.kind] += piece.end - piece.start
        # Copies outside a wait were made by the thread itself.
        copied = overlap(self._prepares, [(share.start, share.end)]) - overlap(self._prepares, spans)
        share.into[SUMS] += copied
        share.into[COMPUTING] += share.length - sum(end - start for start, end in spans) - copied
        self.by_share.append((share, mine))
        self.pieces += mine

    def _pieces_of(self, wait: TracedWait, start: int, end: int) -> list[TimeSlice]:
        """The causes of a wait, as slices of its time."""
        messages = self._coming.get((wait.name, wait.round), [])
        sent = self._to.get((wait.name, wait.round), [])
        peers = [self._begins.get((message.peer, wait.name, wait.round)) for message in sent]
        times = (
            [at for message in messages for at in (message.sent, message.came, message.whole)]
            + [message.at for message in sent]
            + peers
        )
        for move in self._moves.get((wait.name, wait.round), ()):
            times += [move.asked, move.ordered, move.moved, *self._others_asked(wait, move).values()]
        points = {start, end, *(at for at in times if at is not None and start < at < end)}
        for span in within(self._sums, start, end):
            points.update(span)
        found = []
        for begins, ends in pairwise(sorted(points)):
            kind, source = self._kind((begins + ends) // 2, messages, wait)
            found.append(TimeSlice(begins, ends, kind, source))
        return found

    def _kind(self, at: int, messages: Sequence[ExpectedMessage], wait: TracedWait) -> tuple[str, int | None]:
        if next(within(self._sums, at, at + 1), None) is not None:
            return SUMS, None
        moves = self._moves.get((wait.name, wait.round), [])
        for move in moves:
            if move.asked <= at < (at + 1 if move.moved is None else move.moved):
                return self._being_moved(at, wait, move)
        missing = [message for message in messages if message.whole > at]
        if not missing:
            return self._without_messages(at, wait)
        stage = min(message.stage for message in missing)
        missing = [message for message in missing if message.stage == stage]
        unsent = [message for message in missing if message.sent is None or message.sent > at]
        if unsent:
            last = max(unsent, key=lambda message: message.came if message.sent is None else message.sent)
            return OTHERS, last.source
        if moves or all(message.coordinates for message in missing):
            return COORDINATION, None
        return (DATA if any(message.came > at for message in missing) else TRANSFER), None

    def _others_asked(self, wait: TracedWait, move: TracedTransfer) -> dict[int, int]:
        """The times at which the members requested the transfer that this agent takes part in."""
        all_of_them = self._asked.get((wait.name, wait.round, move.stage), {})
        return {rank: at for rank, at in all_of_them.items() if not move.among or rank in move.among}

    def _being_moved(self, at: int, wait: TracedWait, move: TracedTransfer) -> tuple[str, int | None]:
        if move.ordered is not None and at >= move.ordered:
            return TRANSFER, None
        others = self._others_asked(wait, move)
        last = max(others, key=lambda rank: others[rank], default=-1)
        return (OTHERS, last) if others.get(last, 0) > at else (COORDINATION, None)

    def _without_messages(self, at: int, wait: TracedWait) -> tuple[str, int | None]:
        """Messages are not missing, or never arrived: others have not read the messages of this or an earlier
        operation.
        """
        if wait.name.startswith(WINDOW):
            return TRANSFER, None
        if (wait.name, wait.round) in self._failed:
            return OTHERS, None
        sent = self._to.get((wait.name, wait.round), [])
        absent = {message.peer: self._begins.get((message.peer, wait.name, wait.round), 0) for message in sent}
        last = max(absent, key=lambda rank: absent[rank], default=-1)
        if absent.get(last, 0) > at:
            return OTHERS, last
        return (OTHERS, sent[0].peer) if sent and sent[0].at > at else (COORDINATION, None)


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as disjoint spans, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif start < end:
            found.append((start, end))
    return found


def within(spans: Sequence[Span], start: int, end: int) -> Iterator[Span]:
    """The parts of ordered, disjoint spans between two times."""
    at = max(0, bisect_left(spans, (start, start)) - 1)
    while at < len(spans) and spans[at][0] < end:
        if spans[at][1] > start:
            yield max(spans[at][0], start), min(spans[at][1], end)
        at += 1


def overlap(spans: Sequence[Span], others: Iterable[Span]) -> int:
    """How long both are."""
    return sum(ends - begins for start, end in union(others) for begins, ends in within(spans, start, end))


def disjoint(waits: Iterable[TracedWait]) -> list[TracedWait]:
    """Waits of one thread, in order; a nested wait, as of a handle of several operations, is left out."""
    found: list[TracedWait] = []
    for wait in sorted(waits, key=lambda wait: (wait.start, -wait.end)):
        if not found or wait.start >= found[-1].end:
            found.append(wait)
    return found
