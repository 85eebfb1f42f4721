"""Sends this agent's status to the launcher of ``shoal run --watch``, twice a second.

The launcher listens on a Unix socket that only its user can reach (``transport/listeners.py``); ``SHOAL_WATCH`` names
it. A message has the content of ``shoal status`` and the bytes sent on each edge. A thread of its own builds and sends
it, so an error there ends no exchange. It never waits for the launcher: a message for which there is no room is
dropped, because the next one replaces it. Without the variable there is no thread, and nothing is counted.

:class:`StatusMessage` is such a message as the launcher reads it: validated and bounded, because it comes from outside.
This module does not import torch, because launchers run without it.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..transport.addresses import connect
from .run_files import NEIGHBOURS

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..runtime.agent import Agent

log = logging.getLogger("shoal")

SECONDS = 0.5
"""Between two summaries."""
MOST_BYTES = 1 << 16
"""The limit of a summary; parts beyond it are left out."""
MOST_EDGES = 256
"""Those on which most was sent."""
WITHIN_SECONDS = 0.1
"""The limit of the wait for the engine's lock. After it, the status has only the agent's identity."""


class StatusPublisher:
    """Sends the status of one agent, until :meth:`close`.

    Args:
        agent: The agent.
        path: The socket of its launcher.
        seconds: Seconds between two messages.

    Raises:
        OSError: Nobody of this user listens there.
    """

    def __init__(self, agent: Agent, path: str, seconds: float = SECONDS) -> None:
        self._agent, self._seconds = agent, seconds
        self._sock: socket.socket | None = connect(path)
        self._step = _StepTime()
        self._closing = threading.Event()
        self._count(True)
        self._thread = threading.Thread(target=self._run, name=f"shoal-watch-{agent.rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say that it leaves, and end."""
        self._closing.set()
        self._thread.join()
        self._count(False)
        self._push(leaves=True)
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _count(self, counts: bool) -> None:
        with self._agent.engine.lock:
            traffic = self._agent.engine.edge_counters
            traffic.set_counting(NEIGHBOURS if counts else ())

    def _run(self) -> None:
        while self._sock is not None:
            self._push()
            if self._closing.wait(self._seconds):
                return

    def _push(self, leaves: bool = False) -> None:
        """Send one message if there is room for it; stop for ever if the launcher has closed the socket."""
        if self._sock is None:
            return
        try:
            self._sock.send(_in_bounds(self.summary() | {"leaves": leaves}))
        except BlockingIOError:
            pass
        except OSError:  # the launcher does not look on any more
            self._sock.close()
            self._sock = None
        except Exception:  # an error of the publisher must not end a run
            log.exception("rank %d tells its launcher nothing more", self._agent.rank)
            self._sock.close()
            self._sock = None

    def summary(self) -> dict[str, Any]:
        """The current status message."""
        engine = self._agent.engine
        status = engine.describe(WITHIN_SECONDS)
        status |= {"attempt": self._agent.launch.attempt, "rejoins": engine.is_joining}
        status.pop("here", None)
        status.pop("script", None)  # a command line may have what is not meant for the network between launchers
        if "steps" in status:  # else it has no time for more
            status |= self._step.of(status["steps"], status["stepped_ago"])
            with engine.lock:
                traffic = engine.edge_counters
                most = sorted(traffic.bytes_to.items(), key=lambda edge: -edge[1])[:MOST_EDGES]
                status |= {"sent": most, "edges": traffic.edges[:MOST_EDGES]}
        return status


class _StepTime:
    """Measures the duration of steps, from the ends of the last observed ones."""

    def __init__(self) -> None:
        self._count, self._ended = 0, 0.0
        self._seconds: float | None = None

    def of(self, steps: dict[str, int], ago: float | None) -> dict[str, Any]:
        """How many steps there are, and the seconds of one; None if that is not known."""
        count = max(steps.values(), default=0)
        if ago is not None and count > self._count:
            ended = time.monotonic() - ago
            if self._count:
                self._seconds = (ended - self._ended) / (count - self._count)
            self._count, self._ended = count, ended
        return {"step": count, "step_seconds": self._seconds}


def _in_bounds(status: dict[str, Any]) -> bytes:
    """The form that is sent; if it is too long, without its long parts."""
    data = json.dumps(status, separators=(",", ":")).encode()
    for name in ("sent", "measured", "waiting"):
        if len(data) <= MOST_BYTES:
            break
        status.pop(name, None)
        data = json.dumps(status, separators=(",", ":")).encode()
    return data


_summaries: dict[Engine, StatusPublisher] = {}


def attach(agent: Agent) -> None:
    """Begin to send the status of a new agent, if its launcher wants it."""
    path = agent.config.watch
    if not path or agent.launch.launcher == "fleet":  # agents of a fleet have ranks of their own
        return
    try:
        _summaries[agent.engine] = StatusPublisher(agent, path)
    except OSError as error:
        log.warning("rank %d cannot send its status to its launcher, and continues without: %s", agent.rank, error)


def detach(agent: Agent) -> None:
    """Send the last status of an agent that shuts down."""
    summaries = _summaries.pop(agent.engine, None)
    if summaries is not None:
        summaries.close()


_LONGEST = 400
_MOST_RANKS, _MOST_READ_EDGES, _MOST_NAMES = 64, 1024, 32
Number = float | str
"""A text where JSON has no number: ``nan``, ``inf``."""


@dataclass(frozen=True)
class MetricSample:
    """The ``times``-th measurement of a number by the script: this agent's value, and all agents' values."""

    times: int
    own: Number
    mean: Number
    worst: Number


@dataclass(frozen=True)
class WorkStatus:
    """The work of an agent, if it had the time to report it.

    Attributes:
        waits_in: The call that it has waited in for longest; empty if it does not wait.
        waits_for: The ranks that it waits for.
        waits_seconds: The duration of the wait.
        stands_still: A thread of its script is blocked in a call.
        lost, left: The ranks that it knows as lost, or as shut down.
        over: The reason why it cannot exchange with others any more.
        step, step_seconds: The number of training steps, and the duration of one.
        measured: The measurements, by name.
        nbytes: The bytes that it has sent in all.
        sent: The same by destination, only on the edges with the most bytes.
        edges: The destinations of its last exchange with neighbours.
    """

    waits_in: str
    waits_for: tuple[int, ...]
    waits_seconds: float
    stands_still: bool
    lost: tuple[int, ...]
    left: tuple[int, ...]
    over: str
    step: int
    step_seconds: float | None
    measured: dict[str, MetricSample]
    nbytes: int
    sent: dict[int, int]
    edges: tuple[int, ...]


@dataclass(frozen=True)
class StatusMessage:
    """A summary.

    Attributes:
        rank, size, incarnation, attempt: The identity of the agent.
        pid, host: Its process and its machine.
        leaves: The agent has shut down.
        rejoins: The agent was restarted, and the others have not admitted it yet.
        work: None where it had no time for more.
    """

    rank: int
    size: int
    incarnation: int
    attempt: int
    pid: int
    host: str
    leaves: bool
    work: WorkStatus | None = field(default=None)
    rejoins: bool = False

    @staticmethod
    def of(data: dict[str, Any], size: int) -> StatusMessage:
        """The message from JSON data of an agent, in a run of ``size`` agents.

        Raises:
            One of :data:`~shoal.errors.NONSENSE`: The data is malformed.
        """
        rank = _rank(data["rank"], size)
        who = (rank, _count(data["size"]), _count(data["incarnation"]), _count(data["attempt"]), _count(data["pid"]))
        work = _work(data, size) if "step" in data else None
        return StatusMessage(*who, _text(data["host"]), bool(data.get("leaves")), work, bool(data.get("rejoins")))


def _work(data: dict[str, Any], size: int) -> WorkStatus:
    waits = sorted(data.get("waiting", ()), key=lambda wait: -_seconds(wait["seconds"]))[:1]
    agrees = _ranks(data["agrees_with"], size)
    call, ranks, seconds = "", agrees, 0.0
    if agrees:
        call = "the agreement on a loss"
    elif waits:
        call, ranks = _text(waits[0]["call"]), _ranks(waits[0]["ranks"], size)
        seconds = _seconds(waits[0]["seconds"])
    took = data["step_seconds"]
    return WorkStatus(
        call,
        ranks,
        seconds,
        bool(data["stands_still"]) or bool(agrees),
        _ranks(data["lost"], size),
        _ranks(data["left"], size),
        _text(data["over"]),
        _count(data["step"]),
        None if took is None else _seconds(took),
        {_text(name): _measure(measure) for name, measure in list(data.get("measured", {}).items())[:_MOST_NAMES]},
        _count(data["bytes_sent"]),
        {_rank(peer, size): _count(nbytes) for peer, nbytes in data.get("sent", ())[:_MOST_READ_EDGES]},
        tuple(_rank(peer, size) for peer in data.get("edges", ())[:_MOST_READ_EDGES]),
    )


def _measure(data: dict[str, Any]) -> MetricSample:
    return MetricSample(_count(data["times"]), *(_number(data[name]) for name in ("own", "mean", "worst")))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return "".join(char if char.isprintable() else "?" for char in value[:_LONGEST])


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no count")
    return int(value)


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{value!r} is no time")
    return max(0.0, seconds)


def _number(value: Any) -> Number:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _rank(value: Any, size: int) -> int:
    if not isinstance(value, int) or not 0 <= value < size:
        raise ValueError(f"{value!r} is no rank of {size} agents")
    return value


def _ranks(values: Any, size: int) -> tuple[int, ...]:
    return tuple(_rank(rank, size) for rank in values[:_MOST_RANKS])
