"""The optimizers over windows: in step they are the equation, out of step they still agree, and no mass is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import networkx as nx
import pytest
import torch

import shoal
from shoal.windows.window_memory import EDGES
from support.optimizers import AWC, LR, MODEL, MOMENTUM, RING, SIZE, STEPS, batch, by_hand, flat

Fleets = Callable[..., shoal.Fleet]
Make = Callable[..., shoal.DecentralizedOptimizer]

IRREGULAR = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])


def train_in_step(make: Make, bucket_bytes: int) -> torch.Tensor:
    shoal.set_topology(shoal.topology.RingGraph(SIZE))
    model = deepcopy(MODEL)
    optimizer = make(torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM), model, bucket_bytes=bucket_bytes)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(shoal.rank(), step)).square().mean().backward()
        optimizer.synchronize()
        shoal.barrier()
        optimizer.step()
        shoal.barrier()
    optimizer.close()
    assert shoal.bluefog.get_current_created_window_names() == []
    return flat(model)


@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
@pytest.mark.parametrize("make", [shoal.optim.DistributedWinPutOptimizer, shoal.optim.DistributedPullGetOptimizer])
def test_synchronous_put_and_get_are_adapt_with_combine(fleet: Fleets, make: Make, bucket_bytes: int) -> None:
    results = torch.stack(fleet(SIZE).run(train_in_step, make, bucket_bytes))
    assert (results - by_hand(AWC, RING)).abs().max() < 1e-12


def test_push_sum_reaches_the_mean_over_a_directed_graph_asynchronously(fleet: Fleets) -> None:
    done = []

    def run() -> torch.Tensor:
        shoal.set_topology(IRREGULAR)
        model = deepcopy(MODEL)
        start = flat(model) + shoal.rank()
        torch.nn.utils.vector_to_parameters(start, model.parameters())
        optimizer = shoal.optim.DistributedPushSumOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        for step in range(2000):
            optimizer.step()
            if step == 150:
                done.append(shoal.rank())
            if len(done) == SIZE and step > 150:
                break
            time.sleep(0.0002 * shoal.rank())
        shoal.barrier()
        for _ in range(60):  # what is still on its way
            optimizer.step()
            shoal.barrier()
        optimizer.close()
        return flat(model)

    results = torch.stack(fleet(SIZE).run(run))
    assert (results - (flat(MODEL) + 1.5)).abs().max() < 1e-9


def test_push_sum_applies_the_full_gradient_step(fleet: Fleets) -> None:
    """Summed over agents, the biased parameters change by minus the sum of the steps."""

    def run() -> tuple[float, float]:
        shoal.set_topology(IRREGULAR)
        model = torch.nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(5.0)
        optimizer = shoal.optim.DistributedPushSumOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for _ in range(6):
            optimizer.zero_grad()
            (model.weight.sum() * (shoal.rank() + 1)).backward()
            optimizer.step()
            shoal.barrier()
        for _ in range(120):  # how near they are depends on which of the others' shares had come in each step
            optimizer.zero_grad()
            (model.weight.sum() * 0).backward()
            optimizer.step()
            shoal.barrier()
        results = model.weight.item()
        optimizer.close()
        return results, 5.0 - 6 * 2.5

    for result, expected in fleet(SIZE).run(run):
        assert result == pytest.approx(expected, abs=1e-9)


MAKES = (
    shoal.optim.DistributedWinPutOptimizer,
    shoal.optim.DistributedPullGetOptimizer,
    shoal.optim.DistributedPushSumOptimizer,
    shoal.optim.DistributedADPSGDOptimizer,
)


@pytest.mark.parametrize("make", MAKES)
def test_unregister_window_frees_the_windows_and_the_next_step_creates_them_again(fleet: Fleets, make: Make) -> None:
    """So the topology may change during training."""

    def run() -> torch.Tensor:
        assert shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        torch.nn.utils.vector_to_parameters(flat(model) + shoal.rank(), model.parameters())
        optimizer = make(torch.optim.SGD(model.parameters(), lr=0.0), model)
        optimizer.step()
        assert shoal.windows.names()
        before = flat(model)
        optimizer.unregister_window()
        assert shoal.windows.names() == []
        if make is not shoal.optim.DistributedADPSGDOptimizer:  # with which the others' averages are kept
            assert torch.equal(flat(model), before)
        assert shoal.set_topology(shoal.topology.FullyConnectedGraph(SIZE))
        for _ in range(40):
            optimizer.step()
            shoal.barrier()
        shoal.barrier()
        optimizer.unregister_window()
        optimizer.unregister_window()
        return flat(model)

    results = torch.stack(fleet(SIZE).run(run))
    assert (results - results.mean(0)).abs().max() < 1e-3


def test_recreated_windows_do_not_restore_a_state_loaded_before(fleet: Fleets) -> None:
    def run() -> float:
        model = torch.nn.Linear(1, 1, bias=False).double()
        optimizer = shoal.optim.DistributedPushSumOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        shoal.barrier()
        optimizer.unregister_window()
        with torch.no_grad():
            model.weight.fill_(7.0)
        for _ in range(5):
            optimizer.step()
            shoal.barrier()
        optimizer.close()
        return model.weight.item()

    assert fleet(2).run(run) == pytest.approx([7.0, 7.0])


def test_force_barrier_synchronizes_all_agents_before_each_step(fleet: Fleets) -> None:
    started: list[int] = []

    def run() -> list[int]:
        model = deepcopy(MODEL)
        optimizer = shoal.optim.DistributedWinPutOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        assert optimizer.force_barrier is False
        optimizer.step()
        optimizer.force_barrier = True
        seen = []
        for step in range(5):
            time.sleep(0.01 * shoal.rank())
            started.append(step)
            optimizer.step()
            seen.append(started.count(step))
        shoal.barrier()
        optimizer.close()
        return seen

    assert fleet(3).run(run) == [[3] * 5] * 3


def test_destinations_from_a_generator_hold_in_every_round_and_bucket(fleet: Fleets) -> None:
    def run() -> list[float]:
        model = torch.nn.ParameterList([torch.full((2,), float(shoal.rank())), torch.full((3,), float(shoal.rank()))])
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = shoal.optim.DistributedWinPutOptimizer(sgd, model, num_groups=2)
        optimizer.dst_weights = (rank for rank in [1 - shoal.rank()])
        optimizer.force_barrier = True
        for _ in range(3):
            optimizer.step()
        shoal.barrier()
        optimizer.close()
        return flat(model).tolist()

    for found in fleet(2).run(run):
        assert all(0.0 < one < 1.0 for one in found), found


def test_push_sum_refuses_shares_that_do_not_sum_to_one(fleet: Fleets) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = shoal.optim.DistributedPushSumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        optimizer.self_weight = 0.5
        optimizer.dst_weights = dict.fromkeys(shoal.out_neighbor_ranks(), 0.5)
        with pytest.raises(ValueError, match="must sum to 1"):
            optimizer.step()
        shoal.barrier()
        optimizer.close()

    fleet(SIZE).run(run)


def test_push_sum_keeps_its_associated_weights_while_the_script_switches_its_own_off(fleet: Fleets) -> None:
    def run() -> list[float]:
        shoal.set_topology(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]))
        model = torch.nn.Linear(3, 1, dtype=torch.float64)
        start = torch.full((4,), float(shoal.rank()), dtype=torch.float64)
        torch.nn.utils.vector_to_parameters(start, model.parameters())
        optimizer = shoal.optim.DistributedPushSumOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        optimizer.step()
        with shoal.windows.create(torch.ones(2), "own") as own:
            own.put(self_weight=0.5)
            shoal.barrier()
        assert own.p == 1.0  # the optimizer has not turned it on for windows of the script
        shoal.windows.turn_off_associated_p()
        for _ in range(100):
            optimizer.step()
            shoal.barrier()
        optimizer.close()
        return flat(model).tolist()

    for found in fleet(3).run(run):
        assert found == pytest.approx([1.0] * 4, abs=1e-9)


@pytest.mark.parametrize("failing", ["a transfer", "the start of one"])
def test_a_step_of_push_sum_that_fails_leaves_no_transfer_on_its_way(fleet: Fleets, failing: str) -> None:
    """A transfer multiplies u when it ends: if the next step has added to u before, that mass is lost."""

    class Failed:
        def wait(self) -> None:
            raise shoal.DeadlineExceeded("on purpose")

    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = torch.nn.Linear(3, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = shoal.optim.DistributedPushSumOptimizer(sgd, model, bucket_bytes=4, window_prefix="sum")
        exchange: Any = optimizer._bucket_exchange
        exchange.prepare()
        slow = "sum.1" if failing == "a transfer" else "sum.0"
        move, window = exchange._move, shoal.windows.named(slow)

        def move_one(bucket: Any, name: str) -> Any:
            if name == slow:
                return move(bucket, name)
            if failing == "a transfer":
                return Failed()
            raise shoal.DeadlineExceeded("on purpose")

        if shoal.rank():
            with window._part.memory.hold([EDGES], -1, time.monotonic() + 10.0):
                shoal.barrier()
                time.sleep(0.3)
        else:
            exchange._move = move_one
            shoal.barrier()
            with pytest.raises(shoal.DeadlineExceeded, match="on purpose"):
                optimizer.step()
            assert window.p == 0.5
            exchange._move = move
            optimizer.step()
        shoal.barrier()
        optimizer.close()

    fleet(2).run(run)


def test_a_state_saved_asynchronously_has_all_of_the_mass_and_the_run_resumes_from_it(fleet: Fleets) -> None:
    """Agents save after different numbers of steps, while messages are in flight."""

    def make(model: torch.nn.Module) -> shoal.DecentralizedOptimizer:
        return shoal.optim.DistributedPushSumOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)

    def run() -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        shoal.set_topology(IRREGULAR)
        model = deepcopy(MODEL)
        torch.nn.utils.vector_to_parameters(flat(model) + shoal.rank(), model.parameters())
        optimizer = make(model)
        for _ in range(1 + 3 * shoal.rank()):
            optimizer.step()
        saved = deepcopy((model.state_dict(), optimizer.state_dict()))
        went_on = []
        for other in (None, deepcopy(MODEL)):
            if other is not None:
                optimizer.close()
                model, optimizer = other, make(other)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                assert optimizer.rounds == 1 + 3 * shoal.rank()
            for _ in range(100):
                optimizer.step()
                shoal.barrier()
            went_on.append(flat(model))
        optimizer.close()
        return saved[1]["shoal"]["way"], *went_on

    results = fleet(SIZE).run(run)
    masses = [next(iter(way.values())) for way, _, _ in results]
    assert sum(mass["p"] for mass in masses) == pytest.approx(SIZE, abs=1e-12)
    total = torch.stack([mass["u"] for mass in masses]).sum(0)
    expected = flat(MODEL) + 1.5
    # A bucket begins with the last layer.
    sizes = [param.numel() for param in MODEL.parameters()]
    assert (torch.cat(total.split(sizes[::-1])[::-1]) / SIZE - expected).abs().max() < 1e-12
    for _, went_on, resumed in results:
        assert (went_on - expected).abs().max() < 1e-9
        assert (resumed - expected).abs().max() < 1e-9
