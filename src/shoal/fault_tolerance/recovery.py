"""Recovery of operations in flight after the survivors have agreed on a loss, and the cached results that it sends.

An operation completes without the messages of lost agents, restarts, or takes its result from an agent that has it.
The driving thread calls these functions. No generator runs then, except one whose first step still runs in another
thread; its operation has no stage yet.

**The result cache** (:class:`ResultCache`). When a collective operation ends on one agent, another may still miss
messages. If these messages are lost with an agent, only agents with the result can provide it. So each agent keeps a
copy of every small result until all participants have confirmed their results; one message confirms many results.
``agreement.py`` decides which results are sent after a loss. Without a loss no agent waits: the cost is a copy of each
result, and a message for each ``TELL_AFTER`` of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import ProtocolError
from ..execution.control_messages import Service, read_json
from ..execution.lifecycle import Lifecycle
from ..execution.matching import LAST_STAGE, Key
from ..execution.membership import Plan
from ..execution.operation import Operation
from ..execution.shared_parts import SharedParts
from ..transport.link import Published
from ..transport.messages import Kind, Message, inline_payload
from ..transport.shared_regions import ResultPool

HAD = "~had"
RESULT = "~result"
MOST_BYTES = 1 << 20
"""Bytes of a cached result at most. For larger results, messages of confirmation cost less than the copy."""
_NOTHING = torch.empty(0, device="cpu")
TELL_AFTER = 128
TELL_AFTER_BYTES = 1 << 22
"""Results, and bytes of results, after which this agent confirms its results to all others."""


def move_by_links(lifecycle: Lifecycle) -> None:
    """Redirect to links the tensors that a backend was to move, after the loss of an agent."""
    for operation in lifecycle.backend_stages.redirect_to_links():
        _make_ready_once(lifecycle, operation)


def complete_without(lifecycle: Lifecycle, operation: Operation, gone: tuple[int, ...]) -> None:
    """Complete a round between neighbours without the missing or incomplete messages of lost agents."""
    stage, recovery = operation.stage, operation.recovery
    if recovery is None:
        return
    # Also for a message that is sent later, and a stage that begins later: by then agents may have been admitted in
    # their place.
    recovery.lost |= frozenset(gone)
    if stage is None or operation.error is not None:
        return
    # A stage that was complete before has been queued before. A second entry would resume the operation at its next
    # stage, before that one is complete.
    was_complete = stage.complete
    stage.missing.difference_update(gone)
    # The link to a lost agent could not be opened, so the stage was not posted. Without this its other receivers would
    # wait for this agent until their deadline.
    if not stage.posted and not operation.channel.defers(operation):
        operation.channel.defer(operation, stage)
        lifecycle.send_deferred(operation.channel)
    # The rest of these messages will never arrive: the operation would wait for it without end.
    torn = [
        source
        for source, message in stage.arrived.items()
        if source in gone and message.payload is not None and not message.payload.complete
    ]
    for source in torn:
        del stage.arrived[source]
    if torn and operation.generator is not None:  # it may have begun to sum: restart without them
        recovery.again, operation.waiting_more = True, False
    if stage.complete and (torn or not was_complete):
        _make_ready_once(lifecycle, operation)


def conclude(lifecycle: Lifecycle, operation: Operation) -> None:
    """End a collective operation whose result all survivors have, without further confirmations."""
    recovery = operation.recovery
    assert recovery is not None and recovery.result is not None
    result = recovery.result
    lifecycle.leave_stage(operation)
    operation.drop_generator()
    lifecycle.begin_attempt(operation, LAST_STAGE)  # confirmations that other agents have the result
    # Receivers may still read this agent's memory: the last confirmation ends the operation.
    if operation.unconfirmed:
        operation.outcome = result
    else:
        lifecycle.settle(operation, result[0], None)


def await_result(lifecycle: Lifecycle, operation: Operation) -> None:
    """Let a collective operation wait for its result, which a survivor has and sends."""
    _stop(lifecycle, operation)
    lifecycle.begin_attempt(operation, LAST_STAGE)


def take_result(lifecycle: Lifecycle, operation: Operation, result: torch.Tensor) -> None:
    """End a collective operation with the result that another agent has sent."""
    recovery = operation.recovery
    if recovery is None or recovery.take is None:
        return
    await_result(lifecycle, operation)
    # For this agent's own cache: the sender may be lost before it has sent the result to all.
    recovery.copy = result
    try:
        taken = recovery.take(result)
    except Exception as error:
        lifecycle.fail(operation, error)
    else:
        lifecycle.settle(operation, taken, None)


def restart(lifecycle: Lifecycle, operation: Operation, plan: Plan) -> None:
    """Restart a collective operation among the survivors."""
    recovery = operation.recovery
    assert recovery is not None
    _stop(lifecycle, operation)
    # A result that stays would be reported as one of the new attempt, and agents would end with results of different
    # members. The plan comes before `first_stage`, which follows from it: messages of the old attempt must not match.
    recovery.plan, recovery.result, recovery.copy, recovery.again = plan, None, None, True
    lifecycle.begin_attempt(operation, recovery.first_stage)
    _make_ready_once(lifecycle, operation)


def _stop(lifecycle: Lifecycle, operation: Operation) -> None:
    """End the current attempt of an operation."""
    lifecycle.leave_stage(operation)
    operation.drop_generator()
    # Otherwise the next bytes of an old message would queue the operation.
    operation.waiting_more = False
    operation.unconfirmed, operation.outcome = {}, None  # of receivers in this attempt


def _make_ready_once(lifecycle: Lifecycle, operation: Operation) -> None:
    """Queue an operation, unless it is queued for the driving thread already, for an outdated reason."""
    # A second entry would resume the operation at its next stage, before that stage is complete.
    if operation not in lifecycle.ready:
        lifecycle.make_ready(operation)


@dataclass(slots=True)
class CachedResult:
    """A result that some agents may not have.

    Attributes:
        result: A copy, on the CPU.
        without: The ranks that have not confirmed the result.
    """

    result: torch.Tensor
    without: set[int]


class ResultCache(Service):
    """The result cache of one agent. Used under the engine's lock.

    Attributes:
        results: The cached results, by name and round.
    """

    def __init__(self, parts: SharedParts) -> None:
        self.results: dict[Key, CachedResult] = {}
        self._rank = parts.rank
        self._matcher = parts.matcher
        self._membership = parts.membership
        self._sender = parts.sender
        self._ahead: dict[Key, set[int]] = {}  # agents that have a result that is not here yet
        self._unconfirmed: list[Key] = []
        self._unconfirmed_bytes = 0
        self._hurried = False  # an agent shuts down and waits for confirmations

    def ended(self, operation: Operation, result: torch.Tensor | None) -> None:
        """Cache the result of a collective operation that has ended here; ``None`` is not cached."""
        key = operation.name, operation.round
        # Agents confirm once, some before the operation ends here. Without this record, the cache would keep the result
        # for them without end. A failed round drops the record, too.
        ahead = self._ahead.pop(key, ())
        if result is None:
            return
        without = set(self._membership.view.alive)
        without.discard(self._rank)
        # Excluded ranks take no part in the operation, and will never confirm it.
        without.difference_update(operation.excluded_ranks, ahead)
        if without:
            self.results[key] = CachedResult(result, without)
        # Also if no agent needs this copy: the others keep theirs until this agent has confirmed.
        self._unconfirmed.append(key)
        self._unconfirmed_bytes += result.nbytes
        if self._hurried or len(self._unconfirmed) >= TELL_AFTER or self._unconfirmed_bytes >= TELL_AFTER_BYTES:
            self.confirm()

    def confirm(self, leaving: bool = False) -> None:
        """Confirm the results of this agent. If it is ``leaving``, the other agents confirm theirs at once."""
        if not self._unconfirmed and not leaving:
            return
        confirmation = {"had": _runs(self._unconfirmed), "leaving": leaving}
        self._unconfirmed, self._unconfirmed_bytes = [], 0
        self._sender.send_control(self._membership.view.others(self._rank), HAD, confirmation)

    def serve(self, source: int, message: Message) -> None:
        """Take an agent's confirmation of results; see :class:`~.control_messages.Service`."""
        if read_json(message, "results", partial(self._take, source)):
            # Results of later operations as well: the leaving agent waits for their confirmation.
            self._hurried = True
            self.confirm()

    def _take(self, source: int, content: Any) -> bool:
        """Returns whether the sender is leaving."""
        for name, runs in content["had"].items():
            for first, count in runs:
                self._has(source, name, int(first), int(count))
        return bool(content["leaving"])

    def _has(self, source: int, name: str, first: int, count: int) -> None:
        # No agent ends such an operation before all have begun it, so a larger range is malformed. Unchecked, it could
        # keep this agent in the loop below.
        if first < 0 or not 0 < count <= self._matcher.rounds_begun(name) - first:
            raise ValueError(f"results of {count} rounds of {name!r} from {first} on")
        for key in ((name, round_) for round_ in range(first, first + count)):
            kept = self.results.get(key)
            if kept is not None:
                self._drop(key, kept, source)
            # Not for a round that has ended here: nothing would remove the entry.
            elif self._matcher.active_operation(*key) is not None:
                self._ahead.setdefault(key, set()).add(source)

    def _drop(self, key: Key, kept: CachedResult, rank: int) -> None:
        """Record that an agent has a result, and drop the result when all have it."""
        kept.without.discard(rank)
        if not kept.without:
            del self.results[key]

    def on_departure(self, rank: int, because: int | None) -> None:
        """Keep no results for a lost agent; see :class:`~.control_messages.Service`."""
        for key, kept in list(self.results.items()):
            self._drop(key, kept, rank)


class ResultTransfer(Service):
    """Sends cached results after a loss, and takes those of other agents. Used under the engine's lock.

    Attributes:
        cache: The results that this agent has cached.
    """

    def __init__(self, parts: SharedParts, lifecycle: Lifecycle, cache: ResultCache) -> None:
        self.cache = cache
        self._matcher = parts.matcher
        self._membership = parts.membership
        self._lifecycle = lifecycle
        self._sender = parts.sender

    def send(self, rank: int, name: str, round_: int) -> None:
        """Send an agent a cached result."""
        result = self.cache.results[name, round_].result
        message = Message(
            Kind.CONTROL, RESULT, f"{RESULT} {name}", round_, dtype=result.dtype, shape=tuple(result.shape)
        )
        self._sender.send_bytes([rank], message, Published(result.view(-1)).copy(0, result.numel()))

    def serve(self, source: int, message: Message) -> None:
        """Take a result that another agent sends; see :class:`~.control_messages.Service`."""
        if len(message.body) != message.nbytes:
            raise ProtocolError("a result that is not the body of its message")
        result = inline_payload(message.dtype, bytearray(message.body)).data.view(message.shape)
        operation = self._matcher.active_operation(message.name.removeprefix(f"{RESULT} "), message.round)
        # Not from an agent that was lost since: the survivors decide without its report, and may restart the operation.
        if operation is not None and operation.restarts and source in self._membership.view.alive:
            take_result(self._lifecycle, operation, result)


def _runs(keys: Iterable[Key]) -> dict[str, list[list[int]]]:
    """Runs of consecutive rounds by name: for each run, its first round and its length."""
    runs: dict[str, list[list[int]]] = {}
    for name, round_ in keys:
        of_name = runs.setdefault(name, [])
        if of_name and sum(of_name[-1]) == round_:
            of_name[-1][1] += 1
        else:
            of_name.append([round_, 1])
    return runs


def copy_for_cache(result: object, pool: ResultPool) -> torch.Tensor | None:
    """A copy of a result in a pool's memory; an empty tensor if it is no tensor; None if it is too large to keep."""
    if not isinstance(result, torch.Tensor):
        return _NOTHING
    if result.nbytes > MOST_BYTES:
        return None
    return pool.empty(tuple(result.shape), result.dtype).copy_(result.detach())
