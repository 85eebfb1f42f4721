"""Reads the traces of a run's agents: their events and times, as values.

A trace is read line by line, because a killed agent's trace ends in the middle of a line. A folder may have traces of
several runs; the header of a trace identifies its run.

``Flow`` pairs each received message with the sent one in another agent's trace.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import NONSENSE
from .run_files import ASKED, FUSED, MOVING, ORDERING, TRACES, check_fields, check_ranks

_TO, _FROM, _ALL = "to ", "from ", "all from "


class MessageKey(NamedTuple):
    """The key that distinguishes a message from all others on its edge.

    Attributes:
        name: The name of the operation; for several fused calls, of the first one.
        round, stage: The round and stage of the operation.
        calls: The number of fused calls.
    """

    name: str
    round: int
    stage: int
    calls: int


class TracedMessage(NamedTuple):
    """One message, as recorded by one of its two agents. Times are nanoseconds of that agent's clock.

    Attributes:
        peer: The other agent.
        key: The key of the message.
        nbytes: The bytes of its tensor.
        at: When it was sent, or when its header arrived.
        arrived: When its last byte arrived, if it arrived in pieces.
        row: The row of the trace that it is on.
        coordinates: The message moved no tensor.
    """

    peer: int
    key: MessageKey
    nbytes: int
    at: int
    arrived: int = 0
    row: int = 0
    coordinates: bool = False


class TracedTransfer(NamedTuple):
    """The transfer by a process group for one stage of an operation.

    Attributes:
        stage: The number of the stage.
        among: The ranks that took part; empty if all did.
        asked: When this agent requested it.
        ordered, moved: When all had agreed on its turn, and when it ended; None if that never happened.
    """

    stage: int
    among: tuple[int, ...]
    asked: int
    ordered: int | None = None
    moved: int | None = None


@dataclass
class TracedCall:
    """One operation, from its submission to its end; None if it has none.

    Attributes:
        operation, name, round: The call.
        start, end: When.
        inside: The intervals in which this agent copied its tensor, or summed.
        moves: The transfers by a process group, if any.
        error: The reason of its failure; empty if it did not fail.
        of: The fused calls, if any: names, first rounds, and numbers of rounds.
        row: The row of the trace that it is on.
    """

    operation: str
    name: str
    round: int
    start: int
    end: int | None = None
    inside: list[tuple[str, int, int]] = field(default_factory=list)
    moves: list[TracedTransfer] = field(default_factory=list)
    error: str = ""
    of: tuple[tuple[str, int, int], ...] = ()
    row: int = 0


class TracedWait(NamedTuple):
    """A thread stood still for an operation."""

    thread: str
    name: str
    round: int
    start: int
    end: int


class TracedStep(NamedTuple):
    """A step of an optimizer, from the end of the one before to its own."""

    optimizer: str
    number: int
    start: int
    end: int

    @property
    def length(self) -> int:
        """Nanoseconds in all."""
        return self.end - self.start


class TracedMetric(NamedTuple):
    """A number that the script has measured: this agent's, and the mean of all; None if it was not finite."""

    name: str
    own: float | None
    mean: float | None
    at: int


class TracedLoss(NamedTuple):
    """An agent that was lost, or left."""

    rank: int
    how: str
    cause: str
    at: int


@dataclass
class Trace:
    """The events of one agent. Times are nanoseconds since 1970 by its machine's clock.

    Attributes:
        path: Its file.
        rank, size: The agent, and the number of agents.
        host: Its machine's name.
        boot: Identifies its machine's clock: all traces with the same value share it.
        run: Identifies the run, on all agents; empty in a trace without it.
        incarnation: How often the agent had been restarted.
        shift: The offset that was added to the times of the file, which count from the boot of the machine.
        calls, waits, steps, measured, sent, received, losses: The events, in the order in which they ended.
        torn: The file ends in the middle: the agent was killed, or still runs.
        start, end: The first and the last time in it.
    """

    path: Path
    rank: int
    size: int
    host: str
    boot: str
    run: str
    incarnation: int
    shift: int
    calls: list[TracedCall] = field(default_factory=list)
    waits: list[TracedWait] = field(default_factory=list)
    steps: list[TracedStep] = field(default_factory=list)
    measured: list[TracedMetric] = field(default_factory=list)
    sent: list[TracedMessage] = field(default_factory=list)
    received: list[TracedMessage] = field(default_factory=list)
    losses: list[TracedLoss] = field(default_factory=list)
    torn: bool = False
    start: int = 0
    end: int = 0

    def __str__(self) -> str:
        again = f" (start {self.incarnation + 1})" if self.incarnation else ""
        return f"rank {self.rank}{again} on {self.host}"


@dataclass(frozen=True)
class TraceFolder:
    """The content of a folder.

    Attributes:
        traces: The traces of one run, by rank and incarnation.
        others: Traces of other runs.
        skipped: Files that are no traces of Shoal, each with the reason.
    """

    traces: list[Trace]
    others: list[Trace]
    skipped: list[str]

    @property
    def missing(self) -> list[int]:
        """The ranks of which there is no trace."""
        size = max((trace.size for trace in self.traces), default=0)
        return sorted(set(range(size)) - {trace.rank for trace in self.traces})


def read(folder: Path) -> TraceFolder:
    """The traces in a folder: of the run of which there are most, the latest of several.

    Raises:
        FileNotFoundError: There is none.
        ValueError: There are files that look like it, and none of them is.
    """
    paths = sorted(folder.glob(TRACES))
    if not paths:
        raise FileNotFoundError(f"there is no trace of an agent in {folder}; run with SHOAL_TIMELINE={folder}")
    traces, skipped = [], []
    for path in paths:
        try:
            traces.append(read_one(path))
        except (*NONSENSE, IndexError) as error:
            skipped.append(f"{path.name} is no trace of an agent: {error}")
    if not traces:
        raise ValueError(f"there is no trace of an agent in {folder}: {skipped[0]}")
    runs = _runs(traces)
    chosen = max(runs, key=lambda run: (len({trace.rank for trace in run}), max(trace.end for trace in run)))
    chosen.sort(key=lambda trace: (trace.rank, trace.incarnation, trace.start))
    return TraceFolder(chosen, [trace for run in runs if run is not chosen for trace in run], skipped)


def _runs(traces: list[Trace]) -> list[list[Trace]]:
    """The traces of each run. An agent that joined later may know the run by another name, because rank 0 restarted,
    too: it belongs to the run in which it was a member.
    """
    runs: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        runs[trace.run].append(trace)
    for name, run in list(runs.items()):
        if all(trace.incarnation for trace in run):
            start, end = min(trace.start for trace in run), max(trace.end for trace in run)
            for other, known in runs.items():
                overlap = min(end, max(trace.end for trace in known)) > max(start, min(trace.start for trace in known))
                if other != name and overlap and not all(trace.incarnation for trace in known):
                    known += runs.pop(name)
                    break
    return list(runs.values())


def lines_of(path: Path) -> Iterator[dict[str, Any] | None]:
    """The events in a file, and None at its end where that is torn.

    Raises:
        ValueError: A line in the middle is no event.
    """
    closed, bad = False, ""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if bad:
                raise ValueError(bad)
            text = line.strip().rstrip(",")
            if text in ("[", ""):
                continue
            if text == "]":
                closed = True
                continue
            try:
                event = json.loads(text)
            except (ValueError, RecursionError):
                bad = f"its line {text[:60]!r} cannot be read"
                continue
            if not isinstance(event, dict):
                raise ValueError(f"its line {text[:60]!r} is no event")
            yield event
    if not closed:
        yield None


def read_one(path: Path) -> Trace:
    """One trace.

    Raises:
        ValueError, KeyError, TypeError: The file is no trace.
    """
    reader = _TraceReader(path)
    for event in lines_of(path):
        if event is None:
            reader.trace.torn = True
        else:
            reader.take(event)
    trace = reader.trace
    if not trace.start:  # its agent ended before the first event: at 0 the run would have begun in 1970
        trace.start = trace.end = reader.began
    return trace


class _TraceReader:
    """Makes a trace of its lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trace: Trace | None = None
        self.began = 0  # the time of the head
        self._rows: dict[int, tuple[str, str]] = {}  # kind and name
        self._open: dict[int, TracedCall] = {}
        self._last: dict[int, TracedCall] = {}  # that ended on a row
        self._coming: dict[tuple[int, MessageKey], int] = {}  # its index in the received messages

    @property
    def trace(self) -> Trace:
        if self._trace is None:
            raise ValueError("it does not begin with a head of Shoal's")
        return self._trace

    def take(self, event: dict[str, Any]) -> None:
        phase, row = event["ph"], event["tid"]
        check_fields(event)
        check_fields(event.get("args", {}))
        if phase == "M":
            self._take_head(event["name"], row, event["args"])
            return
        trace = self.trace
        at = round(event["ts"] * 1000) + trace.shift
        end = at + round(event.get("dur", 0) * 1000)
        trace.start, trace.end = min(trace.start or at, at), max(trace.end, end)
        kind, name = self._rows[row]
        if kind == "exchange":
            self._take_exchange(phase, row, name, at, end, event)
        elif kind == "waits" and phase == "X":
            arguments = event["args"]
            of = arguments.get("name", event["name"])
            trace.waits.append(TracedWait(name, of, arguments["round"], at, end))
        elif kind == "steps" and phase == "X":
            trace.steps.append(TracedStep(name, event["args"]["step"], at, end))
        elif kind == "measured" and phase == "C":
            trace.measured.append(TracedMetric(name, event["args"].get("own"), event["args"].get("mean"), at))

    def _take_head(self, title: str, row: int, arguments: dict[str, Any]) -> None:
        if title == "thread_name":
            kind, _, name = arguments.get("of", arguments["name"]).partition(": ")
            self._rows[row] = kind, name
        elif title == "shoal":
            shift = arguments["unix_time_ns"] - arguments["perf_counter_ns"]
            size, boot = arguments.get("size", 0), arguments.get("boot", arguments["host"])
            run, incarnation = arguments.get("run", ""), arguments.get("incarnation", 0)
            self._trace = Trace(self._path, arguments["rank"], size, arguments["host"], boot, run, incarnation, shift)
            self.began = arguments["unix_time_ns"]

    def _take_exchange(self, phase: str, row: int, name: str, at: int, end: int, event: dict[str, Any]) -> None:
        if phase == "B":
            arguments = event["args"]
            of = tuple((member[0], member[1], member[2]) for member in arguments.get("of", ()))
            for fused, first, count in of:
                check_fields({"name": fused, "round": first, "calls": count})
            call = TracedCall(event["name"], arguments.get("name", name), arguments.get("round", 0), at, of=of, row=row)
            self._open[row] = call
            self.trace.calls.append(call)
        elif phase == "E":
            if row in self._open:
                self._open.pop(row).end = at
        elif phase == "X":
            if row in self._open:
                self._take_inside(self._open[row], event["name"], at, end)
        elif event["name"] == ASKED:
            if row in self._open:
                arguments = event["args"]
                self._open[row].moves.append(TracedTransfer(arguments["stage"], check_ranks(arguments["among"]), at))
        elif event["name"] == "failed":
            if row in self._open:
                self._open[row].error = event["args"]["error"]
        elif "bytes" in event["args"]:
            self._take_message(row, name, at, event["name"], event["args"])
        elif "cause" in event["args"]:
            how = event["name"].rpartition(" ")[2]
            self.trace.losses.append(TracedLoss(event["args"]["rank"], how, event["args"]["cause"], at))

    @staticmethod
    def _take_inside(call: TracedCall, name: str, start: int, end: int) -> None:
        if name == ORDERING:
            call.moves[-1] = call.moves[-1]._replace(ordered=end)
        elif name == MOVING:
            call.moves[-1] = call.moves[-1]._replace(moved=end)
        else:
            call.inside.append((name, start, end))

    def _take_message(self, row: int, name: str, at: int, label: str, arguments: dict[str, Any]) -> None:
        key = MessageKey(
            arguments.get("name", name), arguments["round"], arguments.get("stage", 0), arguments.get("calls", 1)
        )
        message = TracedMessage(arguments["peer"], key, arguments["bytes"], at, 0, row, "for" in arguments)
        received = self.trace.received
        if label.startswith(_TO):
            self.trace.sent.append(message)
        elif label.startswith(_FROM):
            self._coming[message.peer, key] = len(received)
            received.append(message)
        elif label.startswith(_ALL):
            place = self._coming.pop((message.peer, key), None)
            if place is not None:
                received[place] = received[place]._replace(arrived=at)


def names_of(traces: Sequence[Trace]) -> list[str]:
    """The names in a report for the agents of a run's traces: rank, and whether it had been restarted."""
    found, before = [], Counter[int]()
    for trace in traces:
        times = before[trace.rank]
        before[trace.rank] += 1
        again = f" (restarted{f' {times} times' if times > 1 else ''})" if times else ""
        found.append(f"{trace.rank}{again}")
    return found


@dataclass(frozen=True)
class Flow:
    """One message, as both its agents saw it.

    Attributes:
        source, destination: Their places in the list of traces.
        sent, received: The message as each agent recorded it; times are each by its own clock.
    """

    source: int
    destination: int
    sent: TracedMessage
    received: TracedMessage

    @property
    def key(self) -> MessageKey:
        return self.sent.key


def match(traces: Sequence[Trace]) -> list[Flow]:
    """The messages that were sent in one of these traces and received in another, in the order of their arrival.

    Messages on an edge arrive in the order in which they were sent, even if a key occurs more than once.
    """
    outgoing: dict[tuple[int, int, MessageKey], deque[tuple[int, TracedMessage]]] = defaultdict(deque)
    for number, trace in enumerate(traces):
        for message in trace.sent:
            outgoing[trace.rank, message.peer, message.key].append((number, message))
    found = []
    for number, trace in enumerate(traces):
        for message in trace.received:
            candidates = outgoing.get((message.peer, trace.rank, message.key))
            if candidates:
                source, sent = candidates.popleft()
                found.append(Flow(source, number, sent, message))
    return sorted(found, key=lambda flow: flow.received.at)


def members(trace: Trace) -> dict[MessageKey, tuple[tuple[str, int, int], ...]]:
    """The fused calls of the messages of an agent that contain several."""
    return {key_of(call): call.of for call in trace.calls if call.name == FUSED and call.of}


def key_of(call: TracedCall) -> MessageKey:
    """The key of the messages of a call's first stage."""
    if not call.of:
        return MessageKey(call.name, call.round, 0, 1)
    name, first, _ = call.of[0]
    return MessageKey(name, first, 0, sum(count for _, _, count in call.of))
