"""Events of a model and its optimizer around the steps: copies, conversions, removed parameters and departed agents."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.algorithms import ExactDiffusion, GradientDescent, Momentum
from shoal.optim.exchanges.window_exchange import PushSumExchange
from support.leftovers import wait_until
from support.optimizers import LR, MODEL, RING, SIZE, batch, flat, gradient

Fleets = Callable[..., shoal.Fleet]

ATC, AWC = (
    shoal.DecentralizedOptimizer,
    partial(shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)),
)
GRADIENTS = shoal.bluefog.DistributedGradientAllreduceOptimizer
PUT, PUSH_SUM = shoal.optim.DistributedWinPutOptimizer, shoal.optim.DistributedPushSumOptimizer
both_ways = pytest.mark.parametrize("make", [ATC, AWC], ids=["atc", "awc"])


def sgd(model: nn.Module, lr: float = LR) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    loss: Tensor = model(batch(shoal.rank(), step)).square().mean()
    return loss


def of_rank(model: nn.Module) -> nn.Module:
    """Every parameter is the rank."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(shoal.rank())
    return model


# Agents must have the same model


def test_another_memory_format_is_a_mismatch_that_names_the_parameter(fleet: Fleets) -> None:
    def run() -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 2))
        if shoal.rank() == 1:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with pytest.raises(
            shoal.Mismatch, match=r"0\.weight \[4, 3, 2, 2\] float32.* of strides.*contiguous\(\)"
        ) as caught:
            ATC(sgd(model), model).step()
        assert sorted(caught.value.ranks) == [0, 1]

    fleet(2).run(run)


def test_a_memory_format_that_changes_later_does_not_permute_elements(fleet: Fleets) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        model = nn.Sequential(nn.Conv2d(3, 4, 2))
        with torch.no_grad():
            model[0].weight.copy_(torch.arange(48.0).view(4, 3, 2, 2))
        optimizer = ATC(sgd(model, lr=0.0), model)
        optimizer.step()
        if shoal.rank() == 1:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer.step()
        return model[0].weight.detach().clone()

    for result in fleet(2).run(run):
        assert torch.equal(result, torch.arange(48.0).view(4, 3, 2, 2))


@pytest.mark.parametrize("overlap", [None, "backward"])
def test_averaged_gradients_require_equal_initial_models(fleet: Fleets, overlap: str | None) -> None:
    def run() -> bool:
        model = deepcopy(MODEL)
        with torch.no_grad():
            model[2].weight[0, 0] += shoal.rank()
        optimizer = GRADIENTS(sgd(model), model, overlap=overlap)
        with pytest.raises(shoal.Mismatch, match=r"differ in '2\.weight'.*broadcast_parameters"):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        optimizer.close()
        shoal.broadcast_parameters(model.state_dict(), root_rank=0)
        again = GRADIENTS(sgd(model), model, overlap=overlap)
        again.zero_grad()
        loss_of(model).backward()
        again.step()
        return bool(shoal.consensus_distance(model) == 0.0)

    assert fleet(2).run(run) == [True, True]


# Copies and conversions


@both_ways
def test_a_copy_of_the_model_does_not_drive_the_optimizer(fleet: Fleets, make: Any) -> None:
    def run() -> list[int]:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = deepcopy(MODEL)
        optimizer = make(sgd(model), model)
        teacher = deepcopy(model)
        rounds = []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(teacher, step).backward()
            rounds.append(optimizer.rounds)
            loss_of(model, step).backward()
            optimizer.step()
        return rounds

    assert fleet(2).run(run) == [[0, 1, 2]] * 2


def test_a_wrapped_model_can_be_saved_with_pickle(fleet: Fleets) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = deepcopy(MODEL)
        optimizer = AWC(sgd(model), model, num_steps_per_communication=2)
        loss_of(model).backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save(model, file)
        torch.save(list(model.parameters()), io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loss_of(loaded).backward()
        assert torch.equal(flat(loaded), flat(model))
        return flat(loaded)

    fleet(2).run(run)


@both_ways
def test_a_model_converted_between_steps_trains_on(fleet: Fleets, make: Any) -> None:
    def run() -> tuple[torch.dtype, Tensor]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        model = deepcopy(MODEL).float()
        optimizer = make(sgd(model, lr=0.0), model)
        model(batch(0, 0).float()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        of_rank(model.to(torch.float64))
        model(batch(0, 0)).sum().backward()
        optimizer.step()
        return model[0].weight.dtype, flat(model)

    for dtype, result in fleet(2).run(run):
        assert dtype is torch.float64 and (result == 0.5).all()


def test_a_consensus_model_may_be_converted_and_saved(fleet: Fleets) -> None:
    def run() -> Tensor:
        model = of_rank(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        model[1].running_mean.fill_(10.0 * shoal.rank())
        with shoal.consensus(model):
            half = model.half().state_dict()
            assert half["0.weight"].dtype is torch.float16 and (half["0.weight"] == 0.5).all()
        assert model[0].weight.dtype is torch.float32 and model[1].running_mean.dtype is torch.float32
        return torch.cat([flat(model), model[1].running_mean])

    for rank, result in enumerate(fleet(2).run(run)):
        assert torch.equal(result, torch.tensor([float(rank)] * 10 + [10.0 * rank] * 2))


def test_imaginary_parts_are_averaged(fleet: Fleets) -> None:
    def run() -> tuple[float, complex]:
        model = nn.Module()
        model.weight = nn.Parameter(torch.full((3,), 1j * shoal.rank(), dtype=torch.complex64))
        model.register_buffer("seen", torch.full((1,), 1j * shoal.rank(), dtype=torch.complex64))
        with shoal.consensus(model):
            return shoal.consensus_distance(deepcopy(model)), complex(model.get_buffer("seen").item())

    def imaginary_weight() -> float:
        model = nn.Module()
        model.weight = nn.Parameter(torch.full((3,), 1j * shoal.rank(), dtype=torch.complex64))
        return shoal.consensus_distance(model)

    assert fleet(2).run(run) == [(0.0, 0.5j)] * 2
    assert fleet(2).run(imaginary_weight) == pytest.approx([(3 * 0.25) ** 0.5] * 2)


# Parameters and optimizers that come and go


def test_unnamed_optimizers_do_not_confuse_models(fleet: Fleets) -> None:
    def run() -> tuple[Tensor, Tensor]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        models = [nn.Linear(3, 1), nn.Linear(3, 1)]
        optimizers = []
        for number, model in enumerate(models):
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(10.0 * number + shoal.rank())
            optimizers.append(AWC(sgd(model, lr=0.0), model))
            optimizers[-1].communication_type = shoal.optim.CommunicationType.empty
            optimizers[-1].step()
            optimizers[-1].communication_type = shoal.optim.CommunicationType.neighbor_allreduce
        for model in models[:: 1 if shoal.rank() else -1]:
            model(torch.ones(1, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return flat(models[0]), flat(models[1])

    for first, second in fleet(2).run(run):
        assert (first == 0.5).all() and (second == 10.5).all()


def test_two_optimizers_that_share_a_model_do_not_warn(fleet: Fleets) -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        optimizers = [ATC(sgd(part), model) for part in (model[0], model[2])]
        loss_of(model).backward()
        for optimizer in optimizers:
            optimizer.step()

    fleet(2).run(run)


def test_a_garbage_collected_optimizer_releases_its_parameters() -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        gc.disable()
        try:
            for _ in range(3):
                ATC(sgd(model), model)
        finally:
            gc.enable()

    shoal.Fleet(1).run(run)


@pytest.mark.parametrize("make", [ATC, AWC, PUT], ids=["atc", "awc", "put"])
def test_added_parameters_are_exchanged(fleet: Fleets, make: Any) -> None:
    def run() -> tuple[int, Tensor]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        model = deepcopy(MODEL)
        for param in model[2].parameters():
            param.requires_grad_(False)
        optimizer = make(torch.optim.SGD(model[0].parameters(), lr=0.0), model)
        loss_of(model).backward()
        optimizer.step()
        for param in model[2].parameters():
            param.requires_grad_(True)
        optimizer.add_param_group({"params": model[2].parameters()})
        of_rank(model)
        for step in range(2 if make is PUT else 1):
            loss_of(model, step).backward()
            optimizer.synchronize()
            shoal.barrier()
            optimizer.step()
            shoal.barrier()
        with pytest.raises(ValueError, match="another decentralized optimizer has the parameter"):
            ATC(sgd(model[2]), model)
        groups = len(optimizer.param_groups)
        with pytest.raises(ValueError, match="1 parameters that are not the model's"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert len(optimizer.param_groups) == groups
        optimizer.close()
        return groups, flat(model)

    for groups, result in fleet(2).run(run):
        assert groups == 2 and (result == 0.5).all()


def test_a_window_optimizer_whose_neighbour_left_can_be_closed(fleet: Fleets) -> None:
    both = threading.Barrier(2)

    def run() -> bool:
        shoal.set_topology(shoal.topology.RingGraph(3, connect_style=1))
        model = deepcopy(MODEL)
        optimizer = PUT(sgd(model), model)
        loss_of(model).backward()
        optimizer.step()
        shoal.barrier()
        if shoal.rank() == 2:
            shoal.shutdown()
            return True
        assert wait_until(lambda: 2 not in shoal.observability.membership().alive)
        for _ in range(2):
            with pytest.raises(shoal.PeerLost) if shoal.rank() == 0 else nullcontext():
                loss_of(model).backward()
                optimizer.step()
        both.wait(30)  # or the other one would be gone, too
        optimizer.close()
        return shoal.bluefog.get_current_created_window_names() == []

    assert fleet(3).run(run) == [True] * 3


@pytest.mark.parametrize("atc", [True, False], ids=["atc", "awc"])
def test_push_sum_counts_local_steps_in_either_order(fleet: Fleets, atc: bool) -> None:
    """With a gradient of ones everywhere, every step moves every agent equally, whatever its share is."""

    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(3))
        model = deepcopy(MODEL)
        algorithm = GradientDescent(1.0, atc=atc)
        optimizer = shoal.DecentralizedOptimizer(sgd(model), model, algorithm, bucket_exchange=PushSumExchange)
        for _ in range(4):
            optimizer.zero_grad()
            torch.stack([param.sum() for param in model.parameters()]).sum().backward()
            optimizer.step()
            shoal.barrier()
        optimizer.zero_grad()
        for _ in range(40):  # until they agree: before that their mean counts each alike, and their masses differ
            optimizer.step()
            shoal.barrier()
        optimizer.state_dict()  # nothing is under way any more
        optimizer.close()
        return flat(model) - flat(MODEL)

    moved = torch.stack(fleet(3).run(run))
    assert (moved + 4 * LR).abs().max() < 0.02 * LR


def test_parameter_changes_between_steps_are_kept_by_push_sum(fleet: Fleets) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(3, connect_style=1))
        model = of_rank(deepcopy(MODEL))
        optimizer = PUSH_SUM(sgd(model, lr=0.0), model)
        for _ in range(5):
            optimizer.step()
        optimizer.state_dict()  # nothing is under way any more
        for param in model.parameters():
            param.data.fill_(7.0)
        for _ in range(60):
            optimizer.step()
            shoal.barrier()
        optimizer.close()
        return flat(model)

    assert (torch.stack(fleet(3).run(run)) - 7).abs().max() < 1e-9


# State


def test_another_runs_state_is_refused_with_the_remedy(fleet: Fleets) -> None:
    def save() -> dict[str, Any]:
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model), model)
        optimizer.step()
        return optimizer.state_dict()

    states = fleet(3).run(save)

    def load() -> None:
        model = deepcopy(MODEL)
        with pytest.raises(ValueError, match=r"of agent 1 of 3, and this is agent [01] of 2.*start='consensus'"):
            ATC(sgd(model), model).load_state_dict(states[1])

    fleet(2).run(load)


def test_a_state_saved_before_the_first_step_starts_fresh(fleet: Fleets) -> None:
    def run() -> bool:
        model = deepcopy(MODEL)
        optimizer = shoal.DecentralizedOptimizer(
            sgd(model), model, ExactDiffusion(1.0, lazy=True), topology=shoal.topology.RingGraph(SIZE)
        )
        start, ends = deepcopy((model.state_dict(), optimizer.state_dict())), []
        for _ in range(2):
            model.load_state_dict(start[0])
            optimizer.load_state_dict(start[1])
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
            ends.append(flat(model))
        return torch.equal(*ends)

    assert all(fleet(SIZE).run(run))


@pytest.mark.parametrize(
    "algorithm", [GradientDescent(0.5), Momentum(GradientDescent(1.0), 0.9)], ids=["half", "momentum"]
)
def test_an_algorithm_on_one_agent_is_itself(algorithm: Any) -> None:
    def run() -> Tensor:
        model = deepcopy(MODEL)
        optimizer = shoal.DecentralizedOptimizer(sgd(model), model, algorithm)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        return flat(model)

    x, v, lr, beta = flat(MODEL), torch.zeros(()), *((1.0, 0.9) if isinstance(algorithm, Momentum) else (0.5, 0.0))
    for step in range(2):
        v = beta * v + LR * gradient(deepcopy(MODEL), x, 0, step)
        x = x - lr * v
    (result,) = shoal.Fleet(1).run(run)
    assert (result - x).abs().max() < 1e-12


# Settings


def test_settings_that_windows_ignore_are_refused(fleet: Fleets) -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        optimizer = PUT(sgd(model), model)
        for name, value in (
            ("communication_type", shoal.optim.CommunicationType.allreduce),
            ("self_weight", 0.5),
            ("src_weights", {1 - shoal.rank(): 0.5}),
        ):
            with pytest.raises(ValueError, match=f"{name} would not count.* dst_weights"):
                setattr(optimizer, name, value)
        optimizer.dst_weights = {1 - shoal.rank(): 1.0}
        optimizer.communication_type = shoal.optim.CommunicationType.neighbor_allreduce

    fleet(2).run(run)


@pytest.mark.parametrize("kind", ["neighbors", "all", "machines"])
def test_bluefogs_older_names_adapt_with_combine(fleet: Fleets, kind: str) -> None:
    makes = {
        "neighbors": shoal.bluefog.DistributedNeighborAllreduceOptimizer,
        "all": shoal.bluefog.DistributedAllreduceOptimizer,
        "machines": shoal.bluefog.DistributedHierarchicalNeighborAllreduceOptimizer,
    }

    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        shoal.bluefog.set_machine_topology(shoal.topology.RingGraph(2, connect_style=1), is_weighted=True)
        model = deepcopy(MODEL)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(shoal.rank())
        optimizer = makes[kind](sgd(model), model)
        if kind == "machines":
            optimizer.self_weight = 0.25
            optimizer.src_machine_weights = optimizer.dst_machine_weights = {1 - shoal.bluefog.machine_rank(): 1.0}
            optimizer.src_machine_weights = {1 - shoal.bluefog.machine_rank(): 0.75}
        loss_of(model).backward()
        optimizer.step()
        return flat(model)

    inside = torch.eye(2, dtype=torch.float64).repeat_interleave(2, 0).repeat_interleave(2, 1) / 2
    between = torch.tensor([[0.25, 0.75], [0.75, 0.25]], dtype=torch.float64).repeat_interleave(2, 0)
    W = {
        "neighbors": RING,
        "all": torch.full((SIZE, SIZE), 1 / SIZE, dtype=torch.float64),
        "machines": (between.repeat_interleave(2, 1) / 2) @ (2 * inside) / 2,
    }[kind]
    x = flat(MODEL) + torch.arange(SIZE, dtype=torch.float64)[:, None]
    g = torch.stack([gradient(deepcopy(MODEL), x[rank], rank, 0) for rank in range(SIZE)])
    results = torch.stack(fleet(SIZE, agents_per_machine=2).run(run))
    assert (results - (W @ x - LR * g)).abs().max() < 1e-12


def test_without_the_check_a_push_stays_within_the_topology(fleet: Fleets) -> None:
    def run() -> str:
        shoal.set_topology(shoal.topology.RingGraph(SIZE, connect_style=1))
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model), model)
        optimizer.self_weight, optimizer.dst_weights = 0.5, {(shoal.rank() + 1) % SIZE: 0.5}
        optimizer.enable_topo_check = False
        with pytest.raises(ValueError) as caught:
            optimizer.step()
        return str(caught.value)

    for text in fleet(SIZE).run(run):
        assert "enable_topo_check=False" in text and "are no out-neighbours" in text


class Counting(torch.optim.SGD):
    """Keeps the number of its steps in its group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_overlap_is_refused_for_optimizers_that_count_steps_in_their_groups() -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        optimizer = ATC(Counting(model.parameters(), lr=LR), model, overlap="backward", bucket_bytes=1)
        with pytest.raises(ValueError, match="Counting counts its steps in its param_groups"):
            loss_of(model).backward()
            optimizer.step()

    shoal.Fleet(2).run(run)


def test_a_setting_changed_during_a_round_takes_effect_in_the_next(fleet: Fleets) -> None:
    """Some buckets were sent during the backward pass. A bucket without gradients is sent at the step."""

    def run() -> Tensor:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        model = of_rank(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
        optimizer = ATC(sgd(model, lr=0.0), model, overlap="backward", bucket_bytes=1)
        model(torch.ones(1, 3))
        model[1](torch.ones(1, 3)).sum().backward()
        with pytest.warns(UserWarning, match="holds from the next round on"):
            optimizer.communication_type = shoal.optim.CommunicationType.empty
        optimizer.step()
        return flat(model)

    for result in fleet(2).run(run):
        assert (result == 0.5).all()


def test_loops_that_cannot_be_joined_are_refused(fleet: Fleets) -> None:
    def run() -> None:
        models = [deepcopy(MODEL), deepcopy(MODEL)]
        first, second = (ATC(sgd(model), model) for model in models)
        with first.join():
            with pytest.raises(ValueError, match="inside another optimizer's join"):
                second.join().__enter__()
            with pytest.raises(ValueError, match="communication_type cannot be set for single rounds inside join"):
                first.communication_type = shoal.optim.CommunicationType.allreduce
            loss_of(models[0]).backward()
            first.step()
        first.communication_type = shoal.optim.CommunicationType.allreduce
        with second.join():
            pass

    fleet(2).run(run)
