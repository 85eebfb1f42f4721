"""The launcher's status socket: a Unix socket that only its user can reach, to which its agents push summaries.

Messages are JSON of bounded length. Nothing is unpickled, and nothing is answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any

from ...transport.listeners import listen_privately

MOST_BYTES = 1 << 16
"""Of a summary."""
_CREDENTIALS = struct.Struct("3i")
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
                self._hear(sock)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.getuid():
            sock.close()
            return
        if len(self._open) >= self._most:
            self._end(self._open[0])
        sock.setblocking(False)
        self._open.append(sock)
        self._selector.register(sock, selectors.EVENT_READ, True)

    def _hear(self, sock: socket.socket) -> None:
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
