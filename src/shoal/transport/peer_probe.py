"""Asking an agent that counts as lost, should it be there all the same, what became of it.

A network that fell apart may be whole again without anybody's noticing: who counts as lost is sent nothing. So now and
then somebody has to ask. That is a handshake and no more: what the other side has to say is a number, in the place
where an agent that connects to stay is told how much of what it sent has come. The other side keeps nothing of it, and
neither side takes the end of it for anybody's loss.
"""

from __future__ import annotations

from collections.abc import Callable

from .link import NullReceiver
from .router import Router
from .sockets import Outgoing


class PeerProbe:
    """The questions of one agent, one at a time. Nothing waits for an answer, and an error is none."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._question: Outgoing | None = None

    def ask(self, peer: int, answered: Callable[[int], None]) -> None:
        """Ask a peer in another process; ``answered`` is called with what it says, by whoever drives."""
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
        """Want no answer any more."""
        if self._question is not None:
            self._question.close()
            self._question = None

    def descriptors(self) -> list[int]:
        """What a forked child must close."""
        sock = None if self._question is None else self._question.sock
        return [] if sock is None or sock.fileno() < 0 else [sock.fileno()]
