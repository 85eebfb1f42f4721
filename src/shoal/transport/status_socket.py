"""The status query of ``shoal status``: the request of another process of this user to the agents of a process.

The querying process does not know the job's secret, so it cannot authenticate as an agent. It connects to the Unix
socket that only this user can reach (``listeners.py``), which it finds through ``/proc/<pid>/fd``; the kernel gives
each side the user of the other. In place of the proof of the secret it sends one request. The answer is the status of
that process's agents, in JSON, and then the connection ends. No other request is possible.

A status query counts as an unauthenticated connection, with the same limits of number and time
(``acceptor.py``), and the answer is computed only now and then: a flood of queries costs as much as a flood of
connections. An agent has such a socket for the other agents of its machine anyway. If there are none, one agent of a
process opens it for all agents of that process; when that one leaves, another does.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any, Protocol

from .. import clock

QUESTION = b"SHOAL: what do you do?"
"""In the place of an answer to a greeting, and shorter."""
PACKET_BYTES = 1 << 14
MOST_BYTES = 1 << 17
"""Of an answer: a socket takes it at once."""
BUSY_SECONDS = 0.1
"""For which it is waited for agents of this process that just handle something, all together."""
KEEP_SECONDS = 0.1
"""The time for which an answer is reused for other queries."""


class StatusProvider(Protocol):
    """An agent, as far as it is asked."""

    @property
    def has_private_listener(self) -> bool:
        """Others of this user can reach it."""

    def open_private_listener(self) -> None:
        """Let them, if the system allows."""

    def describe(self, within: float) -> dict[str, Any]:
        """The status; if the agent has no time for it within so many seconds, its identity only. From any thread."""


class StatusSocket:
    """The agents of this process, and their last status."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: list[StatusProvider] = []
        self._packets: list[bytes] = []
        self._until = 0.0

    def join(self, agent: StatusProvider) -> None:
        """An agent is there to be asked."""
        with self._lock:
            self._agents.append(agent)
            self._until = 0.0
            self._ensure_listener()

    def leave(self, agent: StatusProvider) -> None:
        """Remove an agent that is about to close; ignored if it is not registered."""
        with self._lock:
            if agent in self._agents:
                self._agents.remove(agent)
                self._until = 0.0
                self._ensure_listener()

    def _ensure_listener(self) -> None:
        if self._agents and not any(agent.has_private_listener for agent in self._agents):
            self._agents[0].open_private_listener()

    def answer(self) -> list[bytes]:
        """The status of the agents of this process, in packets. Called by the thread that drives one of them."""
        with self._lock:
            now = clock.monotonic()
            if now >= self._until:
                limit = now + BUSY_SECONDS
                found = [agent.describe(max(0.0, limit - clock.monotonic())) for agent in self._agents]
                self._packets = _in_packets(found)
                self._until = clock.monotonic() + KEEP_SECONDS
            return self._packets

    def restart_in_child(self) -> None:
        """A forked child has no agent; its copies of their sockets are closed elsewhere."""
        self.__init__()  # type: ignore[misc]


def _in_packets(agents: list[dict[str, Any]]) -> list[bytes]:
    """One JSON object; of as many agents as there is room for, and how many there are."""
    texts: list[str] = []
    size = 0
    for agent in agents:
        text = json.dumps(agent)
        size += len(text) + 1
        if size > MOST_BYTES - 100:
            break
        texts.append(text)
    whole = f'{{"there": {len(agents)}, "agents": [{",".join(texts)}]}}'.encode()
    return [whole[at : at + PACKET_BYTES] for at in range(0, len(whole), PACKET_BYTES)]


here = StatusSocket()
"""Those of this process."""
os.register_at_fork(after_in_child=here.restart_in_child)
