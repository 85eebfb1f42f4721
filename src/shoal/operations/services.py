"""Services: handlers of messages that belong to no operation of this agent, such as the messages of windows."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..transport.wire import Message
from .control_messages import Bodies


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

    def all(self) -> list[Service]:
        return list(self._by_prefix.values())
