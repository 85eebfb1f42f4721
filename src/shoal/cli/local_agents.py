"""Finds the agents of this user on this machine, and queries the status of all of them in parallel."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import NONSENSE
from ..rendezvous.launch import detect
from ..transport.handshake import HELLO_SIZE, MAGIC
from ..transport.status_socket import MOST_BYTES, PACKET_BYTES, QUESTION
from ..transport.unix_sockets import connect

PROC = Path("/proc")
WITHIN_SECONDS = 1.5
"""For which an answer is waited for."""
_DOOR = re.compile(r"/shoal-[^/]+/door( \(deleted\))?$")
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a device",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
    "I": "idle",
}
STOPPED = (_STATES["T"], _STATES["t"])


@dataclass(frozen=True)
class Process:
    """A process with agents.

    Attributes:
        pid: Its process ID.
        state: Its state in the kernel.
        rank: The rank of its agent, from its answer or from its launcher's variables; None if unknown.
        agents: Their status, in the form of :meth:`~shoal.engine.agent_status.StatusReporter.as_json`.
        there: The number of agents.
        silent: The reason for missing status; empty if they have answered.
    """

    pid: int
    state: str
    rank: int | None
    agents: tuple[dict[str, Any], ...] = ()
    there: int = 0
    silent: str = ""


def find() -> dict[int, list[str]]:
    """The processes of this user that have agents, and the paths at which they can be asked."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (listeners := _listeners(entry)):
            found[int(entry.name)] = listeners
    return found


def _listeners(process: Path) -> list[str]:
    found = []
    with contextlib.suppress(OSError):  # it has ended since, or is another user's
        if process.stat().st_uid != os.getuid():
            return []
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if _DOOR.search(os.readlink(entry)):  # noqa: PTH115 - what a descriptor leads to may be no path
                    found.append(str(entry))
    return sorted(found)


def ask(processes: Mapping[int, Iterable[str]], within: float = WITHIN_SECONDS) -> list[Process]:
    """Ask them, all at the same time, and wait for so many seconds at most."""
    questions = {pid: _StatusQuery(paths) for pid, paths in processes.items()}
    limit = time.monotonic() + within
    with selectors.DefaultSelector() as selector:
        for one in questions.values():
            one.begin(selector)
        while selector.get_map() and (rest := limit - time.monotonic()) > 0:
            for key, _ in selector.select(rest):
                key.data.hear(selector)
    ranks = {pid: rank for one in questions.values() for agent in one.agents for rank, pid in agent.get("here", ())}
    found = []
    for pid, one in sorted(questions.items()):
        one.end()
        state = _state(pid)
        if state is None and not one.agents:
            continue  # it ended before the query
        rank = ranks.get(pid, _rank(pid))
        found.append(Process(pid, state or _STATES["X"], rank, tuple(one.agents), one.there, one.silent))
    return found


class _StatusQuery:
    """One process that is asked."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.agents: list[dict[str, Any]] = []
        self.there = 0
        self.silent = "it does not answer"
        self._paths = iter(paths)
        self._sock: socket.socket | None = None
        self._packets: list[bytes] = []
        self._greeted = False

    def begin(self, selector: selectors.BaseSelector) -> None:
        """Connect, where that works."""
        for path in self._paths:
            try:
                self._sock = connect(path)
            except OSError as error:
                self.silent = f"it cannot be asked ({error.strerror or error})"
                continue
            self.silent = "it does not answer"
            selector.register(self._sock, selectors.EVENT_READ, self)
            return

    def hear(self, selector: selectors.BaseSelector) -> None:
        """Read the received data."""
        sock = self._sock
        assert sock is not None
        try:
            packet = sock.recv(max(PACKET_BYTES, HELLO_SIZE))
            if packet and not self._greeted:
                if not packet.startswith(MAGIC):
                    raise ValueError
                self._greeted = True
                sock.send(QUESTION)
                return
            if packet:
                self._packets.append(packet)
                if sum(map(len, self._packets)) > 2 * MOST_BYTES:
                    raise ValueError
                return
            if self._packets:
                self.there, self.agents = _read(b"".join(self._packets))
                self.silent = ""
        except BlockingIOError:
            return
        except OSError as error:
            self.silent = f"it cannot be asked ({error.strerror or error})"
        except NONSENSE:
            self.silent = "what it answers makes no sense: is it of another version of Shoal?"
        selector.unregister(sock)
        if self.silent and not self._packets:  # it has no place just now, or another of its agents knows more
            self.end()
            self._greeted = False
            self.begin(selector)

    def end(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


_TYPES: dict[str, tuple[type, ...]] = {
    "rank": (int,),
    "size": (int,),
    "host": (str,),
    "job": (str,),
    "script": (str,),
    "since": (int, float),
}
_MORE_TYPES: dict[str, tuple[type, ...]] = {
    "waiting": (list,),
    "stands_still": (bool,),
    "agrees_with": (list,),
    "ended": (str,),
    "seconds_ago": (int, float),
    "waits_in": (int,),
    "lost": (list,),
    "over": (str,),
    "here": (list,),
    "steps": (dict,),
    "stepped_ago": (int, float, type(None)),
    "calls": (int,),
    "bytes_sent": (int,),
}


def _read(text: bytes) -> tuple[int, list[dict[str, Any]]]:
    """The number of agents, and their status. ValueError, TypeError or KeyError if the data is malformed."""
    content = json.loads(text)
    agents = content["agents"]
    for one in agents:
        busy = "waiting" not in one
        for name, types in (_TYPES if busy else _TYPES | _MORE_TYPES).items():
            if not isinstance(one[name], types):
                raise ValueError(name)
        for wait in () if busy else one["waiting"]:
            if not isinstance(wait["call"], str) or not all(isinstance(rank, int) for rank in wait["ranks"]):
                raise ValueError("waiting")
            float(wait["seconds"])
        for rank, pid in one.get("here", ()):
            if not isinstance(rank, int) or not isinstance(pid, int):
                raise ValueError("here")
    return int(content["there"]), list(agents)


def _state(pid: int) -> str | None:
    """The kernel's state of a process; None if it does not exist."""
    try:
        letter = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return _STATES.get(letter, letter)


def _rank(pid: int) -> int | None:
    """The rank in a process's environment, set by its launcher."""
    try:
        environ = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
        launch = detect(dict(_variables(environ)))
    except (OSError, ValueError):
        return None
    return None if launch.launcher == "none" else launch.rank


def _variables(environ: Iterable[str]) -> Iterator[tuple[str, str]]:
    for one in environ:
        name, equals, value = one.partition("=")
        if equals:
            yield name, value
