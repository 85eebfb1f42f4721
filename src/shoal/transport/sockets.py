"""Socket connections between agents: the connecting and the accepting side, with handshake and detection of the end.

An :class:`Outgoing` connection only sends messages; an :class:`Incoming` one only receives them. The sender of the
messages opens the connection, or the receiver does if the sender cannot (``reverse_connections.py``). Messages that are
queued together make a packet, which is sealed when it is sent. A network connection is made again after a cut
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
from ..errors import ProtocolError
from .authentication import (
    ANSWER_SIZE,
    HELLO_SIZE,
    QUESTION,
    REFUSED,
    REPLACED,
    REVERSED,
    SHUT_OUT,
    WELCOME_SIZE,
    Accepting,
    Connecting,
    Keys,
    Seal,
)
from .link import Published, Receiver
from .messages import PACKET_BYTES, Message, encode
from .poller import READ, WRITE, Poller
from .retransmit import ConnectionCut, is_connection_cut

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


class Established(NamedTuple):
    """A connection whose handshake is over."""

    keys: Keys
    peer: int
    incarnation: int


class Connection:
    """The common part of both sides."""

    seal_of: Callable[[bytes], Seal]
    """Makes the seal of one direction from its key."""
    resumes = False
    """It is made again where it is cut."""

    def __init__(self, sock: socket.socket, poller: Poller, receiver: Receiver) -> None:
        self.sock, self._poller, self._receiver = sock, poller, receiver

    def _use(self, keys: Keys) -> None:
        self._seal = type(self).seal_of(keys.messages)
        self._goodbye = type(self).seal_of(keys.goodbye)

    def _is_private(self) -> bool:
        """Whether the handshake may continue: an encrypted connection must have finished its TLS handshake."""
        return True

    def close(self) -> None:
        if self.sock.fileno() >= 0:
            self._poller.remove(self.sock.fileno())
            self.sock.close()


class Outgoing(Connection):
    """The connecting side: handshake first, then whatever has been queued."""

    def __init__(
        self, sock: socket.socket, peer: int, greeting: Connecting, poller: Poller, receiver: Receiver
    ) -> None:
        super().__init__(sock, poller, receiver)
        self.peer = peer
        self.open = False
        self.on_cut: Callable[[Outgoing, str, bool], None] | None = None  # has it tried again; at once?
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
        raise AssertionError("a subclass defines where tensors are")

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
                raise ProtocolError("it does not begin with the data that had arrived")
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
            raise ProtocolError("its message is not allowed there")
        return True

    def _on_arrived_count(self, count: int) -> None:
        """``count`` units have arrived."""
        raise ProtocolError("it acknowledges packets without a request")

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
        raise AssertionError("a subclass defines how it sends")

    @property
    def idle(self) -> bool:
        raise AssertionError("a subclass defines what it has still to send")

    def fail(self, cause: str, certain: bool = False) -> None:
        """Close; ``certain``: the peer caused it, by an orderly end or malformed data, which no network produces."""
        if self.sock.fileno() >= 0:
            if self.open:
                self._read_shutdown_message()
            self.close()
            self._receiver.on_closed(self.peer, cause, certain=certain)

    def close(self) -> None:
        super().close()
        self._frames.clear()
        self._packets.clear()


def _refuse_reversed(connection: Incoming, peer: int, greeting: Accepting) -> None:
    raise ProtocolError("a reversed connection on one machine")


class Incoming(Connection):
    """The accepting side: it identifies the connecting agent, and then reads messages."""

    is_reversed = False
    """This agent has opened the connection."""

    def __init__(
        self, sock: socket.socket, greeting: Accepting | Established, poller: Poller, receiver: Receiver
    ) -> None:
        super().__init__(sock, poller, receiver)
        self.peer = -1
        self.incarnation = 0  # of that agent: how often it has been started again
        self.since = clock.monotonic()
        self.on_end: Callable[[Incoming], None] = lambda _: None
        self.on_known: Callable[[Incoming], None] = lambda _: None
        self.is_shut_out: Callable[[int, int], bool] = lambda rank, incarnation: False
        self.answer: Callable[[int, int], int] = lambda rank, incarnation: 0
        self.on_cut: Callable[[Incoming, str], None] = lambda connection, cause: connection.fail(cause, True)
        self.on_reversed: Callable[[Incoming, int, Accepting], None] = _refuse_reversed
        self._has_sent_shutdown = False
        self._received = b""
        if isinstance(greeting, Established):
            self._know(*greeting)
        else:
            self._greeting = greeting
            sock.setblocking(False)
            sock.send(greeting.hello)
        poller.add(sock.fileno(), self.on_event)

    def on_event(self, _events: int = 0) -> None:
        """Data arrived, or the end of the connection."""
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
            if self.peer >= 0 and self.resumes and is_connection_cut(error):
                self.on_cut(self, str(error) or repr(error))
                return
            if self.peer < 0 or not short:
                self.fail(str(error) or repr(error), isinstance(error, ProtocolError))
                return
            self.close()
            self.on_end(self)
            raise MemoryError(f"there is no memory for the data of rank {self.peer}") from error

    def _greet(self) -> None:
        if not self._is_private():
            return
        self._received += receive_part(self.sock, ANSWER_SIZE - len(self._received))
        if len(self._received) < ANSWER_SIZE:
            self._read_status_query(self._received)
            return
        try:
            peer = self._greeting.check(self._received)
            self._check_identity(peer)
        except ProtocolError:
            with contextlib.suppress(OSError):
                self.sock.send(REFUSED)  # that it need not try again
            raise
        if self._greeting.purpose == QUESTION:
            self.sock.send(self._greeting.welcome(self.answer(peer, self._greeting.incarnation)))
            raise ConnectionCut("it has only asked")
        if self.is_shut_out(peer, self._greeting.incarnation):
            # With an answer: an agent that only sees its connection end would try again until its deadline.
            self.sock.send(self._greeting.welcome(SHUT_OUT))
            raise ConnectionCut("it counts as lost")  # and its end is no loss: another process may have its rank by now
        if self._greeting.is_for_another_process:
            self.sock.send(self._greeting.welcome(REPLACED))
            raise ConnectionCut("it looks for a process that has ended")
        if self._greeting.purpose == REVERSED:
            self.on_reversed(self, peer, self._greeting)
            return
        self._know(self._greeting.keys, peer, self._greeting.incarnation)
        # First the hook, which takes over the state of the connection before: the welcome says how many units it had.
        self.on_known(self)
        self.sock.send(self._greeting.welcome(self.had))

    def _know(self, keys: Keys, peer: int, incarnation: int) -> None:
        self.peer, self.incarnation = peer, incarnation
        self._use(keys)

    @property
    def had(self) -> int:
        """How many units have arrived over earlier connections."""
        return 0

    def _read_status_query(self, question: bytes) -> None:
        """The received data is shorter than an agent's answer: reply to a status query, if it is allowed."""

    def _check_identity(self, peer: int) -> None:
        """Raise :class:`ProtocolError` if the peer has authenticated as another agent."""

    def read(self) -> None:
        """Read the available data and pass it to the receiver. Raises when the connection ended or the data is
        malformed.
        """
        raise AssertionError("a subclass defines how it reads")

    def deliver_to(self, receiver: Receiver) -> None:
        """Set the receiver of later messages."""
        self._receiver = receiver

    def send_shutdown(self, lost: int, cause: str) -> None:
        if self._has_sent_shutdown:
            return
        self._has_sent_shutdown = True
        with contextlib.suppress(OSError, ConnectionCut):  # it left first
            self._send_control(GOODBYE, lost=lost, cause=cause)

    def ask_to_connect(self) -> None:
        """Request the peer to open a reversed connection for messages of this agent."""
        try:
            self._send_control(CONNECT)
        except (OSError, ConnectionCut) as error:
            self.on_cut(self, str(error))

    def _send_control(self, word: bytes, count: int = 0, lost: int = 0, cause: str = "") -> None:
        data = self._goodbye.close(CONTROL.pack(word, count, lost, cause.encode()[:128]))
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            raise ConnectionCut("it does not read its messages")

    def fail(self, cause: str, certain: bool = False) -> None:
        """Close; the end of an unauthenticated connection is no loss of an agent. ``certain``: as for
        :class:`Outgoing`.
        """
        if self.sock.fileno() < 0:
            return
        self.close()
        self.on_end(self)
        if self.peer >= 0:
            self._receiver.on_closed(self.peer, cause, final=True, certain=certain)
