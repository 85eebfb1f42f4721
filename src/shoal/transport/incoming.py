"""The accepting side of a socket connection: it identifies the connecting agent, and then reads messages.

The connecting side, and the control messages of both, are in ``sockets.py``.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable

from .. import clock
from .authentication.handshake import ANSWER_SIZE, QUESTION, REFUSED, REPLACED, REVERSED, SHUT_OUT, Accepting, Keys
from .authentication.message_auth import Seal
from .link import Receiver
from .poller import Poller
from .retransmit import ConnectionCut, is_connection_cut
from .sockets import CONNECT, CONTROL, GOODBYE, Established, receive_part
from .wire import ProtocolError


def _refuse_reversed(connection: Incoming, peer: int, greeting: Accepting) -> None:
    raise ProtocolError("a reversed connection on one machine")


class Incoming:
    """The accepting side: it identifies the connecting agent, and then reads messages."""

    seal_of: Callable[[bytes], Seal]
    """As for :class:`Outgoing`."""
    resumes = False
    """As for :class:`Outgoing`."""
    is_reversed = False
    """This agent has opened the connection."""

    def __init__(
        self, sock: socket.socket, greeting: Accepting | Established, poller: Poller, receiver: Receiver
    ) -> None:
        self.sock = sock
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
        self._poller = poller
        self._receiver = receiver
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
            raise MemoryError(f"there is no memory for what rank {self.peer} has sent") from error

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
        self._seal = type(self).seal_of(keys.messages)
        self._goodbye = type(self).seal_of(keys.goodbye)

    @property
    def had(self) -> int:
        """How many units have arrived over earlier connections."""
        return 0

    def _is_private(self) -> bool:
        """As for :class:`Outgoing`."""
        return True

    def _read_status_query(self, question: bytes) -> None:
        """The received data is shorter than an agent's answer: reply to a status query, if it is allowed."""

    def _check_identity(self, peer: int) -> None:
        """Raise :class:`ProtocolError` if the peer has authenticated as another agent."""

    def read(self) -> None:
        """Read the available data and pass it to the receiver. Raises when the connection ended or the data is
        malformed.
        """
        raise AssertionError("a kind of connection says how it reads")

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
            self._receiver.on_closed(self.peer, cause, True, certain)

    def close(self) -> None:
        if self.sock.fileno() >= 0:
            self._poller.remove(self.sock.fileno())
            self.sock.close()
