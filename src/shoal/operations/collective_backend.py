"""The interface of a backend that moves tensors instead of Shoal's links and needs one order of operations.

Links still carry every header, so disagreements are found as usual, and no tensor moves before the agents agree. The
stage of an operation whose headers have all arrived then waits until the backend has moved its tensors.
"""

from __future__ import annotations

from typing import Protocol

from .operation import Operation, Stage


class CollectiveBackend(Protocol):
    """The interface of a backend. Called under the engine's lock, except :meth:`begin` and :meth:`stop`."""

    @property
    def due(self) -> bool:
        """Whether :meth:`begin` has work to do."""

    def ask(self, operation: Operation, stage: Stage) -> None:
        """Move the tensors of a stage, whose headers are exchanged and match, as soon as all members have asked.

        The backend calls :meth:`~.backend_stages.BackendStages.moved` afterwards.
        """

    def withdraw(self, operation: Operation, stage: Stage) -> bool:
        """Withdraw a stage that has failed here, whether it was requested or not.

        False if its tensors are moved nevertheless, because all members have requested it; otherwise the caller has to
        notify the other agents.
        """

    def begin(self) -> None:
        """Do the work that is due. Called without the lock, because it computes."""

    def reset(self) -> None:
        """Forget all requests and transfers: the survivors have agreed on a loss."""

    def quiesce(self, until: int = 0) -> int:
        """Finish the transfers of the current members before agents are admitted.

        Begin no round with number ``until`` or above. Begin all earlier ones even without requests, because all other
        agents have begun them. Returns the number of rounds that are to have begun.
        """

    @property
    def is_quiescent(self) -> bool:
        """Whether those rounds have begun and no transfer is in progress."""

    def resume(self) -> None:
        """Begin rounds again: no agent is about to be admitted any more."""

    def leave(self) -> None:
        """Announce that this agent shuts down, so that the other agents do not wait for it."""

    @property
    def left(self) -> bool:
        """Whether the other agents know of the shutdown and no transfer is in progress."""

    def stop(self) -> None:
        """End all transfers at once. Called without the lock."""
