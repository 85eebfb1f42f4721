"""Messages that belong to no operation of this agent: the services that handle them, and bodies of control messages.

A service handles the messages under one prefix, such as those of windows, agreements, rejoining, the result cache, and
the stores of process groups. The body of a control message is bytes, usually JSON.
:meth:`.sender.Sender.send_control` sends it in pieces of a packet, and the receiver joins them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ..errors import NONSENSE, ProtocolError
from ..transport.messages import PACKET_BYTES, Message
from .membership import Ranks

T = TypeVar("T")
PIECE_BYTES = PACKET_BYTES // 2
"""Bytes of a body in one piece: with the name of its message it has to fit into a packet."""
MOST_BYTES = 1 << 26
"""The limit of a body. The receiver keeps it until its last piece has arrived."""


def pieces(message: Message, body: bytes) -> list[Message]:
    """Messages with the fields of ``message``, each with a piece of the body; one without any if it is empty.

    They are sent one after another, so a long message keeps its place among the others of a link.

    Raises:
        ValueError: The body is longer than receivers accept.
    """
    if len(body) > MOST_BYTES:  # its receivers would count this agent as lost, for a reason that nobody could read
        raise ValueError(
            f"the message {message.name} has {len(body):,} bytes, and the limit is {MOST_BYTES:,}: it may list all "
            "names that calls have had, so give calls the same names in each step"
        )
    return [
        replace(message, offset=at, nbytes=len(body), body=body[at : at + PIECE_BYTES])
        for at in range(0, len(body) or 1, PIECE_BYTES)
    ]


class Bodies:
    """Bodies of which not all pieces have arrived, by sender and the prefix of their names."""

    def __init__(self) -> None:
        self._incomplete: dict[tuple[int, str], bytearray] = {}

    def join(self, source: int, prefix: str, piece: Message) -> Message | None:
        """The whole message if this was its last piece, or None.

        Raises:
            ProtocolError: The piece does not continue the body before it, or the body is too long.
        """
        if len(piece.body) == piece.nbytes:
            return piece
        # The first piece drops the rest of a body whose sender was lost and started again.
        body = self._incomplete.pop((source, prefix), bytearray()) if piece.offset else bytearray()
        if len(body) != piece.offset or piece.nbytes > MOST_BYTES:
            raise ProtocolError(f"byte {piece.offset:,} of a body of {piece.nbytes:,} follows {len(body):,} bytes")
        body += piece.body
        if len(body) < piece.nbytes:
            self._incomplete[source, prefix] = body
            return None
        return replace(piece, offset=0, body=bytes(body))

    def drop(self, source: int, prefix: str) -> None:
        """Forget the incomplete body of a sender that is lost."""
        self._incomplete.pop((source, prefix), None)


def read_json(message: Message, about: str, parse: Callable[[Any], T], limit: float = float("inf")) -> T:
    """The value that ``parse`` makes of a control message's JSON.

    Args:
        message: The message, with its whole body.
        about: Its subject, for the error.
        parse: Raises one of :data:`~shoal.errors.NONSENSE` if the content is malformed.
        limit: The largest number of bytes.

    Raises:
        ProtocolError: The body is too long or malformed. It ends the connection.
    """
    try:
        if message.nbytes > limit:
            raise ValueError(f"{message.nbytes:,} bytes")
        return parse(json.loads(bytes(message.body)))
    except NONSENSE as error:
        raise ProtocolError(f"an invalid message about {about}: {error}") from None


def parsed_ranks(data: Any, size: int) -> Ranks:
    """Parse ranks of ``size`` agents, ascending; raises one of :data:`~shoal.errors.NONSENSE` if they are malformed."""
    ranks = tuple(parsed_count(rank) for rank in data)
    if list(ranks) != sorted(set(ranks)) or (ranks and ranks[-1] >= size):
        raise ValueError(f"ranks {ranks} of {size}")
    return ranks


def parsed_count(data: Any) -> int:
    """Parse a number from JSON data; raises :class:`ValueError` if it is none, or negative."""
    # Not `isinstance`: JSON's `true` would pass as the number 1.
    if type(data) is not int or data < 0:
        raise ValueError(f"{data!r} where a number is expected")
    return data


def parsed_counts(data: Any) -> dict[str, int]:
    """Parse numbers by name from JSON data; raises one of :data:`~shoal.errors.NONSENSE` if they are malformed."""
    return {str(name): parsed_count(count) for name, count in data.items()}


class Service(ABC):
    """A handler of messages under one prefix, by default without resources.

    Called under the engine's lock, except :meth:`close`.
    """

    @abstractmethod
    def serve(self, source: int, message: Message) -> None:
        """Handle a control message, or the first one of an operation, whose name begins with this service's prefix."""

    @property
    def cause(self) -> int | None:
        """The rank whose loss is the cause if this agent shuts down now; None if there is none."""
        return None

    def on_departure(self, rank: int, because: int | None) -> None:  # noqa: B027 - optional
        """Handle the loss of an agent; ``because``: another lost agent that is its cause, if known."""

    def check(self, now: float) -> float:
        """Do the work that is due. Returns when to check again."""
        return float("inf")

    def descriptors(self) -> list[int]:
        """The file descriptors that a forked child must close."""
        return []

    def holds_topology(self) -> list[str]:
        """The names of the objects that depend on the current topology."""
        return []

    def calls_that_wait(self) -> list[tuple[str, list[int], float]]:
        """The calls without an operation in which threads of this agent may wait. Called from any thread.

        Each has a description, the ranks, and the time since when it waits (``clock.monotonic()``).
        """
        return []

    def close(self, deadline: float) -> None:  # noqa: B027 - optional
        """End all work by the deadline. Called without the lock."""


class Services:
    """The services of one agent, by the prefix of the names of their messages."""

    def __init__(self) -> None:
        self._by_prefix: dict[str, Service] = {}
        self._bodies = Bodies()

    def add(self, prefix: str, service: Service) -> None:
        """Let a service handle messages under ``"prefix name"``; the prefix begins with ``~``."""
        self._by_prefix[prefix] = service

    def get(self, prefix: str) -> Service | None:
        return self._by_prefix.get(prefix)

    def of(self, message: Message) -> Service | None:
        """The service that handles a message; None if no service does."""
        if not self._by_prefix or not message.name.startswith("~"):
            return None
        return self._by_prefix.get(message.name.partition(" ")[0])

    def serve(self, source: int, piece: Message) -> None:
        """Pass a control message to its service when its last piece is here; drop it if no service is for it.

        Raises:
            ProtocolError: The piece does not continue the body before it, or the body is too long.
        """
        prefix = piece.name.partition(" ")[0]
        service = self._by_prefix.get(prefix)
        if service is not None and (message := self._bodies.join(source, prefix, piece)) is not None:
            service.serve(source, message)

    def on_departure(self, rank: int, because: int | None) -> None:
        """Notify all services of the loss of an agent, and drop its incomplete messages."""
        for prefix, service in list(self._by_prefix.items()):
            self._bodies.drop(rank, prefix)
            service.on_departure(rank, because)

    def holds_topology(self) -> list[str]:
        """The names of the objects that depend on the current topology."""
        return [name for service in self.all() for name in service.holds_topology()]

    def all(self) -> list[Service]:
        return list(self._by_prefix.values())
