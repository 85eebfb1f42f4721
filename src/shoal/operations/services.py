"""Services: handlers of messages that belong to no operation of this agent, such as the messages of windows.

Agreements, rejoining, the result cache and the stores of process groups receive control messages, whose body is bytes,
usually JSON. :meth:`.sender.Sender.send_control` sends them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from ..errors import NONSENSE
from ..transport.wire import Message, ProtocolError

T = TypeVar("T")
MOST_BYTES = 1 << 26
"""The limit of a control message's body. It is kept here until its last piece has arrived."""


class Service(Protocol):
    """A handler of messages under one prefix. Called under the engine's lock, except :meth:`close`."""

    def serve(self, source: int, message: Message) -> None:
        """Handle a control message, or the first one of an operation, whose name begins with this service's prefix."""

    @property
    def cause(self) -> int | None:
        """The rank whose loss is the cause if this agent shuts down now; None if there is none."""

    def on_departure(self, rank: int, because: int | None) -> None:
        """Handle the loss of an agent; ``because``: another lost agent that is its cause, if known."""

    def check(self, now: float) -> float:
        """Do the work that is due. Returns when to check again."""

    def descriptors(self) -> list[int]:
        """The file descriptors that a forked child must close."""

    def holds_topology(self) -> list[str]:
        """The names of the objects that depend on the current topology."""

    def calls_that_wait(self) -> list[tuple[str, list[int], float]]:
        """The calls without an operation in which threads of this agent may wait. Called from any thread.

        Each has a description, the ranks, and the time since when it waits (``clock.monotonic()``).
        """

    def close(self, deadline: float) -> None:
        """End all work by the deadline. Called without the lock."""


class MinimalService(Service):
    """A service without resources: the optional methods do nothing."""

    @property
    def cause(self) -> int | None:
        return None

    def on_departure(self, rank: int, because: int | None) -> None: ...

    def check(self, now: float) -> float:
        return float("inf")

    def descriptors(self) -> list[int]:
        return []

    def holds_topology(self) -> list[str]:
        return []

    def calls_that_wait(self) -> list[tuple[str, list[int], float]]:
        return []

    def close(self, deadline: float) -> None: ...


class Services:
    """The services of one agent, by the prefix of the names of their messages."""

    def __init__(self) -> None:
        self._by_word: dict[str, Service] = {}
        self._incomplete: dict[tuple[int, str], bytearray] = {}  # bodies by sender and prefix

    def add(self, word: str, service: Service) -> None:
        """Let a service handle messages under ``"prefix name"``; the prefix begins with ``~``."""
        self._by_word[word] = service

    def get(self, word: str) -> Service | None:
        return self._by_word.get(word)

    def of(self, message: Message) -> Service | None:
        """The service that handles a message; None if no service does."""
        if not self._by_word or not message.name.startswith("~"):
            return None
        return self._by_word.get(message.name.partition(" ")[0])

    def serve(self, source: int, piece: Message) -> None:
        """Pass a control message to its service when its last piece is here; drop it if no service is for it.

        Raises:
            ProtocolError: The piece does not continue the body before it, or the body is too long.
        """
        word = piece.name.partition(" ")[0]
        service = self._by_word.get(word)
        if service is None:
            return
        if len(piece.body) < piece.nbytes:
            # The first piece drops the rest of a body whose sender was lost and started again.
            body = self._incomplete.pop((source, word), bytearray()) if piece.offset else bytearray()
            if len(body) != piece.offset or piece.nbytes > MOST_BYTES:
                raise ProtocolError(f"byte {piece.offset:,} of a body of {piece.nbytes:,} follows {len(body):,} bytes")
            body += piece.body
            if len(body) < piece.nbytes:
                self._incomplete[source, word] = body
                return
            piece = replace(piece, offset=0, body=bytes(body))
        service.serve(source, piece)

    def on_departure(self, rank: int, because: int | None) -> None:
        """Notify all services of the loss of an agent, and drop its incomplete messages."""
        for word, service in list(self._by_word.items()):
            self._incomplete.pop((rank, word), None)
            service.on_departure(rank, because)

    def all(self) -> list[Service]:
        return list(self._by_word.values())


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
