"""What another shell of this user may ask the agents of a process, and how: `shoal status`.

It does not know the job's secret, so it does not come in: it connects to the Unix socket that only this user can reach
(``listeners.py``), which it finds through ``/proc/<pid>/fd``; the kernel tells each side the user of the other; and in
the place where an agent would prove that it knows the secret it says one word. The answer is what the agents of that
process do, in JSON, and the end of the connection. Nothing else can be said or done that way.

Whoever asks has a place among those that have not proved who they are, as many as there are and for as long as any
(``unauthenticated.py``), and what is said is made anew only now and then: a flood of questions costs what a flood of
connections does. An agent has such a socket for the others of its machine anyway. Where there are none, one agent of a
process opens it for all of them, as threads or alone; when that one leaves, another does.
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
"""For which an answer is given again to whoever else asks."""


class StatusProvider(Protocol):
    """An agent, as far as it is asked."""

    @property
    def has_private_listener(self) -> bool:
        """Others of this user can reach it."""

    def open_private_listener(self) -> None:
        """Let them, if the system allows."""

    def describe(self, within: float) -> dict[str, Any]:
        """What it does; where it does not find the time for that in so many seconds, who it is. From any thread."""


class StatusSocket:
    """The agents of this process, and what was last said of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: list[StatusProvider] = []
        self._said: list[bytes] = []
        self._until = 0.0

    def join(self, agent: StatusProvider) -> None:
        """An agent is there to be asked."""
        with self._lock:
            self._agents.append(agent)
            self._until = 0.0
            self._ensure_listener()

    def leave(self, agent: StatusProvider) -> None:
        """It is about to close what it has; nothing if it is not there."""
        with self._lock:
            if agent in self._agents:
                self._agents.remove(agent)
                self._until = 0.0
                self._ensure_listener()

    def _ensure_listener(self) -> None:
        if self._agents and not any(agent.has_private_listener for agent in self._agents):
            self._agents[0].open_private_listener()

    def answer(self) -> list[bytes]:
        """What the agents of this process do, in packets. For who has asked, by the thread that drives one of them."""
        with self._lock:
            now = clock.monotonic()
            if now >= self._until:
                limit = now + BUSY_SECONDS
                found = [agent.describe(max(0.0, limit - clock.monotonic())) for agent in self._agents]
                self._said = _in_packets(found)
                self._until = clock.monotonic() + KEEP_SECONDS
            return self._said

    def restart_in_child(self) -> None:
        """A forked child has no agent; its copies of their sockets are closed where they are."""
        self.__init__()  # type: ignore[misc]


def _in_packets(agents: list[dict[str, Any]]) -> list[bytes]:
    """One JSON object; of as many agents as there is room for, and how many there are."""
    told: list[str] = []
    size = 0
    for agent in agents:
        text = json.dumps(agent)
        size += len(text) + 1
        if size > MOST_BYTES - 100:
            break
        told.append(text)
    whole = f'{{"there": {len(agents)}, "agents": [{",".join(told)}]}}'.encode()
    return [whole[at : at + PACKET_BYTES] for at in range(0, len(whole), PACKET_BYTES)]


here = StatusSocket()
"""Those of this process."""
os.register_at_fork(after_in_child=here.restart_in_child)
