"""The response cache: a repeated call costs one bit instead of a request.

After Horovod (Romero et al., NSDI 2022, section 3.1.1): every agent has the same entries at the same indices, because
all change them in the same way by the same decisions. Unlike in Horovod this is checked: a digest of the cache is sent
with the bits, so different caches are an error and never a wrong sum. Each entry has a round, so a skipped call is
detected. Calls that involve only some agents are cached as well.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..execution.membership import Ranks
from .request import CallSignature, RequestKey, TransferRequest


@dataclass(slots=True)
class _CachedCalls:
    """The cached data of calls of one key.

    Attributes:
        place: The index of its bit.
        round: The last decided round.
        entries: The indices of its cached calls.
    """

    place: int
    round: int
    entries: set[int] = field(default_factory=set)


class ResponseCache:
    """The cache of one agent; equal on all members of the round, except for ``rank``.

    Args:
        rank: The agent that owns it.
        capacity: The number of entries; the least recently used one is evicted. 0: no caching.
    """

    def __init__(self, rank: int, capacity: int) -> None:
        self._rank = rank
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Remove all entries, as when the membership has changed."""
        self._entries: list[CallSignature | None] = []  # by place
        self._places: OrderedDict[CallSignature, int] = OrderedDict()  # in the order of last use
        self._keys: list[RequestKey | None] = []
        self._calls: dict[RequestKey, _CachedCalls] = {}
        self._foreign = [0, 0]  # the bits of entries, and of keys, in which this agent has no part
        self.digest = b"\0" * 8
        """Of all changes since the cache was empty."""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def width(self) -> int:
        """Bits of entries; those of keys follow them."""
        return len(self._entries)

    @property
    def bits(self) -> int:
        """The number of all bits."""
        return len(self._entries) + len(self._keys)

    def knows(self, request: TransferRequest) -> bool:
        """The call is cached, and this is its next round."""
        calls = self._calls.get(request.key)
        # A bit stands for the next round only. After a skipped call, this agent has no request for the round that runs.
        return calls is not None and request.round == calls.round + 1 and request.entry in self._places

    def vector(self, pending: Iterable[TransferRequest]) -> int:
        """This agent's bits: its requests that are cached, and all calls in which it has no part.

        Args:
            pending: The next request of each key.
        """
        # An agent without a part in a call sets the bits of it: otherwise the AND of all agents would never let it run.
        entries, keys = self._foreign
        for request in pending:
            calls = self._calls.get(request.key)
            if calls is None:
                continue
            # Set for any call of a known key: if all members set it and have no entry in common, their calls differ.
            # Without this bit no negotiation would report that, and they would wait for each other.
            keys |= 1 << calls.place
            if self.knows(request):
                entries |= 1 << self._places[request.entry]
        return keys << self.width | entries

    def ready(self, common: int) -> list[CallSignature]:
        """The calls that all agents have requested, from the bits that all have set, in one order for all."""
        found, taken = [], dict[tuple[str, int], set[Ranks]]()
        for place in _places(common & (1 << self.width) - 1):
            entry = self._entries[place]
            assert entry is not None
            others = taken.setdefault(entry.key[:2], set())
            if not any(_intersect(entry.key.members, members) for members in others):  # a call runs only once
                others.add(entry.key.members)
                found.append(entry)
        return found

    def in_conflict(self, common: int, ready: Iterable[CallSignature]) -> bool:
        """Whether all members of some call have requested it but differ; from the bits that all have set."""
        agreed = {entry.key for entry in ready}
        return any(self._keys[place] not in agreed for place in _places(common >> self.width))

    def used(self, entries: Sequence[CallSignature]) -> list[int]:
        """These calls were decided again: returns the round of each."""
        rounds = []
        for entry in entries:
            self._places.move_to_end(entry)
            calls = self._calls[entry.key]
            calls.round += 1
            rounds.append(calls.round)
        if entries:
            self._note([self._places[entry] for entry in entries])
        return rounds

    def put(self, request: TransferRequest) -> None:
        """Cache a decided request."""
        if not self._capacity:
            return
        entry, key = request.entry, request.key
        if entry not in self._places:
            # All agents have used the entries in the same order, so all evict the same one and fill the same place.
            if len(self._places) >= self._capacity:
                self._forget(next(iter(self._places)))
            self._places[entry] = place = _free(self._entries)
            self._entries[place] = entry
            if key not in self._calls:
                self._calls[key] = _CachedCalls(_free(self._keys), request.round)
                self._keys[self._calls[key].place] = key
            self._calls[key].entries.add(place)
            # Here and not in `vector`, which every round calls: it costs a pass over all entries.
            self._foreign = self._of_others()
        self._places.move_to_end(entry)
        self._calls[key].round = request.round
        self._note([entry, request.round])

    def _forget(self, entry: CallSignature) -> None:
        place = self._places.pop(entry)
        self._entries[place] = None
        calls = self._calls[entry.key]
        calls.entries.discard(place)
        if not calls.entries:
            self._keys[calls.place] = None
            del self._calls[entry.key]

    def _of_others(self) -> list[int]:
        found = [0, 0]
        for entry, place in self._places.items():
            if entry.key.members and self._rank not in entry.key.members:
                found[0] |= 1 << place
                found[1] |= 1 << self._calls[entry.key].place
        return found

    def _note(self, change: object) -> None:
        self.digest = hashlib.blake2b(self.digest + repr(change).encode(), digest_size=8).digest()


def _free(places: list[CallSignature | None] | list[RequestKey | None]) -> int:
    """The first free index."""
    try:
        return places.index(None)
    except ValueError:
        places.append(None)
        return len(places) - 1


def _places(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _intersect(some: Ranks, others: Ranks) -> bool:
    return not some or not others or not set(some).isdisjoint(others)
