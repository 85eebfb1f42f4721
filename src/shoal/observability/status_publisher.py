"""Sends this agent's status to the launcher of ``shoal run --watch``, twice a second.

The launcher listens on a Unix socket that only its user can reach (``transport/listeners.py``); ``SHOAL_WATCH`` names
it. A message has the content of ``shoal status`` and the bytes sent on each edge. A thread of its own builds and sends
it, so an error there ends no exchange. It never waits for the launcher: a message for which there is no room is
dropped, because the next one replaces it. Without the variable there is no thread, and nothing is counted.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from typing import Any

from ..engine.engine import Engine
from ..runtime.agent import Agent
from ..transport.addresses import connect

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
            traffic.set_counting(counts)

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
        log.warning("rank %d cannot tell its launcher what it does, and goes on without: %s", agent.rank, error)


def detach(agent: Agent) -> None:
    """Send the last status of an agent that shuts down."""
    summaries = _summaries.pop(agent.engine, None)
    if summaries is not None:
        summaries.close()
