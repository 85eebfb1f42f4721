"""The response cache: a repeated call costs one bit instead of a request.

After Horovod (Romero et al., NSDI 2022, section 3.1.1): every agent has the same entries at the same indices, because
all change them in the same way by the same decisions. Unlike in Horovod this is checked: a digest of the cache travels
with the bits, so different caches are an error and never a wrong sum. Each entry has a round, so a skipped call is
detected. Calls that involve only some agents are cached as well.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .request import CallSignature, Ranks, RequestKey, TransferRequest


@dataclass(slots=True)
class _CachedCalls:
    """What is known of calls of one key.

    Attributes:
        place: Of its bit.
        round: The last that was decided on.
        entries: The places of the calls that it is known in.
    """

    place: int
    round: int
    entries: set[int] = field(default_factory=set)


class ResponseCache:
    """Of one agent; the same on all that are in ``group``, but for whose it is.

    Args:
        rank: Whose.
        capacity: Entries; the one that was not used for longest makes room. 0: nothing is remembered.
    """

    def __init__(self, rank: int, capacity: int) -> None:
        self._rank = rank
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forget everything, as where others are there than before."""
        self._entries: list[CallSignature | None] = []  # by place
        self._places: OrderedDict[CallSignature, int] = OrderedDict()  # the one that was used last comes last
        self._keys: list[RequestKey | None] = []
        self._calls: dict[RequestKey, _CachedCalls] = {}
        self._foreign = [0, 0]  # the bits of entries, and of keys, that are no business of this agent's
        self.digest = b"\0" * 8
        """Of all that was ever changed here since it was empty."""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def width(self) -> int:
        """Bits of entries; those of keys follow them."""
        return len(self._entries)

    @property
    def bits(self) -> int:
        """How many bits there are in all."""
        return len(self._entries) + len(self._keys)

    def knows(self, request: TransferRequest) -> bool:
        """The call is known, and this is its next round."""
        calls = self._calls.get(request.key)
        return calls is not None and request.round == calls.round + 1 and request.entry in self._places

    def vector(self, pending: Iterable[TransferRequest]) -> int:
        """This agent's bits: what it asks for and is known, and all in which it has no part.

        Args:
            pending: The next request of each key.
        """
        entries, keys = self._foreign
        for request in pending:
            calls = self._calls.get(request.key)
            if calls is None:
                continue
            keys |= 1 << calls.place
            if self.knows(request):
                entries |= 1 << self._places[request.entry]
        return keys << self.width | entries

    def ready(self, common: int) -> list[CallSignature]:
        """The calls for which all agents have asked, by the bits that all have set, in one order for all."""
        found, taken = [], dict[tuple[str, int], set[Ranks]]()
        for place in _places(common & (1 << self.width) - 1):
            entry = self._entries[place]
            assert entry is not None
            others = taken.setdefault(entry.key[:2], set())
            if not any(_intersect(entry.key.members, members) for members in others):  # one call is not two
                others.add(entry.key.members)
                found.append(entry)
        return found

    def in_conflict(self, common: int, ready: Iterable[CallSignature]) -> bool:
        """Of some call all members have come, and do not agree; by the bits that all have set."""
        agreed = {entry.key for entry in ready}
        return any(self._keys[place] not in agreed for place in _places(common >> self.width))

    def used(self, entries: Sequence[CallSignature]) -> list[int]:
        """These are decided on once more: the round of each."""
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
        """Remember what was decided on."""
        if not self._capacity:
            return
        entry, key = request.entry, request.key
        if entry not in self._places:
            if len(self._places) >= self._capacity:
                self._forget(next(iter(self._places)))
            self._places[entry] = place = _free(self._entries)
            self._entries[place] = entry
            if key not in self._calls:
                self._calls[key] = _CachedCalls(_free(self._keys), request.round)
                self._keys[self._calls[key].place] = key
            self._calls[key].entries.add(place)
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
    """The first place at which there is nothing."""
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
