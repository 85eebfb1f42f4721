"""The common part of the two kinds of socket connection, and the connecting side: handshake, and detection of the end.

An :class:`Outgoing` connection only sends messages; an :class:`~.incoming.Incoming` one only receives them. The sender
of the messages opens the connection, or the receiver does if the sender cannot (``reverse_connections.py``). Messages
that are queued together make a packet, which is sealed when it is sent. A network connection is made again after a cut
(``retransmit.py``). Subclasses define how packets and tensors become bytes on their kind of socket. All sockets are
non-blocking and driven by the agent's poll loop.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from .. import clock
from .authentication.handshake import HELLO_SIZE, QUESTION, REPLACED, REVERSED, SHUT_OUT, WELCOME_SIZE, Connecting, Keys
from .authentication.message_auth import Seal
from .link import Published, Receiver
from .poller import READ, WRITE, Poller
from .retransmit import ConnectionCut, is_connection_cut
from .wire import PACKET_BYTES, Message, ProtocolError, encode

CONTROL = struct.Struct("<7sQi128s")
"""A control message to the peer that opened a connection. At shutdown: goodbye, the rank that this agent had
lost, and the cause. Over a network, also the number of arrived units, and the request for a reversed connection."""
GOODBYE, ARRIVED, CONNECT = b"goodbye", b"has had", b"connect"
log = logging.getLogger("shoal")

NO_DESCRIPTOR = -1
GREETING_SECONDS = 10.0
"""A connection that is not authenticated after this time is closed."""
SHORT_SECONDS = 1.0
"""A cut connection that lasted less than this is made again after a pause, a longer one at once."""


def receive_part(sock: socket.socket, nbytes: int) -> bytes:
    """The received part of the next ``nbytes`` of a handshake."""
    try:
        data = sock.recv(nbytes)
    except BlockingIOError:
        return b""
    if not data:
        raise ConnectionCut("it closed the connection during the handshake")
    return data


def detached(sock: socket.socket, poller: Poller) -> socket.socket:
    """A closed socket that replaces a socket whose connection another object takes over."""
    poller.remove(sock.fileno())
    closed = socket.socket()
    closed.close()
    return closed


class Established(NamedTuple):
    """A connection whose handshake is over."""

    keys: Keys
    peer: int
    incarnation: int


class Outgoing:
    """The connecting side: handshake first, then whatever has been queued."""

    seal_of: Callable[[bytes], Seal]
    """Makes the seal of one direction from its key."""
    resumes = False
    """It is made again where it is cut."""

    def __init__(
        self, sock: socket.socket, peer: int, greeting: Connecting, poller: Poller, receiver: Receiver
    ) -> None:
        self.peer = peer
        self.sock = sock
        self.open = False
        self.on_cut: Callable[[Outgoing, str, bool], None] | None = None  # sees to it that it is tried again; at once?
        self.on_answer: Callable[[int], None] = lambda answer: None  # for a probe
        self.on_reversed: Callable[[Outgoing], None] = lambda link: None  # for a reversed connection, when it is open
        self.on_request: Callable[[int], None] = lambda peer: None  # the peer asks for a reversed connection
        self.may_be_refused: Callable[[int], bool] = lambda peer: False  # a refusal may be a firewall's
        self.problem: Exception | None = None  # of the attempt that failed last
        self.is_reversed = False  # the peer has opened the connection
        self._awaits_count = False  # the count of arrived units, the last part of a reversed handshake
        self._since = 0.0  # when it was opened last
        self._left = False  # the peer has sent its shutdown message
        self._cut_by = ""  # the cause of a cut after it was open
        self._greeting = greeting
        self._hello = b""
        self._answered = False
        self._received = b""
        self._poller = poller
        self._receiver = receiver
        self._events = READ
        self._frames: list[bytes] = []
        self._size = 0
        self._packets: deque[tuple[bytes, int]] = deque()  # each with a descriptor to send, or none
        poller.add(sock.fileno(), self._on_event)

    def begin_again(self, sock: socket.socket, greeting: Connecting) -> None:
        """Continue over another connection, after this one was cut. Queued messages wait for it."""
        self.sock.close()
        self.sock, self._greeting = sock, greeting
        self._hello, self._answered, self._received, self._events = b"", False, b"", READ
        self.is_reversed = self._awaits_count = False
        self._poller.add(sock.fileno(), self._on_event)

    def take_over(self, sock: socket.socket, keys: Keys) -> None:
        """Continue over a connection that the peer has opened, once it has sent the number of arrived units."""
        if self.open:
            self.open, self._cut_by = False, "the peer has opened another one"
        if self.sock.fileno() >= 0:
            self._poller.remove(self.sock.fileno())
            self.sock.close()
        self.sock, self._received, self._events = sock, b"", READ
        self.is_reversed = self._awaits_count = True
        self._use(keys)
        self._poller.add(sock.fileno(), self._on_event)

    def _use(self, keys: Keys) -> None:
        self._seal = type(self).seal_of(keys.messages)
        self._goodbye = type(self).seal_of(keys.goodbye)

    def post(self, message: Message, published: Published | None = None, start: int = 0, stop: int = 0) -> None:
        if published is not None:
            self._place(message, published, start, stop)
        frame = encode(message)
        if self._size + len(frame) > PACKET_BYTES:
            self._pack()
        self._frames.append(frame)
        self._size += len(frame)

    def _place(self, message: Message, published: Published, start: int, stop: int) -> None:
        """Set the location of its tensor in the message."""
        raise AssertionError("a kind of connection says where tensors are")

    def _pack(self) -> None:
        """Make a packet of the queued messages; it is sealed when it is sent, in that order and with the key of that
        time.
        """
        if self._frames:
            self._packets.append((b"".join(self._frames), NO_DESCRIPTOR))
            self._frames.clear()
            self._size = 0

    def _on_event(self, events: int) -> None:
        try:
            if self.open:
                self._on_open_event(events)
            else:
                self._greet()
        except (OSError, ProtocolError) as error:
            self._end(error)

    def _end(self, error: Exception, context: str = "") -> None:
        """The connection has ended by an error: make it again, or fail."""
        cause = f"{context}{error}" if str(error) else repr(error)
        # A peer that shuts down sends its reason and closes, and our last write to it may fail before that is read.
        # Without this read its orderly end would look like a cut, and be tried again.
        if self.open:
            self._read_shutdown_message()
        if self.open:
            may_pass = self.resumes and not self._left and is_connection_cut(error)
        else:  # a reconnection does not meet a flood: a peer that does not answer then is gone
            may_pass = is_connection_cut(error) if self._cut_by else self._is_passing(error)
        self.problem = error
        if may_pass and self.on_cut is not None:
            lasted = self.open and clock.monotonic() - self._since > SHORT_SECONDS
            if self.open:
                self.open, self._cut_by = False, cause
            self._poller.remove(self.sock.fileno())  # and not closed: without a socket a link counts as done with
            self.on_cut(self, cause, lasted)
        elif self._cut_by and isinstance(error, ConnectionRefusedError):
            self.fail(self._cut_by, certain=True)  # and there is no listener any more: its process has ended
        else:
            self.fail(cause, isinstance(error, ProtocolError))

    def _is_passing(self, error: Exception) -> bool:
        """Whether an error of a connection that is not open yet may also come from a flooded listener. Without a
        listener the connection is refused.
        """
        return is_connection_cut(error) or (isinstance(error, OSError) and error.errno == errno.ETIMEDOUT)

    def _greet(self) -> None:
        if self._awaits_count:
            self._read_arrived_count()
            return
        if not self._hello:
            self._hello = self._whole(HELLO_SIZE)
        if not self._hello or not self._is_private():
            return
        if not self._answered:
            try:
                self.sock.send(self._greeting.answer(self._hello))
            except OSError:
                self._whole(WELCOME_SIZE)  # it may have sent the reason before it ended the connection
                raise
            self._answered = True
            return
        welcome = self._whole(WELCOME_SIZE)
        if not welcome:
            return
        had = self._greeting.check(welcome)
        if self._greeting.purpose == QUESTION:
            self.close()
            self.on_answer(had)
            return
        if had == SHUT_OUT:
            self._receiver.on_shut_out(self.peer)
            raise ProtocolError("it counts this agent as lost")
        if had == REPLACED:
            raise ProtocolError("its process has ended, and another one has its port")
        if self._greeting.purpose == REVERSED:
            self.on_reversed(self)
            return
        self._use(self._greeting.keys)
        self._begin(had)

    def _read_arrived_count(self) -> None:
        """The end of the handshake of a reversed connection: how many units had come over another one."""
        data = self._whole(self._goodbye.size + CONTROL.size)
        if data:
            word, count, _, _ = CONTROL.unpack(self._goodbye.open(memoryview(data)))
            if word != ARRIVED:
                raise ProtocolError("it does not begin with what had come")
            self._awaits_count = False
            self._begin(count)

    def _begin(self, had: int) -> None:
        """The handshake is over, and ``had`` units have arrived over other connections."""
        self._resend_after(had)
        self.open, self._since = True, clock.monotonic()
        if self._cut_by:
            log.warning("the connection to rank %d was cut (%s), and is there again", self.peer, self._cut_by)
        self.flush()

    @property
    def has_been_open(self) -> bool:
        """The connection has been open before, even if it was cut since."""
        return self._since > 0.0

    def _resend_after(self, had: int) -> None:
        """``had`` units have arrived over other connections."""

    def _whole(self, nbytes: int) -> bytes:
        """The next part of the handshake, once it is complete."""
        self._received += receive_part(self.sock, nbytes - len(self._received))
        if len(self._received) < nbytes:
            return b""
        question, self._received = self._received, b""
        return question

    def _is_private(self) -> bool:
        """Whether the handshake may continue: an encrypted connection must have finished its TLS handshake."""
        return True

    def _on_open_event(self, events: int) -> None:
        if events & ~WRITE:
            self._listen()
        self.flush()

    def _listen(self) -> bool:
        """Read a control message of the peer, which has a fixed size. Returns whether any bytes arrived."""
        size = self._goodbye.size + CONTROL.size
        try:
            data = self.sock.recv(size - len(self._received))
        except BlockingIOError:
            return False
        self._received += data
        if not data:
            raise ConnectionCut("its end of the connection closed")
        if len(self._received) < size:
            return True
        word, count, lost, cause = CONTROL.unpack(self._goodbye.open(memoryview(self._received)))
        self._received = b""
        if word == GOODBYE:
            self._left = True
            self._receiver.on_left(self.peer, lost, cause.rstrip(b"\0").decode(errors="replace"))
        elif word == ARRIVED:
            self._on_arrived_count(count)
        elif word == CONNECT and self.resumes:
            self.on_request(self.peer)
        else:
            raise ProtocolError("it says what nobody says there")
        return True

    def _on_arrived_count(self, count: int) -> None:
        """``count`` units have arrived."""
        raise ProtocolError("it counts what comes to it without being asked")

    def _read_shutdown_message(self) -> None:
        """Read a shutdown message, which names the rank for which the peer leaves, from before the connection broke."""
        for _ in range(2):  # the error of our unread last message may come first
            with contextlib.suppress(OSError, ProtocolError):
                while self._listen():
                    pass

    def _want_write(self, wanted: bool) -> None:
        events = READ | WRITE if wanted else READ
        if events != self._events and self.sock.fileno() >= 0:
            self._events = events
            self._poller.modify(self.sock.fileno(), events)

    def flush(self) -> None:
        raise AssertionError("a kind of connection says how it sends")

    @property
    def idle(self) -> bool:
        raise AssertionError("a kind of connection says what it has still to send")

    def fail(self, cause: str, certain: bool = False) -> None:
        """Close; ``certain``: the peer caused it, by an orderly end or malformed data, which no network produces."""
        if self.sock.fileno() >= 0:
            if self.open:
                self._read_shutdown_message()
            self.close()
            self._receiver.on_closed(self.peer, cause, certain=certain)

    def close(self) -> None:
        if self.sock.fileno() >= 0:
            self._poller.remove(self.sock.fileno())
            self.sock.close()
        self._frames.clear()
        self._packets.clear()
