"""The state of a finished run at any moment, from the traces and membership logs of its agents."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import clock_alignment, membership_log, traces
from ..membership_log import CAME, LEFT, MembershipEvent
from ..run_files import NEIGHBOURS, kinds_in
from ..traces import Trace
from .run_state import ABSENT, BYTES, COMPUTING, LOST, REJOINING, STARTING, STEP_TIME, WAITING, History, loss_of, window
from .run_state import LEFT as HAS_LEFT

MOMENTS = 120
"""At most; fewer where there are many agents."""
MOST_CELLS = 20_000
"""Of all tables of all moments, about."""
SECOND = 1_000_000_000


def read(folder: Path) -> dict[str, Any]:
    """The states of a run, as JSON data: see :meth:`.RunState.as_json`, with ``frames`` added.

    Raises:
        FileNotFoundError: The folder has neither a trace nor a membership log.
        ValueError: A file is malformed.
    """
    of_traces, of_records = kinds_in(folder)
    entries = membership_log.read(folder) if of_records else []
    if not of_traces:
        return _LogReplay(entries).as_json()
    _, laid = clock_alignment.aligned(traces.read(folder).traces)
    return _TraceReplay(laid, entries).as_json()


class _TraceReplay:
    """A run of which there are traces."""

    def __init__(self, found: list[Trace], entries: list[MembershipEvent]) -> None:
        self._of: dict[int, list[_TracedAgent]] = defaultdict(list)
        for trace in found:
            self._of[trace.rank].append(_TracedAgent(trace))
        self._begin, self._end = min(trace.start for trace in found), max(trace.end for trace in found)
        self._size = max(max(trace.size, trace.rank + 1) for trace in found)
        self._entries = entries
        self._all = found

    def as_json(self) -> dict[str, Any]:
        edges = {(trace.rank, message.peer) for trace in self._all for message in trace.sent}
        count = max(2, min(MOMENTS, MOST_CELLS // max(1, self._size + len(edges))))
        passed = max(1, self._end - self._begin)
        moments = [self._begin + passed * (k + 1) // count for k in range(count)]
        frames = [self._frame(at) for at in moments]
        seconds = passed / SECOND
        return {
            "title": f"{self._size} agents, {seconds:.1f} s",
            "over": "a run that is over, as its traces have it",
            "seconds": round(seconds, 2),
            "agents": frames[-1]["agents"],
            "edges": frames[-1]["edges"],
            "series": self._series(frames).as_json(),
            "events": self._events(),
            "frames": frames,
        }

    def _since(self, at: int) -> float:
        return round((at - self._begin) / SECOND, 2)

    def _frame(self, at: int) -> dict[str, Any]:
        rows, edges = [], []
        there: dict[int, _TracedAgent | None] = {}
        for rank in range(self._size):
            begun = [agent for agent in self._of.get(rank, ()) if agent.trace.start <= at]
            there[rank] = begun[-1] if begun else None
        lost = {loss.rank for trace in self._all for loss in trace.losses if loss.how == "died" and loss.at <= at}
        into: Counter[int] = Counter()
        rates: dict[int, tuple[int, int]] = {}
        for rank, agent in there.items():
            if agent is None:
                continue
            step = agent.step_at(at)
            stretch = window(step.length / SECOND if step is not None else None)
            stretch = max(1e-3, min(stretch, (at - agent.trace.start) / SECOND))
            now, before = agent.bytes_until(at), agent.bytes_until(at - round(stretch * SECOND))
            used = agent.edges_at(at) if at <= agent.trace.end else set()
            for peer in {*now, *used}:
                rate = round((now[peer] - before[peer]) / stretch)
                edges.append((rank, peer, now[peer], rate, peer in used))
                into[peer] += now[peer]
            rates[rank] = sum(now.values()), sum(edge[3] for edge in edges if edge[0] == rank)
        for rank, agent in there.items():
            came = sum(edge[3] for edge in edges if edge[1] == rank)
            rows.append(self._row(rank, agent, at, rank in lost, rates.get(rank), came, into[rank]))
        edges.sort(key=lambda edge: (-edge[2], edge[0], edge[1]))
        return {"at": self._since(at), "agents": rows, "edges": edges}

    def _row(
        self,
        rank: int,
        agent: _TracedAgent | None,
        at: int,
        lost: bool,
        sent: tuple[int, int] | None,
        came: int,
        into: int,
    ) -> dict[str, Any]:
        row = row_of(rank)
        if agent is None:
            return row
        state, waits_for = COMPUTING, list[int]()
        words = ""
        if at > agent.trace.end:
            state = LOST if agent.trace.torn or lost else HAS_LEFT
        elif lost and at > agent.trace.end - SECOND:
            state = LOST
        else:
            wait = agent.waits_at(at)
            missing = agent.missing(wait, at) if wait is not None else []
            if wait is not None and missing is None:
                state, words = WAITING, f"in {wait.name}"
            elif wait is not None and missing:
                state, waits_for = WAITING, missing
                words = f"for {', '.join(map(str, missing))}, in {wait.name}"
        step = agent.step_at(at)
        measured = {name: own for name, own in agent.measured_at(at).items() if own is not None}
        going = state in (COMPUTING, WAITING)
        return row | {
            "host": agent.trace.host,
            "again": agent.trace.incarnation - self._of[rank][0].trace.incarnation,
            "state": state,
            "words": words,
            "waits_for": waits_for,
            "step": step.number if step is not None else 0,
            "step_seconds": step.length / SECOND if step is not None else None,
            "loss": loss_of(measured),
            "out": sent[1] if sent is not None and going else None,
            "in": came if going else None,
            "sent": sent[0] if sent is not None else None,
            "received": into,
        }

    def _series(self, frames: list[dict[str, Any]]) -> History:
        history = History()
        noted: set[str] = set()
        for trace in self._all:
            for name in {measure.name for measure in trace.measured} - noted:
                noted.add(name)
                for measure in (candidate for candidate in trace.measured if candidate.name == name):
                    mean = "nan" if measure.mean is None else measure.mean
                    history.add(name, (self._since(measure.at), mean, mean))
        for frame in frames:
            steps = [row["step_seconds"] for row in frame["agents"] if row["step_seconds"] is not None]
            if steps:
                history.add(STEP_TIME, (frame["at"], fmean(steps), max(steps)))
            out = [row["out"] for row in frame["agents"] if row["out"] is not None]
            if out:
                history.add(BYTES, (frame["at"], sum(out), max(out)))
        return history

    def _events(self) -> list[tuple[float, str, str]]:
        found: list[tuple[float, str, str]] = []
        noted: set[tuple[int, str]] = set()
        for at, rank, how, cause in sorted(
            (loss.at, loss.rank, loss.how, loss.cause) for trace in self._all for loss in trace.losses
        ):
            if (rank, how) not in noted:
                noted.add((rank, how))
                found.append((self._since(at), f"rank {rank} {how}: {cause}", "bad" if how == "died" else ""))
        for rank, agents in self._of.items():
            for agent in agents:  # a joining agent is started like a restarted one
                text = f"rank {rank} is there, started again" if agent is not agents[0] else f"rank {rank} has joined"
                if agent.trace.incarnation:
                    found.append((self._since(agent.trace.start), text, "good"))
        begin = self._begin / SECOND
        found += [(round(at - begin, 1), text, kind) for at, text, kind in _changes(self._entries)]
        return sorted(found)


class _TracedAgent:
    """The trace of one agent, for queries by time."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._sent = sorted(
            (message for message in trace.sent if not message.coordinates), key=lambda message: message.at
        )
        self._to: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], [0]))  # when, how much so far
        for message in self._sent:
            when, much = self._to[message.peer]
            when.append(message.at)
            much.append(much[-1] + message.nbytes)
        ops = {(call.name, call.round): call.operation for call in trace.calls}
        between = [message for message in self._sent if ops.get(message.key[:2], "").startswith(NEIGHBOURS)]
        self._between = between or self._sent
        self._between_at = [message.at for message in self._between]
        self._steps = sorted(trace.steps, key=lambda step: step.end)
        self._steps_at = [step.end for step in self._steps]
        self._waits = sorted(trace.waits, key=lambda wait: wait.start)
        self._waits_at = [wait.start for wait in self._waits]
        self._coming: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        for message in trace.received:
            self._coming[message.key[:2]].append((message.peer, max(message.at, message.arrived)))

    def bytes_until(self, at: int) -> Counter[int]:
        """Sent so far, by destination."""
        found = {peer: (much, bisect_right(when, at)) for peer, (when, much) in self._to.items()}
        return Counter({peer: much[number] for peer, (much, number) in found.items() if number})

    def edges_at(self, at: int) -> set[int]:
        """The destinations of the last exchange before a time."""
        last = bisect_right(self._between_at, at) - 1
        used = set()
        for k in range(last, -1, -1):
            if self._between[k].key[:2] != self._between[last].key[:2]:
                break
            used.add(self._between[k].peer)
        return used

    def waits_at(self, at: int) -> traces.TracedWait | None:
        """The wait of one of its threads at a time."""
        for wait in self._waits[: bisect_right(self._waits_at, at)][:-9:-1]:  # of several threads one may
            if wait.end >= at:
                return wait
        return None

    def missing(self, wait: traces.TracedWait, at: int) -> list[int] | None:
        """The ranks whose messages arrived after a time; None if the trace has no message for it."""
        coming = self._coming.get((wait.name, wait.round))
        return None if coming is None else sorted({peer for peer, came in coming if came > at})

    def step_at(self, at: int) -> traces.TracedStep | None:
        """The last that had ended."""
        number = bisect_right(self._steps_at, at)
        return self._steps[number - 1] if number else None

    def measured_at(self, at: int) -> dict[str, float | None]:
        """The last of each number."""
        return {metric.name: metric.own for metric in self.trace.measured if metric.at <= at}


class _LogReplay:
    """A run without traces, of which only the membership is known."""

    def __init__(self, entries: list[MembershipEvent]) -> None:
        self._entries = entries
        self._begin = entries[0].at
        self._size = 1 + max(max((event.rank, *event.alive)) for event in entries)

    def as_json(self) -> dict[str, Any]:
        times = sorted({round(event.at - self._begin, 2) for event in self._entries})
        frames = [{"at": at, "agents": self._rows(at), "edges": []} for at in times[:: max(1, len(times) // MOMENTS)]]
        return {
            "title": f"{self._size} agents, {times[-1]:.1f} s",
            "over": "a run that is over, as its records have it",
            "seconds": times[-1],
            "agents": self._rows(times[-1]),
            "edges": [],
            "series": [],
            "events": [(round(at - self._begin, 1), text, kind) for at, text, kind in _changes(self._entries)],
            "frames": [*frames, {"at": times[-1], "agents": self._rows(times[-1]), "edges": []}],
        }

    def _rows(self, at: float) -> list[dict[str, Any]]:
        state, again = dict.fromkeys(range(self._size), ABSENT), dict.fromkeys(range(self._size), 0)
        first: dict[int, int] = {}  # a joining agent is started like a restarted one
        for event in self._entries:
            if round(event.at - self._begin, 2) > at:
                break
            again[event.rank] = max(
                again[event.rank], event.incarnation - first.setdefault(event.rank, event.incarnation)
            )
            if event.what == CAME:
                state[event.rank] = COMPUTING if not event.incarnation else REJOINING if again[event.rank] else STARTING
            elif event.what == LEFT:
                state[event.rank] = HAS_LEFT
            for rank in event.lost:
                state[rank] = LOST
            for rank in event.entered:
                state[rank] = COMPUTING
        return [row_of(rank) | {"state": state[rank], "again": again[rank]} for rank in state]


def row_of(rank: int) -> dict[str, Any]:
    """An agent of which nothing is known."""
    unknown = ("pid", "host", "step", "step_seconds", "loss", "out", "in", "sent", "received")
    return {"rank": rank, "again": 0, "state": ABSENT, "words": "", "waits_for": [], **dict.fromkeys(unknown)}


def _changes(entries: list[MembershipEvent]) -> list[tuple[float, str, str]]:
    """The membership changes that agents have agreed on, each once: time (seconds since 1970), text, and whether it is
    good.
    """
    found = []
    noted: set[tuple[tuple[int, ...], ...]] = set()
    for event in entries:
        change = event.lost, event.entered, event.alive
        if (event.lost or event.entered) and change not in noted:
            noted.add(change)
            parts = [f"lost: {', '.join(map(str, event.lost))}"] if event.lost else []
            parts += [f"entered: {', '.join(map(str, event.entered))}"] if event.entered else []
            text = f"agreed on: {'; '.join(parts)}; there are {len(event.alive)}"
            found.append((event.at, text, "bad" if event.lost else "good"))
    return found
