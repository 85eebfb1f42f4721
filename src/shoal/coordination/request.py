"""A request to transfer the tensors of one stage of an operation, once all its members have requested it.

A request does not describe the tensors. By then the two agents of each edge have compared them, message by message
(``execution/matching.py``). The ``properties`` of a call are those that all must agree on
and no message compares.

An agent keeps its own requests as ``PendingRequest`` until their tensors have been transferred.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..execution.control_messages import parsed_count, parsed_ranks
from ..execution.matching import Matcher
from ..execution.membership import Ranks
from ..execution.operation import Operation
from ..execution.stage import Stage
from ..transport.link import Lease
from ..transport.process_group import CollectivePlan

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
    properties: str = ""
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
    name, stage, members, op, properties, kind, round_, peers = data
    key = RequestKey(str(name), parsed_count(stage), parsed_ranks(members, size))
    entry = CallSignature(key, str(op), str(properties), str(kind))
    return TransferRequest(entry, parsed_count(round_), None if peers is None else parsed_ranks(peers, size))


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request of this agent that has not been decided.

    Attributes:
        leases: Leases of the memory that is to be sent.
        committed: It was sent in the current round: others may transfer because of it.
        withdrawn: The operation has failed here.
        held: It was held back from the last round, because an earlier call may still request the same stage.
    """

    request: TransferRequest
    operation: Operation
    stage: Stage
    movement: CollectivePlan
    leases: list[Lease]
    committed: bool = False
    withdrawn: bool = False
    held: bool = False

    @property
    def partners(self) -> set[int]:
        """The ranks without which it cannot be transferred."""
        return self.stage.needs | self.stage.arrived.keys()

    def release(self) -> None:
        for lease in self.leases:
            lease.release()
        self.leases = []


class PendingRequests:
    """All undecided requests of an agent. Used under the engine's lock.

    Attributes:
        known: Requests whose members are known, by key, each in the order of the rounds.
        concerned: Requests whose members are known only to themselves.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.known: dict[RequestKey, deque[PendingRequest]] = {}
        self.concerned: list[PendingRequest] = []
        self._matcher = matcher

    def __bool__(self) -> bool:
        return bool(self.known or self.concerned)

    def all(self) -> list[PendingRequest]:
        return [*(request for requests in self.known.values() for request in requests), *self.concerned]

    def add(self, pending: PendingRequest) -> None:
        if pending.request.peers is not None:
            self.concerned.append(pending)
            return
        requests = self.known.setdefault(pending.request.key, deque())
        # In the order of the rounds: a negotiation round offers the first request of a key only.
        place = len(requests)
        while place and requests[place - 1].request.round > pending.request.round:  # its headers arrived later
            place -= 1
        requests.insert(place, pending)

    def find(self, request: TransferRequest) -> PendingRequest:
        """This agent's own request, for a request that all members have made."""
        requests = self.concerned if request.peers is not None else self.known[request.key]
        return next(
            pending
            for pending in requests
            if pending.request.round == request.round and pending.request.key == request.key
        )

    def take_out(self, pending: PendingRequest) -> None:
        key = pending.request.key
        if pending.request.peers is not None:
            self.concerned = [other for other in self.concerned if other is not pending]
        else:
            self.known[key].remove(pending)
            if not self.known[key]:
                del self.known[key]

    def drop(self, pending: PendingRequest) -> None:
        """Remove a request and release its memory."""
        self.take_out(pending)
        pending.release()

    def commit(self, there: Ranks) -> None:
        """A round begins among these ranks: choose the requests that this agent makes in it.

        Requests that need an agent that has left are not made: their operations fail when its departure arrives.
        """
        first_open: dict[tuple[str, int], float] = {}
        for pending in self.all():
            name, number = place = pending.operation.name, pending.stage.number
            if place not in first_open:
                first_open[place] = self._first_open(name, number)
            pending.held = pending.request.peers is None and pending.request.round > first_open[place]
            pending.committed = not (pending.withdrawn or pending.held) and pending.partners <= {*there}

    def has_released(self) -> bool:
        """A request may be made now that was held back when the last round began."""
        held = [pending for pending in self.all() if pending.held]
        return any(
            pending.request.round <= self._first_open(pending.operation.name, pending.stage.number) for pending in held
        )

    def _first_open(self, name: str, number: int) -> float:
        """The first round under a name whose call may still request a stage, because it waits for headers.

        A request implies that this agent's earlier rounds have made theirs, or will not: see :func:`~.round.decide`.
        So later rounds are held back until then. Otherwise the other agents would regard the earlier call as skipped by
        this agent, and it would fail.
        """
        for operation in self._matcher.under(name):
            stage = operation.stage
            if stage is None:
                may_ask = operation.outcome is None
            else:
                may_ask = stage.number < number or (
                    stage.number == number and stage.to_move and not stage.transfer_requested
                )
            if may_ask:
                return operation.round
        return float("inf")
