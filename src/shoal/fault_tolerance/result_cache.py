"""With ``on_loss="continue"``: keeps results of collective operations for agents that may not have them yet.

When a collective operation ends on one agent, another may still miss messages. If these messages are lost with an
agent, only agents with the result can provide it. So each agent keeps a copy of every small result until all
participants have confirmed their results; one message confirms many results. ``agreement.py`` decides which results are
sent after a loss. Without a loss no agent waits: the cost is a copy of each result, and a message for each
``TELL_AFTER`` of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..operations.control_messages import read_json
from ..operations.lifecycle import Lifecycle
from ..operations.matching import Key
from ..operations.operation import Operation
from ..operations.services import Service
from ..operations.shared_parts import SharedParts
from ..transport.link import Published
from ..transport.shared_regions import ResultPool
from ..transport.wire import Kind, Message, ProtocolError, inline_payload
from .recovery import take_result

HAD = "~had"
RESULT = "~result"
MOST_BYTES = 1 << 20
"""Bytes of a cached result at most. For larger results, messages of confirmation cost less than the copy."""
_NOTHING = torch.empty(0)
TELL_AFTER = 128
TELL_AFTER_BYTES = 1 << 22
"""Results, and bytes of results, after which this agent confirms its results to all others."""


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
        """Take an agent's confirmation of results; see :class:`~.services.Service`."""
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
        if first < 0 or not 0 < count <= self._matcher.begun(name) - first:
            raise ValueError(f"results of {count} rounds of {name!r} from {first} on")
        for key in ((name, round_) for round_ in range(first, first + count)):
            kept = self.results.get(key)
            if kept is not None:
                self._drop(key, kept, source)
            # Not for a round that has ended here: nothing would remove the entry.
            elif self._matcher.active(*key) is not None:
                self._ahead.setdefault(key, set()).add(source)

    def _drop(self, key: Key, kept: CachedResult, rank: int) -> None:
        """Record that an agent has a result, and drop the result when all have it."""
        kept.without.discard(rank)
        if not kept.without:
            del self.results[key]

    def on_departure(self, rank: int, because: int | None) -> None:
        """Keep no results for a lost agent; see :class:`~.services.Service`."""
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
        """Take a result that another agent sends; see :class:`~.services.Service`."""
        if len(message.body) != message.nbytes:
            raise ProtocolError("a result that is not the body of its message")
        result = inline_payload(message.dtype, bytearray(message.body)).data.view(message.shape)
        operation = self._matcher.active(message.name.removeprefix(f"{RESULT} "), message.round)
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
