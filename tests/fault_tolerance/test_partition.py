"""Probes that detect a healed partition, and the part that yields: agents on a network of the test."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import pytest

from shoal.errors import PeerLost, ProtocolError
from shoal.execution.shared_parts import SharedParts
from shoal.fault_tolerance.membership_states import AgentEvent, MembershipTable
from shoal.fault_tolerance.partition import EVERY, PATIENCE, PartitionResolver
from shoal.transport.authentication import QUESTION
from shoal.transport.messages import Kind, Message
from support.recording_sender import recording_sender


@dataclass
class PendingProbe:
    """One that waits for its answer; also the socket of it."""

    peer: int
    on_answer: Callable[[int], None] = lambda answer: None
    open: bool = True

    @property
    def sock(self) -> PendingProbe:
        return self

    def fileno(self) -> int:
        return 5 if self.open else -1

    def close(self) -> None:
        self.open = False


@dataclass
class FakePeerId:
    incarnation: int = 0


@dataclass
class Agent:
    """One agent with all parts of its partition resolver; it is in a job of ``size``."""

    rank: int
    size: int
    probed: list[PendingProbe] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)
    sent: list[tuple[int, bytes]] = field(default_factory=list)
    error: PeerLost | None = None
    # As a gate.
    paused: bool = False
    closing: bool = False
    looks_at: float = float("inf")

    def __post_init__(self) -> None:
        self.membership = MembershipTable(self.size)
        self.lock = RLock()
        self.places = [FakePeerId() for _ in range(self.size)]
        me: Any = self
        keep: Any = lambda peer, message: self.sent.append((peer, message.body))  # noqa: E731
        sender = recording_sender(self.rank, self.membership, keep)
        parts = SharedParts(self.rank, self.size, me, me, self.membership, me, me, sender)
        self.partition_resolver = PartitionResolver(parts, self.membership, me, me)
        self.partition_resolver.activate()

    @property
    def ended(self) -> PeerLost | None:
        return self.error

    # As a router

    def answer_by(self, answer: Callable[[int, int], int]) -> None:
        self.answer = answer

    def transport_to(self, rank: int) -> str:
        return self.kinds.get(rank, "network")

    def outgoing(self, peer: int, receiver: object, purpose: int) -> PendingProbe:
        assert purpose == QUESTION and not any(one.open for one in self.probed), "a link that stays, or two questions"
        self.probed.append(PendingProbe(peer))
        return self.probed[-1]

    # As all others

    def check_by(self, when: float) -> None:
        self.looks_at = when

    @property
    def out_of_reach(self) -> frozenset[int]:
        return frozenset(self.membership.view.out_of_reach)

    def yield_to_majority(self, why: PeerLost) -> None:
        self.error = why

    def lose_touch(self, *ranks: int) -> Agent:
        """They are out of reach."""
        for rank in ranks:
            self.membership.apply(AgentEvent.LOSE_TOUCH, rank, "silent")
        return self

    def receive(self, source: int, text: bytes) -> None:
        message = Message(Kind.CONTROL, name="~reunion", nbytes=len(text), body=text)
        self.partition_resolver.serve(source, message)


def peers(agent: Agent) -> list[int]:
    return [one.peer for one in agent.probed]


def part(count: int, lowest: int) -> int:
    return count << 32 | lowest


def test_without_unreachable_agents_there_are_no_probes_and_no_clock_reads() -> None:
    full = Agent(1, 4)
    assert full.partition_resolver.check(100.0) == float("inf")
    full.membership.apply(AgentEvent.LOSE, 0, "its process ended")
    full.membership.apply(AgentEvent.LEAVE, 2)
    full.membership.begin_without([3])
    assert (
        full.partition_resolver.check(200.0) == float("inf")
        and not full.probed
        and not full.partition_resolver.descriptors()
    )


def test_the_larger_part_sends_no_probes() -> None:
    for agent, beyond in ((Agent(2, 5), (3, 4)), (Agent(1, 4), (2, 3)), (Agent(0, 2), (1,))):
        agent.lose_touch(*beyond)
        assert agent.partition_resolver.check(100.0) == float("inf") and not agent.probed


def test_the_smaller_part_probes_one_agent_at_a_time_in_turn() -> None:
    agent = Agent(3, 5).lose_touch(0, 1, 2)
    assert agent.looks_at == 0.0
    now = 100.0
    for _ in range(6):
        assert agent.partition_resolver.check(now) == now + EVERY
        agent.probed[-1].close()  # refused
        assert agent.partition_resolver.check(now + EVERY / 2) == now + EVERY, "asked before its time"
        now += EVERY
    assert sorted(peers(agent)[:3]) == [0, 1, 2] and peers(agent)[3:] == peers(agent)[:3]


def test_an_unanswered_probe_is_dropped_for_the_next() -> None:
    agent = Agent(1, 2).lose_touch(0)
    assert agent.partition_resolver.check(100.0) == 100.0 + EVERY
    now = 100.0
    while now < 100.0 + PATIENCE:
        assert len(agent.probed) == 1 and agent.partition_resolver.descriptors() == [5]
        now = agent.partition_resolver.check(now)
    agent.partition_resolver.check(now)
    assert [one.open for one in agent.probed] == [False, True]
    agent.partition_resolver.close(0.0)
    assert not agent.partition_resolver.descriptors() and agent.partition_resolver.check(now + EVERY) == float("inf")
    assert len(agent.probed) == 2


def test_a_rejoined_agent_is_not_probed() -> None:
    agent = Agent(1, 2).lose_touch(0)
    agent.partition_resolver.check(100.0)
    agent.membership.apply(AgentEvent.ADMIT, 0)
    assert agent.partition_resolver.check(100.5) == float("inf") and not agent.probed[0].open


@pytest.mark.parametrize("kind", ["", "threads"])
def test_an_agent_without_an_address_is_not_probed(kind: str) -> None:
    agent = Agent(2, 3, kinds={0: kind}).lose_touch(0, 1)
    for step in range(3):
        agent.partition_resolver.check(100.0 + step * PATIENCE)
    assert peers(agent) == [1, 1, 1]


@pytest.mark.parametrize("state", ["paused", "closing", "is_joining", "error"])
def test_an_agent_that_has_not_agreed_or_has_ended_neither_probes_nor_replies(state: str) -> None:
    agent = Agent(2, 3).lose_touch(0, 1)
    assert agent.answer(0, 0) == part(1, 2)
    if state == "is_joining":
        agent.membership = MembershipTable(3)
        agent.membership.stand_alone(2)
        agent.partition_resolver._membership = agent.membership
    else:
        setattr(agent, state, True)
    agent.partition_resolver.check(100.0)
    assert not agent.probed and agent.answer(0, 0) == 0
    if state == "paused":
        agent.paused = False
        agent.partition_resolver.check(100.0 + EVERY)
        assert agent.probed


def test_the_membership_is_reported_only_to_excluded_agents() -> None:
    agent = Agent(0, 4).lose_touch(2, 3)
    agent.membership.apply(AgentEvent.LOSE, 1, "its process ended")
    assert agent.answer(3, 0) == part(1, 0)
    agent.membership.apply(AgentEvent.ADMIT, 3)
    assert agent.answer(3, 0) == 0, "as one that was stopped, and wakes"
    agent.places[3].incarnation = 2
    assert agent.answer(3, 1) == part(2, 0), "a process that was replaced"
    assert agent.answer(3, 2) == agent.answer(3, 3) == 0


@pytest.mark.parametrize("answer", [0, part(2, 3), part(1, 0), part(5, 0), part(1 << 30, 0), (1 << 64) - 1], ids=hex)
def test_an_invalid_reply_or_one_from_no_larger_part_is_ignored(answer: int) -> None:
    agent = Agent(2, 5).lose_touch(0, 1, 4)
    agent.partition_resolver.check(100.0)
    agent.probed[0].on_answer(answer)
    assert agent.error is None and not agent.sent


@pytest.mark.parametrize(
    ("answer", "why"),
    [(part(3, 0), "as one of 3: theirs is the larger part"), (part(2, 1), "as large a part, with the lowest rank, 1")],
)
def test_the_smaller_part_yields_and_notifies_its_members(answer: int, why: str) -> None:
    agent, other = Agent(2, 5).lose_touch(0, 1, 4), Agent(3, 5).lose_touch(0, 1, 4)
    agent.partition_resolver.check(100.0)
    agent.probed[0].on_answer(answer)
    [(peer, text)] = agent.sent
    other.receive(2, text)
    assert peer == 3 and not other.sent
    for one in (agent, other):
        assert one.error is not None and one.error.ranks == (0, 1, 4)
        assert f"rank {agent.probed[0].peer} can be reached again, and has gone on without ranks [2, 3]" in str(
            one.error
        )
        assert why in str(one.error) and f"rank {one.rank} takes their state" in str(one.error)


def test_invalid_and_foreign_messages_end_no_agent() -> None:
    agent = Agent(3, 5).lose_touch(0, 1, 2)
    for text in (b"{", b"7", b"[0, 3]", b'["a", 1, 2]', b"[0, null, 0]", b"\xff"):
        with pytest.raises(ProtocolError, match="another part"):
            agent.receive(4, text)
    agent.receive(0, b"[0, 3, 0]")
    assert agent.error is None
    agent.receive(4, b"[0, 3, 0]")
    assert agent.error is not None


@pytest.mark.parametrize("seed", range(60))
def test_exactly_the_largest_of_any_parts_continues(seed: int) -> None:
    """Agents have died in each part, unknown to the others. The reachability is random."""
    draws = random.Random(seed)
    size = draws.randint(2, 9)
    index = [draws.randrange(draws.randint(1, 4)) for _ in range(size)]
    left = [rank for rank in range(size) if draws.random() < 0.7] or [0]
    agents = {rank: Agent(rank, size) for rank in left}
    for rank, agent in agents.items():
        for other in range(size):
            if index[other] != index[rank]:
                agent.lose_touch(other)
            elif other not in agents:
                agent.membership.apply(AgentEvent.LOSE, other, "its process ended")
    parts = [[rank for rank in left if index[rank] == one] for one in set(index)]
    largest = max((part for part in parts if part), key=lambda one: (len(one), -one[0]))
    for step in range(20 * size):
        for rank in draws.sample(left, len(left)):
            agent = agents[rank]
            agent.partition_resolver.check(100.0 + step * EVERY)
            question = next((one for one in agent.probed if one.open), None)
            if question is not None:
                question.close()
                if question.peer in agents and draws.random() < 0.5:
                    question.on_answer(agents[question.peer].answer(rank, 0))
            for other, text in agent.sent:
                agents[other].receive(rank, text)
            agent.sent.clear()
    assert [rank for rank in left if agents[rank].error is None] == largest
