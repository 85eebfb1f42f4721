"""Agents that have left in good order, and are needed all the same: that makes it a loss, of which all must hear."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import PeerLost
from .gate import Gate
from .membership import Departure, Membership
from .operation import Operation
from .outbox import Outbox


class Missed:
    """Used under the engine's lock.

    Attributes:
        survived: The loss of an agent does not end what needs everybody.
    """

    def __init__(self, rank: int, gate: Gate, outbox: Outbox, membership: Membership) -> None:
        self.survived = False
        self._rank, self._gate, self._outbox, self._membership = rank, gate, outbox, membership
        self._on_missed: Callable[[int], None]

    def survive(self, on_missed: Callable[[int], None]) -> None:
        """A loss does not end what needs everybody; ``on_missed`` is told when somebody is missed who has left."""
        self.survived, self._on_missed = True, on_missed

    def error(self, operation: Operation, ranks: Sequence[int]) -> PeerLost:
        """An operation needs agents that have left, and ends. The others hear of it; but not where nobody else takes
        part."""
        what = "; ".join(self._membership.describe(one) for one in ranks)
        error = PeerLost(f"{operation} on rank {self._rank} needs agents that are gone: {what}", ranks)
        if operation.one_sided:
            return error
        self.tell_of(operation, ranks)
        self._gate.end(PeerLost(f"{what}, and was needed; shut down and start again", ranks))
        return error

    def tell_of(self, operation: Operation, ranks: Sequence[int]) -> None:
        """Agents that have left are missed: all others must hear of it."""
        left, gone = self._membership.view.left, self._gate.gone
        missed = [rank for rank in ranks if rank in left and rank not in gone] if self.survived else ranks[:1]
        for rank in missed:
            cause = f"it left while rank {self._rank} needed it for {operation}"
            self._outbox.pass_on(Departure(rank, cause, True, self._rank, certain=True))
            if self.survived:
                self._on_missed(rank)
