"""The launcher's side of the live page: receives status messages, watches processes, and serves or forwards the state.

It is part of the launcher's own loop, without a thread or a process of its own.

Agents push summaries to the launcher's status socket, a Unix socket that only its user can reach. Messages are JSON of
bounded length. Nothing is unpickled, and nothing is answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ...transport.addresses import peer_credentials
from ...transport.listeners import listen_privately
from .launcher_link import StatusCollector, StatusSender, StatusSink
from .run_state import RunState
from .server import PageServer

LOOK_SECONDS = 0.5
"""Between two looks at the processes of agents."""


def print_message(text: str) -> None:
    """Print a message of ``shoal run`` on stderr, if that is open."""
    with contextlib.suppress(OSError):
        print(f"shoal run: {text}", file=sys.stderr, flush=True)


class EventSource(Protocol):
    """An object with a descriptor; it is called when the descriptor is readable."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Watch:
    """The watch of one launcher, as a context that closes all of its resources at the end.

    Args:
        sink: The receiver of the observations.
        agents: The number of agents on this machine.

    Raises:
        OSError: The socket for the agents' messages cannot be made.
    """

    def __init__(self, sink: StatusSink, agents: int) -> None:
        self._sink = sink
        self._host = socket.gethostname()
        self._pids: dict[int, int] = {}
        self._looked = 0.0
        self._selector = selectors.EpollSelector()
        self._parts = contextlib.ExitStack()
        self._over = False  # it has failed
        try:
            inbox = StatusListener(self._take_summary, 2 * agents + 16)
        except BaseException:
            self._close()
            raise
        self._add(inbox, inbox.read)
        self.path = inbox.path

    def _add(self, part: EventSource, serve: Callable[[], None]) -> None:
        self._parts.callback(part.close)
        self._selector.register(part.fileno(), selectors.EVENT_READ, serve)

    def _take_summary(self, summary: dict[str, Any]) -> None:
        self._sink.take(summary)
        self._changed()

    def _changed(self) -> None:
        """The shown state has changed."""

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self._parts.close()
        self._selector.close()

    # For the launcher's loop

    def fileno(self) -> int:
        return self._selector.fileno()

    @property
    def due(self) -> float:
        """When to call :meth:`serve` at the latest, as ``time.monotonic()``."""
        return float("inf") if self._over else self._next()

    def serve(self) -> None:
        """Do the pending work, without waiting. An error is printed, and does not end the job."""
        if self._over:
            return
        try:
            self._serve()
        except Exception as error:
            self._over = True
            with contextlib.suppress(Exception):
                for key in list(self._selector.get_map().values()):
                    self._selector.unregister(key.fileobj)
                self._parts.close()
            print_message(f"the page is no longer served ({type(error).__name__}: {error})")

    def _next(self) -> float:
        return self._looked + LOOK_SECONDS

    def _serve(self) -> None:
        for key, _ in self._selector.select(0):
            key.data()
        if time.monotonic() >= self._looked + LOOK_SECONDS:
            self._looked = time.monotonic()
            self._look()

    def _look(self) -> None:
        for rank, pid in self._pids.items():
            with contextlib.suppress(OSError, IndexError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                self._sink.process(rank, pid, self._host, state)
        self._changed()

    # Events of the launcher

    def started(self, rank: int, pid: int) -> None:
        """The launcher has started an agent."""
        self._pids[rank] = pid
        self._sink.process(rank, pid, self._host, "S")
        self._changed()

    def ended(self, rank: int, how: str, well: bool) -> None:
        """An agent has ended."""
        self._pids.pop(rank, None)
        self._sink.ended(rank, how, well)
        self._changed()

    def begin_again(self, attempt: int) -> None:
        """All agents are restarted."""

    def end(self, how: str) -> None:
        """The run is over."""

    @property
    def address(self) -> str:
        """The address of the page; empty if another launcher shows it."""
        return ""


class LocalViewer(Watch):
    """The watch of the launcher that shows the run.

    Args:
        size: The limit of the number of agents, on all machines.
        agents: The number of agents on this machine.
        title: The title of the page.
        port: The port of the page; 0 takes a free one.
        begins: The number of agents at the begin, on all machines; ``size`` if not given.

    Raises:
        OSError: The port is taken.
    """

    def __init__(
        self,
        size: int,
        agents: int,
        title: str,
        port: int = 0,
        begins: int | None = None,
    ) -> None:
        self.state = RunState(size, title, begins)
        super().__init__(self.state, agents)
        self._gatherer: StatusCollector | None = None
        self._parts.callback(self._gather_no_more)
        try:
            self._server = PageServer(self.state.as_json, port)
        except BaseException:
            self._close()
            raise
        self._add(self._server, self._server.serve)

    def gather(self, listener: socket.socket, secret: str, launchers: int) -> None:
        """Receive the messages of the job's other launchers, on other machines and joining ones, instead of the earlier
        ones.

        Args:
            listener: The socket on which they connect; it is closed with this.
            secret: The secret of the job.
            launchers: The limit of their number.
        """
        self._gather_no_more()
        if self._over:
            listener.close()
            return
        self._gatherer = StatusCollector(listener, secret, self.state, launchers + 4)
        self._selector.register(self._gatherer, selectors.EVENT_READ, self._gatherer.serve)

    def _gather_no_more(self) -> None:
        if self._gatherer is not None:
            if self._gatherer.fileno() in self._selector.get_map():
                self._selector.unregister(self._gatherer)
            self._gatherer.close()
            self._gatherer = None

    def _changed(self) -> None:
        self._server.mark_changed()

    def _next(self) -> float:
        return min(super()._next(), self._server.due)

    def _serve(self) -> None:
        super()._serve()
        if self._gatherer is not None:
            self._gatherer.serve()
        self.state.draw()
        self._server.serve()

    def begin_again(self, attempt: int) -> None:
        self.state.begin_again(attempt)
        self._server.mark_changed()

    def end(self, how: str) -> None:
        self.state.end(how)
        self._server.mark_changed()

    @property
    def address(self) -> str:
        return self._server.address


class RemoteViewer(Watch):
    """The watch of a launcher that reports to the first one.

    Args:
        teller: Sends the reports.
        agents: The number of agents on this machine.
    """

    def __init__(self, teller: StatusSender, agents: int) -> None:
        super().__init__(teller, agents)
        self._status_sender = teller
        self._add(teller, teller.serve)

    def _next(self) -> float:
        return min(super()._next(), self._status_sender.due)

    def _serve(self) -> None:
        super()._serve()
        self._status_sender.serve()


MOST_BYTES = 1 << 16
"""Of a summary."""
_A_TURN = 64
"""Summaries that are read before others have their turn."""


class StatusListener:
    """The launcher's listener. An event loop calls :meth:`read` when :meth:`fileno` is readable.

    Args:
        take: Called with each agent's message.
        most: The limit of connections; the oldest is closed to make room.

    Raises:
        OSError: The system allows no such socket.
    """

    def __init__(self, take: Callable[[dict[str, Any]], None], most: int) -> None:
        found = listen_privately()
        if found is None:
            raise OSError("no Unix socket of this user's alone could be opened: is there a folder for temporary files?")
        self._listener, self._name = found
        self._take, self._most = take, most
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, False)
        self._open: list[socket.socket] = []

    @property
    def path(self) -> str:
        """The path of the socket, for agents."""
        return f"/proc/{os.getpid()}/fd/{self._name}"

    def fileno(self) -> int:
        return self._selector.fileno()

    def read(self) -> None:
        """Take what is there."""
        for key, _ in self._selector.select(0):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._listener:
                self._accept()
            else:
                self._receive(sock)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if peer_credentials(sock)[1] != os.getuid():
            sock.close()
            return
        if len(self._open) >= self._most:
            self._end(self._open[0])
        sock.setblocking(False)
        self._open.append(sock)
        self._selector.register(sock, selectors.EVENT_READ, True)

    def _receive(self, sock: socket.socket) -> None:
        for _ in range(_A_TURN):
            try:
                packet = sock.recv(MOST_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet or len(packet) > MOST_BYTES:
                self._end(sock)
                return
            with contextlib.suppress(ValueError, RecursionError):
                content = json.loads(packet)
                if isinstance(content, dict):
                    self._take(content)

    def _end(self, sock: socket.socket) -> None:
        self._open.remove(sock)
        self._selector.unregister(sock)
        sock.close()

    def close(self) -> None:
        for sock in list(self._open):
            self._end(sock)
        self._selector.close()
        self._listener.close()
        os.close(self._name)
