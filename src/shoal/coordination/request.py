"""A request to transfer the tensors of one stage of an operation, once all its members have requested it.

A request does not describe the tensors. By then the two agents of each edge have compared them, message by message
(``operations/matching.py``). ``what`` holds the properties that all must agree on and no message compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

Ranks = tuple[int, ...]
ALL: Ranks = ()
"""Stands for all present ranks."""


class RequestKey(NamedTuple):
    """The common properties of calls of one kind, in all rounds."""

    name: str
    stage: int
    members: Ranks
    """The ranks that take part, ascending; :data:`ALL` if all do."""


class CallSignature(NamedTuple):
    """A call that is repeated."""

    key: RequestKey
    op: str
    what: str = ""
    """The properties that must be equal on all, such as "sum of float32, shape [3]"; empty if edges compare them."""
    kind: str = ""
    """The backend's operation that transfers it; empty for sends and receives."""

    def of(self, members: Ranks) -> CallSignature:
        """The same call among these members."""
        return self._replace(key=self.key._replace(members=members))


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """One agent's request to transfer the tensors of one stage of an operation.

    Attributes:
        entry: The requested call. If ``peers`` are given, its members are not known, and ``key.members`` is empty.
        round: The agent's count of calls under that name.
        peers: The ranks that it exchanges with, if only the connected agents take part; None if the members are known.
    """

    entry: CallSignature
    round: int
    peers: Ranks | None = None

    @property
    def key(self) -> RequestKey:
        return self.entry.key

    def __str__(self) -> str:
        return f"{self.entry.op} {self.key.name.removeprefix('~')!r} round {self.round}"

    def as_data(self) -> list[Any]:
        """The form that is sent."""
        name, stage, members = self.entry.key
        return [name, stage, members, *self.entry[1:], self.round, self.peers]


def parsed_request(data: Any, size: int) -> TransferRequest:
    """The request, from the form that is sent.

    Raises:
        ValueError, TypeError: The data is malformed.
    """
    name, stage, members, op, what, kind, round_, peers = data
    key = RequestKey(str(name), _count(stage), parsed_ranks(members, size))
    entry = CallSignature(key, str(op), str(what), str(kind))
    return TransferRequest(entry, _count(round_), None if peers is None else parsed_ranks(peers, size))


def parsed_ranks(data: Any, size: int) -> Ranks:
    """The ranks, ascending, from the form that is sent.

    Raises:
        ValueError, TypeError: The data is malformed.
    """
    ranks = tuple(_count(one) for one in data)
    if list(ranks) != sorted(set(ranks)) or (ranks and ranks[-1] >= size):
        raise ValueError(f"ranks {ranks} of {size}")
    return ranks


def _count(data: Any) -> int:
    if type(data) is not int or data < 0:
        raise ValueError(f"{data!r} in the place of a number")
    return data
