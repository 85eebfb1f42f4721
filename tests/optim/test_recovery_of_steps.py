"""States and steps after an error, a change by the script, or with another number of agents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal import algorithms
from shoal.compression import Cast, MinMaxUInt8, TopK

Fleets = Callable[..., shoal.Fleet]
TARGET = torch.arange(1.0, 9.0)


class Weights(torch.nn.Module):
    """A model that is a vector."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(numel))

    def forward(self) -> torch.Tensor:
        return self.w * 1.0


def model_of(numel: int = 8) -> Weights:
    return Weights(numel)


def step(model: Weights, optimizer: Any, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    ((model() - TARGET[: len(model.w)]).square().sum() * scale).backward()
    optimizer.step()


def machines(algorithm: algorithms.Algorithm, model: Weights) -> shoal.DecentralizedOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    between = shoal.optim.CommunicationType.hierarchical_neighbor_allreduce
    ring = shoal.topology.RingGraph(2)
    return shoal.DecentralizedOptimizer(sgd, model, algorithm, topology=ring, communication_type=between)


def relay(algorithm: algorithms.Algorithm, model: Weights) -> shoal.DecentralizedOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    chain = shoal.topology.ChainGraph(shoal.size())
    return shoal.DecentralizedOptimizer(sgd, model, algorithm, topology=chain)


def compressed(algorithm: algorithms.Algorithm, model: Weights) -> shoal.DecentralizedOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return shoal.DecentralizedOptimizer(sgd, model, algorithm, compression=TopK(0.3))


@pytest.mark.parametrize(
    ("make", "algorithm", "numel"),
    [
        (machines, algorithms.ExactDiffusion(1.0, lazy=True), 8),
        (relay, algorithms.RelaySum(1.0), 8),
        (compressed, algorithms.ParallelGradientDescent(1.0), 7),
    ],
    ids=["machines", "relay", "compressed"],
)
def test_a_start_at_the_mean_drops_the_memory_that_has_none(
    tmp_path: Path, make: Callable[..., Any], algorithm: algorithms.Algorithm, numel: int
) -> None:
    def train() -> None:
        model = model_of(numel)
        optimizer = make(algorithm, model)
        for _ in range(60):
            step(model, optimizer)
        shoal.Checkpoint(model=model, optimizer=optimizer).save(tmp_path, 60)

    def resume() -> float:
        model = model_of(numel)
        optimizer = make(algorithm, model)
        shoal.Checkpoint(model=model, optimizer=optimizer).load(tmp_path, start="consensus")
        step(model, optimizer)
        distance: float = (model.w - TARGET[:numel]).abs().max().item()
        return distance

    shoal.Fleet(4, agents_per_machine=2).run(train)
    assert max(shoal.Fleet(4, agents_per_machine=2).run(resume)) < 0.2


@pytest.mark.parametrize("what", ["state_dict", "close", "unregister_window"])
@pytest.mark.parametrize("make", ["DistributedPushSumOptimizer", "DistributedADPSGDOptimizer"])
def test_parameters_that_the_script_has_set_stay(make: str, what: str) -> None:
    def run() -> list[float]:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = model_of(3)
        optimizer = getattr(shoal.optim, make)(torch.optim.SGD(model.parameters(), lr=0.01), model)
        with optimizer.join():
            for _ in range(3):
                step(model, optimizer)
        model.load_state_dict({"w": torch.full((3,), 7.0)})
        shoal.barrier()
        getattr(optimizer, what)()
        found: list[float] = model.w.tolist()
        shoal.barrier()
        return found

    for values in shoal.Fleet(2).run(run):
        assert values == pytest.approx([7.0] * 3, abs=1e-5)


def test_a_push_sum_checkpoint_has_the_model_of_its_masses(tmp_path: Path) -> None:
    """The save takes in what has arrived, and so changes the model."""

    def train() -> tuple[list[float], list[float]]:
        shoal.set_topology(shoal.topology.RingGraph(3))
        model, saved = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)  # two parameters: a state copies parts of a bucket
        optimizer = shoal.optim.DistributedPushSumOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for number in range(9 + 3 * (shoal.rank() == 0)):  # its last messages wait in the windows of the others
            optimizer.zero_grad()
            model(torch.ones(3) * (1 + shoal.rank())).sum().backward()
            optimizer.step()
            if number == 8:
                shoal.barrier()
        shoal.barrier()
        shoal.Checkpoint(model=model, optimizer=optimizer).save(tmp_path, 9)
        shoal.Checkpoint(model=saved).load(tmp_path)
        return model.weight[0].tolist(), saved.weight[0].tolist()

    for now, saved in shoal.Fleet(3).run(train):
        assert now == saved


@pytest.mark.parametrize("overlap", [None, "backward"])
def test_agents_meet_again_after_a_step_that_failed_on_one(monkeypatch: pytest.MonkeyPatch, overlap: Any) -> None:
    """A failed exchange counts on all: otherwise the agents would use edges of different rounds for good."""
    monkeypatch.setenv("SHOAL_CHECK_FINITE", "1")

    def run() -> list[str]:
        model = model_of()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        one_peer = shoal.topology.OnePeerExponential(4)
        optimizer = shoal.DecentralizedOptimizer(
            sgd, model, algorithms.QuasiGlobalMomentum(1.0, 0.9), topology=one_peer, overlap=overlap
        )
        outcomes = []
        for number in range(5):
            good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            try:
                step(model, optimizer, float("nan") if number == 1 and shoal.rank() == 0 else 1.0)
                outcomes.append("ok")
            except shoal.ShoalError as error:
                outcomes.append(type(error).__name__)
                model.load_state_dict(good)
        return outcomes

    outcomes = shoal.Fleet(4).run(run)
    assert outcomes[0][1] == "NotFinite"
    assert all(one[0] == "ok" and one[3:] == ["ok", "ok"] for one in outcomes), outcomes


def test_a_second_backward_pass_fails_one_step_only() -> None:
    def run() -> list[str]:
        model = model_of()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = shoal.DecentralizedOptimizer(sgd, model, overlap="backward", name="second")
        outcomes = []
        for number in range(5):
            optimizer.zero_grad()
            try:
                for _ in range(1 + (number == 1)):
                    (model() - TARGET).square().sum().backward()
                optimizer.step()
                outcomes.append("ok")
            except RuntimeError as error:
                outcomes.append(str(error)[:50])
        return outcomes

    for outcomes in shoal.Fleet(2).run(run):
        assert outcomes.count("ok") == 4, outcomes


def test_a_frozen_parameter_stays_after_the_warm_up_of_one_bit_adam() -> None:
    def run() -> float:
        model = model_of()
        adam = shoal.optim.OneBitAdam(model.parameters(), 0.1, warmup=2)
        optimizer = shoal.DecentralizedOptimizer(adam, model, algorithms.ParallelGradientDescent(1.0))
        for _ in range(3):
            step(model, optimizer)
        model.w.requires_grad_(False)
        before = model.w.clone()
        for _ in range(2):
            optimizer.zero_grad()
            adam.momenta_for_gradients()
            adam.step()
        moved: float = (model.w - before).abs().max().item()
        return moved

    assert shoal.Fleet(2).run(run) == [0.0, 0.0]


@pytest.mark.parametrize(
    "make", [lambda p: shoal.optim.OneBitAdam(p, warmup=1), lambda p: shoal.optim.AccumAdamW(p, accumulate=1)]
)
def test_complex_parameters_are_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="takes no complex parameters"):
        make([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))])


@pytest.mark.parametrize("compression", [MinMaxUInt8(), Cast(torch.bfloat16)])
def test_the_mean_of_large_finite_16_bit_gradients_is_finite(compression: Any) -> None:
    def run() -> float:
        model = model_of().half()
        optimizer = shoal.DecentralizedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model,
            algorithms.ParallelGradientDescent(1.0),
            compression=compression,
        )
        model.w.grad = torch.full_like(model.w, 20000.0)
        optimizer.step()
        return model.w[0].item()

    assert shoal.Fleet(4).run(run) == pytest.approx([-20000.0] * 4, rel=0.01)


def test_a_mask_is_no_shard(fleet: Fleets) -> None:
    def run() -> None:
        labels = torch.arange(12) % 2
        with pytest.raises(TypeError, match=r"mask\.nonzero\(\)"):
            shoal.data.AgentSampler(labels, shard=labels == shoal.rank())
        assert len(shoal.data.AgentSampler(labels, shard=(labels == shoal.rank()).nonzero().view(-1))) == 6

    fleet(2).run(run)


def test_a_gradscaler_goes_on_after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[float]:
        model = model_of(2)
        optimizer = plain(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(model().sum()).backward()
        with monkeypatch.context() as patch:
            patch.setattr(optimizer.optimizer, "step", fail)
            with pytest.raises(RuntimeError, match="broken"):
                scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scaler.scale(model().sum()).backward()
        scaler.step(optimizer)
        return model.w.tolist()

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    def plain(model: Weights) -> shoal.DecentralizedOptimizer:
        return shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)

    assert shoal.Fleet(1).run(run) == [[-0.5, -0.5]]


def test_the_memory_of_another_algorithm_is_refused() -> None:
    censored = algorithms.CensoredGradientDescent(1.0, 1.0, 0.9)  # its memory has the form of CHOCO-SGD's

    def make(model: Weights, algorithm: algorithms.Algorithm) -> shoal.DecentralizedOptimizer:
        return shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, algorithm)

    def run() -> None:
        model, other = model_of(), model_of()
        optimizer = make(model, algorithms.ChocoSGD(1.0, 0.5, TopK(0.5)))
        step(model, optimizer)
        loaded = make(other, censored)
        with pytest.raises(ValueError, match=r"memory of ChocoSGD, .* steps by CensoredGradientDescent"):
            loaded.load_state_dict(optimizer.state_dict())
        make(model_of(), algorithms.ChocoSGD(1.0, 0.25, TopK(0.5))).load_state_dict(optimizer.state_dict())

    shoal.Fleet(2).run(run)


@pytest.mark.parametrize("how", ["append", "wrapped"])
def test_parameters_put_into_a_group_past_the_optimizer_are_refused(how: str) -> None:
    def run() -> None:
        model = torch.nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(2)})
        model["b"].requires_grad_(False)
        sgd = torch.optim.SGD([model["a"]], lr=0.1)
        optimizer = shoal.DecentralizedOptimizer(sgd, torch.nn.ModuleList([model]))
        optimizer.step()
        model["b"].requires_grad_(True)
        if how == "append":
            optimizer.param_groups[0]["params"].append(model["b"])
        else:
            sgd.add_param_group({"params": [model["b"]]})
        with pytest.raises(RuntimeError, match="1 parameters that were put there past this optimizer"):
            optimizer.step()

    shoal.Fleet(2).run(run)


def test_one_bit_adam_alone_steps_with_its_own_gradients() -> None:
    def train(alone: bool) -> list[float]:
        model = model_of()
        adam = shoal.optim.OneBitAdam(model.parameters(), lr=0.1, warmup=2)
        averaging = algorithms.ParallelGradientDescent(1.0)
        optimizer: Any = adam
        if not alone:
            optimizer = shoal.DecentralizedOptimizer(adam, model, averaging, compression=TopK(0.3))
        for _ in range(5):
            step(model, optimizer)
        return model.w.tolist()

    [wrapped] = shoal.Fleet(1).run(train, False)
    assert wrapped == train(True)


def test_errors_of_messages_begin_anew_in_other_buckets() -> None:
    def make(bucket_bytes: int) -> tuple[torch.nn.Module, shoal.DecentralizedOptimizer]:
        model = torch.nn.Sequential(Weights(6), Weights(4))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        averaging = algorithms.ParallelGradientDescent(1.0)
        return model, shoal.DecentralizedOptimizer(
            sgd, model, averaging, compression=TopK(0.3), bucket_bytes=bucket_bytes
        )

    def train(model: torch.nn.Module, optimizer: shoal.DecentralizedOptimizer) -> list[float]:
        for number, param in enumerate(model.parameters()):
            param.grad = torch.arange(1.0, 1.0 + len(param)) * (number + 1 + shoal.rank())
        optimizer.step()
        return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()

    def run() -> tuple[list[float], list[float]]:
        model, optimizer = make(1000)
        train(model, optimizer)
        loaded, resumed = make(8)
        fresh, plain = make(8)
        for other in (loaded, fresh):
            other.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        plain.load_state_dict(optimizer.optimizer.state_dict())
        return train(loaded, resumed), train(fresh, plain)

    for resumed, fresh in shoal.Fleet(2).run(run):
        assert resumed == fresh
