"""Dispatches received messages by kind: tensors, acknowledgements, probes, refusals, and notices of departures.

All of it runs in the thread that drives the exchange, under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..errors import DeadlineExceeded, Mismatch, PeerLost, ProtocolError
from ..execution.control_messages import Services
from ..execution.fused_operation import PREFIX
from ..execution.fusion import Fusion
from ..execution.lifecycle import Lifecycle
from ..execution.matching import MatchResult
from ..execution.operation import Operation
from ..execution.shared_parts import SharedParts
from ..execution.stage import Stage
from ..fault_tolerance.failure_detector import Failures
from ..transport.messages import AGAIN, DIED, HERE, Kind, Message, Where
from ..transport.reverse_connections import CONNECT


class Probe(NamedTuple):
    """The handlers of one kind of probe: of another agent's request, and of the answer to this agent's request."""

    answer: Callable[[int, Message], None]
    on_answer: Callable[[int, Message], None]


class Dispatch:
    """The :class:`~shoal.transport.link.Receiver` of one agent: passes each message to the part that handles it.

    Args:
        probes: The handlers of probes that belong to no stage of an operation, by the ``op`` of their messages.
    """

    def __init__(
        self,
        parts: SharedParts,
        lifecycle: Lifecycle,
        fusion: Fusion,
        failures: Failures,
        services: Services,
        probes: Mapping[str, Probe],
    ) -> None:
        self._rank = parts.rank
        self._matcher = parts.matcher
        self._sender = parts.sender
        self._lifecycle = lifecycle
        self._fusion = fusion
        self._failures = failures
        self._services = services
        self._probes = probes
        self._events = parts.events
        self._router = parts.router
        # The rest of the interface of a receiver: signs of a loss.
        self.on_closed, self.on_cut = failures.on_closed, failures.on_cut
        self.on_shut_out, self.on_left = failures.on_shut_out, failures.on_left

    def on_message(self, source: int, message: Message) -> None:
        kind = message.kind
        try:
            if kind is Kind.DATA:
                if self._events.active:
                    key = message.op, message.name, message.round
                    self._events.emit("received", *key, 0, source, message.nbytes, "", message.stage)
                self.take(source, message)
            elif kind is Kind.CONTROL:
                if self._events.active:
                    key = message.op, message.name, message.round
                    self._events.emit("received", *key, 0, source, len(message.body))
                self._services.serve(source, message)
            # With a name it confirms one part of a message; only one without a name frees the memory of all parts.
            elif kind is Kind.DONE and message.name:
                self._lifecycle.confirmed_in_part(source, message)
            elif kind is Kind.DONE:
                self._lifecycle.acknowledged(source, message.token)
            elif kind is Kind.REFUSE:
                self._on_refuse(source, message)
            elif kind is Kind.ASK:
                self._on_ask(source, message)
            elif kind is Kind.DENY:
                self._on_deny(source, message)
            elif kind is Kind.WAITS:
                self._on_waits(source, message)
            elif kind is Kind.NOTICE:
                self._failures.on_notice(source, message)
        except ProtocolError as error:  # also for a kept message that is handled later
            self._failures.on_closed(source, str(error), final=True, certain=True)

    def on_arrived(self, source: int, message: Message) -> None:
        payload = message.payload
        assert payload is not None
        if payload.complete and self._events.active:
            key = message.op, message.name, message.round
            self._events.emit("arrived", *key, 0, source, message.nbytes, "", message.stage)
        if payload.on_more is not None:
            payload.on_more()

    def take(self, source: int, message: Message) -> None:
        """Deliver a tensor to its operation. It may be a part of an unpacked fused message."""
        # The matcher has no round of such a name, and would keep the message as early for good.
        if message.name.startswith(PREFIX):
            self._fusion.on_fused_message(source, message)
            return
        if message.where is Where.CARRIED:
            self._lifecycle.backend_stages.check(message)
        service = self._services.of(message) if message.name.startswith("~") else None
        if service is not None and message.stage == 0:
            service.serve(source, message)
            return
        if self._matcher.of_earlier_attempt(message):
            self._sender.acknowledge(source, message)
            return
        result, operation = self._matcher.match(message)
        lifecycle = self._lifecycle
        # Before the results: a member of a fused operation has no stage, so every message for it looks early.
        if operation is not None and operation.fused is not None:
            self._fusion.put(operation, source, message)
        elif result is MatchResult.LATE or (
            result is MatchResult.EARLY and operation is None and lifecycle.gate.closing
        ):  # no operation here will take it
            self._sender.acknowledge(source, message)
        elif result is MatchResult.EARLY:
            self._matcher.keep(source, message)
        elif message.flags & AGAIN and not self._is_missing(source, result, operation):  # it was moved in time
            self._sender.acknowledge(source, message)
        elif result is MatchResult.UNEXPECTED or operation is None or operation.stage is None:
            error = lifecycle.refuse_unexpected(source, message)
            if operation is not None:
                lifecycle.fail(operation, error)
            else:
                lifecycle.fail_after_end(source, message, error)
        elif message.where is Where.CARRIED and not operation.stage.to_move:
            pass  # announced during an agreement on a loss: a link brings it
        elif message.flags & AGAIN and source in operation.stage.arrived:  # its sender has agreed on a loss earlier
            lifecycle.accept(operation, operation.stage, source, message)
        else:
            stage = operation.stage
            lifecycle.take(operation, stage, source, message)
            if operation.error is None:
                lifecycle.go_on(operation, stage)

    @staticmethod
    def _is_missing(source: int, result: MatchResult, operation: Operation | None) -> bool:
        """Whether neither the backend nor a link has brought the tensor that a source announced."""
        stage = operation.stage if operation is not None and result is MatchResult.NOW else None
        if stage is None:
            return False
        announced = stage.arrived.get(source)
        return source in stage.missing or (announced is not None and announced.where is Where.CARRIED and stage.to_move)

    def _on_refuse(self, source: int, message: Message) -> None:
        """Handle a refusal: this agent's message, or its absence, did not match, or the peer cannot continue."""
        lost = bool(message.flags & DIED)
        error = PeerLost(message.text, (message.digest,)) if lost else Mismatch(message.text, (source, self._rank))
        result, operation = self._matcher.match(message)
        if operation is not None:
            self._lifecycle.fail(operation, error)
        # The round has ended here, perhaps with a result. Unless the next call raises the error, no caller sees it.
        elif result is MatchResult.UNEXPECTED:
            self._lifecycle.fail_after_end(source, message, error)
        # Only after the failure: the token may be the last confirmation, and would end the operation with its result.
        self._lifecycle.acknowledged(source, message.token)

    def _on_ask(self, source: int, message: Message) -> None:
        if message.name == CONNECT:
            self._router.reversing.on_request(message)
            return
        probe = self._probes.get(message.op)
        if probe is not None:
            probe.answer(source, message)
            return
        if self._services.of(message) is not None:  # the service answers when it can
            return
        result, operation = self._matcher.match(message)
        if result is MatchResult.EARLY:
            self._matcher.keep_ask(source, message)
            waiting_for = operation.blocked_on if operation is not None else []
            if waiting_for:
                self._sender.send_waits(source, message, waiting_for)
        elif result is MatchResult.NOW and operation is not None and operation.stage is not None:
            self._sender.answer(source, operation, operation.stage, bool(message.flags & HERE))
        elif operation is None or operation.stage is None or not operation.stage.will_send(source, message.stage):
            # If the message was sent nevertheless, it arrives before this denial, which then has no effect.
            self._sender.deny(source, message, message.stage, self._matcher.failure_of(message))

    def _on_waits(self, source: int, message: Message) -> None:
        """Record the ranks that an awaited peer waits for itself."""
        result, operation = self._matcher.match(message)
        # A report on another stage is outdated: an error would name ranks that do not block this one.
        if result is MatchResult.NOW and operation is not None and operation.stage is not None:
            operation.stage.reported_waits[source] = message.shape

    def _on_deny(self, source: int, message: Message) -> None:
        probe = self._probes.get(message.op)
        if probe is not None:
            probe.on_answer(source, message)
            return
        result, operation = self._matcher.match(message)
        if result is MatchResult.EARLY:
            self._matcher.take_back(source, message)
            return
        stage = operation.stage if operation else None
        if result is not MatchResult.NOW or operation is None or stage is None:
            return
        # If the message has arrived, this answers an earlier probe and is outdated.
        if message.flags & HERE or source not in stage.missing:
            if stage.to_move:
                self._on_backend_report(source, message, operation, stage)
            return
        if self._fusion.is_coming(source, (message.name, message.round)):  # sent before, still arriving
            return
        if self._lifecycle.gate.paused and operation.restarts:  # the operation has restarted there already
            return
        # With agreements the survivors exclude the peer and this operation continues. Without them it fails on both
        # sides.
        if message.flags & DIED and self._failures.leave_behind(source, message.text):
            return
        why = (
            f"whose own call failed there ({message.text})"
            if message.text
            else f"which took part in this round without sending one to rank {self._rank}, or whose own call failed"
        )
        text = f"{operation}: rank {self._rank} expects a tensor from rank {source}, {why}"
        message.token = 0
        if message.shape and message.text.startswith(DeadlineExceeded.__name__):  # other agents did not take part
            self._lifecycle.fail(operation, DeadlineExceeded(text, message.shape))
            return
        # The peer's call may have ended with a result. The refusal makes its next call raise the mismatch there as
        # well.
        self._sender.refuse(source, message, text)
        self._lifecycle.fail(operation, Mismatch(text, (source, self._rank, *message.shape)))

    def _on_backend_report(self, source: int, message: Message, operation: Operation, stage: Stage) -> None:
        """Handle a peer's report on a stage that a backend is to move: it has reached the stage, or has failed."""
        if not message.text:  # it has reached the stage, or needs nothing more of it
            stage.confirmed_by(source)
            self._lifecycle.go_on(operation, stage)
        elif not (message.flags & DIED and self._failures.leave_behind(source, message.text)):
            kind = DeadlineExceeded if message.text.startswith(DeadlineExceeded.__name__) else Mismatch
            cause = f"rank {self._rank} waits for rank {source}, whose own call failed there ({message.text})"
            self._lifecycle.fail(operation, kind(f"{operation}: {cause}", message.shape or (source, self._rank)))
