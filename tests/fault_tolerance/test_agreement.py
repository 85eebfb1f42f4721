"""Agents that lose others and let others in, in any order, plan alike: many agreements, on a network that is drawn."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict, deque
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from shoal.errors import ProtocolError
from shoal.execution.matching import LAST_STAGE, Matcher
from shoal.execution.membership import Departure, Plan, View
from shoal.execution.operation import FailurePolicy, Operation, Recovery
from shoal.execution.progress import Callbacks
from shoal.execution.shared_parts import SharedParts
from shoal.execution.submission_gate import SubmissionGate
from shoal.fault_tolerance import recovery
from shoal.fault_tolerance.agreement import AGREEMENT, MOST_DECISIONS, Agreement
from shoal.fault_tolerance.loss_reports import Decision, LossReport, parsed_report
from shoal.fault_tolerance.membership_states import AgentEvent, MembershipTable
from shoal.fault_tolerance.recovery import HAD, RESULT, ResultCache, ResultTransfer
from shoal.fault_tolerance.rejoin import JoiningPeer, Rejoin
from shoal.transport.acceptor import ENTRY
from shoal.transport.messages import Kind, Message
from shoal.transport.peer_address import Endpoint, PeerId, local_peer_id
from shoal.transport.sockets import Outgoing
from support.recording_sender import recording_sender

HERE = local_peer_id(0)
ALL, IN, SMALL, ROOTED = "b", "c", "d", "e"
"""Operations of all; those that admit agents; those whose results are cached; and broadcasts from :data:`ROOT`."""
COLLECTIVE = (ALL, IN, SMALL, ROOTED)
ROOT = 1
ROOT_IS_GONE = "the root is gone"


class Lifecycle:
    """As much of one as agreements, entries and repairs use."""

    def __init__(self, one: Simulated) -> None:
        self.gate = SubmissionGate(lambda: None)
        self.ready: deque[Operation] = deque()
        self.departed_peers = type("Departed", (), {"survive": lambda *_: None})()
        self.callbacks = Callbacks()
        self.backend_stages = SimpleNamespace(redirect_to_links=list)
        self._one = one

    def leave_stage(self, _: Operation) -> None: ...

    def begin_attempt(self, operation: Operation, stage: int) -> None:
        (self._one.awaiting.add if stage == LAST_STAGE else self._one.awaiting.discard)(operation)

    def make_ready(self, operation: Operation) -> None:
        self._one.attempts(operation)

    def settle(self, operation: Operation, result: object, _: object) -> None:
        self._one.end(operation, result)

    def fail(self, _: Operation, error: BaseException) -> None:
        raise error


class Fusion:
    def split_all(self) -> None: ...


class Stub:
    """What nobody looks at here."""

    lock = nullcontext()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Router:
    """The addresses of all agents as one agent knows them, and the messages of pending peers."""

    def __init__(self, one: Simulated, size: int) -> None:
        self.place = replace(HERE, rank=one.rank, incarnation=one.incarnation)
        self.places = [replace(HERE, rank=rank) for rank in range(size)]
        self.places[one.rank] = self.place
        self.endpoints = [Endpoint()] * size
        self.is_joining = False
        self.links: dict[int, Any] = {}
        self.waiting: dict[tuple[int, int], list[Message]] = {}
        self._one = one

    def has_pending(self, rank: int, incarnation: int) -> bool:
        result = self._one.net.running.get(rank)
        return (rank, incarnation) in self.waiting and result is not None and result.incarnation == incarnation

    def admit(self, place: PeerId, endpoint: Endpoint) -> None:
        self.places[place.rank], self.endpoints[place.rank] = place, endpoint

    def drop(self, rank: int) -> None:
        del self.links[rank]

    def admit_pending(self) -> None:
        for rank, incarnation in list(self.waiting):
            if not self.is_joining and self.places[rank].incarnation == incarnation:
                for message in self.waiting.pop((rank, incarnation), []):
                    self._one.receive(rank, incarnation, message)

    def take(self, source: int, incarnation: int, message: Message) -> bool:
        """Whether it is to be heard now."""
        known = self.places[source].incarnation
        if incarnation < known and not self.is_joining:
            return False
        buffered = self.waiting.get((source, incarnation))  # also of an admitted agent, until they are delivered
        if (incarnation > known or self.is_joining or buffered) and message.name != ENTRY:
            self.waiting.setdefault((source, incarnation), []).append(message)
            return False
        if incarnation > known:
            self.waiting.setdefault((source, incarnation), [])
        return incarnation != known or message.name == ENTRY or source in self._one.membership.view.alive


class Link(NamedTuple):
    source: int
    source_incarnation: int
    to: int
    incarnation: int


class Simulated:
    """One agent: it begins rounds between neighbours, and of all. The result of all is the attempt that gave it."""

    def __init__(self, rank: int, net: Net, incarnation: int = 0) -> None:
        self.rank, self.net, self.incarnation = rank, net, incarnation
        self.matcher, self.membership = Matcher(), MembershipTable(net.size)
        self.planned: dict[int, Plan] = {}  # by round between neighbours
        self.partners: dict[int, dict[PeerId, bool]] = {}  # members of its plan, and whether they still take part
        self.ended: dict[tuple[str, int], object] = {}  # the results of all
        self.awaiting: set[Operation] = set()  # what waits for a result that others hand on
        lifecycle: Any = Lifecycle(self)
        router: Any = Router(self, net.size)
        fusion: Any = Fusion()
        nothing: Any = Stub()
        self.lifecycle, self.router = lifecycle, router
        sender = recording_sender(rank, self.membership, self._send)
        parts = SharedParts(rank, net.size, router, nothing, self.membership, self.matcher, nothing, sender)
        self.result_cache = ResultCache(parts)
        self.result_transfer = ResultTransfer(parts, lifecycle, self.result_cache)
        self.agreement = Agreement(parts, self.membership, lifecycle, fusion, self.result_transfer)
        failures: Any = SimpleNamespace(take_notice=self.notice)
        self.agreement.react_by(failures)
        self.agreement.activate()
        self.entry = Rejoin(parts, self.membership, self.agreement, nothing, self.lifecycle.gate)
        self.entry._marker = nothing  # to a launcher
        if incarnation:
            self.entry.begin_waiting()
        elif net.begins < net.size:
            absent = tuple(range(net.begins, net.size))
            self.membership.begin_without(absent)
            self.agreement.begin_without(absent)

    def request_admission(self) -> None:
        """As :meth:`Rejoin.request_admission`."""
        self.router.endpoints[self.rank] = Endpoint()
        text = JoiningPeer(self.router.place, Endpoint()).as_json()
        for other in self.net.running.values():
            if other is not self:
                message = Message(Kind.CONTROL, ENTRY, ENTRY, nbytes=len(text), body=text)
                self.net.put(Link(self.rank, self.incarnation, other.rank, other.incarnation), message)

    def _send(self, peer: int, message: Message) -> None:
        self.net.handed_on += message.op == RESULT
        self.net.put(Link(self.rank, self.incarnation, peer, self.router.places[peer].incarnation), message)

    def notice(self, departure: Departure) -> None:
        before = self.membership.view.alive
        self.membership.apply(AgentEvent.LOSE if departure.died else AgentEvent.LEAVE, departure.rank, departure.cause)
        if departure.rank in before and (departure.died or self.lifecycle.gate.paused):
            self.agreement.report_losses()
        self.result_cache.on_departure(departure.rank, None)

    def miss_departed_ranks(self) -> None:
        """A round needs an agent that has left, if there is one."""
        for rank in self.membership.view.left:
            self.agreement.need_departed(rank)
        self.agreement.check(0.0)

    def begin(self, name: str) -> None:
        if self.lifecycle.gate.shut or (name == IN and self.matcher.under(IN)):
            return
        operation = self.matcher.begin(name, name, float("inf"), False)
        if name not in COLLECTIVE:
            plan, lost = self.agreement.plan_of(name, operation.round, FailurePolicy.SKIP_MISSING)
            self.planned[operation.round] = plan
            members = set(self.agreement.alive).difference(plan.gone)
            self.partners[operation.round] = {self.router.places[rank]: rank not in lost for rank in members}
            self.matcher.end(operation, None)
            return
        plan, _ = self.agreement.plan_of(name, operation.round, FailurePolicy.RETRY)
        operation.recovery = Recovery(lambda _: iter(()), FailurePolicy.RETRY, plan)  # type: ignore[arg-type, return-value]
        operation.recovery.take = as_plan if name == SMALL else None
        self.attempts(operation)

    def attempts(self, operation: Operation) -> None:
        if operation.name == ROOTED and ROOT in operation.excluded_ranks:
            self.end(operation, ROOT_IS_GONE)
            return
        key = operation.name, operation.round, operation.plan
        if operation.name == IN:  # it contributes once all have come
            self.entry.admit_after(operation)
            self.net.present[key].add(self.rank)
        else:
            self.net.contributed[key][self.rank] = None

    def advance(self) -> None:
        """Take a result that all of an attempt have contributed to, or the first of them alone, as the root of a
        broadcast; end where all of them have it."""
        for operation in self.matcher.in_flight():
            key, recovery = (operation.name, operation.round, operation.plan), operation.recovery
            assert recovery is not None
            group = set(range(self.net.size)) - set(operation.excluded_ranks)
            parts = self.net.contributed[key]
            if operation.name == IN and self.rank not in parts and self.net.present[key] >= group:
                parts[self.rank] = self.entry.joining_peers(), self.entry.hold()
            complete = ROOT in parts if operation.name == ROOTED else set(parts) >= group
            if operation.name == SMALL:
                if complete and operation not in self.awaiting:
                    self.end(operation, operation.plan)
                continue
            as_root = operation.name == ALL and self.rank == min(group)
            if recovery.result is None and (complete or as_root):
                recovery.result = (joined(parts, operation) if operation.name == IN else operation.plan,)
                self.net.have[key].add(self.rank)
            elif recovery.result is not None and self.net.have[key] >= group:
                self.end(operation, recovery.result[0])

    def end(self, operation: Operation, result: object) -> None:
        self.ended[operation.name, operation.round] = result
        if operation.name == SMALL:
            assert isinstance(result, Plan)
            self.result_cache.ended(operation, torch.tensor([result.n_admitted, *result.gone]))
        self.matcher.end(operation, None)
        if operation.on_end is not None:
            operation.on_end(result)
        if operation.on_outcome is not None:
            operation.on_outcome(result, None)

    def receive(self, source: int, incarnation: int, message: Message) -> None:
        if self.router.take(source, incarnation, message):
            services = {
                ENTRY: self.entry,
                AGREEMENT: self.agreement,
                HAD: self.result_cache,
                RESULT: self.result_transfer,
            }
            services[message.name.partition(" ")[0]].serve(source, message)
        self.router.admit_pending()


def as_plan(result: torch.Tensor) -> Plan:
    admitted, *departed = result.tolist()
    return Plan(tuple(departed), admitted)


def joined(parts: dict[int, Any], operation: Operation) -> tuple[dict[int, JoiningPeer], dict[str, int]]:
    """As ``ops/state_transfer.py`` joins what all say."""
    result: dict[int, JoiningPeer] = {}
    started: dict[str, int] = {}
    for asking, counts in parts.values():
        for rank, one in asking.items():
            known = result.get(rank)
            if rank in operation.excluded_ranks and (known is None or known.place.incarnation < one.place.incarnation):
                result[rank] = one
        for name, count in counts.items():
            started[name] = max(count, started.get(name, 0))
    return result, started


class Chances(NamedTuple):
    """The cumulative chances of the events of a step; the kinds of rounds; the range of sizes; the number of steps."""

    deliver: float
    notice: float
    lose: float
    miss: float
    come_back: float
    begun: tuple[str, ...]
    sizes: tuple[int, int]
    steps: int


ALL_KINDS = Chances(0.4, 0.45, 0.47, 0.49, 0.51, ("a", ALL, SMALL, SMALL, SMALL, ROOTED), (3, 6), 400)
BROADCASTS = Chances(0.25, 0.45, 0.47, 0.475, 0.5, (ROOTED,), (5, 8), 150)
"""With few reports in time, so that some agents agree on a loss while others notice the next one; and with few steps,
so that the agents that agreed first are still there at the end."""


class Net:
    def __init__(self, size: int, begins: int | None = None) -> None:
        self.size, self.begins, self.handed_on = size, begins or size, 0
        self.links: dict[Link, deque[Message]] = {}
        self.contributed: defaultdict[tuple[str, int, Plan], dict[int, Any]] = defaultdict(dict)
        self.present: defaultdict[tuple[str, int, Plan], set[int]] = defaultdict(set)
        self.have: defaultdict[tuple[str, int, Plan], set[int]] = defaultdict(set)
        self.running = {rank: Simulated(rank, self) for rank in range(self.begins)}
        # By rank and incarnation; whether they died, or left. Who has not come yet is as who died before it began.
        self.dead: dict[tuple[int, int], bool] = {(rank, 0): True for rank in range(self.begins, size)}
        self.starts: Counter[int] = Counter()

    @property
    def inside(self) -> list[Simulated]:
        return [value for value in self.running.values() if not value.entry.is_joining]

    def put(self, link: Link, message: Message) -> None:
        self.links.setdefault(link, deque()).append(message)

    @property
    def waiting(self) -> list[Link]:
        """The links with undelivered notices."""
        running = {(value.rank, value.incarnation) for value in self.running.values()}
        return [link for link, queue in self.links.items() if queue and (link.to, link.incarnation) in running]

    def deliver(self, link: Link) -> None:
        self.running[link.to].receive(link.source, link.source_incarnation, self.links[link].popleft())

    def notices(self, rank: int, dead: int, incarnation: int = 0) -> None:
        one = self.running[rank]
        if not one.entry.is_joining and one.router.places[dead].incarnation == incarnation:
            one.notice(Departure(dead, "gone", self.dead[dead, incarnation], rank))

    def lose(self, rank: int, died: bool = True) -> None:
        self.dead[rank, self.running[rank].incarnation] = died
        del self.running[rank]

    def come_back(self, rank: int) -> None:
        self.starts[rank] += 1
        one = self.running[rank] = Simulated(rank, self, self.starts[rank])
        one.request_admission()

    def step(self, draw: random.Random, returns: bool, chances: Chances) -> None:
        waiting = self.waiting
        what = draw.random()
        one = draw.choice(list(self.running.values()))
        if what < chances.deliver and waiting:
            self.deliver(draw.choice(waiting))
        elif what < chances.notice and self.dead:
            self.notices(one.rank, *draw.choice(list(self.dead)))
        elif what < chances.lose and len(self.inside) > 2:
            self.lose(one.rank, died=draw.random() < 0.7)
        elif what < chances.miss:
            one.miss_departed_ranks()
        elif what < chances.come_back and returns and len(self.running) < self.size:
            self.come_back(draw.choice([rank for rank in range(self.size) if rank not in self.running]))
        elif one.entry.is_joining or one.lifecycle.gate.paused:
            pass
        elif what < 0.7:
            one.begin(draw.choice([*chances.begun, *([IN] if returns else [])]))
        else:
            one.advance()

    def finish(self, draw: random.Random) -> None:
        """Notice all losses, deliver all notices, and let each agent that is behind make the calls of the others."""
        for _ in range(30):
            for rank in self.running:
                for dead in self.dead:
                    self.notices(rank, *dead)
            draw.choice(self.inside).miss_departed_ranks()
            while waiting := self.waiting:
                self.deliver(waiting[0])
            for name in ("a", *COLLECTIVE):
                most = max(one.matcher.rounds_begun(name) for one in self.inside)
                for one in self.inside:
                    for _ in range(most - one.matcher.rounds_begun(name)):
                        if not one.lifecycle.gate.paused:
                            one.begin(name)
            for one in self.inside:
                one.advance()
                one.router.admit_pending()  # the driving thread checks the clock
            if self.asking:
                for one in self.inside:
                    if not one.lifecycle.gate.paused:
                        one.begin(IN)

    @property
    def asking(self) -> list[int]:
        """The agents that wait, and of which a member knows."""
        joining = [one for one in self.running.values() if one.entry.is_joining]
        known = {of for one in self.inside for of in one.router.waiting}
        return [one.rank for one in joining if (one.rank, one.incarnation) in known]


def check(net: Net) -> None:
    left = net.inside
    first = left[0]
    assert not net.asking
    for one in left:
        assert not one.lifecycle.gate.paused and one.agreement.plan == first.agreement.plan
        assert set(one.agreement.alive) == {other.rank for other in left}
        assert not one.matcher.in_flight()
        assert one.matcher.all_begun() == first.matcher.all_begun()
    ended: dict[tuple[str, int], object] = {}
    planned: dict[int, Plan] = {}
    for one in left:
        one.result_cache.confirm()
    for link in net.waiting:
        net.deliver(link)
    for one in left:
        assert not one.result_cache.results and not one.result_cache._ahead
        for key, result in one.ended.items():
            assert ended.setdefault(key, result) == result
        for number, plan in one.planned.items():
            assert planned.setdefault(number, plan) == plan
        for number, partners in one.partners.items():
            for place, takes_part in partners.items():
                other = net.running.get(place.rank)
                if other is not None and other.incarnation == place.incarnation:
                    assert (number in other.planned) == takes_part


@pytest.mark.parametrize("how", ["lost", "lost, broadcasts", "lost and back", "joined, lost and back"])
@pytest.mark.parametrize("first", [0, *(pytest.param(k, marks=pytest.mark.soak) for k in range(250, 2000, 250))])
def test_surviving_agents_plan_and_end_all_rounds_equally(
    first: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "TELL_AFTER", 3)
    failed = entered = handed_on = 0
    returns = "back" in how
    chances = BROADCASTS if how.endswith("broadcasts") else ALL_KINDS
    for seed in range(first, first + 250):
        draw = random.Random(seed)
        size = draw.randint(*chances.sizes)
        net = Net(size, draw.randint(1, size) if how.startswith("joined") else size)
        for _ in range(600 if returns else chances.steps):
            net.step(draw, returns, chances)
        net.finish(draw)
        check(net)
        failed += len(net.dead)
        entered += net.inside[0].lifecycle.gate.plan.n_admitted
        handed_on += net.handed_on
    assert failed > 250 and (handed_on > 10 or chances is BROADCASTS)
    assert entered > 150 or not returns


def test_an_agent_that_missed_an_agreement_plans_its_rounds_like_the_others() -> None:
    net = Net(4)
    first, second = net.running[0], net.running[1]
    net.lose(3)
    for rank in (0, 1, 2):
        net.notices(rank, 3)
    for source, to in ((1, 0), (2, 0)):
        net.deliver(Link(source, 0, to, 0))
    assert first.agreement.gone == (3,) and second.lifecycle.gate.paused
    first.begin("a")
    net.lose(2)
    net.notices(1, 2)  # before it has received the reports of 0 and 2 on the first
    net.notices(0, 2)
    net.finish(random.Random(0))
    assert first.agreement.gone == second.agreement.gone == (2, 3)
    assert first.planned == second.planned == {0: Plan((3,))}
    first.begin("a")
    assert first.planned[1] == Plan((2, 3))


def test_an_agent_that_was_admitted_after_a_round_had_begun_takes_no_part_in_it() -> None:
    net = Net(3)
    first, second = net.running[0], net.running[1]
    second.begin("a")
    net.lose(2)
    for rank in (0, 1):
        net.notices(rank, 2)
    net.come_back(2)
    while net.waiting:
        net.deliver(net.waiting[0])
    for one in (first, second):
        one.begin(IN)
    for _ in range(3):
        for one in (first, second):
            one.advance()
    assert first.agreement.plan == second.agreement.plan == Plan((), 1)
    first.begin("a")
    first.begin("a")
    assert first.planned == {0: Plan(), 1: Plan((), 1)}
    taking_part = [{place.rank for place, part in first.partners[k].items() if part} for k in (0, 1)]
    assert taking_part == [{0, 1}, {0, 1, 2}]


def test_an_agent_that_starts_again_while_it_is_admitted_is_admitted_once_more() -> None:
    net = Net(2)
    one = net.running[0]

    def notice_and_receive() -> None:
        for rank, incarnation in list(net.dead):
            net.notices(0, rank, incarnation)
        while net.waiting:
            net.deliver(net.waiting[0])

    net.lose(1)
    net.come_back(1)
    notice_and_receive()
    one.begin(IN)
    one.advance()  # it has read who asks
    net.lose(1)
    net.come_back(1)
    notice_and_receive()
    one.advance()  # it admits the first of the two
    one.advance()
    notice_and_receive()
    assert one.router.places[1].incarnation == 1 and one.agreement.plan == Plan((1,), 1)
    one.begin(IN)
    one.advance()
    one.advance()
    notice_and_receive()
    assert not net.running[1].entry.is_joining
    assert one.agreement.plan == net.running[1].agreement.plan == Plan((), 2)


def test_the_request_of_an_earlier_start_replaces_no_later_one() -> None:
    net = Net(2)
    net.lose(1)
    net.notices(0, 1)
    net.come_back(1)
    net.lose(1)
    net.come_back(1)
    net.deliver(Link(1, 2, 0, 0))
    net.deliver(Link(1, 1, 0, 0))
    assert [one.place.incarnation for one in net.running[0].entry.joining_peers().values()] == [2]


def link(opened_at: float) -> Outgoing:
    made = Outgoing.__new__(Outgoing)
    made._since = opened_at
    return made


def test_a_rejoined_agent_drops_its_remaining_join_requests() -> None:
    """Unreached agents may be another part, which would admit it too. Others know of it, and may admit it later."""
    net = Net(4)
    for rank in (1, 2, 3):
        net.lose(rank)
        net.notices(0, rank)
    inside = net.running[0]
    assert inside.agreement.gone == (1, 2, 3)
    net.come_back(3)
    joining_peer = net.running[3]
    joining_peer.router.links.update({0: link(1.0), 1: link(0.0), 2: link(1.0)})
    net.deliver(Link(3, 1, 0, 0))
    inside.begin(IN)
    inside.advance()
    inside.advance()
    net.deliver(Link(0, 0, 3, 1))
    assert joining_peer.agreement.alive == (0, 3)
    assert set(joining_peer.router.links) == {0, 2}


def test_results_of_two_attempts_are_not_mixed() -> None:
    net = Net(4)
    first, second = net.running[0], net.running[1]
    for value in net.running.values():
        value.begin(ALL)
    first.advance()
    second.advance()  # both have a result with rank 3; rank 2 has none
    net.lose(3)
    for rank in (0, 1, 2):
        net.notices(rank, 3)
    for source, to in ((1, 0), (2, 0)):
        net.deliver(Link(source, 0, to, 0))
    first.advance()  # as a root it has the result of the next attempt at once
    net.lose(2)
    net.notices(1, 2)  # which therefore never makes that attempt
    net.notices(0, 2)
    net.finish(random.Random(0))
    assert first.ended == second.ended == {(ALL, 0): Plan((2, 3))}


def test_a_broadcast_that_failed_on_one_agent_after_an_agreement_fails_on_all() -> None:
    net = Net(4)
    first, last = net.running[0], net.running[3]
    for rank in (0, ROOT, 3):
        net.running[rank].begin(ROOTED)
    first.advance()
    last.advance()  # both have the root's tensor; rank 2 has not begun the round
    net.lose(ROOT)
    for rank in (0, 2, 3):
        net.notices(rank, ROOT)
    for source in (0, 2):
        net.deliver(Link(source, 0, 3, 0))  # so rank 3 alone decides that the round restarts, without its root
    assert last.ended == {(ROOTED, 0): ROOT_IS_GONE}
    net.lose(2, died=False)
    for rank in (0, 3):
        net.notices(rank, 2)
        net.running[rank].miss_departed_ranks()
    net.finish(random.Random(0))
    assert first.ended == last.ended
    check(net)


def test_with_on_failure_raise_there_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agreement, "activate", lambda _: None)
    net = Net(3)
    net.lose(2)
    net.notices(0, 2)
    assert net.waiting
    while net.waiting:
        net.deliver(net.waiting[0])
    one = net.running[1]
    assert not one.agreement.active
    assert (one.lifecycle.gate.paused, one.membership.view.alive, one.agreement.gone) == (False, (0, 1, 2), ())


def test_a_report_lists_each_name_once_and_not_with_each_decision() -> None:
    """With a copy in each decision, the reports of a job with many names exceeded the limit of a message."""
    chance, begun, decisions = random.Random(1), dict[str, int](), list[Decision]()
    for number in range(MOST_DECISIONS):
        for _ in range(30):
            name = f"loss of step {chance.randrange(600)}"
            begun = {**begun, name: begun.get(name, 0) + 1}
        begun.pop(chance.choice(sorted(begun)))  # as in a decision of agents that had not begun it
        restarted = frozenset({(chance.choice(sorted(begun)), number)})
        decisions.append(Decision(Plan((number % 3,), number), begun, (1,) * (number % 2), restarted))
    own = {**begun, "another": 2}
    report = LossReport(Plan((1,), MOST_DECISIONS), own, {"x": {3: None}}, {"y": [4]}, decisions, frozenset({1}))
    text = json.dumps(report.as_data(View(0, (0,))))
    losses, parsed = parsed_report(json.loads(text), 4)
    assert parsed == report and losses == [(1, "it left", False)]
    assert text.count('loss of step 7"') + text.count("another") < 10 and len(text) < 4 * len(json.dumps(begun))


@pytest.mark.parametrize(
    "report",
    [
        "nonsense",
        "[]",
        '{"gone": []}',
        '{"gone": [[7, "", true, false]], "admitted": 0, "begun": {}, "open": {}, "kept": {}, "decisions": []}',
        '{"gone": [[1, "", 1, 0], [1, "", 1, 1]], "admitted": 0, "begun": {}, "open": {}, "kept": {}, "decisions": 1}',
        '{"gone": [], "admitted": "x", "begun": {}, "open": {}, "kept": {}, "decisions": []}',
        '{"gone": [], "admitted": Infinity, "begun": {}, "open": {}, "kept": {}, "decisions": []}',
        '{"gone": [], "admitted": 0, "begun": {}, "open": {}, "kept": {"a": ["x"]}, "decisions": []}',
        '{"gone": [], "admitted": 0, "begun": {"a": "x"}, "open": {}, "kept": {}, "decisions": []}',
        '{"gone": [], "admitted": 0, "begun": {}, "open": {"a": 1}, "kept": {}, "decisions": []}',
        '{"gone": [], "admitted": 0, "begun": {}, "open": {}, "kept": {}, "decisions": [[[2, 1], 0, {}, [], []]]}',
    ],
)
def test_an_invalid_failure_report_is_a_protocol_error(report: str) -> None:
    message = Message(Kind.CONTROL, AGREEMENT, AGREEMENT, nbytes=len(report), body=report.encode())
    with pytest.raises(ProtocolError, match="an invalid message about"):
        Net(4).running[0].receive(1, 0, message)
