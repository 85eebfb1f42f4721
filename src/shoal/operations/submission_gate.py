"""Decides which operations may begin: the agent is initialized and not shut down, no loss has ended it, and no
agreement is in progress. It also holds the plan of operations that begin.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import NotInitialized, PeerLost, ShoalError
from .membership import WHOLE, Plan


class SubmissionGate:
    """Used under the engine's lock.

    Args:
        opened: Called when waiting operations may begin.

    Attributes:
        ended: Why no operation is possible any more.
        aborted: Not even a one-sided operation, which the loss of others does not end.
        closing: This agent has shut down, or is about to.
        paused: The survivors agree on a loss. Until they have, no operation begins and no collective one continues.
        plan: The plan of operations that begin now, as all members have agreed.
    """

    def __init__(self, opened: Callable[[], None]) -> None:
        self.ended: ShoalError | None = None
        self.aborted = False
        self.closing = False
        self.paused = False
        self.plan = WHOLE
        self._opened = opened

    @property
    def gone(self) -> tuple[int, ...]:
        """The lost ranks, ascending."""
        return self.plan.gone

    @property
    def entered(self) -> int:
        """How many agents have entered since the job began."""
        return self.plan.entered

    def check_open(self, op: str, one_sided: bool) -> None:
        """Raise the reason why an operation cannot begin."""
        if self.closing:
            raise NotInitialized(f"{op}: this agent has shut down; call shoal.init() first")
        ended = self.reason_against(one_sided)
        if ended is not None:
            raise type(ended)(f"{op}: {ended}", ended.ranks)

    def reason_against(self, one_sided: bool) -> ShoalError | None:
        """Why operations are not possible any more; ``one_sided`` ones may survive the loss of others."""
        return self.ended if self.aborted or not one_sided else None

    def end(self, error: ShoalError) -> ShoalError:
        """Collective operations are not possible any more. Returns the reason: the first one stays."""
        self.ended = self.ended or error
        return self.ended

    def abort(self, error: ShoalError) -> None:
        """No operation is possible any more."""
        self.end(error)
        self.aborted = True

    def refuse_all(self) -> None:
        """Accept no more operations."""
        self.closing = True

    def pause(self) -> None:
        """Begin no operation and continue no collective one, until the survivors agree."""
        self.paused = True

    def resume(self, gone: tuple[int, ...]) -> None:
        """The survivors have agreed on a loss: waiting operations may begin."""
        self.paused, self.plan = False, Plan(gone, self.entered)
        self._opened()

    def install_plan(self, plan: Plan) -> None:
        """Agents have entered: set the plan of later operations."""
        self.plan = plan


def cannot_go_on(what: object, gone: tuple[int, ...]) -> PeerLost:
    """The error of an operation that cannot continue after a loss."""
    return PeerLost(f"{what} cannot go on without ranks {list(gone)}, which are gone; see docs/survival.md", gone)
