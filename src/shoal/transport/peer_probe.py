"""Probes agents that count as lost, to learn whether they are alive and in which state.

A partition may heal without any agent's noticing, because no messages are sent to lost agents. So agents probe them
from time to time. A probe is only a handshake: the answer is a number, in the field that tells a permanent connection
how many of its units have arrived. The other side stores nothing for it, and neither side regards its end as a loss.
"""

from __future__ import annotations

from collections.abc import Callable

from .link import NullReceiver
from .router import Router
from .sockets import Outgoing


class PeerProbe:
    """The probes of one agent, one at a time. No call waits for an answer, and an error means no answer."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._question: Outgoing | None = None

    def ask(self, peer: int, answered: Callable[[int], None]) -> None:
        """Probe a peer in another process; the driving thread calls ``answered`` with the answer."""
        self.cancel()
        try:
            self._question = self._router.outgoing(peer, NullReceiver(), asks=True)
        except OSError:
            return
        self._question.on_answer = answered

    @property
    def is_pending(self) -> bool:
        """An answer may still come."""
        return bool(self.descriptors())

    def cancel(self) -> None:
        """Ignore the answer of the current probe."""
        if self._question is not None:
            self._question.close()
            self._question = None

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        sock = None if self._question is None else self._question.sock
        return [] if sock is None or sock.fileno() < 0 else [sock.fileno()]
