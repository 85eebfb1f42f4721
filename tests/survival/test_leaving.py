"""``on_loss="continue"``: agents that leave early, over every transport, and what is refused."""

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
def go_on(monkeypatch: pytest.MonkeyPatch) -> None:
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
    there = shoal.allgather(torch.tensor([rank])).tolist()
    return seen, tuple(there)


@pytest.mark.parametrize("calls_all", [False, True])
@pytest.mark.parametrize("last", [1, 6])
def test_who_leaves_early_is_left_out_from_then_on(fleet: Fleets, last: int, calls_all: bool) -> None:
    found = fleet(SIZE).run(averages, last, calls_all)
    left = {rank: seen for rank, (seen, _) in enumerate(found) if rank != FIRST}
    assert [alive for rank, (_, alive) in enumerate(found) if rank != FIRST] == [(0, 2, 3)] * 3
    # The round that it did not take part in, and what others had begun before they had agreed on that.
    assert 1 <= check_averages(left, SIZE, FIRST) <= 3


def test_an_algorithm_with_memory_says_that_it_cannot_go_on(fleet: Fleets) -> None:
    def run() -> str:
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        shoal.set_topology(topology_util.RingGraph(SIZE), is_weighted=True)
        optimizer = shoal.DecentralizedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, shoal.algorithms.GradientTracking(0.1)
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            return loss

        try:
            for number in range(50):
                if shoal.rank() == FIRST and number == 3:
                    shoal.shutdown()
                    return "left"
                optimizer.step(closure)
        except shoal.PeerLost as error:
            return "stopped" if FIRST in error.ranks else str(error)
        return "went on"

    assert fleet(SIZE).run(run) == ["stopped", "left", "stopped", "stopped"]


def test_a_checkpoint_of_what_is_left_is_refused(fleet: Fleets, tmp_path: Any) -> None:
    def run() -> str:
        if shoal.rank() == FIRST:
            shoal.shutdown()
            return ""
        while FIRST in shoal.allgather(torch.tensor([shoal.rank()])).tolist():
            pass
        try:
            shoal.Checkpoint(model=torch.nn.Linear(1, 1)).save(tmp_path, 1)
        except shoal.PeerLost as error:
            shoal.barrier()
            return str(error)
        return "saved"

    expected = "Checkpoint.save: a checkpoint is of all 4 agents, and ranks (1,) are gone"
    assert fleet(SIZE).run(run) == [expected, "", expected, expected]


def test_the_policy_is_one_for_all_and_checked(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> bool:
        with pytest.raises(ValueError, match="has begun otherwise; shut down first"):
            shoal.init(on_loss="raise")
        shoal.init(on_loss="continue")
        with pytest.raises(ValueError, match="it must be 'raise' or 'continue'"):
            shoal.init(on_loss="perhaps")
        return shoal.alive() == (0, 1)

    assert fleet(2).run(run) == [True, True]
    monkeypatch.setenv("SHOAL_ON_LOSS", "raise")

    def otherwise() -> None:
        with pytest.raises(ValueError, match="a loss ends this run"):
            shoal.on_membership_change(print)

    fleet(2).run(otherwise)
    monkeypatch.setenv("SHOAL_ON_LOSS", "perhaps")
    with pytest.raises(ValueError, match="SHOAL_ON_LOSS='perhaps': it must be 'raise' or 'continue'"):
        fleet(2).run(otherwise)


def test_what_a_listener_raises_ends_nothing(fleet: Fleets, caplog: pytest.LogCaptureFixture) -> None:
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
