"""Decides which operations may begin, and holds the plan of operations that begin.

An operation may begin if the agent is initialized and not shut down, no loss has ended it, and no agreement on a loss
is in progress.

``DepartedPeerPolicy`` reports needed agents that have shut down: such a shutdown counts as a loss, and all agents must
learn it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import NotInitialized, PeerLost, ShoalError
from .membership import WHOLE, Plan, needed_departure
from .operation import FailurePolicy, Operation
from .shared_parts import SharedParts
from .stage import Stage


class SubmissionGate:
    """The gate of one agent. Used under the engine's lock.

    Args:
        opened: Called when operations that wait at the gate may begin.

    Attributes:
        ended: The error of collective operations, which are not possible any more; None while they are.
        aborted: Whether one-sided operations are not possible either; the loss of other agents does not end those.
        closing: Whether this agent has shut down, or is about to.
        paused: Whether the survivors are agreeing on a loss. Until then no operation begins and no collective one
            continues.
        shut: Whether no operation begins now: the gate is paused, or agents are being admitted.
        plan: The plan of operations that begin now, as all members have agreed.
    """

    def __init__(self, opened: Callable[[], None]) -> None:
        self.ended: ShoalError | None = None
        self.aborted = False
        self.closing = False
        self.paused = self.shut = self._is_held = False
        self.plan = WHOLE
        self._opened = opened

    def check_open(self, op: str, one_sided: bool) -> None:
        """Raise the reason why an operation cannot begin."""
        if self.closing:
            raise NotInitialized(f"{op}: this agent has shut down; call shoal.init() first")
        ended = self.reason_against(one_sided)
        if ended is not None:
            raise type(ended)(f"{op}: {ended}", ended.ranks)

    def reason_against(self, one_sided: bool) -> ShoalError | None:
        """The error of operations that are not possible any more; ``one_sided`` ones may survive a loss."""
        return self.ended if self.aborted or not one_sided else None

    def end(self, error: ShoalError) -> ShoalError:
        """End collective operations for good. Returns the reason: the first one remains."""
        # Later errors are often consequences of the first, and would hide the lost agent that it names.
        self.ended = self.ended or error
        return self.ended

    def abort(self, error: ShoalError) -> None:
        """End all operations for good."""
        self.end(error)
        self.aborted = True

    def refuse_all(self) -> None:
        """Accept no more operations."""
        self.closing = True

    def pause(self) -> None:
        """Begin no operation and continue no collective one, until the survivors have agreed."""
        self.paused = self.shut = True

    def expect_pause(self) -> None:
        """Begin no operation until :meth:`resume`: the next check pauses this gate."""
        # An agent whose neighbours have all left never waits: it would end its script before the check.
        self.shut = True

    def hold(self) -> None:
        """Begin no operation until :meth:`release`; those that have begun continue."""
        self.shut = self._is_held = True

    def release(self) -> None:
        """Let waiting operations begin, if there is no agreement in progress."""
        if self._is_held:
            self._is_held, self.shut = False, self.paused
            self._opened()

    def resume(self, gone: tuple[int, ...]) -> None:
        """Let waiting operations begin: the survivors have agreed on the loss of the ranks ``gone``."""
        # Together: an operation that began with the former plan would wait for a lost agent.
        self.paused, self.plan = False, self.plan._replace(gone=gone)
        self.shut = self._is_held
        self._opened()

    def install_plan(self, plan: Plan) -> None:
        """Set the plan of later operations, after agents have been admitted."""
        self.plan = plan


def impossible_without(operation: object, gone: tuple[int, ...]) -> PeerLost:
    """The error of an operation that cannot continue without the lost ranks."""
    return PeerLost(f"{operation} cannot go on without ranks {list(gone)}, which are gone; see docs/survival.md", gone)


class DepartedPeerPolicy:
    """Reports needed agents that have shut down. Used under the engine's lock."""

    def __init__(self, parts: SharedParts, gate: SubmissionGate) -> None:
        self._rank, self._gate, self._sender, self._membership = parts.rank, gate, parts.sender, parts.membership
        self._on_needed: Callable[[int], None] | None = None  # if losses are survived

    def survive(self, on_needed: Callable[[int], None]) -> None:
        """Let losses be survived. ``on_needed`` is called with each needed agent that has shut down."""
        self._on_needed = on_needed

    def lose_needed_by(self, lose: Callable[[int], None]) -> None:
        """Set ``lose``, which ends collective operations on all agents if a departed agent is needed."""
        self._lose = lose

    def error_of(self, operation: Operation, ranks: Sequence[int]) -> PeerLost:
        """The error of a one-sided operation that needs lost agents. No other agent takes part in it."""
        states = "; ".join(self._membership.describe(rank) for rank in ranks)
        return PeerLost(f"{operation} on rank {self._rank} needs agents that are gone: {states}", ranks)

    def leave_out_departed(self, operation: Operation, stage: Stage, needs: set[int]) -> ShoalError | None:
        """Let a stage that begins continue without agents that are gone, if it can, and report those that it needs.

        ``stage.missing`` changes: it loses the ranks whose messages will never arrive.

        Args:
            operation, stage: The stage, after its early messages have been taken.
            needs: The ranks from which it receives, and those to which it sends.

        Returns:
            The error that ends the operation, if it cannot continue.
        """
        view = self._membership.view
        # An agent admitted to replace a lost one is alive, and never sends its part of this round.
        if view.epoch:
            stage.missing.difference_update(operation.lost_ranks)
        # An agent that has shut down after it sent its part of this stage is not needed any more.
        through = {rank for rank in view.left if stage.has_all_of(rank)} if view.left else ()
        gone = sorted(rank for rank in needs if rank not in view.alive and rank not in through) if view.epoch else []
        ended = self._gate.reason_against(operation.one_sided)
        if ended is not None:
            return type(ended)(f"{operation} on rank {self._rank}: {ended}", ended.ranks)
        if gone and operation.one_sided:
            return self.error_of(operation, gone)
        if gone:
            self.report_needed(gone)
            if operation.recovery is not None and operation.recovery.on_loss is FailurePolicy.SKIP_MISSING:
                # Their messages never arrive, and would keep the stage from completing until its deadline.
                stage.missing.difference_update(gone)
        return None

    def report_needed(self, ranks: Sequence[int]) -> None:
        """Notify all other agents that an operation, which is not one-sided, needs departed agents."""
        if self._on_needed is None:
            # All agents have to end the same calls. Otherwise some would wait for a call that has failed here.
            self._lose(ranks[0])
            return
        left, gone = self._membership.view.left, self._gate.plan.gone
        # The survivors have agreed on the ranks in `gone`. Reported again, they would begin another agreement.
        for rank in [rank for rank in ranks if rank in left and rank not in gone]:
            self._sender.pass_on(needed_departure(rank, self._rank))
            self._on_needed(rank)
