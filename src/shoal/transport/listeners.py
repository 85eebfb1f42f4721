"""Rate-limited listeners, with separate accept queues for agents of the job.

A connection attempt costs a stranger nothing, so it must not cost the agent much. A :class:`RateLimitedListener` is
polled for a small share of the time only. In the rest of the time connections queue in the kernel, and a flood would
keep that queue full. So agents of the job have queues of their own: on one machine a socket that only this user can
reach; on the network a second listener at the same port, to which the kernel assigns connections from known addresses.
If a system has neither, all share one queue, and agents retry.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .. import clock
from .poller import Poller

log = logging.getLogger("shoal")

A_TURN = 16
"""The number of connections that are accepted before other listeners, and the sums, have their turn."""
SHARE = 0.03
"""The share of the agent's time for one listener's connections."""
AT_ONCE_SECONDS = 0.05
"""Time that may be taken at once after a quiet second: some hundreds of agents, that all connect at the beginning."""
MOST_SECONDS = 0.005
"""The most that one connection is charged, which takes a tenth of a millisecond to accept. More time is not
its fault: Python may collect garbage within it, which takes a second if torch is imported."""
PAUSE_SECONDS = 0.05
"""The pause of accepting when no descriptor is left."""
BACKLOG = 1024
_SO_ATTACH_REUSEPORT_CBPF = 51
_MOST_INSTRUCTIONS = 4096
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NETWORK_HEADER = (1 << 32) - 0x100000
_SOURCE_IN_IPV4, _SOURCE_IN_IPV6 = 12, 8


class RateLimitedListener:
    """A listener that is polled only while it takes less than its share of the time.

    Args:
        sock: The listening socket.
        poller: The agent's poller.
        on_accept: Called with an accepted connection and its address.
    """

    def __init__(self, sock: socket.socket, poller: Poller, on_accept: Callable[[socket.socket, Any], None]) -> None:
        self.sock = sock
        self.next_turn = float("inf")  # when polling resumes; inf while it is polled
        self._poller = poller
        self._on_accept = on_accept
        self._credit = AT_ONCE_SECONDS
        self._counted = clock.monotonic()
        self._short = False  # the last connection could not be taken
        poller.add(sock.fileno(), self._on_event)

    def _on_event(self, _events: int) -> None:
        began = clock.monotonic()
        # Saved time is limited. After a quiet hour a flood could otherwise take minutes of this agent's time at once.
        self._credit = min(AT_ONCE_SECONDS, self._credit + SHARE * (began - self._counted))
        computed = clock.thread_time()  # thread time, because the process may be stopped for minutes in between
        came, enough = self._take_turn()
        pause = 0.0 if enough else PAUSE_SECONDS
        self._credit -= min(clock.thread_time() - computed, came * MOST_SECONDS)
        self._counted = clock.monotonic()
        if self._credit < 0.0:
            pause = max(pause, -self._credit / SHARE)
        if pause:
            # A registered listener with waiting connections would wake the poll loop at once, again and again, and the
            # pause would save nothing.
            self._poller.remove(self.sock.fileno())
            self.next_turn = self._counted + pause

    def _take_turn(self) -> tuple[int, bool]:
        """Accept queued connections: how many, and False if the system cannot give one."""
        # Not until the queue is empty: a flood refills it as fast as this loop empties it, and no message would be read
        # in that time.
        for came in range(A_TURN):
            try:
                sock, address = self.sock.accept()
            except BlockingIOError:
                return came, True
            except OSError as error:  # no descriptor is left, or the network failed for this one
                if not self._short:
                    log.warning("this agent cannot take a connection, and keeps trying: %s", error)
                self._short = True
                return came, False
            self._short = False
            self._on_accept(sock, address)
        return A_TURN, True

    def check(self, now: float) -> None:
        """Poll it again, if it is time to."""
        if now >= self.next_turn:
            # Registered once: a poller refuses a descriptor that it has already.
            self.next_turn = float("inf")
            self._poller.add(self.sock.fileno(), self._on_event)

    def close(self) -> None:
        self._poller.remove(self.sock.fileno())
        self.sock.close()


def listen_privately() -> tuple[socket.socket, int] | None:
    """A Unix socket that processes of other users cannot connect to, and the descriptor by which peers find it.

    It has no name any more when this returns: a process that may inspect this one opens
    ``/proc/<pid>/fd/<descriptor>``.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
            path = Path(folder, "socket")
            sock.bind(str(path))
            # Between bind() and listen(): a process of another user that connects before the rights are set is refused,
            # as nobody listens yet.
            path.chmod(0o600)
            # Opened before the folder is removed: this descriptor is the only way left to the socket, and it ends with
            # this process.
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        sock.listen(BACKLOG)
    except OSError:  # no folder to write to, or one with too long a name
        sock.close()
        return None
    sock.setblocking(False)
    return sock, descriptor


def listen_for(known: Iterable[str], beside: socket.socket) -> socket.socket | None:
    """A second listener at the port of the first, to which the kernel assigns connections from known addresses."""
    name = beside.getsockname()
    program = _program(sorted(set(known)), beside.family)
    # The kernel refuses longer filters. The job is then served by one queue, which costs retries in a flood and nothing
    # else.
    if len(program) > _MOST_INSTRUCTIONS:
        return None
    sock = socket.socket(beside.family, socket.SOCK_STREAM)
    try:
        # Before bind(), which would fail at a port that another socket has.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(name)
        # Kept in a variable: the kernel reads the instructions from this address in setsockopt() below.
        code = ctypes.create_string_buffer(b"".join(program))
        sock.listen(BACKLOG)
        attached = struct.pack("HL", len(program), ctypes.addressof(code))
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, attached)
    except OSError:  # a kernel without these
        sock.close()
        return None
    sock.setblocking(False)
    return sock


def _program(known: list[str], family: int) -> list[bytes]:
    """The kernel's filter that chooses between two listeners: 1 if a packet's source is one of these, else 0."""
    ipv6 = family == socket.AF_INET6
    at, width = (_SOURCE_IN_IPV6, 16) if ipv6 else (_SOURCE_IN_IPV4, 4)
    program = []
    for source in [address for address in known if (":" in address) == ipv6]:
        packed = socket.inet_pton(family, source.partition("%")[0])
        words = struct.unpack(f"!{width // 4}I", packed)
        for k, word in enumerate(words):
            program.append(_instruction(_LOAD_WORD, _NETWORK_HEADER + at + 4 * k))
            # If one word differs, the rest of this address is skipped: two instructions for each later word, and the
            # return.
            program.append(_instruction(_JUMP_IF_EQUAL, word, not_equal=2 * (len(words) - k) - 1))
        program.append(_instruction(_RETURN, 1))
    return [*program, _instruction(_RETURN, 0)]


def _instruction(code: int, value: int, not_equal: int = 0) -> bytes:
    return struct.pack("=HBBI", code, 0, not_equal, value)
