"""The state of a run, from the status of its agents and of their processes, and its form for the page.

Its time series have a bounded length: the longer the run, the larger the distance of the points. ``EdgeRates`` gives
the bytes per second of an agent's edges, over a window that is long enough to be the same for all viewers.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ...errors import NONSENSE
from ..status_publisher import Number, StatusMessage

MOST_POINTS = 240
MOST_SERIES = 12
STEP_TIME, BYTES = "step time", "bytes per second"
UNITS = {STEP_TIME: "s", BYTES: "B/s"}
Point = tuple[float, Number, Number]
"""Seconds since the run began, the mean of all agents, and the worst of them."""


class Series:
    """One of them."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._last: Point | None = None
        self._every, self._skipped = 1, 0

    def add(self, point: Point) -> None:
        self._last = point
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._points.append(point)
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._every *= 2

    @property
    def points(self) -> list[Point]:
        """From the first to the last."""
        return [*self._points, self._last] if self._last is not None and self._skipped else list(self._points)


class History:
    """All of a run, by name."""

    def __init__(self) -> None:
        self._of: dict[str, Series] = {}
        self._times: dict[str, int] = {}

    def add(self, name: str, point: Point) -> None:
        if name in self._of or len(self._of) < MOST_SERIES:
            self._of.setdefault(name, Series()).add(point)

    def add_measured(self, name: str, times: int, point: Point) -> None:
        """Add a value that all agents know: the first report of it counts."""
        if times > self._times.get(name, 0):
            self._times[name] = times
            self.add(name, point)

    def begin_again(self) -> None:
        """The agents count from the beginning."""
        self._times.clear()

    def as_json(self) -> list[dict[str, object]]:
        return [
            {"name": name, "unit": UNITS.get(name, ""), "points": series.points} for name, series in self._of.items()
        ]


WINDOW_SECONDS = 5.0
WINDOW_STEPS = 3
"""A rate is over the longer of the two: one step sends all of its bytes in a moment."""
MOST_SAMPLES = 64


def window(step_seconds: float | None) -> float:
    """The seconds over which the rates of an agent are, whose steps take so long."""
    return max(WINDOW_SECONDS, WINDOW_STEPS * (step_seconds or 0.0))


class EdgeRates:
    """Those of one agent: by destination, from how much it had sent at each of its status messages."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, Mapping[int, int]]] = []

    def add(self, now: float, sent: Mapping[int, int], step_seconds: float | None) -> None:
        """So much was sent to each destination until now."""
        samples = self._samples
        samples.append((now, sent))
        since = now - window(step_seconds)
        while len(samples) > 2 and samples[1][0] <= since:
            del samples[0]
        if len(samples) > MOST_SAMPLES:  # of a long window every second one will do
            del samples[1:-1:2]

    @property
    def by_destination(self) -> dict[int, float]:
        """Bytes per second."""
        if len(self._samples) < 2:
            return {}
        (begin, before), (end, sent) = self._samples[0], self._samples[-1]
        seconds = max(1e-3, end - begin)
        return {peer: max(0, nbytes - before.get(peer, 0)) / seconds for peer, nbytes in sent.items()}


SILENT_SECONDS = 2.0
"""After this time without a message an agent counts as silent."""
HISTORY_SECONDS = 1.0
"""Between two points of a series that is no measurement of the script."""
MOST_EVENTS = 200
MOST_EDGES = 2048
STARTING, COMPUTING, WAITING, STOPPED, SILENT = "starting", "computing", "waiting", "stopped", "silent"
LOST, LEFT, FAILED, FINISHED, ABSENT = "lost", "left", "failed", "finished", "not there"
REJOINING = "rejoining"
_PROCESS_STOPPED = ("T", "t")


@dataclass
class _AgentView:
    """The known state of one agent.

    Attributes:
        incarnation: How often it has been restarted.
        last_message_at: The time of its last message, as ``time.monotonic()``; 0 if there was none.
        message: Its last message, and its last message with its work.
        process: The state of its process, as the kernel's letter; empty if no launcher observes it.
        ended: How its process ended; and whether successfully.
        restarted: Its process took the place of one that ended.
        rates: Bytes per second, by destination.
    """

    incarnation: int = -1
    last_message_at: float = 0.0
    message: StatusMessage | None = None
    known: StatusMessage | None = None
    process: str = ""
    pid: int = 0
    host: str = ""
    ended: str = ""
    ended_well: bool = False
    restarted: bool = False
    rates: EdgeRates = field(default_factory=EdgeRates)


class RunState:
    """The state of one run.

    Args:
        size: The limit of the number of agents.
        title: The title of the run.
        begins: The number of agents at the begin, on the first ranks; ``size`` if not given. The others may join.
    """

    def __init__(self, size: int, title: str, begins: int | None = None) -> None:
        self._size, self._title = size, title
        self._begins = size if begins is None else begins
        self._began = time.monotonic()
        self._attempt = 0
        self._agents = {rank: _AgentView() for rank in range(size)}
        self._noted: set[tuple[int, int]] = set()
        """The losses that are among the events: the rank, and how often it had been started again."""
        self._events: deque[tuple[float, str, str]] = deque(maxlen=MOST_EVENTS)
        self._history = History()
        self._ending: str | None = None
        self._drawn = 0.0

    # Incoming reports

    def take(self, summary: dict[str, Any]) -> None:
        """Receive a status message. A malformed one is ignored."""
        try:
            message = StatusMessage.of(summary, self._size)
        except NONSENSE:
            return
        agent = self._agents[message.rank]
        if message.attempt != self._attempt or message.incarnation < agent.incarnation:
            return  # a late message of an ended agent
        now = time.monotonic()
        if message.incarnation > agent.incarnation:
            again = self._again(message.rank, message.incarnation)
            if again:
                self.note(f"rank {message.rank} is there, started for the {_nth(again + 1)} time", "good")
            elif message.rank >= self._begins:
                self.note(f"rank {message.rank} has joined", "good")
            agent.incarnation, agent.known, agent.rates = message.incarnation, None, EdgeRates()
            agent.restarted = again > 0
        if message.work is not None:
            self._take_work(agent, message, now)
        if message.leaves and not (agent.message is not None and agent.message.leaves):
            self.note(f"rank {message.rank} has left", "")
        agent.message, agent.last_message_at, agent.pid, agent.host = message, now, message.pid, message.host

    def _take_work(self, agent: _AgentView, message: StatusMessage, now: float) -> None:
        work = message.work
        assert work is not None
        agent.rates.add(now, work.sent, work.step_seconds)
        for rank in work.lost:
            loss = rank, self._agents[rank].incarnation
            if loss not in self._noted and not self._agents[rank].restarted:
                self._noted.add(loss)
                self.note(f"rank {rank} is lost, as rank {message.rank} knows", "bad")
        for name, metric in work.measured.items():
            self._history.add_measured(name, metric.times, (self._seconds, metric.mean, metric.worst))
        agent.known = message

    def _again(self, rank: int, incarnation: int) -> int:
        """How often an agent was restarted. The first start of a joining agent has incarnation 1, as a restart, and
        does not count.
        """
        return max(0, incarnation - (rank >= self._begins))

    def process(self, rank: int, pid: int, host: str, state: str) -> None:
        """A launcher observes the process of an agent: the kernel's letter for its state."""
        agent = self._agents.get(rank)
        if agent is not None:
            if pid != agent.pid and agent.ended:  # another has taken its place
                self._agents[rank] = agent = _AgentView(restarted=True)
            agent.pid, agent.host, agent.process = pid, host, state

    def ended(self, rank: int, how: str, well: bool) -> None:
        """A launcher has observed how a process ended; repeated reports are ignored."""
        agent = self._agents.get(rank)
        if agent is not None and not agent.ended:
            agent.ended, agent.ended_well, agent.process = how, well, ""
            self.note(how, "" if well else "bad")

    def note(self, text: str, kind: str) -> None:
        """Add an event to the page: ``"bad"``, ``"good"``, or neither."""
        self._events.append((round(self._seconds, 1), text, kind))

    def begin_again(self, attempt: int) -> None:
        """All agents are restarted."""
        self._attempt = attempt
        self._agents = {rank: _AgentView() for rank in range(self._size)}
        self._noted.clear()
        self._history.begin_again()
        self.note(f"all agents begin again, for the {_nth(attempt + 1)} time", "bad")

    def end(self, how: str) -> None:
        """The run is over."""
        self._ending = how
        self.note(how, "")

    def draw(self) -> None:
        """Note what is shown over time, when it is due."""
        now = time.monotonic()
        if now < self._drawn + HISTORY_SECONDS:
            return
        self._drawn = now
        there = [agent.known.work for agent in self._agents.values() if agent.known is not None and not agent.ended]
        steps = [work.step_seconds for work in there if work is not None and work.step_seconds is not None]
        if steps:
            self._history.add(STEP_TIME, (self._seconds, fmean(steps), max(steps)))
        rates = [sum(_rates_of(agent, now).values()) for agent in self._agents.values() if agent.known is not None]
        if rates:
            self._history.add(BYTES, (self._seconds, sum(rates), max(rates)))

    @property
    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 2)

    # The page's data

    def as_json(self) -> dict[str, Any]:
        """The state for a page. ``None`` for unknown values."""
        now = time.monotonic()
        received: dict[int, float] = dict.fromkeys(self._agents, 0.0)
        total: dict[int, int] = dict.fromkeys(self._agents, 0)
        edges = []
        for rank, agent in self._agents.items():
            work = agent.known.work if agent.known is not None else None
            if work is None:
                continue
            rates = _rates_of(agent, now)
            for peer in {*work.sent, *work.edges}:
                rate = rates.get(peer, 0.0)
                nbytes = work.sent.get(peer, 0)
                received[peer] += rate
                total[peer] += nbytes
                edges.append((rank, peer, nbytes, round(rate), peer in work.edges and not agent.ended))
        edges.sort(key=lambda edge: (-edge[2], edge[0], edge[1]))
        lost = self._lost_ranks()
        return {
            "title": self._title,
            "over": self._ending,
            "seconds": self._seconds,
            "agents": [
                self._agent(rank, agent, received[rank], total[rank], rank in lost, now)
                for rank, agent in self._agents.items()
            ],
            "edges": edges[:MOST_EDGES],
            "series": self._history.as_json(),
            "events": list(self._events),
        }

    def _agent(
        self, rank: int, agent: _AgentView, received: float, total: int, lost: bool, now: float
    ) -> dict[str, Any]:
        work = agent.known.work if agent.known is not None else None
        state, words = self._state(agent, lost, now)
        speaks = work is not None and not agent.ended
        return {
            "rank": rank,
            "pid": agent.pid or None,
            "host": agent.host or None,
            "again": self._again(rank, agent.incarnation),
            "state": state,
            "words": words,
            "waits_for": list(work.waits_for) if work is not None and state == WAITING else [],
            "step": work.step if work is not None else None,
            "step_seconds": work.step_seconds if work is not None else None,
            "loss": loss_of({name: metric.own for name, metric in work.measured.items()}) if work is not None else None,
            "out": round(sum(_rates_of(agent, now).values())) if speaks else None,
            "in": round(received) if speaks else None,
            "sent": work.nbytes if work is not None else None,
            "received": total if work is not None else None,
        }

    def _lost_ranks(self) -> set[int]:
        """The agents that another agent, which has not ended itself, counts as lost."""
        found: set[int] = set()
        for other, agent in self._agents.items():
            if not agent.ended and agent.known is not None and agent.known.work is not None:
                found.update(rank for rank in agent.known.work.lost if rank != other)
        return found

    def _state(self, agent: _AgentView, lost: bool, now: float) -> tuple[str, str]:
        """In one word, and in a few more."""
        if agent.ended:
            return (FINISHED if agent.ended_well else LOST), agent.ended.partition(") ")[2] or agent.ended
        if agent.process in _PROCESS_STOPPED:
            return STOPPED, f"(continue it with kill -CONT {agent.pid})"
        message, known = agent.message, agent.known
        if (message is not None and message.rejoins) or (agent.restarted and lost):
            return REJOINING, "when the others save their checkpoint"
        if lost:
            return LOST, "as the others know"
        if message is None:
            starting = REJOINING if agent.restarted else STARTING
            return (starting, "") if agent.process else (ABSENT, "")
        if message.leaves:
            return LEFT, "and its process goes on"
        if now - agent.last_message_at > SILENT_SECONDS:
            return SILENT, f"for {now - agent.last_message_at:.0f} s"
        work = known.work if known is not None else None
        if work is None:
            return COMPUTING, ""
        if work.over:
            return FAILED, work.over
        if work.waits_in and work.stands_still:
            ranks = ", ".join(map(str, work.waits_for)) or "nobody in particular"
            return WAITING, f"for {ranks}, since {_duration(work.waits_seconds)}, in {work.waits_in}"
        return COMPUTING, ""


def _rates_of(agent: _AgentView, now: float) -> Mapping[int, float]:
    """Bytes per second by destination: none of an agent that has ended or is silent."""
    return {} if agent.ended or now - agent.last_message_at > SILENT_SECONDS else agent.rates.by_destination


def loss_of(measured: Mapping[str, Number]) -> Number | None:
    """An agent's own loss: the first number that is called so, if there is one."""
    return next((own for name, own in measured.items() if "loss" in name.lower()), None)


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else f"{math.floor(seconds)} s"


def _nth(count: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(count, f"{count}th")
