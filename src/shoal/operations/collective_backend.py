"""The interface of a backend that moves tensors instead of Shoal's links and needs one order of operations.

Links still carry every header, so disagreements are found as usual, and no tensor moves before the agents agree. The
stage of an operation whose headers have all arrived then waits until the backend has moved its tensors.
"""

from __future__ import annotations

from typing import Protocol

from .operation import Operation, Stage


class CollectiveBackend(Protocol):
    """Used under the engine's lock, except for :meth:`begin`."""

    @property
    def due(self) -> bool:
        """Whether :meth:`begin` has work to do."""

    def ask(self, operation: Operation, stage: Stage) -> None:
        """All headers of a stage are exchanged and match: move its tensors as soon as all members have asked.
        :meth:`~.backend_stages.BackendStages.moved` is called afterwards.
        """

    def withdraw(self, operation: Operation, stage: Stage) -> bool:
        """A stage has failed here, asked for or not. False if its tensors move all the same, since all members have
        asked; else the others have to be notified.
        """

    def begin(self) -> None:
        """Do the work that is due. Not under the lock, because it computes."""

    def reset(self) -> None:
        """The survivors have agreed on a loss: forget all requests and transfers."""

    def quiesce(self, until: int = 0) -> int:
        """Agents are about to enter, and transfers without them must be finished: begin no round from this number on,
        and all earlier ones even without requests, because all others have begun them. Returns how many rounds are to
        have begun.
        """

    @property
    def is_quiescent(self) -> bool:
        """Those rounds have begun, and no transfer is in progress."""

    def resume(self) -> None:
        """No agent is about to enter any more."""

    def leave(self) -> None:
        """This agent shuts down: the others must not wait for it."""

    @property
    def left(self) -> bool:
        """The others know, and no transfer is in progress."""

    def stop(self) -> None:
        """End all transfers at once. Not under the lock."""
