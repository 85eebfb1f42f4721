"""One-sided windows: what each call leaves where, over every transport; nothing is lost and nothing is half."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch

import shoal
from shoal.windows.window_memory import WindowMemory
from support.leftovers import descriptors, wait_until
from support.limits import scaled

Fleets = Callable[..., shoal.Fleet]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)


def two_sources() -> nx.DiGraph:
    """Three agents, each with two in-neighbours."""
    return shoal.topology.FullyConnectedGraph(3)


def test_put_and_get_of_a_scalar_between_three_agents(fleet: Fleets) -> None:
    """The BlueFog paper's figure 4."""

    def run() -> tuple[float, float]:
        shoal.set_topology(two_sources())
        x = torch.tensor(float(shoal.rank()))
        shoal.bluefog.win_create(x, "x", zero_init=True)
        if shoal.rank() == 0:
            shoal.bluefog.win_put(torch.tensor(10.0), "x")
        shoal.barrier()
        put = shoal.bluefog.win_update("x", 0.0, dict.fromkeys(shoal.in_neighbor_ranks(), 1.0), clone=True).item()
        shoal.barrier()
        if shoal.rank() == 0:
            shoal.bluefog.win_get("x")
        got = shoal.bluefog.win_update("x", 0.0, dict.fromkeys(shoal.in_neighbor_ranks(), 1.0), clone=True).item()
        shoal.barrier()
        return put, got

    assert fleet(3).run(run) == [(0.0, 3.0), (10.0, 10.0), (10.0, 10.0)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [5, 70_000])
def test_put_accumulate_and_collect_in_every_dtype(fleet: Fleets, dtype: torch.dtype, numel: int, shared: bool) -> None:
    def run() -> list[float]:
        shoal.set_topology(shoal.topology.RingGraph(2))
        x = shoal.windows.empty(numel, dtype=dtype) if shared else torch.empty(numel, dtype=dtype)
        x.fill_(shoal.rank() + 1)
        shoal.bluefog.win_create(x, "x", zero_init=True)
        shoal.bluefog.win_put(x, "x")
        shoal.bluefog.win_accumulate(x, "x", dst_weights={1 - shoal.rank(): 3})
        shoal.barrier()
        result = shoal.bluefog.win_update_then_collect("x")
        assert result is x
        again = shoal.bluefog.win_update_then_collect("x")
        shoal.barrier()
        return [again[0].item(), again[-1].item()]

    assert fleet(2).run(run) == [[9, 9], [6, 6]]


def test_the_tensor_that_is_sent_changes_only_by_self_weight(fleet: Fleets) -> None:
    def run() -> list[float]:
        x, y = torch.ones(3), torch.full((3,), 2.0)
        shoal.bluefog.win_create(x, "x")
        shoal.bluefog.win_put(y, "x")
        before = y[0].item()
        shoal.bluefog.win_accumulate(y, "x", self_weight=0.25)
        shoal.barrier()
        return [before, y[0].item(), x[0].item()]

    assert fleet(2).run(run) == [[2.0, 0.5, 1.0]] * 2


def test_mass_is_conserved_over_thousands_of_interleaved_operations(fleet: Fleets) -> None:
    """Weights are dyadic, so the sums of values and of associated weights are exact."""
    size, rounds = 4, 300

    def run() -> tuple[float, float]:
        rank = shoal.rank()
        shoal.bluefog.turn_on_win_ops_with_associated_p()
        chance = random.Random(rank)
        x = torch.full((7,), float(rank + 1), dtype=torch.float64)
        shoal.bluefog.win_create(x, "x", zero_init=True)
        destinations = shoal.out_neighbor_ranks()
        for _ in range(rounds):
            if chance.random() < 0.6:
                shoal.bluefog.win_accumulate(
                    x, "x", self_weight=0.5, dst_weights=dict.fromkeys(destinations, 0.5 / len(destinations))
                )
            else:
                shoal.bluefog.win_update_then_collect("x", require_mutex=chance.random() < 0.3)
        shoal.barrier()
        shoal.bluefog.win_update_then_collect("x")
        shoal.barrier()
        return x[0].item(), shoal.bluefog.win_associated_p("x")

    results = fleet(size).run(run)
    assert sum(x for x, _ in results) == pytest.approx(10.0, abs=1e-12)
    assert sum(p for _, p in results) == pytest.approx(4.0, abs=1e-12)


def test_push_sum_reaches_the_mean_on_an_irregular_digraph(fleet: Fleets) -> None:
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 0)])

    def run() -> float:
        shoal.set_topology(graph)
        shoal.bluefog.turn_on_win_ops_with_associated_p()
        x = torch.tensor([float(shoal.rank())], dtype=torch.float64)
        shoal.bluefog.win_create(x, "x", zero_init=True)
        share = 1 / (len(shoal.out_neighbor_ranks()) + 1)
        for _ in range(60):
            for _ in range(1 + shoal.rank()):
                weights = dict.fromkeys(shoal.out_neighbor_ranks(), share)
                shoal.bluefog.win_accumulate(x, "x", self_weight=share, dst_weights=weights, require_mutex=True)
                shoal.bluefog.win_update_then_collect("x")
            shoal.barrier()
        shoal.bluefog.win_update_then_collect("x")
        estimate = x.item() / shoal.bluefog.win_associated_p("x")
        shoal.barrier()
        return estimate

    assert fleet(4).run(run) == pytest.approx([1.5] * 4, abs=1e-10)


def test_a_reader_sees_complete_writes_only(fleet: Fleets) -> None:
    stop = threading.Event()

    def run() -> bool:
        shoal.set_topology(shoal.topology.RingGraph(2))
        x = torch.zeros(50_000)
        shoal.bluefog.win_create(x, "x")
        full = True
        if shoal.rank() == 0:
            for i in range(60):
                shoal.bluefog.win_put(torch.full((50_000,), float(i)), "x")
            stop.set()
        else:
            while not stop.is_set():
                slot = shoal.bluefog.win_update("x", 0.0, {0: 1.0}, clone=True)
                full = full and slot.min().item() == slot.max().item()
        shoal.barrier()
        return full

    assert fleet(2).run(run) == [True, True]


def test_a_mutex_excludes_all_others_and_is_reentrant(fleet: Fleets) -> None:
    inside: list[int] = []

    def run() -> bool:
        shoal.bluefog.win_create(torch.zeros(1), "x")
        alone = True
        for _ in range(40):
            with (
                shoal.bluefog.win_mutex("x", for_self=shoal.rank() == 0, ranks=[0]),
                shoal.bluefog.win_mutex("x", for_self=shoal.rank() == 0, ranks=[0]),
            ):
                inside.append(shoal.rank())
                alone = alone and len(inside) == 1
                inside.pop()
        shoal.barrier()
        return alone

    assert all(fleet(3).run(run))


def test_versions_count_puts_and_gets_since_the_last_update(fleet: Fleets) -> None:
    def run() -> list[dict[int, int]]:
        shoal.set_topology(shoal.topology.RingGraph(2))
        shoal.bluefog.win_create(torch.zeros(2), "x")
        for _ in range(3):
            shoal.bluefog.win_put(torch.ones(2), "x")
        shoal.bluefog.win_accumulate(torch.ones(2), "x")
        shoal.barrier()
        shoal.bluefog.win_get("x")
        versions = [shoal.bluefog.get_win_version("x")]
        slot = shoal.bluefog.win_slots("x")[1 - shoal.rank()]
        assert (slot.puts, slot.gets, slot.accumulates) == (3, 1, 1)
        assert slot.age < 5
        shoal.bluefog.win_update("x")
        versions.append(shoal.bluefog.get_win_version("x"))
        shoal.barrier()
        return versions

    assert fleet(2).run(run) == [[{1: 4}, {1: 0}], [{0: 4}, {0: 0}]]


def test_invalid_calls_raise_and_send_nothing(fleet: Fleets) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(4, connect_style=2))
        rank = shoal.rank()
        assert shoal.bluefog.win_create(torch.zeros(2), "x")
        assert not shoal.bluefog.win_create(torch.zeros(2), "x")
        assert not shoal.set_topology(shoal.topology.RingGraph(4))
        with pytest.raises(KeyError, match="'y'"):
            shoal.bluefog.win_put(torch.zeros(2), "y")
        with pytest.raises(ValueError, match="shape"):
            shoal.bluefog.win_put(torch.zeros(3), "x")
        with pytest.raises(ValueError, match="float64"):
            shoal.bluefog.win_accumulate(torch.zeros(2, dtype=torch.float64), "x")
        with pytest.raises(ValueError, match="out-neighbours"):
            shoal.bluefog.win_put(torch.zeros(2), "x", dst_weights={(rank + 2) % 4: 1.0})
        with pytest.raises(ValueError, match="in-neighbours"):
            shoal.bluefog.win_update("x", 0.5, {(rank + 1) % 4: 0.5})
        with pytest.raises(ValueError, match="both"):
            shoal.bluefog.win_update("x", 0.5)
        with pytest.raises(ValueError, match="no handle"):
            shoal.bluefog.win_wait(True)  # type: ignore[arg-type]
        with pytest.raises(KeyError):
            shoal.bluefog.win_free("y")
        shoal.barrier()
        assert all(count == 0 for count in shoal.bluefog.get_win_version("x").values())
        assert shoal.bluefog.get_current_created_window_names() == ["x"]
        shoal.bluefog.win_free()
        assert shoal.bluefog.get_current_created_window_names() == []
        assert shoal.set_topology(shoal.topology.RingGraph(4))

    fleet(4).run(run)


def test_shapes_that_differ_are_detected_when_the_window_is_created(fleet: Fleets) -> None:
    def run() -> None:
        with pytest.raises(shoal.Mismatch, match="shape"):
            shoal.bluefog.win_create(torch.zeros(2 + shoal.rank()), "x")
        assert shoal.bluefog.get_current_created_window_names() == []

    fleet(2).run(run)


def test_writing_to_a_freed_window_is_an_error_at_the_writer(fleet: Fleets) -> None:
    def run() -> float:
        shoal.set_topology(shoal.topology.RingGraph(2))
        x = torch.ones(3)
        shoal.bluefog.win_create(x, "x")
        shoal.barrier()
        if shoal.rank() == 0:
            shoal.bluefog.win_free("x")
        shoal.barrier()
        if shoal.rank() == 1:
            with pytest.raises(shoal.Mismatch, match="freed") as caught:
                shoal.bluefog.win_put(x, "x")
            assert 0 in caught.value.ranks
            with pytest.raises(shoal.Mismatch, match="freed"):
                shoal.bluefog.win_get("x")
            shoal.bluefog.win_free("x")
        shoal.bluefog.win_create(x, "x")
        shoal.bluefog.win_put(x, "x")
        shoal.barrier()
        return shoal.bluefog.win_update("x", 0.0, {1 - shoal.rank(): 1.0})[0].item()

    assert fleet(2).run(run) == [1.0, 1.0]


def test_a_slot_that_stays_locked_raises_at_the_deadline_and_is_named(fleet: Fleets) -> None:
    def run() -> None:
        shoal.bluefog.win_create(torch.zeros(2), "x")
        if shoal.rank() == 0:
            with shoal.bluefog.win_mutex("x", for_self=True):
                shoal.barrier()
                shoal.barrier()
        else:
            shoal.barrier()
            with pytest.raises(shoal.DeadlineExceeded, match="'x'") as caught:
                shoal.bluefog.win_put(torch.ones(2), "x", require_mutex=True, timeout=0.2)
            assert caught.value.ranks == (0,)
            shoal.barrier()
        shoal.barrier()
        shoal.bluefog.win_put(torch.ones(2), "x", require_mutex=True)
        shoal.barrier()

    fleet(2).run(run)


def test_nonblocking_calls_take_effect_in_order(fleet: Fleets) -> None:
    def run() -> float:
        shoal.set_topology(shoal.topology.RingGraph(2))
        shoal.bluefog.win_create(torch.zeros(4), "x")
        tensors = [torch.full((4,), float(i)) for i in range(20)]
        handles = [shoal.bluefog.win_put_nonblocking(tensor, "x") for tensor in tensors]
        assert all(shoal.bluefog.win_wait(handle) for handle in handles)
        assert all(shoal.bluefog.win_poll(handle) for handle in handles)
        shoal.barrier()
        return shoal.bluefog.win_update("x", 0.0, {1 - shoal.rank(): 1.0})[0].item()

    assert fleet(2).run(run) == [19.0, 19.0]


def test_windows_created_and_freed_leave_nothing(fleet: Fleets) -> None:
    def run() -> None:
        early = 0
        for i in range(40):
            shoal.bluefog.win_create(torch.ones(100), f"x{i % 3}")
            shoal.bluefog.win_put(torch.ones(100), f"x{i % 3}")
            shoal.barrier()
            shoal.bluefog.win_free(f"x{i % 3}")
            shoal.barrier()
            if i == 9:
                early = len(descriptors())
        # The other agent may not know of the last one's end yet.
        assert wait_until(lambda: len(descriptors()) <= early)
        shoal.barrier()

    fleet(2).run(run)


def test_a_single_agent_has_windows_too() -> None:
    def run() -> float:
        x = torch.ones(2)
        assert shoal.bluefog.win_create(x, "x")
        shoal.bluefog.win_put(x, "x", self_weight=0.5)
        shoal.bluefog.win_get(x, "x")
        shoal.bluefog.win_update_then_collect("x")
        result = shoal.bluefog.win_update("x")[0].item()
        shoal.bluefog.win_free()
        return result

    assert shoal.Fleet(1).run(run) == [0.5]


def test_accumulates_of_any_shape_are_summed(fleet: Fleets) -> None:
    def run() -> list[torch.Tensor]:
        shoal.set_topology(shoal.topology.RingGraph(2))
        results = []
        for name, x in {"matrix": torch.arange(6.0).view(2, 3), "number": torch.tensor(2.0)}.items():
            shoal.bluefog.win_create(x.clone(), name, zero_init=True)
            for _ in range(3):
                shoal.bluefog.win_accumulate(x, name)
            shoal.barrier()
            results.append(shoal.bluefog.win_update_then_collect(name).clone())
        shoal.barrier()
        shoal.bluefog.win_free()
        return results

    for matrix, number in fleet(2).run(run):
        assert torch.equal(matrix, torch.arange(6.0).view(2, 3) * 4)
        assert number.item() == 8.0


def test_win_get_accepts_weights_and_mutex_by_position(fleet: Fleets) -> None:
    def run() -> float:
        shoal.set_topology(shoal.topology.RingGraph(2))
        x = torch.tensor(float(shoal.rank() + 1))
        shoal.bluefog.win_create(x, "x", zero_init=True)
        other = 1 - shoal.rank()
        shoal.barrier()
        shoal.bluefog.win_get("x", {other: 3.0}, True)
        first = shoal.bluefog.win_update("x", 0.0, {other: 1.0}, clone=True).item()
        shoal.bluefog.win_get("x", [other])
        assert shoal.bluefog.win_update("x", 0.0, {other: 1.0}, clone=True).item() == other + 1
        with pytest.raises(ValueError, match="src_weights is given twice"):
            shoal.bluefog.win_get("x", [other], [other])
        with pytest.raises(ValueError, match="the name is given twice"):
            shoal.bluefog.win_get("x", "x")
        shoal.barrier()
        shoal.bluefog.win_free("x")
        return first

    assert fleet(2).run(run) == [6.0, 3.0]


def test_a_put_after_the_read_of_an_update_counts_as_new(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it arrives before the update has returned."""
    combine = WindowMemory.combine
    between: dict[int, Callable[[], None]] = {}

    def slowly(self: WindowMemory, *args: Any, **options: Any) -> Any:
        result = combine(self, *args, **options)
        between.pop(shoal.rank(), lambda: None)()
        return result

    monkeypatch.setattr(WindowMemory, "combine", slowly)

    def run() -> int:
        shoal.set_topology(shoal.topology.RingGraph(2))
        x = torch.tensor(1.0)
        shoal.bluefog.win_create(x, "x")
        has_read, has_put = "has read", "has put"
        if shoal.rank() == 0:
            between[0] = lambda: (done[has_read].set(), done[has_put].wait(30))[0]
            shoal.bluefog.win_update("x")
        else:
            done[has_read].wait(30)
            shoal.bluefog.win_put(x, "x")
            done[has_put].set()
        shoal.barrier()
        version = shoal.bluefog.get_win_version("x")[1 - shoal.rank()]
        shoal.barrier()
        shoal.bluefog.win_free("x")
        return version

    done = {"has read": threading.Event(), "has put": threading.Event()}
    assert fleet(2).run(run)[0] == 1


def test_shutdown_does_not_wait_for_a_blocked_call(fleet: Fleets) -> None:
    """Ten seconds at most, of which half is for messages in flight."""
    over = threading.Event()

    def run() -> tuple[float, str]:
        shoal.bluefog.win_create(torch.zeros(4), "x")
        shoal.barrier()
        if shoal.rank() == 1:
            with shoal.bluefog.win_mutex("x", for_self=True):
                shoal.barrier()
                over.wait(30)
            return 0.0, ""
        shoal.barrier()
        waiting = [
            shoal.bluefog.win_put_nonblocking(torch.ones(4), "x", require_mutex=True, timeout=25) for _ in range(3)
        ]
        started = time.monotonic()
        shoal.shutdown()
        took = time.monotonic() - started
        over.set()
        printed = []
        for handle in waiting:
            with pytest.raises((shoal.NotInitialized, shoal.Mismatch)) as caught:
                handle.wait()
            printed.append(str(caught.value))
        return took, printed[-1]

    took, output = fleet(2).run(run)[0]
    assert took < scaled(12)
    assert "has shut down while" in output
