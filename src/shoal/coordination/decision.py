"""The coordinator's decision on the requests of all agents: which run, in which order, and which are refused.

A request is ready when every member has requested it. Calls that name their own sources and destinations have no known
members. For these the connected agents count as members: all peers of each must have requested it. The decision is a
function of the requests alone. So the coordinator keeps no state, and another agent can make the next decision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..operations.control_messages import parsed_ranks
from ..operations.membership import Ranks
from .request import RequestKey, TransferRequest, parsed_request

_SHOWN = 8
"""Ranks that an error lists of each side."""


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
