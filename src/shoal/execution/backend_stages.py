"""Stages whose tensors a backend moves: the messages that agents exchange first, and recovery after a loss.

A backend moves tensors instead of Shoal's links, and needs one order of operations (``CollectiveBackend``). Links still
carry every header, so disagreements are found as usual, and no tensor moves before the agents agree. The stage of an
operation whose headers have all arrived then waits until the backend has moved its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from ..errors import PeerLost, ProtocolError
from ..transport.messages import Message
from ..transport.quotas import MACHINE_BYTES
from .operation import Operation
from .shared_parts import SharedParts
from .stage import Exchange, Stage
from .submission_gate import SubmissionGate


class BackendStages:
    """The backend stages of one agent; without a backend all tensors travel over links. Used under the engine's lock.

    Args:
        go_on: Called when tensors of a stage have arrived.

    Attributes:
        backend: Moves the tensors of exchanges that do not have to travel over links.
    """

    def __init__(self, parts: SharedParts, gate: SubmissionGate, go_on: Callable[[Operation, Stage], object]) -> None:
        self.backend: CollectiveBackend | None = None
        self._rank, self._gate, self._progress = parts.rank, gate, parts.progress
        self._matcher, self._sender, self._membership = parts.matcher, parts.sender, parts.membership
        self._go_on = go_on

    def carry_with(self, backend: CollectiveBackend) -> None:
        """Set the backend. Call it before the exchange starts."""
        self.backend = backend

    def carries(self, operation: Operation, exchange: Exchange) -> bool:
        """Whether the backend moves the tensors of an exchange: only if no agent was lost since its plan was made."""
        known = operation.plan.losses == self._gate.plan.losses
        return self.backend is not None and exchange.carried is not None and known

    def check(self, message: Message) -> None:
        """Raise ``ProtocolError`` for a message that announces an impossible transfer."""
        # Accepted, the announcement would let the operation wait for a tensor that nothing brings.
        if self.backend is None:
            raise ProtocolError("a tensor that travels over an engine that there is not")
        if message.nbytes > MACHINE_BYTES:
            raise ProtocolError(f"a tensor of {message.nbytes:,} bytes, more than this machine has")

    def ask_if_agreed(self, operation: Operation, stage: Stage) -> None:
        """Ask the backend to move the tensors of a stage, once all agents have agreed on it."""
        # A backend cannot refuse a tensor of another shape or call, so the headers of all sides have to match first.
        if (
            stage.to_move
            and not stage.transfer_requested
            and stage.posted
            and not stage.missing
            and not stage.unconfirmed
        ):
            assert self.backend is not None
            stage.transfer_requested = True
            self.backend.ask(operation, stage)

    def transferred(self, operation: Operation, stage: Stage) -> None:
        """Record that the backend has moved the tensors of a stage."""
        stage.to_move, stage.transferred_with = False, set()
        for message in stage.arrived.values():
            # The backend has written the tensors itself: no link marks them as arrived, and a sum would wait for that.
            if message.payload is not None:
                message.payload.mark_complete()
        # The operation may have failed or left the stage during the transfer. Resumed, it would skip its current stage.
        if operation.error is None and operation.stage is stage:
            self._go_on(operation, stage)
            self._progress.notify()

    def leave(self, operation: Operation, stage: Stage) -> None:
        """Withdraw the request for a stage that an operation leaves, perhaps before its tensors were moved."""
        withdrawn = stage.to_move and self.backend is not None and self.backend.withdraw(stage)
        if withdrawn and operation.error is not None:
            self.send_withdrawal(operation, stage)

    def send_withdrawal(self, operation: Operation, stage: Stage) -> None:
        """Notify the agents that would wait for the tensors of a stage, which fails here and will not be moved."""
        if self._gate.ended is not None or isinstance(operation.error, PeerLost):
            return  # the shutdown message or the notice of the loss reaches them anyway
        carried, alive = stage.exchange.carried, self._membership.view.alive
        assert carried is not None
        ranks = stage.needs | stage.arrived.keys() if carried.among is None else set(carried.among or alive)
        failure = self._matcher.failure_of(operation)
        for rank in sorted(ranks - {self._rank}):
            self._sender.deny(rank, operation, stage.number, failure)

    def redirect_to_links(self) -> Iterator[Operation]:
        """Redirect tensors in transit between survivors to links after a loss, unless all survivors have them already.

        Operations that restart use the backend again. Yields the operations whose stages are complete.
        """
        if self.backend is None:
            return
        # Left in place, a former request could still begin a transfer with the lost agent.
        self.backend.reset()
        for operation in self._matcher.in_flight():
            stage = operation.stage
            if stage is not None and stage.to_move and not operation.restarts:
                stage.redirect_to_links()
                if stage.complete:
                    yield operation
        # Reached only if the caller exhausts this generator. Otherwise the receivers wait until their deadlines.
        self._sender.send_by_links()


class CollectiveBackend(Protocol):
    """The interface of a backend. Called under the engine's lock, except :meth:`begin` and :meth:`stop`."""

    @property
    def due(self) -> bool:
        """Whether :meth:`begin` has work to do."""

    def ask(self, operation: Operation, stage: Stage) -> None:
        """Move the tensors of a stage, whose headers are exchanged and match, as soon as all members have asked.

        The backend calls :meth:`~.backend_stages.BackendStages.transferred` afterwards.
        """

    def withdraw(self, stage: Stage) -> bool:
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
