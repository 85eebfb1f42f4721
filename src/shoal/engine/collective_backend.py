"""What moves tensors in the place of Shoal's own links, where something does: an engine that needs one order.

The links still carry every header, so agents that disagree find out as ever, and nothing moves before they agree. The
stage of an operation whose headers have all come then waits until its carrier has moved its tensors.
"""

from __future__ import annotations

from typing import Protocol

from .operation import Operation, Stage


class CollectiveBackend(Protocol):
    """Used under the engine's lock, but for :meth:`begin`."""

    @property
    def due(self) -> bool:
        """:meth:`begin` has something to do."""

    def ask(self, operation: Operation, stage: Stage) -> None:
        """All that a stage has to say is said, and what it heard agrees: move its tensors, as soon as all that take
        part have come so far. :meth:`~.carrying.BackendStages.moved` is called when that is done."""

    def withdraw(self, operation: Operation, stage: Stage) -> bool:
        """A stage has failed here, asked for or not. False where its tensors move all the same, since all have come;
        else the others must hear of it."""

    def begin(self) -> None:
        """Do what is due. Not under the lock: it computes."""

    def reset(self) -> None:
        """An agent was lost, and those that are left have agreed on it: forget what was asked for and is under way."""

    def quiesce(self, until: int = 0) -> int:
        """Agents are about to enter, and what goes on without them has to be over: begin no round but those before a
        number, which all of the others have begun, and those even if nothing is asked for. Returns how many are to have
        begun."""

    @property
    def is_quiescent(self) -> bool:
        """They have, and nothing is under way."""

    def resume(self) -> None:
        """Nobody is about to enter any more."""

    def leave(self) -> None:
        """This agent leaves in good order: the others must not wait for it."""

    @property
    def left(self) -> bool:
        """They know, and nothing moves any more."""

    def stop(self) -> None:
        """Nothing moves any more, whatever was under way. Not under the lock."""
