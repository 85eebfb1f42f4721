"""Launchers of other machines report their agents' status to the first launcher, which serves the page.

The connection is TCP, to the port after that of the rendezvous. Both sides authenticate with the job's secret, without
sending it: HMAC-SHA-256 over fresh nonces. Messages go one way. Each is authenticated with a key of the connection and
its number, so it cannot be changed, repeated or left out; like tensors between machines it is not encrypted. A launcher
that cannot reach the first retries, and its agents are unaffected. Each report is complete, so a lost one needs no
retransmission.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from typing import Any, Protocol

LABEL = b"shoal watch 1 "
NONCE, SEAL = 32, 16
MOST_BYTES = (1 << 16) + 1024
"""The limit of a message's size."""
MOST_WAITING = 1 << 19
"""The limit of buffered bytes; later messages are dropped."""
PROVING_SECONDS = 10.0
"""The limit for connecting and authenticating."""
RETRY_SECONDS = 2.0
"""The pause before a connection is tried again."""
REPORT_SECONDS = 0.5
"""The time between two reports of all processes of a machine."""
FLUSH_SECONDS = 1.0
"""The limit for sending the last report."""
_LENGTH = struct.Struct(">I")
_COUNT = struct.Struct(">Q")


class StatusSink(Protocol):
    """The receiver of observations: the state of the run, or another launcher."""

    def take(self, summary: dict[str, Any]) -> None:
        """Receive a status message of an agent."""

    def process(self, rank: int, pid: int, host: str, state: str) -> None:
        """Receive the kernel's state of an agent's process."""

    def ended(self, rank: int, how: str, well: bool) -> None:
        """An agent's process has ended."""


def _mac(secret: bytes, purpose: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, LABEL + purpose + b"".join(parts), "sha256")


class _MessageMac:
    """Computes the MACs of a connection's messages, in order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def seal(self, message: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, _COUNT.pack(self._count) + message, "sha256")[:SEAL]


class _FramedStream:
    """A connection of messages, each with its length before it. No method waits."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.out = bytearray()
        self._received = bytearray()
        sock.setblocking(False)

    def put(self, message: bytes) -> bool:
        """Queue a message to be sent; False if there is no room."""
        if len(self.out) + len(message) > MOST_WAITING:
            return False
        self.out += _LENGTH.pack(len(message)) + message
        return True

    def write(self) -> None:
        """Send as much as there is room for. OSError if the connection is closed."""
        while self.out:
            try:
                del self.out[: self.sock.send(self.out)]
            except BlockingIOError:
                return

    def receive(self) -> list[bytes]:
        """The completely received messages. OSError or ValueError if the connection is closed, or the data is
        malformed.
        """
        with contextlib.suppress(BlockingIOError):
            data = self.sock.recv(MOST_BYTES)
            if not data:
                raise ConnectionResetError("it has hung up")
            self._received += data
        found = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MOST_BYTES:
                raise ValueError("its message is too long")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            found.append(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return found


class StatusCollector:
    """The first launcher's side: accepts the other launchers, and forwards their messages.

    Args:
        listener: The socket on which they connect; closed with this.
        secret: The secret of the job.
        to: The receiver of the messages.
        most: The limit of connected launchers; as many more connections may be unauthenticated.
    """

    def __init__(self, listener: socket.socket, secret: str, to: StatusSink, most: int) -> None:
        self._listener, self._secret, self._to, self._most = listener, secret.encode(), to, most
        listener.setblocking(False)
        self._selector = selectors.EpollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._guests: list[_LauncherConnection] = []

    def fileno(self) -> int:
        return self._selector.fileno()

    def serve(self) -> None:
        """Do what can be done now."""
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
            elif key.data in self._guests:
                try:
                    self._receive(key.data)
                except (OSError, ValueError, TypeError, KeyError, RecursionError):
                    self._end(key.data)
        now = time.monotonic()
        for guest in [other for other in self._guests if other.sealed is None and now >= other.limit]:
            self._end(guest)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        for proved in (False, True):  # unauthenticated connections do not exclude authenticated ones
            known = [other for other in self._guests if (other.sealed is not None) == proved]
            if len(known) >= self._most:
                self._end(known[0])
        guest = _LauncherConnection(sock)
        self._guests.append(guest)
        self._selector.register(sock, selectors.EVENT_READ, guest)
        guest.stream.put(guest.nonce)
        self._write(guest)

    def _write(self, guest: _LauncherConnection) -> None:
        try:
            guest.stream.write()
        except OSError:
            self._end(guest)

    def _receive(self, guest: _LauncherConnection) -> None:
        for message in guest.stream.receive():
            if guest.sealed is None:
                nonces = guest.nonce, message[:NONCE]
                if not hmac.compare_digest(message[NONCE:], _mac(self._secret, b"asks", *nonces)):
                    raise ValueError("it does not have the secret")
                guest.sealed = _MessageMac(_mac(self._secret, b"key", *nonces))
                guest.stream.put(_mac(self._secret, b"answers", *nonces))
                self._write(guest)
                continue
            if not hmac.compare_digest(guest.sealed.seal(message[SEAL:]), message[:SEAL]):
                raise ValueError("its message was modified in transit")
            self._take(json.loads(message[SEAL:]))

    def _take(self, content: dict[str, Any]) -> None:
        if "summary" in content:
            self._to.take(dict(content["summary"]))
        for rank, pid, host, state in content.get("processes", ()):
            self._to.process(int(rank), int(pid), str(host)[:200], str(state)[:1])
        for rank, how, well in content.get("ended", ()):
            self._to.ended(int(rank), str(how)[:400], bool(well))

    def _end(self, guest: _LauncherConnection) -> None:
        if guest in self._guests:
            self._guests.remove(guest)
            self._selector.unregister(guest.stream.sock)
            guest.stream.sock.close()

    def close(self) -> None:
        for guest in list(self._guests):
            self._end(guest)
        self._selector.close()
        self._listener.close()


class _LauncherConnection:
    """A launcher that has connected; ``sealed`` once it has proved that it is one."""

    def __init__(self, sock: socket.socket) -> None:
        self.stream = _FramedStream(sock)
        self.nonce = secrets.token_bytes(NONCE)
        self.sealed: _MessageMac | None = None
        self.limit = time.monotonic() + PROVING_SECONDS


class StatusSender:
    """Another launcher's side: forwards the status to the first launcher.

    Args:
        address: The address of the first launcher, in the format of ``socket``; and its family.
        secret: The secret of the job.
    """

    def __init__(self, family: socket.AddressFamily, address: Any, secret: str) -> None:
        self._family, self._address, self._secret = family, address, secret.encode()
        self._selector = selectors.EpollSelector()
        self._stream: _FramedStream | None = None
        self._sealed: _MessageMac | None = None
        self._nonces: tuple[bytes, bytes] | None = None
        self._limit = self._again = self._sent_at = 0.0
        self._processes: dict[int, tuple[int, str, str]] = {}
        self._ended: dict[int, tuple[str, bool]] = {}

    # Status to send

    def take(self, summary: dict[str, Any]) -> None:
        self._send_content({"summary": summary})

    def process(self, rank: int, pid: int, host: str, state: str) -> None:
        if rank not in self._processes or self._processes[rank][0] != pid:
            self._ended.pop(rank, None)  # another has taken its place
        self._processes[rank] = pid, host, state

    def ended(self, rank: int, how: str, well: bool) -> None:
        self._processes.pop(rank, None)
        self._ended[rank] = how, well
        self._send_status()

    def _send_status(self) -> None:
        self._sent_at = time.monotonic()
        processes = [(rank, *state) for rank, state in self._processes.items()]
        self._send_content({"processes": processes, "ended": [(rank, *state) for rank, state in self._ended.items()]})

    def _send_content(self, content: dict[str, Any]) -> None:
        if self._stream is None or self._sealed is None:
            return
        message = json.dumps(content).encode()
        room = MOST_WAITING - len(self._stream.out) - SEAL - _LENGTH.size
        if len(message) + SEAL <= min(room, MOST_BYTES):  # else its number would be used, and not be sent
            self._stream.put(self._sealed.seal(message) + message)
            self._write()

    # For the launcher's loop

    def fileno(self) -> int:
        return self._selector.fileno()

    @property
    def due(self) -> float:
        """When to call :meth:`serve` at the latest, as ``time.monotonic()``."""
        if self._stream is None:
            return self._again
        return self._limit if self._sealed is None else self._sent_at + REPORT_SECONDS

    def serve(self) -> None:
        """Do what can be done now."""
        now = time.monotonic()
        if self._stream is None and now >= self._again:
            self._connect()
        for _, events in self._selector.select(0):
            try:
                if events & selectors.EVENT_READ and self._stream is not None:
                    self._receive(self._stream)
                if events & selectors.EVENT_WRITE:
                    self._write()
            except (OSError, ValueError):
                self._hang_up()
        if self._stream is not None and self._sealed is None and now >= self._limit:
            self._hang_up()
        if self._sealed is not None and now >= self._sent_at + REPORT_SECONDS:
            self._send_status()

    def _connect(self) -> None:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        self._stream, self._limit = _FramedStream(sock), time.monotonic() + PROVING_SECONDS
        self._selector.register(sock, selectors.EVENT_READ, None)
        try:
            sock.connect(self._address)
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up()

    def _receive(self, stream: _FramedStream) -> None:
        for message in stream.receive():
            if self._nonces is None:
                if len(message) != NONCE:
                    raise ValueError("it is no launcher of Shoal's")
                self._nonces = message, secrets.token_bytes(NONCE)
                stream.put(self._nonces[1] + _mac(self._secret, b"asks", *self._nonces))
                self._write()
            elif self._sealed is None:
                if not hmac.compare_digest(message, _mac(self._secret, b"answers", *self._nonces)):
                    raise ValueError("it does not have the secret")
                self._sealed = _MessageMac(_mac(self._secret, b"key", *self._nonces))
                self._send_status()
            else:
                raise ValueError("it closed the connection without a message")

    def _write(self) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write()
        except OSError:
            self._hang_up()
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._stream.out else 0)
        self._selector.modify(self._stream.sock, wanted, None)

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._selector.unregister(self._stream.sock)
            self._stream.sock.close()
        self._stream = self._sealed = self._nonces = None
        self._again = time.monotonic() + RETRY_SECONDS

    def close(self) -> None:
        """Send the final messages within a time limit, and disconnect."""
        if self._sealed is not None:
            self._send_status()
        limit = time.monotonic() + FLUSH_SECONDS
        while self._stream is not None and self._stream.out and time.monotonic() < limit:
            self._selector.select(limit - time.monotonic())
            self._write()
        self._hang_up()
        self._selector.close()
