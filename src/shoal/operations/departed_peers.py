"""Reports needed agents that have shut down: such a shutdown counts as a loss, and all agents must learn it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import PeerLost, ShoalError
from .membership import NEEDED, Departure, Membership
from .operation import FailurePolicy, Operation, Stage
from .sender import Sender
from .submission_gate import SubmissionGate


class DepartedPeerPolicy:
    """Reports needed agents that have shut down. Used under the engine's lock.

    Attributes:
        survived: The loss of an agent does not end collective operations.
    """

    def __init__(self, rank: int, gate: SubmissionGate, sender: Sender, membership: Membership) -> None:
        self.survived = False
        self._rank, self._gate, self._sender, self._membership = rank, gate, sender, membership
        self._on_missed: Callable[[int], None]

    def survive(self, on_missed: Callable[[int], None]) -> None:
        """Let losses be survived. ``on_missed`` is called with each needed agent that has shut down."""
        self.survived, self._on_missed = True, on_missed

    def lose_by(self, lose: Callable[[int], None]) -> None:
        """Set ``lose``, which ends collective operations on all agents if a departed agent is needed."""
        self._lose = lose

    def error(self, operation: Operation, ranks: Sequence[int]) -> PeerLost:
        """The error of a one-sided operation that needs lost agents. No other agent takes part in it."""
        what = "; ".join(self._membership.describe(one) for one in ranks)
        return PeerLost(f"{operation} on rank {self._rank} needs agents that are gone: {what}", ranks)

    def error_of(self, operation: Operation, stage: Stage, needs: set[int]) -> ShoalError | None:
        """Announce lost agents that a stage needs although they are gone; the stage continues without them if it can.

        Args:
            operation, stage: A stage that begins.
            needs: The ranks from which it receives, and those to which it sends.

        Returns:
            The error that ends the operation, if it cannot continue.
        """
        view = self._membership.view
        # An agent that has shut down after it sent its part of this stage is not needed any more.
        through = {rank for rank in view.left if stage.has_all_of(rank)} if view.left else ()
        gone = sorted(rank for rank in needs if rank not in view.alive and rank not in through) if view.epoch else []
        ended = self._gate.reason_against(operation.one_sided)
        if ended is not None:
            return type(ended)(f"{operation} on rank {self._rank}: {ended}", ended.ranks)
        if gone and operation.one_sided:
            return self.error(operation, gone)
        if gone:
            self.announce(gone)
            if operation.recovery is not None and operation.recovery.on_loss is FailurePolicy.SKIP_MISSING:
                stage.missing.difference_update(gone)
        return None

    def announce(self, ranks: Sequence[int]) -> None:
        """Notify all other agents that an operation, which is not one-sided, needs departed agents."""
        if not self.survived:
            self._lose(ranks[0])
            return
        left, gone = self._membership.view.left, self._gate.gone
        for rank in [rank for rank in ranks if rank in left and rank not in gone]:
            self._sender.pass_on(Departure(rank, NEEDED, True, self._rank, certain=True))
            self._on_missed(rank)
