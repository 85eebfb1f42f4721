"""Pending requests of one agent."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..operations.matching import Matcher
from ..operations.operation import Operation, Stage
from ..transport.collective_plan import CollectivePlan
from ..transport.link import Lease
from .request import Ranks, RequestKey, TransferRequest


@dataclass(eq=False, slots=True)
class PendingRequest:
    """What this agent has asked for and has not been told to move.

    Attributes:
        leases: Of the memory that is to be sent.
        committed: It was said in the round that is under way: others may move theirs because of it.
        withdrawn: It has failed here.
        held: It was kept out of the round that began last, since an earlier call may still ask for the same stage.
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
        """Without whom it cannot be moved."""
        return self.stage.needs | self.stage.arrived.keys()

    def release(self) -> None:
        for lease in self.leases:
            lease.release()
        self.leases = []


class PendingRequests:
    """All that an agent has asked for and has not been told to move. Used under the engine's lock.

    Attributes:
        known: Requests whose members are known, by key, each in the order of the rounds.
        concerned: Requests of which only those concerned know that they take part.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.known: dict[RequestKey, deque[PendingRequest]] = {}
        self.concerned: list[PendingRequest] = []
        self._matcher = matcher

    def __bool__(self) -> bool:
        return bool(self.known or self.concerned)

    def all(self) -> list[PendingRequest]:
        return [*(one for several in self.known.values() for one in several), *self.concerned]

    def add(self, asked: PendingRequest) -> None:
        if asked.request.peers is not None:
            self.concerned.append(asked)
            return
        several = self.known.setdefault(asked.request.key, deque())
        place = len(several)
        while place and several[place - 1].request.round > asked.request.round:  # its headers came later
            place -= 1
        several.insert(place, asked)

    def find(self, request: TransferRequest) -> PendingRequest:
        """This agent's own, of a request that all have made."""
        several = self.concerned if request.peers is not None else self.known[request.key]
        return next(one for one in several if one.request.round == request.round and one.request.key == request.key)

    def take_out(self, asked: PendingRequest) -> None:
        key = asked.request.key
        if asked.request.peers is not None:
            self.concerned = [one for one in self.concerned if one is not asked]
        else:
            self.known[key].remove(asked)
            if not self.known[key]:
                del self.known[key]

    def drop(self, asked: PendingRequest) -> None:
        """It is asked for no more."""
        self.take_out(asked)
        asked.release()

    def commit(self, there: Ranks) -> None:
        """A round begins among these ranks: decide what this agent asks for in it.

        What needs an agent that has left is not asked for: it fails when the goodbye arrives.
        """
        first_open: dict[tuple[str, int], float] = {}
        for asked in self.all():
            name, number = place = asked.operation.name, asked.stage.number
            if place not in first_open:
                first_open[place] = self._first_open(name, number)
            asked.held = asked.request.peers is None and asked.request.round > first_open[place]
            asked.committed = not (asked.withdrawn or asked.held) and asked.partners <= {*there}

    def is_one_free(self) -> bool:
        """A request may be made now that was held when the last round began."""
        held = [asked for asked in self.all() if asked.held]
        return any(asked.request.round <= self._first_open(asked.operation.name, asked.stage.number) for asked in held)

    def _first_open(self, name: str, number: int) -> float:
        """The first round under a name whose call may still ask for a stage, since it waits for headers.

        A request says to the others that this agent's rounds before it have asked, or will not: see
        :func:`~.decision.decide`. So later rounds are held until then. Else the others take the earlier call for one
        that this agent has skipped, and it fails.
        """
        for operation in self._matcher.under(name):
            stage = operation.stage
            if stage is None:
                may_ask = operation.outcome is None
            else:
                may_ask = stage.number < number or (stage.number == number and stage.to_move and not stage.asked_for)
            if may_ask:
                return operation.round
        return float("inf")
