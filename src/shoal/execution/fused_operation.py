"""A fused operation: its members, the name that encodes them, and what neighbours have sent in other groupings.

The calls of one encoded name are its successive rounds.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from ..transport.messages import COMMON, MAX_DIMENSIONS, MAX_NAME, Kind, Message, Parts, Payload, Where
from .matching import Channel
from .operation import FusionSpec, Operation
from .stage import Yields

PREFIX = "~fused "
MOST_OPERATIONS = 256


class FusedRounds(NamedTuple):
    """Operations of one name in successive rounds, with tensors of one shape."""

    name: str
    first: int
    length: int
    shape: tuple[int, ...]


def encode_fused_name(runs: list[FusedRounds]) -> str:
    """The name of a fused operation with these members."""
    return PREFIX + json.dumps(runs, separators=(",", ":"))


@lru_cache(32)  # the name of a kept or unpacked message is decoded several times
def decode_fused_name(name: str) -> tuple[FusedRounds, ...]:
    """The members of a fused operation, decoded from its name; empty if the name is malformed."""
    try:
        parts = json.loads(name[len(PREFIX) :])
        runs = tuple(FusedRounds(member, first, length, tuple(shape)) for member, first, length, shape in parts)
    except (ValueError, TypeError, RecursionError):
        return ()
    # Check the types first: a malformed size from a peer could make the product or a loop take all memory or time.
    return runs if all(map(_is_sound, runs)) and sum(run.length for run in runs) <= MOST_OPERATIONS else ()


def runs_of(message: Message) -> Sequence[FusedRounds]:
    """The members of a fused message; empty if its name is malformed or does not match its tensor."""
    runs, payload = decode_fused_name(message.name), message.payload
    total = sum(run.length * math.prod(run.shape) for run in runs)
    adds_up = payload is not None and (message.flags & COMMON or total == payload.data.numel())
    return runs if adds_up else ()


def _is_sound(run: FusedRounds) -> bool:
    return (
        isinstance(run.name, str)
        and type(run.first) is int
        and type(run.length) is int
        and 0 <= run.first < 1 << 63
        and 0 < run.length <= MOST_OPERATIONS
        and len(run.shape) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in run.shape)
    )


def keys(runs: Sequence[FusedRounds]) -> Iterator[tuple[str, int]]:
    """The name and the round of each member."""
    return ((run.name, round_) for run in runs for round_ in range(run.first, run.first + run.length))


MOST_BYTES = 1 << 20
"""Bytes of a fused operation at most: for more bytes, their transfer costs more than the bookkeeping."""
_LOOKED_THROUGH = 4 * MOST_OPERATIONS


class FusedOwner(Protocol):
    """The interface by which the lifecycle proceeds and fails a fused operation."""

    def proceed(
        self, fused: FusedOperation, item: Yields | None, result: Any, error: BaseException | None, /
    ) -> None: ...

    def fail(self, fused: FusedOperation, error: BaseException, /) -> None: ...


@dataclass(slots=True)
class Partial:
    """Tensors that one source has sent for a stage of a fused operation, grouped differently or not fused."""

    data: torch.Tensor
    like: Message
    here: set[Operation] = field(default_factory=set)

    @property
    def common(self) -> bool:
        """Whether one payload stands for all members, as in a message of coordination."""
        return bool(self.like.flags & COMMON)


class UnpackedMessage(NamedTuple):
    """A fused message of a neighbour, and its source."""

    source: int
    message: Message


class FusedOperation(Operation):
    """Several operations as one. The matcher knows its members, which replace it if it fails.

    Attributes:
        had: Messages of earlier stages, kept because its members begin again after a split.
        stages_sent: The stages that have been sent; the members do not send them again.
        places: The start and the end of each member's tensor, in elements of the joined tensor.
    """

    __slots__ = ("had", "members", "partial", "places")

    def __init__(self, name: str, members: list[Operation], owner: FusedOwner) -> None:
        super().__init__(members[0].op, name, 0, members[0].timeout)
        self.members = members
        self.owner = owner
        # Not a member's channel, which counts unread messages by round: this message, of round 0, would hold up later
        # rounds. Fusion itself limits the unread ones.
        self.channel = Channel(name)
        self.had: list[UnpackedMessage] = []
        self.partial: dict[int, Partial] = {}
        self.places: dict[Operation, tuple[int, int]] = {}
        at = 0
        for member in members:
            self.places[member] = (at, at := at + fusible(member).flat.numel())

    @property
    def nbytes(self) -> int:
        """Bytes of the joined tensors."""
        return self.places[self.members[-1]][1] * fusible(self.members[0]).flat.element_size()

    @property
    def parts(self) -> Sequence[Operation]:
        return self.members

    def expect_confirmation(self, token: int, destination: int) -> None:
        # Each member waits by itself, because a receiver that unpacks the message confirms its parts one by one.
        for member in self.members:
            member.expect_confirmation(token, destination)

    def confirmed(self, token: int) -> None:
        # A receiver that has acknowledged the whole message has taken the tensors of all members.
        for member in self.members:
            member.confirmed(token)


def fusible(operation: Operation) -> FusionSpec:
    """The fusion spec of an operation that may be fused."""
    assert operation.fusible is not None
    return operation.fusible


def _can_fuse(first: Operation, other: Operation) -> bool:
    """Whether two operations may be fused, also if agents were lost or admitted between their submissions."""
    planned_alike = not any(operation.excluded_ranks or operation.lost_ranks for operation in (first, other))
    return planned_alike and first.op == other.op and fusible(first).can_fuse_with(fusible(other))


def take_fusible(unbegun: deque[Operation], members: list[Operation]) -> str:
    """Move the first operation from the queue into ``members``, with all operations that may be fused with it.

    Returns the name of the fused operation. ``members`` is empty if all operations have failed. It is sorted by name
    and round: agents that submit the same operations in another order form the same fused operation. After an error it
    has all operations that were taken out.
    """
    passed: list[Operation] = []
    nbytes = length = 0
    try:
        # The number of passed operations is bounded, because each fused operation searches the queue from its start
        # again. In a long queue of many families the search would take quadratic time.
        while unbegun and len(members) < MOST_OPERATIONS and len(passed) < _LOOKED_THROUGH:
            operation = unbegun[0]
            if operation.handle is None:  # it has failed since
                unbegun.popleft()
                continue
            if members and not _can_fuse(members[0], operation):
                passed.append(unbegun.popleft())
                continue
            spec = fusible(operation)
            nbytes += spec.flat.numel() * spec.flat.element_size()
            # An upper bound of the encoded name, which has to fit in a message: the sorted members form no more runs
            # than these.
            if not (members and _follows(operation, members[-1])):
                length += len(json.dumps(operation.name)) + 32 + 12 * len(spec.shape)
            if members and (nbytes > MOST_BYTES or length > MAX_NAME - 64):
                break
            members.append(unbegun.popleft())
    finally:
        # Back in front, in their order: behind later submissions, an operation could be passed over again and again.
        unbegun.extendleft(reversed(passed))
    members.sort(key=lambda member: (member.name, member.round))
    return encode_fused_name(_runs_in(members))


def _follows(operation: Operation, before: Operation) -> bool:
    """Whether two operations are in one run."""
    next_round = operation.name == before.name and operation.round == before.round + 1
    return next_round and fusible(operation).shape == fusible(before).shape


def _runs_in(members: list[Operation]) -> list[FusedRounds]:
    runs: list[FusedRounds] = []
    for index, member in enumerate(members):
        if index and _follows(member, members[index - 1]):
            runs[-1] = runs[-1]._replace(length=runs[-1].length + 1)
        else:
            runs.append(FusedRounds(member.name, member.round, 1, fusible(member).shape))
    return runs


def message_part(
    like: Message, name: str, round_: int, shape: tuple[int, ...], data: torch.Tensor, part_of: Parts | None = None
) -> Message:
    """Create the message of one member from a fused message, or the fused message from those of its members."""
    found = Message(
        Kind.DATA,
        like.op,
        name,
        round_,
        like.stage,
        flags=like.flags & COMMON,
        digest=like.digest,
        scale=like.scale,
        dtype=like.dtype,
        shape=shape,
        payload=Payload(data, data.numel()),
        where=Where.INLINE,
        nbytes=data.numel() * data.element_size(),
    )
    # Without `part_of` the original message is acknowledged as a whole. A token here would acknowledge it twice.
    if part_of is not None:
        found.part_of, found.token, found.flags = part_of, like.token, like.flags
    return found
