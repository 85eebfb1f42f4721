"""``on_loss="continue"``: agents that leave early, over every transport, and refused calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal import topology_util
from support.leftovers import wait_until
from support.survivors import check_averages, first_value

SIZE, FIRST = 4, 1
Fleets = Callable[..., shoal.Fleet]


@pytest.fixture(autouse=True)
def continue_on_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ON_LOSS", "continue")


def averages(last: int, calls_all: bool) -> tuple[list[float], tuple[int, ...]]:
    rank = shoal.rank()
    shoal.set_topology(topology_util.RingGraph(SIZE), is_weighted=True)
    shoal.barrier()
    x = torch.full((8,), first_value(rank), dtype=torch.float64)
    seen = [float(x[0])]
    for number in range(20):
        if rank == FIRST and number == last:
            shoal.shutdown()
            return seen, ()
        x = shoal.neighbor_allreduce(x, name="x")
        seen.append(float(x[0]))
        if calls_all:
            shoal.allreduce(x)
    members = shoal.allgather(torch.tensor([rank])).tolist()
    return seen, tuple(members)


@pytest.mark.parametrize("calls_all", [False, True])
@pytest.mark.parametrize("last", [1, 6])
def test_an_agent_that_leaves_early_is_excluded_from_then_on(fleet: Fleets, last: int, calls_all: bool) -> None:
    results = fleet(SIZE).run(averages, last, calls_all)
    left = {rank: seen for rank, (seen, _) in enumerate(results) if rank != FIRST}
    assert [alive for rank, (_, alive) in enumerate(results) if rank != FIRST] == [(0, 2, 3)] * 3
    # The round that it did not take part in, and what others had begun before they had agreed on that.
    assert 1 <= check_averages(left, SIZE, FIRST) <= 3


def until_it_has_departed() -> bool:
    """Whether this agent is a survivor; returns once all survivors know of the departure."""
    if shoal.rank() == FIRST:
        shoal.shutdown()
        return False
    while FIRST in shoal.allgather(torch.tensor([shoal.rank()])).tolist():
        pass
    return True


def saved(folder: Any) -> float | None:
    """Save a checkpoint of the survivors; returns the model's number in it."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 10.0 + shoal.rank())
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    if not until_it_has_departed():
        return None
    checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.save(folder, 7)
    return model.weight.item()


def loaded(folder: Any, start: Any) -> float:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    assert shoal.Checkpoint(model=model, optimizer=optimizer).load(folder, start=start) == 7
    model(torch.ones(1, 1)).sum().backward()
    result = model.weight.item()
    optimizer.step()
    return result


def test_a_checkpoint_of_the_survivors_loads_into_the_same_and_any_number(fleet: Fleets, tmp_path: Any) -> None:
    values = [one for one in fleet(SIZE).run(saved, tmp_path) if one is not None]
    assert len(values) == 3
    assert fleet(3).run(loaded, tmp_path, "own") == values
    assert fleet(5).run(loaded, tmp_path, "consensus") == [pytest.approx(sum(values) / 3)] * 5


def test_the_policy_is_the_same_for_all_and_validated(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> bool:
        with pytest.raises(ValueError, match="has begun otherwise; shut down first"):
            shoal.init(on_loss="raise")
        shoal.init(on_loss="continue")
        with pytest.raises(ValueError, match="it must be 'raise' or 'continue'"):
            shoal.init(on_loss="perhaps")
        return shoal.alive() == (0, 1)

    assert fleet(2).run(run) == [True, True]
    monkeypatch.setenv("SHOAL_ON_LOSS", "raise")

    def register_callback() -> None:
        with pytest.raises(ValueError, match="a loss ends this run"):
            shoal.on_membership_change(print)

    fleet(2).run(register_callback)
    monkeypatch.setenv("SHOAL_ON_LOSS", "perhaps")
    with pytest.raises(ValueError, match="SHOAL_ON_LOSS='perhaps': it must be 'raise' or 'continue'"):
        fleet(2).run(register_callback)


def test_an_exception_in_a_listener_ends_nothing(fleet: Fleets, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> tuple[int, ...]:
        seen: list[tuple[int, ...]] = []

        @shoal.on_membership_change
        def first(change: Any) -> None:
            raise RuntimeError("a fault of the caller's")

        @shoal.on_membership_change
        def second(change: Any) -> None:
            assert shoal.rank() in change.alive
            seen.append(change.lost)

        shoal.barrier()  # before that a change would find nobody to tell
        if shoal.rank() == FIRST:
            shoal.shutdown()
            return ()
        while FIRST in shoal.allgather(torch.tensor([shoal.rank()])).tolist():
            pass
        assert wait_until(lambda: bool(seen))
        shoal.barrier()
        return seen[0]

    assert fleet(3).run(run) == [(FIRST,), (), (FIRST,)]
    assert "a callback of" in caplog.text
