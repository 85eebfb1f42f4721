"""With ``on_loss="continue"``: keeps results of collective operations for agents that may still lack them.

When a collective operation ends on one agent, another may still miss messages. If these are lost with an agent, it can
get the result only from agents that have it. So each agent keeps a copy of every small result until all participants
have confirmed that they have theirs; one message confirms many results. ``agreement.py`` decides which results are sent
after a loss. Without a loss no agent waits: the cost is a copy of each result, and a message for each ``TELL_AFTER`` of
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from ..errors import NONSENSE
from ..operations.matching import Key, Matcher
from ..operations.membership import Membership
from ..operations.operation import Operation
from ..operations.services import MinimalService, as_tensor, when_complete
from ..transport.shared_regions import ResultPool
from ..transport.wire import Kind, Message, ProtocolError

HAD = "~had"
MOST_BYTES = 1 << 20
"""Of a result that is kept. Above, the messages in advance cost less than the copy."""
_NOTHING = torch.empty(0)
TELL_AFTER = 128
TELL_AFTER_BYTES = 1 << 22
"""So many results, or so many bytes of them, and the others are told that they are here."""


@dataclass(slots=True)
class CachedResult:
    """A result that some agent may lack.

    Attributes:
        result: A copy, on the CPU.
        without: The ranks that have not confirmed that they have it.
    """

    result: torch.Tensor
    without: set[int]


class ResultCache(MinimalService):
    """The results that one agent keeps. Used under the engine's lock.

    Args:
        send: Sends a peer a message outside of any operation; see :func:`~.sender.send_alone`.
        acknowledge: Confirms that a message has been read.

    Attributes:
        results: By name and round.
    """

    def __init__(
        self,
        rank: int,
        matcher: Matcher,
        membership: Membership,
        send: Callable[[int, Message, torch.Tensor], None],
        acknowledge: Callable[[int, Message], None],
    ) -> None:
        self.results: dict[Key, CachedResult] = {}
        self._rank = rank
        self._matcher = matcher
        self._membership = membership
        self._send = send
        self._acknowledge = acknowledge
        self._ahead: dict[Key, set[int]] = {}  # who has a result that is not here yet
        self._untold: list[Key] = []
        self._untold_bytes = 0
        self._hurried = False  # somebody leaves, and waits for being told

    def ended(self, operation: Operation, result: torch.Tensor | None) -> None:
        """A collective operation has ended here, with a result to keep, or None."""
        key = operation.name, operation.round
        ahead = self._ahead.pop(key, ())
        if result is None:
            return
        without = set(self._membership.view.alive)
        without.discard(self._rank)
        without.difference_update(operation.excluded_ranks, ahead)
        if without:
            self.results[key] = CachedResult(result, without)
        self._untold.append(key)
        self._untold_bytes += result.nbytes
        if self._hurried or len(self._untold) >= TELL_AFTER or self._untold_bytes >= TELL_AFTER_BYTES:
            self.tell()

    def tell(self, leaving: bool = False) -> None:
        """Send which results are here. An agent that is ``leaving`` asks the others to confirm theirs at once."""
        if not self._untold and not leaving:
            return
        data = as_tensor(json.dumps({"had": _runs(self._untold), "leaving": leaving}).encode())
        self._untold, self._untold_bytes = [], 0
        for peer in self._membership.view.alive:
            if peer != self._rank:
                self._send(peer, Message(Kind.DATA, HAD, HAD), data)

    def serve(self, source: int, message: Message) -> None:
        """An agent confirms results; see :class:`~.services.Service`."""
        when_complete(message, partial(self._heard, source, message))

    def _heard(self, source: int, message: Message, text: bytes) -> None:
        self._acknowledge(source, message)
        try:
            said = json.loads(text)
            for name, runs in said["had"].items():
                for first, count in runs:
                    self._has(source, name, int(first), int(count))
            leaving = bool(said["leaving"])
        except NONSENSE as error:
            raise ProtocolError(f"what was said of results makes no sense: {error}") from None
        if leaving:
            self._hurried = True
            self.tell()

    def _has(self, source: int, name: str, first: int, count: int) -> None:
        if first < 0 or not 0 < count <= self._matcher.begun(name) - first:
            raise ValueError(f"results of {count} rounds of {name!r} from {first} on")
        for key in ((name, round_) for round_ in range(first, first + count)):
            kept = self.results.get(key)
            if kept is not None:
                self._drop(key, kept, source)
            elif self._matcher.active(*key) is not None:
                self._ahead.setdefault(key, set()).add(source)

    def _drop(self, key: Key, kept: CachedResult, rank: int) -> None:
        """An agent has a result."""
        kept.without.discard(rank)
        if not kept.without:
            del self.results[key]

    def on_gone(self, rank: int, because: int | None) -> None:
        """A lost agent needs no results; see :class:`~.services.Service`."""
        for key, kept in list(self.results.items()):
            self._drop(key, kept, rank)


def _runs(keys: Iterable[Key]) -> dict[str, list[list[int]]]:
    """By name: the first of some rounds that follow each other, and how many."""
    runs: dict[str, list[list[int]]] = {}
    for name, round_ in keys:
        of_name = runs.setdefault(name, [])
        if of_name and sum(of_name[-1]) == round_:
            of_name[-1][1] += 1
        else:
            of_name.append([round_, 1])
    return runs


def copy_for_cache(result: object, pool: ResultPool) -> torch.Tensor | None:
    """A copy of a result, in a pool's memory, or of an empty one; None if it is too large to keep."""
    if not isinstance(result, torch.Tensor):
        return _NOTHING
    if result.nbytes > MOST_BYTES:
        return None
    return pool.empty(tuple(result.shape), result.dtype).copy_(result.detach())
