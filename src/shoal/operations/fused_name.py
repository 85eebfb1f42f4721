"""The members of a fused operation, encoded as its name. Successive rounds of one name form one run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..transport.wire import COMMON, MAX_DIMENSIONS, Message

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
