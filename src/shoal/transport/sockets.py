"""What the two kinds of socket connection share: who connects to whom, the handshake, and how an end shows.

An :class:`Outgoing` connection only carries messages away; an :class:`Incoming` one only brings them. Subclasses say
how messages become bytes on their kind of socket. Everything is non-blocking and driven by the agent's poll loop.
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Callable

from .handshake import ANSWER_SIZE, HELLO_SIZE, WELCOME_SIZE, Accepting, Connecting
from .link import Receiver
from .poller import READ, WRITE, Poller
from .wire import ProtocolError

GOODBYE = struct.Struct("<7si128s")
"""What an agent that leaves says to those that connected to it: the word, the rank that it had lost, and the cause."""
_BYE = b"goodbye"
GREETING_SECONDS = 10.0
"""A connection that has not proved itself after this long is closed."""


_PASSING = {errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.ENOTCONN}
"""Of a connection that is not made yet: what also one that is flooded does. Where nobody listens, it is refused."""


class CutOff(ProtocolError):
    """The other side has closed the connection during the handshake."""


def hear(sock: socket.socket, nbytes: int) -> bytes:
    """What has come of the next ``nbytes`` of a handshake."""
    try:
        data = sock.recv(nbytes)
    except BlockingIOError:
        return b""
    if not data:
        raise CutOff("it closed the connection during the handshake")
    return data


def _is_passing(error: Exception) -> bool:
    return isinstance(error, CutOff) or (isinstance(error, OSError) and error.errno in _PASSING)


class Outgoing:
    """The connecting side: handshake first, then whatever the subclass has queued."""

    transport = ""

    def __init__(
        self, sock: socket.socket, peer: int, greeting: Connecting, poller: Poller, receiver: Receiver
    ) -> None:
        self.peer = peer
        self.sock = sock
        self.open = False
        self.on_cut: Callable[[Outgoing, str], None] | None = None  # sees to it that a handshake is tried again
        self._greeting = greeting
        self._answered = False
        self._heard = b""
        self._poller = poller
        self._receiver = receiver
        self._events = READ
        poller.add(sock.fileno(), self._on_event)

    def begin_again(self, sock: socket.socket, greeting: Connecting) -> None:
        """Once more, over another connection, after this one was cut. What is queued waits for it."""
        self.sock.close()
        self.sock, self._greeting = sock, greeting
        self._answered, self._heard, self._events = False, b"", READ
        self._poller.add(sock.fileno(), self._on_event)

    def _on_event(self, events: int) -> None:
        try:
            if self.open:
                self._on_open_event(events)
            else:
                self._greet()
        except (OSError, ProtocolError) as error:
            cause = str(error) or repr(error)
            if self.open or self.on_cut is None or not _is_passing(error):
                self.fail(cause, isinstance(error, ProtocolError))
                return
            self._poller.remove(self.sock.fileno())  # and not closed: without a socket a link counts as done with
            self.on_cut(self, cause)

    def _greet(self) -> None:
        expected = WELCOME_SIZE if self._answered else HELLO_SIZE
        self._heard += hear(self.sock, expected - len(self._heard))
        if len(self._heard) < expected:
            return
        heard, self._heard = self._heard, b""
        if not self._answered:
            self.sock.send(self._greeting.answer(heard))
            self._answered = True
            return
        self._greeting.check(heard)
        self.open = True
        self.flush()

    def _on_open_event(self, events: int) -> None:
        if events & ~WRITE:
            self._listen()
        self.flush()

    def _listen(self) -> None:
        """All that the peer ever says here is goodbye; else anything readable is an end."""
        try:
            try:
                said = self.sock.recv(GOODBYE.size - len(self._heard))
            except ConnectionResetError:  # it did not read our last words; its own may still be here
                said = self.sock.recv(GOODBYE.size - len(self._heard))
        except BlockingIOError:
            return
        self._heard += said
        if not said or not _BYE.startswith(self._heard[: len(_BYE)]):
            raise ProtocolError("its end of the connection closed")
        if len(self._heard) == GOODBYE.size:
            _, lost, cause = GOODBYE.unpack(self._heard)
            self._heard = b""
            self._receiver.on_left(self.peer, lost, cause.rstrip(b"\0").decode(errors="replace"))

    def _want_write(self, wanted: bool) -> None:
        events = READ | WRITE if wanted else READ
        if events != self._events and self.sock.fileno() >= 0:
            self._events = events
            self._poller.modify(self.sock.fileno(), events)

    def flush(self) -> None:
        raise AssertionError("a kind of connection says how it sends")

    def fail(self, cause: str, certain: bool = False) -> None:
        """Close; ``certain``: by what the peer did, an orderly end or nonsense, which no network makes up."""
        if self.sock.fileno() >= 0:
            try:
                if self.open:  # it may have said goodbye, which says for whom it leaves, before it broke the connection
                    self._listen()
            except (OSError, ProtocolError):
                pass
            self.close()
            self._receiver.on_closed(self.peer, cause, certain=certain)

    def close(self) -> None:
        if self.sock.fileno() >= 0:
            self._poller.remove(self.sock.fileno())
            self.sock.close()


class Incoming:
    """The accepting side: it learns who connects, and then reads messages."""

    def __init__(self, sock: socket.socket, greeting: Accepting, poller: Poller, receiver: Receiver) -> None:
        self.sock = sock
        self.peer = -1
        self.since = time.monotonic()
        self.on_end: Callable[[Incoming], None] = lambda _: None
        self.on_known: Callable[[Incoming], None] = lambda _: None
        self._greeting = greeting
        self._heard = b""
        self._poller = poller
        self._receiver = receiver
        sock.setblocking(False)
        sock.send(greeting.hello)
        poller.add(sock.fileno(), self.on_event)

    def on_event(self, _events: int = 0) -> None:
        """Something came, or the end of it."""
        if self.sock.fileno() < 0:
            return
        try:
            if self.peer >= 0:
                self.read()
            else:
                self._greet()
        except BlockingIOError:
            return
        except (OSError, ProtocolError, MemoryError, ValueError, OverflowError) as error:
            short = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
            if self.peer < 0 or not short:
                self.fail(str(error) or repr(error), isinstance(error, ProtocolError))
                return
            self.close()
            self.on_end(self)
            raise MemoryError(f"there is no memory for what rank {self.peer} has sent") from error

    def _greet(self) -> None:
        self._heard += hear(self.sock, ANSWER_SIZE - len(self._heard))
        if len(self._heard) < ANSWER_SIZE:
            return
        self.peer, welcome = self._greeting.check(self._heard)
        self.on_known(self)
        self.sock.send(welcome)

    def read(self) -> None:
        """Read what is there and hand it to the receiver. Raises when the connection ended or speaks nonsense."""
        raise AssertionError("a kind of connection says how it reads")

    def say_goodbye(self, lost: int, cause: str) -> None:
        try:
            self.sock.send(GOODBYE.pack(_BYE, lost, cause.encode()[:128]))
        except OSError:
            pass  # it left first

    def fail(self, cause: str, certain: bool = False) -> None:
        """Close; the loss of a stranger is nobody's loss. ``certain``: as for :class:`Outgoing`."""
        if self.sock.fileno() < 0:
            return
        self.close()
        self.on_end(self)
        if self.peer >= 0:
            self._receiver.on_closed(self.peer, cause, True, certain)

    def close(self) -> None:
        if self.sock.fileno() >= 0:
            self._poller.remove(self.sock.fileno())
            self.sock.close()
