"""Recorded histories of windows, and the check whether the agents' results could have happened one step at a time.

Threads of agents record when they called each operation, when it returned, and the value that it read. The history
of each slot is then searched for an order that keeps to these times and to the sequential model of a slot (Wing and
Gong 1993, "Testing and verifying concurrent objects", with the memory of Lowe 2017, "Testing for linearizability").
If no order exists, the error names the operation without a place.

The sequential model of the slot that agent i has for its in-neighbour j is :class:`Slot`, and each :class:`Effect` says
the effect of one step on it. A get is two steps in one interval, as the tensor that it copies is another object than
the slot that it fills; an update over several slots is one read for each slot, all in one interval.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch

import shoal

T = TypeVar("T")
Edge = tuple[int, int]
"""(source, owner): the slot that the owner has for the source."""
NEVER = float("inf")


@dataclass(frozen=True)
class Slot:
    """One slot between two steps.

    Attributes:
        value: of every element; an empty slot counts as zeros. Ints stay ints, so that int64 is exact too.
        p: the associated weight.
        puts, gets, accumulates: how many there have been.
        registered: the tensor of the source, which a get copies.
        fetched: what gets have read from it and not stored yet, by the number of the get.
    """

    value: float = 0
    p: float = 0.0
    puts: int = 0
    gets: int = 0
    accumulates: int = 0
    registered: float = 0
    fetched: frozenset[tuple[int, float]] = frozenset()


class Effect(Protocol):
    """One step."""

    def after(self, slot: Slot) -> Slot | None:
        """The slot after the step; None if the step cannot have read what it read from this slot."""
        ...


@dataclass(frozen=True)
class Put:
    """The source writes a value; ``p=None`` leaves the associated weight."""

    value: float
    p: float | None = None

    def after(self, slot: Slot) -> Slot:
        return replace(slot, value=self.value, p=slot.p if self.p is None else self.p, puts=slot.puts + 1)


@dataclass(frozen=True)
class Accumulate:
    """The source adds a value."""

    value: float
    p: float = 0.0

    def after(self, slot: Slot) -> Slot:
        return replace(slot, value=slot.value + self.value, p=slot.p + self.p, accumulates=slot.accumulates + 1)


@dataclass(frozen=True)
class Register:
    """The source changes its registered tensor."""

    value: float

    def after(self, slot: Slot) -> Slot:
        return replace(slot, registered=self.value)


@dataclass(frozen=True)
class Fetch:
    """The first half of a get: the owner reads the source's registered tensor."""

    get: int

    def after(self, slot: Slot) -> Slot:
        return replace(slot, fetched=slot.fetched | {(self.get, slot.registered)})


@dataclass(frozen=True)
class Store:
    """The second half: the owner writes what it has fetched into the slot. Associated weights are not moved."""

    get: int

    def after(self, slot: Slot) -> Slot | None:
        for number, value in slot.fetched:
            if number == self.get:
                return replace(slot, value=value, gets=slot.gets + 1, fetched=slot.fetched - {(number, value)})
        return None


@dataclass(frozen=True)
class Read:
    """The owner reads a value in an update."""

    value: float

    def after(self, slot: Slot) -> Slot | None:
        return slot if slot.value == self.value else None


@dataclass(frozen=True)
class Collect:
    """The owner reads a value and empties the slot; None for a value that nobody has seen, as the call failed."""

    value: float | None

    def after(self, slot: Slot) -> Slot | None:
        return replace(slot, value=0, p=0.0) if self.value in (None, slot.value) else None


@dataclass(frozen=True)
class Look:
    """The owner reads the counts and the associated weight."""

    puts: int
    gets: int
    accumulates: int
    p: float

    def after(self, slot: Slot) -> Slot | None:
        seen = self.puts, self.gets, self.accumulates, self.p
        return slot if (slot.puts, slot.gets, slot.accumulates, slot.p) == seen else None


@dataclass(frozen=True)
class Record:
    """One step of a history.

    Attributes:
        who: the agent and its thread, as errors show them.
        called, returned: in ``time.monotonic_ns()``, one clock for all processes of a machine. ``NEVER`` if the call
            ended in an error or at its deadline: then it has taken effect at any later time, or not at all.
    """

    effect: Effect
    who: str
    called: float
    returned: float


class NotLinearizable(AssertionError):
    """There is no order. ``record`` is the first operation, by its return, up to which there is none."""

    def __init__(self, record: Record, slots: Iterable[Slot]) -> None:
        seen = "\n".join(f"  {slot}" for slot in list(slots)[:5])
        super().__init__(
            f"{record.effect} of {record.who}, from {record.called} to {record.returned}, has no place in the history. "
            f"When all that had returned before had taken place, the slot was\n{seen}"
        )
        self.record = record


State = tuple[int, Slot]
"""The steps that are placed, as bits, and the slot after them."""


def find_order(history: Iterable[Record], start: Slot | None = None) -> list[Record]:
    """An order of the steps in which each took effect between its call and its return.

    Each step that is unknown may double the search: histories should have few of them, up to ten.

    Raises:
        NoPlace: There is none.
    """
    records = sorted(history, key=lambda one: one.called)
    first: State = (0, start or Slot())
    came_from: dict[State, tuple[State, int] | None] = {first: None}
    pending = [first]
    furthest, slots = -1.0, set[Slot]()
    culprit = None
    while pending:
        state = placed, slot = pending.pop()
        possible, next_to_return = _possible(records, placed)
        if next_to_return is None:
            return _path(records, came_from, state)
        if next_to_return.returned > furthest:
            furthest, culprit, slots = next_to_return.returned, next_to_return, set()
        if next_to_return is culprit:
            slots.add(slot)
        for index in possible:
            after = records[index].effect.after(slot)
            if after is None:
                continue
            result = placed | 1 << index, after
            if result not in came_from:
                came_from[result] = state, index
                pending.append(result)
    assert culprit is not None
    raise NotLinearizable(culprit, slots)


def _possible(records: list[Record], placed: int) -> tuple[list[int], Record | None]:
    """The possible next steps, the likeliest last, and the unplaced step that returned first."""
    possible: list[int] = []
    first: Record | None = None
    lowest = (~placed & placed + 1).bit_length() - 1
    for index in range(lowest, len(records)):
        if placed >> index & 1:
            continue
        record = records[index]
        if first is not None and record.called > first.returned:
            break
        possible.append(index)
        if record.returned != NEVER and (first is None or record.returned < first.returned):
            first = record
    return sorted(possible, key=lambda index: -records[index].returned), first


def _path(records: list[Record], came_from: dict[State, tuple[State, int] | None], state: State) -> list[Record]:
    order = []
    step = came_from[state]
    while step is not None:
        state, index = step
        order.append(records[index])
        step = came_from[state]
    return order[::-1]


# Recording


@dataclass
class Recorder:
    """What one thread of an agent did to which slots. Each thread has its own."""

    who: str
    histories: dict[Edge, list[Record]] = field(default_factory=lambda: defaultdict(list))

    def run(self, call: Callable[[], T], effects: Callable[[T | None], Iterable[tuple[Edge, Effect]]]) -> T | None:
        """Call something and record its steps.

        Args:
            effects: The steps, given what the call returned, or None where it ended in a deadline or a lost peer.
        """
        called = time.monotonic_ns()
        result: T | None
        try:
            result, returned = call(), float(time.monotonic_ns())
        except (shoal.DeadlineExceeded, shoal.PeerLost):
            result, returned = None, NEVER
        for edge, effect in effects(result):
            self.histories[edge].append(Record(effect, self.who, called, returned))
        return result


def merged(parts: Iterable[dict[Edge, list[Record]]]) -> dict[Edge, list[Record]]:
    """The histories of several threads or agents as one for each slot."""
    result: dict[Edge, list[Record]] = defaultdict(list)
    for part in parts:
        for edge, records in part.items():
            result[edge] += records
    return result


def check_all(histories: dict[Edge, list[Record]], starts: dict[Edge, Slot] | None = None) -> int:
    """Find an order for each slot; the number of steps in all of them.

    Raises:
        NoPlace: One has none; a note says which.
    """
    for edge, records in histories.items():
        try:
            find_order(records, (starts or {}).get(edge))
        except NotLinearizable as error:
            raise AssertionError(f"the slot that agent {edge[1]} has for agent {edge[0]}: {error}") from error
    return sum(map(len, histories.values()))


def common_value(tensor: torch.Tensor) -> float:
    """What all elements are (an int in a tensor of ints); not a number if they differ, which no step has written."""
    low, high = tensor.min().item(), tensor.max().item()
    return low if low == high else float("nan")
