"""Agents that lose others in any order plan alike: many agreements, with a network and losses that are drawn."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch

from shoal.engine.agreement import WORD, Agreement, Ranks
from shoal.engine.callbacks import Callbacks
from shoal.engine.matching import Matcher
from shoal.engine.membership import Departure, Membership
from shoal.engine.operation import OnLoss, Operation, Recovery
from shoal.transport.wire import Kind, Message, Payload, ProtocolError


class Lifecycle:
    """As much of one as agreements and repairs use."""

    def __init__(self, one: Simulated) -> None:
        self.frozen = False
        self.gone: Ranks = ()
        self.ready: deque[Operation] = deque()
        self._one = one

    def survive(self, _: object) -> None: ...
    def leave_stage(self, _: Operation) -> None: ...
    def close_generator(self, _: Operation) -> None: ...
    def forget_before(self, _: Operation, __: int) -> None: ...

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self, gone: Ranks) -> None:
        self.frozen, self.gone = False, gone

    def make_ready(self, operation: Operation) -> None:
        self._one.attempts(operation)

    def settle(self, operation: Operation, result: object, _: object) -> None:
        self._one.end(operation, result)


class Fusion:
    def split_all(self) -> None: ...


class Simulated:
    """One agent: it begins rounds between neighbours, and of all. The result of all is the attempt that gave it."""

    def __init__(self, rank: int, net: Net) -> None:
        self.rank, self.net = rank, net
        self.matcher, self.membership = Matcher(), Membership(net.size)
        self.planned: list[Ranks] = []  # of each round between neighbours
        self.ended: dict[int, object] = {}  # the results of all
        lifecycle: Any = Lifecycle(self)
        fusion: Any = Fusion()
        self.lifecycle = lifecycle
        self.agreement = Agreement(
            rank,
            net.size,
            self.matcher,
            self.membership,
            lifecycle,
            fusion,
            Callbacks(),
            self._send,
            lambda *_: None,
            self.notice,
            lambda _: None,
        )
        self.agreement.activate()

    def _send(self, peer: int, what: Message, data: torch.Tensor) -> None:
        message = Message(what.kind, what.op, what.name, dtype=data.dtype, payload=Payload(data, data.numel()))
        self.net.links[self.rank, peer].append(message)

    def notice(self, departure: Departure) -> None:
        if self.membership.remove(departure.rank, departure.cause, departure.died):
            self.net.links[departure.rank, self.rank].clear()
            if departure.died or self.lifecycle.frozen:
                self.agreement.change()

    def misses_somebody(self) -> None:
        """A round needs an agent that has left, if there is one."""
        for rank in self.membership.view.left:
            self.agreement.missed(rank)
        self.agreement.check(0.0)

    def begin_a_round(self) -> None:
        operation = self.matcher.begin("average", "a", float("inf"), False)
        self.planned.append(self.agreement.plan("a", operation.round, OnLoss.GO_ON))
        self.matcher.end(operation, None)

    def begin_one_of_all(self) -> None:
        operation = self.matcher.begin("sum", "b", float("inf"), False)
        gone = self.agreement.plan("b", operation.round, OnLoss.RESTART)
        operation.recovery = Recovery(lambda _: iter(()), OnLoss.RESTART, gone)  # type: ignore[arg-type, return-value]
        self.attempts(operation)

    def attempts(self, operation: Operation) -> None:
        self.net.here.setdefault((operation.round, operation.gone), set()).add(self.rank)

    def go_on(self) -> None:
        """Take a result that all of an attempt have contributed to, or the first of them alone, as the root of a
        broadcast; end where all of them have it."""
        for operation in self.matcher.in_flight():
            key, recovery = (operation.round, operation.gone), operation.recovery
            assert recovery is not None
            group = set(range(self.net.size)) - set(operation.gone)
            if recovery.result is None and (self.net.here[key] >= group or self.rank == min(group)):
                recovery.keep(operation.gone)
                self.net.have.setdefault(key, set()).add(self.rank)
            elif recovery.result is not None and self.net.have[key] >= group:
                self.end(operation, recovery.result[0])

    def end(self, operation: Operation, result: object) -> None:
        self.ended[operation.round] = result
        self.matcher.end(operation, None)

    def hear(self, source: int, message: Message) -> None:
        self.agreement.serve(source, message)


class Net:
    def __init__(self, size: int) -> None:
        self.size = size
        self.links: dict[tuple[int, int], deque[Message]] = {
            (one, other): deque() for one in range(size) for other in range(size)
        }
        self.here: dict[tuple[int, Ranks], set[int]] = {}
        self.have: dict[tuple[int, Ranks], set[int]] = {}
        self.there = {rank: Simulated(rank, self) for rank in range(size)}
        self.dead: dict[int, bool] = {}  # and whether they died, or left

    def deliver(self, source: int, to: int) -> None:
        self.there[to].hear(source, self.links[source, to].popleft())

    def notices(self, rank: int, dead: int) -> None:
        self.there[rank].notice(Departure(dead, "gone", self.dead[dead], rank))

    def lose(self, rank: int, died: bool = True) -> None:
        self.dead[rank] = died
        del self.there[rank]

    def step(self, draw: random.Random) -> None:
        waiting = [(source, to) for (source, to), link in self.links.items() if link and to in self.there]
        what = draw.random()
        one = draw.choice(list(self.there.values()))
        if what < 0.4 and waiting:
            self.deliver(*draw.choice(waiting))
        elif what < 0.45 and self.dead:
            self.notices(one.rank, draw.choice(list(self.dead)))
        elif what < 0.47 and len(self.there) > 2:
            self.lose(one.rank, died=draw.random() < 0.7)
        elif what < 0.49:
            one.misses_somebody()
        elif what < 0.7 and not one.lifecycle.frozen:
            draw.choice([one.begin_a_round, one.begin_one_of_all])()
        elif not one.lifecycle.frozen:
            one.go_on()

    def finish(self, draw: random.Random) -> None:
        """All losses are noticed, all that was said is heard, and who is behind calls what the others have called."""
        for rank in self.there:
            for dead in self.dead:
                self.notices(rank, dead)
        draw.choice(list(self.there.values())).misses_somebody()
        while waiting := [(source, to) for (source, to), link in self.links.items() if link and to in self.there]:
            self.deliver(*waiting[0])
        most = max(one.matcher.begun("b") for one in self.there.values())
        for one in self.there.values():
            while one.matcher.begun("b") < most:
                one.begin_one_of_all()
        for _ in range(2):  # contribute, then end
            for one in self.there.values():
                one.go_on()


def check(net: Net) -> None:
    left = list(net.there.values())
    for one in left:
        assert not one.lifecycle.frozen and one.agreement.gone == tuple(sorted(net.dead))
        assert not one.matcher.in_flight()
        assert one.ended == left[0].ended
    for plans in zip(*(one.planned for one in left), strict=False):
        assert len(set(plans)) == 1, plans


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_agents_that_are_left_plan_and_end_all_rounds_alike(first: int) -> None:
    lost = 0
    for seed in range(first, first + 250):
        draw = random.Random(seed)
        net = Net(draw.randint(3, 6))
        for _ in range(400):
            net.step(draw)
        net.finish(draw)
        check(net)
        lost += len(net.dead)
    assert lost > 250


def test_who_missed_a_first_agreement_plans_its_rounds_like_those_who_had_it() -> None:
    net = Net(4)
    first, second = net.there[0], net.there[1]
    net.lose(3)
    for rank in (0, 1, 2):
        net.notices(rank, 3)
    for source, to in ((1, 0), (2, 0)):
        net.deliver(source, to)
    assert first.agreement.gone == (3,) and second.lifecycle.frozen
    first.begin_a_round()
    net.lose(2)
    net.notices(1, 2)  # before it has heard what 0 and 2 said of the first
    net.notices(0, 2)
    net.finish(random.Random(0))
    assert first.agreement.gone == second.agreement.gone == (2, 3)
    second.begin_a_round()
    assert first.planned == second.planned == [(3,)]
    first.begin_a_round()
    assert first.planned[1] == (2, 3)


def test_results_of_two_attempts_are_not_taken_for_one() -> None:
    net = Net(4)
    first, second = net.there[0], net.there[1]
    for one in net.there.values():
        one.begin_one_of_all()
    first.go_on()
    second.go_on()  # both have a result with rank 3; rank 2 has none
    net.lose(3)
    for rank in (0, 1, 2):
        net.notices(rank, 3)
    for source, to in ((1, 0), (2, 0)):
        net.deliver(source, to)
    first.go_on()  # as a root it has the result of the next attempt at once
    net.lose(2)
    net.notices(1, 2)  # which therefore never makes that attempt
    net.notices(0, 2)
    net.finish(random.Random(0))
    assert first.ended == second.ended == {0: (2, 3)}


@pytest.mark.parametrize(
    "said",
    [
        "nonsense",
        "[]",
        '{"gone": []}',
        '{"gone": [[7, "", true]], "begun": {}, "open": {}, "decisions": []}',
        '{"gone": [[1, "", true], [1, "", true]], "begun": {}, "open": {}, "decisions": []}',
        '{"gone": [], "begun": {"a": "x"}, "open": {}, "decisions": []}',
        '{"gone": [], "begun": {}, "open": {"a": 1}, "decisions": []}',
        '{"gone": [], "begun": {}, "open": {}, "decisions": [[[2, 1], {}]]}',
    ],
)
def test_nonsense_about_a_loss_is_a_protocol_error(said: str) -> None:
    data = torch.frombuffer(bytearray(said.encode()), dtype=torch.uint8)
    message = Message(Kind.DATA, WORD, WORD, dtype=torch.uint8, payload=Payload(data, data.numel()))
    with pytest.raises(ProtocolError, match="makes no sense"):
        Net(4).there[0].hear(1, message)
