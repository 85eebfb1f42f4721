"""One negotiation round: all agents exchange their requests, and end with the same list of operations to run.

First each agent sends its bits to ``ceil(log2 n)`` others and receives as many (dissemination). AND and OR have the
same result on all agents, even if bits arrive twice. If all requests are cached, the round ends here without a
decision.

Otherwise new requests go up a tree to the first agent, which decides without keeping state, and the decision comes
down. Up to ``FLAT`` agents the tree has one level. Beyond that, requests are merged on the way, so no agent receives
from more than ``FAN_OUT`` others.

The bits are a vector with a bit for each cached call, and flags. Bits are combined by AND: the result is the calls
requested by all. Flags are combined by OR: an agent has a new request, an agent leaves, or two caches differ.

The decision says which requests run, in which order, and which are refused. A request is ready when every member has
requested it. Calls that name their own sources and destinations have no known members. For these the connected agents
count as members: all peers of each must have requested it. The decision is a function of the requests alone, so another
agent can make the next decision.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..engine.engine import Engine
from ..errors import Mismatch
from ..execution.control_messages import parsed_ranks
from ..execution.membership import Ranks
from ..execution.operation import Operation
from ..execution.stage import MORE, Exchange, Send, Steps
from ..transport.messages import Message
from .request import CallSignature, RequestKey, TransferRequest, parsed_request
from .response_cache import ResponseCache

_SHOWN = 8
"""Ranks that an error lists of each side."""
T = TypeVar("T")
FLAT = 64
FAN_OUT = 8
_UP, _DOWN = 32, 64
"""The numbers of the stages in which requests are sent up and the decision is sent down the tree."""


@dataclass(frozen=True, slots=True)
class Response:
    """A transfer to run next.

    Attributes:
        request: The request of all members. With peers, ``()``, if only the members know each other.
        members: The ranks that take part, ascending.
    """

    request: TransferRequest
    members: Ranks

    def as_data(self) -> list[Any]:
        return [self.request.as_data(), self.members]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that cannot be satisfied.

    Attributes:
        name, stage, round: The request.
        ranks: The ranks that requested it.
        text: The reason.
        concerned: The ranks that disagree.
    """

    name: str
    stage: int
    round: int
    ranks: Ranks
    text: str
    concerned: Ranks

    def as_data(self) -> list[Any]:
        return [self.name, self.stage, self.round, self.ranks, self.text, self.concerned]


Decision = list[Response | Refusal]


def decide(requests: Mapping[TransferRequest, Sequence[int]], group: Sequence[int]) -> Decision:
    """The ready requests and the refusals, in one order for all agents.

    Args:
        requests: The requests, each with its requesting ranks; the first request is decided first.
        group: The present ranks, ascending.
    """
    declared: dict[RequestKey, list[tuple[TransferRequest, Sequence[int]]]] = defaultdict(list)
    concerned: dict[tuple[str, int, int], list[tuple[TransferRequest, Sequence[int]]]] = defaultdict(list)
    for request, ranks in requests.items():
        if request.peers is None:
            declared[request.key].append((request, ranks))
        else:
            concerned[request.key.name, request.key.stage, request.round].append((request, ranks))
    found: Decision = []
    for key, requests_of_call in declared.items():
        found += _decide_collective(requests_of_call, key.members or tuple(group))
    for requests_of_call in concerned.values():
        found += _decide_edges(requests_of_call)
    return found


def _decide_collective(requests_of_call: list[tuple[TransferRequest, Sequence[int]]], members: Ranks) -> Decision:
    """Decide on calls with known members. Each agent makes its calls under a name one after the other: an agent in a
    later round will not join an earlier one.
    """
    found: Decision = []
    rounds: dict[int, list[tuple[TransferRequest, list[int]]]] = defaultdict(list)
    first: dict[int, int] = {}
    for request, some in requests_of_call:
        rounds[request.round].append((request, sorted(some)))
        for rank in some:
            # An agent with several rounds in flight has passed only those before its earliest one.
            first[rank] = min(request.round, first.get(rank, request.round))
    for round_, here in sorted(rounds.items()):
        ranks = tuple(sorted({rank for _, some in here for rank in some}))
        beyond = sorted(rank for rank, earliest in first.items() if earliest > round_)
        if beyond:
            found.append(_refusal(here[0][0], ranks, tuple(beyond), f"{_text_of(beyond)} passed that round without it"))
        # Refused before all have come: the missing agents cannot make these calls equal.
        elif len({request.entry for request, _ in here}) > 1:
            found.append(_disagreement(here, ranks))
        elif len(ranks) == len(members):
            found.append(Response(here[0][0], ranks))
    return found


def _decide_edges(requests_of_call: list[tuple[TransferRequest, Sequence[int]]]) -> Decision:
    """Decide on calls whose members are the connected agents: the components in which no member is missing."""
    by_rank = {rank: request for request, ranks in requests_of_call for rank in ranks}
    found: Decision = []
    remaining = set(by_rank)
    while remaining:
        part, more = set[int](), [min(remaining)]
        while more:
            rank = more.pop()
            if rank in part:
                continue
            part.add(rank)
            request = by_rank.get(rank)
            more += request.peers or () if request is not None else ()
        remaining -= part
        # A missing agent may have further peers, so its component is not known yet, and waits.
        if all(rank in by_rank for rank in part):
            entry, round_ = by_rank[min(part)].entry, by_rank[min(part)].round
            found.append(Response(TransferRequest(entry, round_, ()), tuple(sorted(part))))
    return found


def _disagreement(requests_of_call: list[tuple[TransferRequest, list[int]]], ranks: Ranks) -> Refusal:
    (first, here), (second, there) = sorted(requests_of_call, key=lambda each: (-len(each[1]), each[1]))[:2]
    if first.entry.op != second.entry.op:
        text = f"{_text_of(there)} called {second.entry.op} and {_text_of(here)} called {first.entry.op}"
    else:
        text = (
            f"{_text_of(there)} asked for the {second.entry.properties}, "
            f"and {_text_of(here)} for the {first.entry.properties}"
        )
    return _refusal(first, ranks, tuple(sorted({here[0], *there})), text)


def _refusal(request: TransferRequest, ranks: Ranks, concerned: Ranks, why: str) -> Refusal:
    return Refusal(request.key.name, request.key.stage, request.round, ranks, f"{request}: {why}", concerned)


def _text_of(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


# The form that is sent


def merged(request_lists: Iterable[Mapping[TransferRequest, Sequence[int]]]) -> dict[TransferRequest, list[int]]:
    """The joined requests of several agents, or of groups of agents."""
    found: dict[TransferRequest, list[int]] = defaultdict(list)
    for requests in request_lists:
        for request, ranks in requests.items():
            found[request] += ranks
    return dict(found)


def requests_as_data(requests: Mapping[TransferRequest, Sequence[int]]) -> list[Any]:
    return [[request.as_data(), sorted(ranks)] for request, ranks in requests.items()]


def requests_of(data: Any, size: int) -> dict[TransferRequest, list[int]]:
    """The requests, from the form that is sent.

    Raises:
        ValueError, TypeError: The data is malformed.
    """
    return {parsed_request(request, size): list(parsed_ranks(ranks, size)) for request, ranks in data}


def decision_as_data(decision: Decision) -> list[Any]:
    return [verdict.as_data() for verdict in decision]


def decision_of(data: Any, size: int) -> Decision:
    """The decision, from the form that is sent.

    Raises:
        ValueError, TypeError: The data is malformed.
    """
    found: Decision = []
    for item in data:
        if len(item) == 2:
            found.append(Response(parsed_request(item[0], size), parsed_ranks(item[1], size)))
        else:
            name, stage, round_, ranks, text, concerned = item
            of = parsed_ranks(ranks, size), str(text), parsed_ranks(concerned, size)
            found.append(Refusal(str(name), stage, round_, *of))
    return found


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The result of a round, equal on all agents.

    Attributes:
        group: The members of the round.
        ready: The cached calls that all have requested.
        decision: The decision on the other requests.
        negotiated: The round needed a decision.
        leaving: The ranks that take part in no later round.
        differs: A rank whose cache differs from others'; -1: none.
    """

    group: Ranks
    ready: list[CallSignature] = field(default_factory=list)
    decision: Decision = field(default_factory=list)
    negotiated: bool = False
    leaving: Ranks = ()
    differs: int = -1

    @property
    def productive(self) -> bool:
        return bool(self.ready or self.decision or self.leaving) or self.differs >= 0


OwnRequests = Callable[[Sequence[CallSignature]], Mapping[TransferRequest, list[int]]]
"""Returns this agent's requests, without ready calls."""


def coordinate(
    engine: Engine, operation: Operation, group: Ranks, own: Vector, cache: ResponseCache, own_requests: OwnRequests
) -> Steps[RoundOutcome]:
    """The steps of one round, for this agent."""
    total, size, place = own, len(group), group.index(engine.rank)
    step = 1
    while step < size:
        ahead, behind = group[(place + step) % size], group[(place - step) % size]
        received = yield from _exchange_messages(engine, operation, {ahead: total.as_tensor()}, [behind])
        try:
            total = total.combined_with(Vector.of(received[behind]), behind)
        except ValueError as error:
            raise Mismatch(f"{operation}: rank {behind} sent an invalid message: {error}", (behind,)) from None
        step *= 2
    leaving = tuple(rank for rank in group if total.leaving >> rank & 1)
    # A bit means another call in another cache: tensors of different calls would be summed.
    if total.differs:
        return RoundOutcome(group, leaving=leaving, differs=total.differs - 1)
    ready = cache.ready(total.bits)
    if not total.asks and not cache.in_conflict(total.bits, ready):
        return RoundOutcome(group, ready, leaving=leaving)
    decision = yield from _negotiated(engine, operation, group, place, own_requests(ready))
    return RoundOutcome(group, ready, decision, True, leaving)


def _negotiated(
    engine: Engine, operation: Operation, group: Ranks, place: int, own_requests: Mapping[TransferRequest, list[int]]
) -> Steps[Decision]:
    """Requests go up the tree, the decision comes down."""
    fan_out = len(group) if len(group) <= FLAT else FAN_OUT
    depth, deepest = _depth(place, fan_out), _depth(len(group) - 1, fan_out)
    children = [group[index] for index in range(place * fan_out + 1, (place + 1) * fan_out + 1) if index < len(group)]
    parent = group[(place - 1) // fan_out]
    # Stages up the tree are counted from its deepest level, so a child sends in the stage in which its parent receives.
    if children:
        received = yield from _exchange_messages(engine, operation, {}, children, _UP + deepest - depth)
        request_lists = [
            _read(operation, rank, data, lambda content: requests_of(content, engine.size))
            for rank, data in received.items()
        ]
        own_requests = merged([own_requests, *request_lists])
    if place:
        up = _written(requests_as_data(own_requests))
        yield from _exchange_messages(engine, operation, {parent: up}, [], _UP + deepest - depth + 1)
        received = yield from _exchange_messages(engine, operation, {}, [parent], _DOWN + depth)
        decision = _read(operation, parent, received[parent], lambda content: decision_of(content, engine.size))
    else:
        decision = decide(own_requests, group)
    if children:
        down = _written(decision_as_data(decision))
        yield from _exchange_messages(engine, operation, dict.fromkeys(children, down), [], _DOWN + depth + 1)
    return decision


def _exchange_messages(
    engine: Engine,
    operation: Operation,
    outgoing: Mapping[int, torch.Tensor],
    sources: Sequence[int],
    stage: int | None = None,
) -> Steps[dict[int, torch.Tensor]]:
    """Send data to some ranks and receive data from others: uint8."""
    # By identity: all children get the same tensor, so the decision is copied once.
    published = {id(data): engine.publish(operation, data) for data in outgoing.values()}
    sends = [Send(rank, published[id(data)], 0, data.numel(), tuple(data.shape)) for rank, data in outgoing.items()]
    arrived = yield Exchange(sends, sources, torch.uint8, stage=stage)
    payloads = {rank: _payload(message) for rank, message in arrived.items()}
    # A long message arrives in parts: its header alone resumes this operation.
    while not all(payload.complete for payload in payloads.values()):
        yield MORE
    return {rank: payloads[rank].data for rank in sources}


def _payload(message: Message) -> Any:
    assert message.payload is not None
    return message.payload


def _depth(place: int, fan_out: int) -> int:
    depth = 0
    while place:
        place, depth = (place - 1) // fan_out, depth + 1
    return depth


def _written(content: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(content, separators=(",", ":")).encode()), dtype=torch.uint8)


def _read(operation: Operation, rank: int, data: torch.Tensor, read: Callable[[Any], T]) -> T:
    try:
        return read(json.loads(bytes(data.numpy())))
    except (ValueError, TypeError, RecursionError) as error:
        raise Mismatch(f"{operation}: rank {rank} sent an invalid message: {error}", (rank,)) from None


_HEAD = struct.Struct("<8sBIII")
_ASKS = 1
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Vector:
    """The vector of an agent, or of several combined.

    Attributes:
        digest: The digest of the sender's cache.
        bits: The bits of :meth:`ResponseCache.vector`.
        asks: There are requests that are not cached.
        leaving: A bit for each rank that takes no part in later rounds.
        differs: 1 + a rank whose cache differs from that of the agent that noticed it; 0: none.
    """

    digest: bytes
    bits: int
    asks: bool = False
    leaving: int = 0
    differs: int = 0

    def combined_with(self, other: Vector, rank: int) -> Vector:
        """Combined with the vector from ``rank``."""
        differs = self.differs or other.differs or (rank + 1 if other.digest != self.digest else 0)
        return Vector(
            self.digest, self.bits & other.bits, self.asks or other.asks, self.leaving | other.leaving, differs
        )

    def as_tensor(self) -> torch.Tensor:
        """The form that is sent: uint8."""
        bits, leaving = _bytes(self.bits), _bytes(self.leaving)
        head = _HEAD.pack(self.digest, _ASKS if self.asks else 0, self.differs, len(bits), len(leaving))
        return torch.frombuffer(bytearray(head + bits + leaving), dtype=torch.uint8)

    @staticmethod
    def of(data: torch.Tensor) -> Vector:
        """The vector, from the form that is sent.

        Raises:
            ValueError: The data is malformed.
        """
        raw = bytes(data.numpy())
        if not _HEAD.size <= len(raw) <= _MOST_BYTES:
            raise ValueError(f"{len(raw)} bytes")
        digest, flags, differs, n_bits, n_leaving = _HEAD.unpack_from(raw)
        # A shorter slice would be read without an error, as other bits than the sender's.
        if len(raw) != _HEAD.size + n_bits + n_leaving:
            raise ValueError(f"{len(raw)} bytes for vectors of {n_bits} and {n_leaving}")
        bits = int.from_bytes(raw[_HEAD.size : _HEAD.size + n_bits], "little")
        leaving = int.from_bytes(raw[_HEAD.size + n_bits :], "little")
        return Vector(digest, bits, bool(flags & _ASKS), leaving, differs)


def _bytes(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")
