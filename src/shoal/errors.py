"""The errors between agents. Every error names the operation, the tensor, and the ranks.

A correct call can fail for three reasons: an agent is gone (:class:`PeerLost`), an agent did not call in time
(:class:`DeadlineExceeded`), or the agents' calls differ (:class:`Mismatch`). Each error has ``ranks``, the agents that
it is about, so that a program can react without parsing a message.
"""

from __future__ import annotations

from collections.abc import Iterable

NONSENSE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""The errors raised while malformed data are parsed."""


class ShoalError(RuntimeError):
    """Base of all errors that concern other agents. ``ranks`` is the sorted tuple of the ranks concerned."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(sorted(set(ranks)))


class PeerLost(ShoalError, ConnectionError):
    """An agent died, or left with :func:`shoal.shutdown`, while it was still needed."""


class DeadlineExceeded(ShoalError, TimeoutError):
    """Agents did not take part before the deadline (``SHOAL_TIMEOUT``, 300 s by default)."""


class Mismatch(ShoalError, ValueError):
    """Agents disagree: on a shape, a dtype, an operation, a root, or on senders and receivers."""


class NotFinite(ShoalError, ArithmeticError):
    """A tensor to be averaged has NaN or infinity in it, and ``SHOAL_CHECK_FINITE`` is set. Nothing of it was sent."""


class ProtocolError(Exception):
    """The bytes that a peer has sent are no valid message. No user sees it: the connection ends, with this reason."""


class NotInitialized(ShoalError, ValueError):
    """An operation was called before :func:`shoal.init` or after :func:`shoal.shutdown`."""
