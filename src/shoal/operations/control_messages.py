"""The bodies of control messages: bytes, usually JSON, that are sent in pieces of a packet and joined by the receiver.

Agreements, rejoining, the result cache and the stores of process groups use them. :meth:`.sender.Sender.send_control`
sends them, and :class:`.services.Services` passes them on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ..errors import NONSENSE
from ..transport.wire import PACKET_BYTES, Message, ProtocolError
from .membership import Ranks

T = TypeVar("T")
PIECE_BYTES = PACKET_BYTES // 2
"""Bytes of a body in one piece: with the name of its message it has to fit into a packet."""
MOST_BYTES = 1 << 26
"""The limit of a body. The receiver keeps it until its last piece has arrived."""


def pieces(message: Message, body: bytes) -> list[Message]:
    """Messages with the fields of ``message``, each with a piece of the body; one without any if it is empty.

    They are sent one after another, so a long message keeps its place among the others of a link.
    """
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
        raise ProtocolError(f"a message about {about} makes no sense: {error}") from None


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
        raise ValueError(f"{data!r} in the place of a number")
    return data


def parsed_counts(data: Any) -> dict[str, int]:
    """Parse numbers by name from JSON data; raises one of :data:`~shoal.errors.NONSENSE` if they are malformed."""
    return {str(name): parsed_count(count) for name, count in data.items()}
