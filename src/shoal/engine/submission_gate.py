"""What may begin on one agent: it has met and not shut down, no loss has ended it, and none is just being agreed on.

Whom all that begins is with, as those that are there have agreed, is here, too.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import NotInitialized, PeerLost, ShoalError
from .membership import WHOLE, Plan


class SubmissionGate:
    """Used under the engine's lock.

    Args:
        opened: Told when what had to wait may begin.

    Attributes:
        ended: Why no operation is possible any more.
        aborted: Not even a one-sided one, which the loss of others does not end.
        closing: This agent has shut down, or is about to.
        frozen: Those that are left agree on a loss. Nothing begins until they have, and no operation of all goes on.
        plan: Whom what begins now is planned without, as all that are there have agreed.
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
        """The ranks that are gone, ascending."""
        return self.plan.gone

    @property
    def entered(self) -> int:
        """How many agents have entered since the run began."""
        return self.plan.entered

    def check_open(self, op: str, one_sided: bool) -> None:
        """Raise why an operation cannot begin."""
        if self.closing:
            raise NotInitialized(f"{op}: this agent has shut down; call shoal.init() first")
        ended = self.reason_against(one_sided)
        if ended is not None:
            raise type(ended)(f"{op}: {ended}", ended.ranks)

    def reason_against(self, one_sided: bool) -> ShoalError | None:
        """Why operations are not possible any more; those that are ``one_sided`` may outlive others."""
        return self.ended if self.aborted or not one_sided else None

    def end(self, error: ShoalError) -> ShoalError:
        """What needs all is not possible any more. Returns why: the first reason stays."""
        self.ended = self.ended or error
        return self.ended

    def abort(self, error: ShoalError) -> None:
        """Nothing is possible any more."""
        self.end(error)
        self.aborted = True

    def refuse_all(self) -> None:
        """Take no more operations."""
        self.closing = True

    def pause(self) -> None:
        """Begin nothing, and let no operation of all go on, until the agents that are left agree."""
        self.paused = True

    def resume(self, gone: tuple[int, ...]) -> None:
        """The agents that are left have agreed on who is gone: what waits may begin."""
        self.paused, self.plan = False, Plan(gone, self.entered)
        self._opened()

    def install_plan(self, plan: Plan) -> None:
        """Agents have entered: whom all begins with from here on."""
        self.plan = plan


def cannot_go_on(what: object, gone: tuple[int, ...]) -> PeerLost:
    """Why an operation fails for which there is no way to go on."""
    return PeerLost(f"{what} cannot go on without ranks {list(gone)}, which are gone; see docs/survival.md", gone)
