"""Unnamed calls over process groups are matched by their order, whatever order their headers arrive in."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.coordination.ordering import CollectiveOrdering
from shoal.coordination.request import ALL, CallSignature, PendingRequest, PendingRequests, RequestKey, TransferRequest
from shoal.execution.matching import Matcher
from shoal.execution.stage import Exchange, Stage
from shoal.runtime.agent import current
from shoal.transport.process_group import CollectivePlan
from support import PROCESS_GROUP
from support.leftovers import nothing_is_left, wait_until

SIZE = 3
LARGE = 40_000


@pytest.fixture
def fleet() -> Any:
    with nothing_is_left():
        yield partial(shoal.Fleet, transport=PROCESS_GROUP, timeout=20.0)


def pending(matcher: Matcher, number: int, requested: bool, name: str = "~allreduce") -> PendingRequest:
    """The next call under a name, in a stage whose tensors are to be moved."""
    operation = matcher.begin("allreduce", name, 10.0, False)
    operation.stage = stage = Stage(number, Exchange((), ()), set(), {}, to_move=True, transfer_requested=requested)
    request = TransferRequest(CallSignature(RequestKey(name, number, ALL), "allreduce"), operation.round)
    return PendingRequest(request, operation, stage, CollectivePlan((), [], []), [])


def test_a_request_is_held_while_an_earlier_call_may_still_request() -> None:
    matcher = Matcher()
    requests = PendingRequests(matcher)
    waits, asks, other = (
        pending(matcher, 0, False),
        pending(matcher, 0, True),
        pending(matcher, 0, True, "~broadcast"),
    )
    requests.add(asks)
    requests.add(other)
    requests.commit((0, 1, 2))
    assert (asks.committed, asks.held, other.committed) == (False, True, True)
    assert not requests.has_released()
    waits.stage.transfer_requested = True
    requests.add(waits)
    assert requests.has_released()
    assert [one.request.round for one in requests.known[asks.request.key]] == [0, 1]
    requests.commit((0, 1, 2))
    assert waits.committed
    assert asks.committed


@pytest.mark.parametrize("end", ["fails", "goes on", "waits for confirmations"])
def test_a_held_request_is_released_when_the_earlier_call_makes_none(end: str) -> None:
    matcher = Matcher()
    requests = PendingRequests(matcher)
    earlier, later = pending(matcher, 0, False), pending(matcher, 0, True)
    requests.add(later)
    requests.commit((0, 1))
    assert not requests.has_released()
    if end == "fails":
        matcher.end(earlier.operation, ValueError())
    elif end == "goes on":
        earlier.operation.stage = Stage(1, Exchange((), ()), set(), {})
    else:
        earlier.operation.stage, earlier.operation.outcome = None, (None,)
    assert requests.has_released()


# By real agents

CALLS: dict[str, Callable[[float], shoal.Handle[Any]]] = {
    "small": lambda x: shoal.nonblocking.allreduce(torch.full((3,), x), average=False),
    "large": lambda x: shoal.nonblocking.allreduce(torch.full((LARGE,), x), average=False),
    # No engine reduces these, so their headers are compared first, and they ask for their turn when these are here.
    "by owners": lambda x: shoal.nonblocking.allreduce(torch.full((LARGE,), complex(x)), average=False),
    "by owners, whole": lambda x: shoal.nonblocking.allreduce(torch.full((LARGE,), int(x)).short(), average=False),
    "average": lambda x: shoal.nonblocking.neighbor_allreduce(torch.full((3,), x)),
    "push": lambda x: shoal.nonblocking.neighbor_allreduce(
        torch.full((3,), x), 0.5, dst_weights=[(shoal.rank() + 1) % SIZE]
    ),
    "gather": lambda x: shoal.nonblocking.allgather(torch.full((1,), x)),
    "broadcast": lambda x: shoal.nonblocking.broadcast(torch.full((3,), x), 1),
}


def expected(kind: str, rank: int) -> float:
    """The first number of the result, where each agent gives its rank; of a fully connected topology."""
    result = {"average": (SIZE - 1) / 2, "push": 0.5 * rank + (rank - 1) % SIZE, "gather": 0.0, "broadcast": 1.0}
    return result.get(kind, SIZE * (SIZE - 1) / 2)


REFUSED: list[Callable[[], Any]] = [
    lambda: shoal.nonblocking.allreduce(torch.ones(3), op="mean"),
    lambda: shoal.nonblocking.allreduce(torch.ones(3), out=torch.ones(4)),
    lambda: shoal.nonblocking.allreduce(torch.ones(3), timeout=-1.0),
    lambda: shoal.nonblocking.allreduce(torch.ones(3), name="~mine"),
    lambda: shoal.nonblocking.allreduce([1.0]),  # type: ignore[arg-type]
    lambda: shoal.nonblocking.allreduce(torch.ones(3), group=[7]),
    lambda: shoal.nonblocking.neighbor_allreduce(torch.ones(3), 0.5),
    lambda: shoal.nonblocking.neighbor_allreduce(torch.ones(3), 0.5, {9: 1.0}, {}),
    lambda: shoal.nonblocking.allgather(torch.tensor(1.0)),
    lambda: shoal.nonblocking.broadcast(torch.ones(3), SIZE),
    lambda: shoal.pair_gossip(torch.ones(3), shoal.rank()),
]
"""Calls whose arguments are refused."""


def counted() -> tuple[Any, ...]:
    """All by which an agent numbers and remembers its calls."""
    engine = current().engine
    order = engine.backend
    assert isinstance(order, CollectiveOrdering)
    with engine.lock:
        remembered = order._cache.digest, len(order._pending.all()), order._changed, order._call
        return engine.matcher.all_begun(), [str(one) for one in engine.matcher.in_flight()], remembered


@pytest.mark.transport(PROCESS_GROUP)
def test_a_refused_call_shifts_no_numbers(fleet: Any) -> None:
    together = threading.Barrier(SIZE)

    def run() -> None:
        for kind in ("small", "average", "gather", "broadcast"):
            CALLS[kind](1.0).wait()
        wait_until(lambda: not current().engine.matcher.in_flight())
        together.wait(30)
        if shoal.rank() == 1:
            before = counted()
            for call in REFUSED:
                with pytest.raises((TypeError, ValueError)):
                    call()
                assert counted() == before
        together.wait(30)
        rank = shoal.rank()
        for kind in CALLS:
            assert CALLS[kind](float(rank)).wait().reshape(-1)[0].item() == expected(kind, rank), kind

    fleet(SIZE).run(run)


@pytest.mark.transport(PROCESS_GROUP)
def test_an_immediate_request_does_not_overtake_an_earlier_call_that_waits_for_headers(fleet: Any) -> None:
    def run() -> list[float]:
        if shoal.rank() == 2:
            time.sleep(0.3)  # the others have begun a round, in which only the second call can ask
        handles = [CALLS[kind](float(shoal.rank())) for kind in ("by owners", "small")]
        return [handle.wait()[0].real.item() for handle in handles]

    assert fleet(SIZE).run(run) == [[3.0, 3.0]] * SIZE


def go_through(seeds: list[int]) -> None:
    def run() -> None:
        rank = shoal.rank()
        shoal.set_topology(shoal.topology.FullyConnectedGraph(SIZE))
        for seed in seeds:
            common, own = random.Random(seed), random.Random(f"{seed} {rank}")
            handles = []
            for kind in common.choices([*CALLS], k=6):
                if common.randrange(SIZE) == rank:
                    with pytest.raises((TypeError, ValueError)):
                        own.choice(REFUSED)()
                if own.random() < 0.5:
                    time.sleep(own.random() * 2e-3)
                handles.append((kind, CALLS[kind](float(rank))))
            for kind, handle in own.sample(handles, len(handles)):
                assert handle.wait().reshape(-1)[0].real.item() == expected(kind, rank), kind

    shoal.Fleet(SIZE, transport=PROCESS_GROUP, timeout=20.0).run(run)


@pytest.mark.slow
@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=5))
@settings(max_examples=25)
@pytest.mark.transport(PROCESS_GROUP)
def test_random_programs_of_unnamed_calls_complete(seeds: list[int]) -> None:
    go_through(seeds)


@pytest.mark.soak
@pytest.mark.transport(PROCESS_GROUP)
@pytest.mark.parametrize("part", range(4))
def test_a_thousand_random_programs_of_unnamed_calls_complete(part: int) -> None:
    for first in range(0, 250, 10):
        go_through([1000 * part + first + number for number in range(10)])
