"""A decentralized optimizer among all else that a training script does."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.engine.engine import Engine
from support.compiler import load_compiler
from support.optimizers import LR, MODEL, RING, SIZE, batch, flat, gradient

Fleets = Callable[..., shoal.Fleet]
Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]

ATC, AWC = (
    shoal.DecentralizedOptimizer,
    partial(shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)),
)
both_ways = pytest.mark.parametrize("make", [ATC, AWC], ids=["atc", "awc"])


class SignDescent(torch.optim.Optimizer):
    """From outside torch: its own step, and a state that is no tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
                    param.sub_(param.grad.sign(), alpha=group["lr"] / self.state[param]["steps"])


LOCAL: Optimizers = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "outside torch": lambda params: SignDescent(params, lr=0.01),
}


def sgd(model: nn.Module, lr: float = LR) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(batch(rank, step)).square().mean()
    return loss


def average(x: Tensor) -> Tensor:
    """Over the ring, of the rows."""
    return RING @ x


@pytest.mark.parametrize("name", LOCAL)
@both_ways
def test_any_local_optimizer_unmodified(fleet: Fleets, make: Any, name: str) -> None:
    """Equal to the same optimizer, with its state, on every row alone."""

    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = make(LOCAL[name](model.parameters()), model, mix_state=())
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, shoal.rank(), step).backward()
            optimizer.step()
        return flat(model)

    models = [deepcopy(MODEL) for _ in range(SIZE)]
    locals_ = [LOCAL[name](model.parameters()) for model in models]

    def combine() -> None:
        for model, row in zip(models, average(torch.stack([flat(model) for model in models])), strict=True):
            with torch.no_grad():
                nn.utils.vector_to_parameters(row, model.parameters())

    for step in range(4):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        if make is AWC:
            combine()
        for local in locals_:
            local.step()
        if make is ATC:
            combine()
    results = torch.stack(fleet(SIZE).run(run))
    assert (results - torch.stack([flat(model) for model in models])).abs().max() < 1e-12


def test_the_state_of_the_wrapped_optimizer_is_kept(fleet: Fleets) -> None:
    def run() -> bool:
        model = deepcopy(MODEL)
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        loss_of(model, 0, 0).backward()
        plain.step()
        before = deepcopy(plain.state_dict())
        optimizer = ATC(plain, model, mix_state=())
        kept = optimizer.state_dict()["state"]
        assert optimizer.optimizer is plain
        return all(torch.equal(kept[k]["exp_avg"], before["state"][k]["exp_avg"]) for k in before["state"])

    assert all(fleet(2).run(run))


def test_lbfgs_is_refused_with_the_reason() -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        with pytest.raises(ValueError, match="line search is about one agent's own loss"):
            ATC(torch.optim.LBFGS(model.parameters()), model)

    shoal.Fleet(1).run(run)


@both_ways
def test_all_accumulated_micro_batches_count(fleet: Fleets, make: Any) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = make(sgd(model), model, num_steps_per_communication=3)
        for micro in range(3):
            loss_of(model, shoal.rank(), micro).backward()
        optimizer.step()
        assert optimizer.rounds == 1
        return flat(model)

    model = deepcopy(MODEL)
    x = flat(model).repeat(SIZE, 1)
    g = torch.stack([sum(gradient(model, x[k], k, m) for m in range(3)) for k in range(SIZE)])  # type: ignore[misc]
    expected = average(x - LR * g) if make is ATC else average(x) - LR * g
    assert (torch.stack(fleet(SIZE).run(run)) - expected).abs().max() < 1e-12


def test_steps_between_communications_are_local(fleet: Fleets) -> None:
    def run() -> int:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model), model, num_steps_per_communication=2)
        for step in range(5):
            before = optimizer.rounds
            optimizer.zero_grad()
            loss_of(model, shoal.rank(), step).backward()
            optimizer.step()
            assert optimizer.rounds == before + step % 2
        return optimizer.rounds

    assert fleet(SIZE).run(run) == [2] * SIZE


def test_clipping_applies_to_the_local_gradients(fleet: Fleets) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model, lr=1.0), model, communication_type=shoal.optim.CommunicationType.empty)
        (1000 * loss_of(model, shoal.rank(), 0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return (flat(model) - flat(MODEL)).norm()

    assert torch.stack(fleet(SIZE).run(run)).numpy() == pytest.approx([0.5] * SIZE, abs=1e-4)


def test_schedulers_drive_the_learning_rate(fleet: Fleets) -> None:
    def run() -> list[float]:
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model), model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        results = []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, shoal.rank(), step).backward()
            optimizer.step()
            schedule.step()
            results.append(optimizer.param_groups[0]["lr"])
        return results

    assert fleet(2).run(run)[0] == [LR / 2, LR / 4, LR / 8]


@both_ways
def test_an_overflow_on_one_agent_skips_its_step_and_not_its_exchange(fleet: Fleets, make: Any) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = make(sgd(model), model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        loss = loss_of(model, shoal.rank(), 0) * (float("inf") if shoal.rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (4.0 if shoal.rank() == 1 else 8.0)
        return flat(model)

    model = deepcopy(MODEL)
    x = flat(model).repeat(SIZE, 1)
    g = torch.stack([gradient(model, x[k], k, 0) for k in range(SIZE)])
    g[1] = 0
    expected = average(x - LR * g) if make is ATC else average(x) - LR * g
    assert (torch.stack(fleet(SIZE).run(run)) - expected).abs().max() < 1e-12


def test_with_averaged_gradients_an_overflow_counts_as_zero_and_models_stay_equal(fleet: Fleets) -> None:
    def run() -> Tensor:
        model = deepcopy(MODEL)
        optimizer = shoal.bluefog.DistributedGradientAllreduceOptimizer(sgd(model), model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        loss = loss_of(model, shoal.rank(), 0) * (float("inf") if shoal.rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return flat(model)

    model = deepcopy(MODEL)
    x = flat(model)
    g = sum(gradient(model, x, k, 0) for k in (0, 2, 3)) / SIZE
    assert (torch.stack(fleet(SIZE).run(run)) - (x - LR * g)).abs().max() < 1e-12


@both_ways
def test_autocast_changes_only_the_forward_pass(fleet: Fleets, make: Any) -> None:
    """Parameters and the averaged values keep their dtype."""

    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL).float()
        optimizer = make(sgd(model), model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(batch(shoal.rank(), 0).float())
        assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()
        optimizer.step()
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        return flat(model).double()

    model = deepcopy(MODEL)
    x = flat(model).repeat(SIZE, 1)
    g = torch.stack([gradient(model, x[k], k, 0) for k in range(SIZE)])
    expected = average(x - LR * g) if make is ATC else average(x) - LR * g
    assert (torch.stack(fleet(SIZE).run(run)) - expected).abs().max() < 0.01  # eight bits of the gradients


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("make", [ATC, shoal.bluefog.DistributedGradientAllreduceOptimizer], ids=["atc", "gradients"])
def test_gradients_may_be_zeroed_or_set_to_none(fleet: Fleets, make: Any, set_to_none: bool) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = make(sgd(model), model)
        for step in range(3):
            loss_of(model, shoal.rank(), step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert all((param.grad is None) == set_to_none for param in model.parameters())
        return flat(model)

    model = deepcopy(MODEL)
    x = flat(model).repeat(SIZE, 1)
    for step in range(3):
        g = torch.stack([gradient(model, x[k], k, step) for k in range(SIZE)])
        x = average(x - LR * g) if make is ATC else x - LR * g.mean(0)
    assert (torch.stack(fleet(SIZE).run(run)) - x).abs().max() < 1e-12


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_scaler_without_overflow_changes_nothing(fleet: Fleets, unscaled: bool) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model), model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, shoal.rank(), step)).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return flat(model)

    def plain() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model), model)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, shoal.rank(), step).backward()
            optimizer.step()
        return flat(model)

    agents = fleet(SIZE)
    assert (torch.stack(agents.run(run)) - torch.stack(agents.run(plain))).abs().max() < 1e-12


class MixedParameters(nn.Module):
    """Parameters of several kinds: one beside children, a shared one, an unused one, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.first = nn.Linear(5, 5).double()
        self.second = nn.Linear(5, 5).double()
        self.second.weight = self.first.weight
        self.unused = nn.Linear(2, 2).double()
        self.paused = nn.Linear(5, 5).double().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.paused(self.second(self.first(x * self.scale)))
        return y


AWKWARD = MixedParameters()


@both_ways
def test_unusual_parameters_are_averaged(fleet: Fleets, make: Any) -> None:
    def run() -> tuple[Tensor, Tensor]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(SIZE))
        model = deepcopy(AWKWARD)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(shoal.rank())
        start = flat(model)
        optimizer = make(sgd(model, lr=0.0), model)
        model(batch(shoal.rank(), 0)).square().mean().backward()
        optimizer.step()
        model.paused.requires_grad_(True)
        model(batch(shoal.rank(), 0)).square().mean().backward()
        optimizer.step()
        assert model.second.weight is model.first.weight
        return start, flat(model)

    starts, ends = zip(*fleet(SIZE).run(run), strict=True)
    assert (torch.stack(ends) - torch.stack(starts).mean(0)).abs().max() < 1e-12


def test_a_root_module_that_is_a_leaf(fleet: Fleets) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        model = nn.Linear(5, 1).double()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(shoal.rank())
        optimizer = AWC(sgd(model, lr=0.0), model)
        model(batch(0, 0)).sum().backward()
        optimizer.step()
        return flat(model)

    assert torch.equal(torch.stack(fleet(2).run(run)), torch.full((2, 6), 0.5, dtype=torch.float64))


def test_sparse_gradients(fleet: Fleets) -> None:
    def run(gradients: bool) -> Tensor:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        model = nn.Embedding(6, 2, sparse=True).double()
        with torch.no_grad():
            model.weight.zero_()
        make = shoal.bluefog.DistributedGradientAllreduceOptimizer if gradients else ATC
        optimizer = make(sgd(model, lr=1.0), model)
        model(torch.tensor([shoal.rank()])).sum().backward()
        optimizer.step()
        return model.weight.detach().clone()

    expected = torch.zeros(6, 2, dtype=torch.float64)
    expected[:2] = -0.5
    for gradients in (False, True):
        assert all(torch.equal(one, expected) for one in fleet(2).run(run, gradients))


def test_several_models_and_several_optimizers(fleet: Fleets) -> None:
    def run() -> tuple[Tensor, Tensor]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        parts = [nn.Linear(5, 5).double(), nn.Linear(5, 5).double(), nn.Linear(5, 1).double()]
        for part in parts:
            with torch.no_grad():
                for param in part.parameters():
                    param.fill_(shoal.rank())
        first = ATC(torch.optim.SGD([*parts[0].parameters(), *parts[1].parameters()], lr=0.0), parts[:2], name="first")
        second = ATC(sgd(parts[2], lr=0.0), parts[2], name="second")
        parts[2](parts[1](parts[0](batch(0, 0)))).sum().backward()
        first.step()
        second.step()
        return torch.cat([flat(parts[0]), flat(parts[1])]), flat(parts[2])

    for first, second in fleet(2).run(run):
        assert (first == 0.5).all() and (second == 0.5).all()


def test_a_compiled_model_with_the_exchange_outside(fleet: Fleets) -> None:
    load_compiler()

    def run() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = deepcopy(MODEL)
        optimizer = AWC(sgd(model), model)
        compiled = torch.compile(model, backend="eager")
        loss = loss_of(compiled, shoal.rank(), 0)
        assert optimizer.rounds == 1  # it began with the forward pass
        loss.backward()
        optimizer.step()
        return flat(model)

    def plain() -> Tensor:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model = deepcopy(MODEL)
        optimizer = AWC(sgd(model), model)
        loss_of(model, shoal.rank(), 0).backward()
        optimizer.step()
        return flat(model)

    agents = fleet(2)
    assert torch.equal(torch.stack(agents.run(run)), torch.stack(agents.run(plain)))


def test_attributes_set_after_the_forward_pass_take_effect_in_the_next_round_with_a_warning(fleet: Fleets) -> None:
    def run() -> list[float]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        model = nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(float(shoal.rank()))
        optimizer = AWC(sgd(model, lr=0.0), model, unchecked="doubly stochastic")
        results = []
        for step in range(2):
            model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            if step == 0:
                with pytest.warns(UserWarning, match="holds from the next round on"):
                    optimizer.self_weight = 1.0
                optimizer.src_weights = {1 - shoal.rank(): 1.0}
            optimizer.step()
            results.append(model.weight.item())
        return results

    assert fleet(2).run(run) == [[0.5, 1.0], [0.5, 1.0]]


def test_an_unknown_attribute_is_an_error() -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model), model)
        with pytest.raises(AttributeError, match=r"no attribute 'sel_weight' to set; there are: self_weight"):
            optimizer.sel_weight = 1.0
        with pytest.raises(TypeError, match=r"must be a shoal\.optim\.CommunicationType"):
            optimizer.communication_type = "allreduce"
        with pytest.raises(ValueError, match="whole number from 1 on"):
            optimizer.num_steps_per_communication = 0

    shoal.Fleet(1).run(run)


@both_ways
def test_a_resumed_run_equals_an_uninterrupted_one(fleet: Fleets, make: Any) -> None:
    def steps(model: nn.Module, optimizer: shoal.DecentralizedOptimizer, numbers: range) -> None:
        for step in numbers:
            optimizer.zero_grad()
            loss_of(model, shoal.rank(), step).backward()
            optimizer.step()

    def run() -> bool:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        full, first, second = (deepcopy(MODEL) for _ in range(3))
        made = [make(LOCAL["adam"](model.parameters()), model, mix_state=()) for model in (full, first)]
        steps(full, made[0], range(6))
        steps(first, made[1], range(3))
        saved = deepcopy((first.state_dict(), made[1].state_dict()))
        other = make(LOCAL["adam"](second.parameters()), second, mix_state=())
        second.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        steps(second, other, range(3, 6))
        assert other.rounds == made[0].rounds == 6
        return torch.equal(flat(full), flat(second))

    assert all(fleet(SIZE).run(run))


def test_models_that_differ_are_named_at_the_first_step(fleet: Fleets) -> None:
    def run() -> None:
        model = nn.Sequential(nn.Linear(5, 7 + shoal.rank() // 2), nn.Flatten()).double()
        optimizer = ATC(sgd(model), model)
        loss_of(model, 0, 0).backward()
        with pytest.raises(shoal.Mismatch, match=r"rank \d has the parameter 0\.weight \[[78], 5\] float64") as caught:
            optimizer.step()
        assert len(caught.value.ranks) == 2

    fleet(3).run(run)


def test_two_wrappers_on_one_parameter_are_refused_until_one_is_closed() -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        first = ATC(sgd(model), model)
        with pytest.raises(ValueError, match=r"another decentralized optimizer has the parameter '0\.weight'"):
            ATC(sgd(model), model)
        with pytest.raises(ValueError, match="decentralized already"):
            ATC(first, model)
        first.close()
        ATC(sgd(model), model)

    shoal.Fleet(1).run(run)


def test_a_parameter_without_a_wrapper_is_named_in_a_warning() -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        some = ATC(torch.optim.SGD(list(model.parameters())[:2], lr=LR), model)
        with pytest.warns(UserWarning, match=r"which are learnt: 2\.weight, 2\.bias"):
            some.step()
        some.step()  # and no more

    shoal.Fleet(1).run(run)


def test_parameters_of_another_model_are_refused() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="4 parameters that are not the model's"):
            ATC(sgd(deepcopy(MODEL)), deepcopy(MODEL))

    shoal.Fleet(1).run(run)


@pytest.mark.parametrize("nbytes", [0, -1, 25e6, "25 MB"])
def test_a_bucket_size_of_none_is_refused(nbytes: Any) -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        with pytest.raises(ValueError, match="whole number of bytes"):
            ATC(sgd(model), model, bucket_bytes=nbytes)

    shoal.Fleet(1).run(run)


def test_parameters_moved_to_other_memory_are_copied_back_into_the_bucket(fleet: Fleets) -> None:
    def run() -> Tensor:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        model = deepcopy(MODEL)
        optimizer = ATC(sgd(model, lr=0.0), model)
        optimizer.step()
        for param in model.parameters():
            param.data = torch.full_like(param, float(shoal.rank()))
        optimizer.step()
        return flat(model)

    assert (torch.stack(fleet(2).run(run)) == 0.5).all()


def test_channels_last_parameters_keep_their_strides(fleet: Fleets) -> None:
    def run() -> tuple[bool, Tensor]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        model = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            model.weight.copy_(torch.arange(108).view(4, 3, 3, 3) * (1 + shoal.rank()))
        optimizer = ATC(sgd(model, lr=0.0), model)
        optimizer.step()
        return model.weight.is_contiguous(memory_format=torch.channels_last), model.weight.detach().clone()

    for kept, weight in fleet(2).run(run):
        assert kept
        assert torch.equal(weight, torch.arange(108, dtype=torch.float64).view(4, 3, 3, 3) * 1.5)


def test_listing_4(fleet: Fleets) -> None:
    """The calls and attributes of the BlueFog paper's listing 4, with its periodic average over all."""
    bf = shoal.bluefog

    def run() -> tuple[Tensor, Tensor]:
        bf.init()
        bf.set_topology(bf.ExponentialTwoGraph(bf.size()))
        model = deepcopy(MODEL)
        opt: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        opt = bf.DistributedAdaptThenCombineOptimizer(
            optimizer=opt, model=model, communication_type=bf.CommunicationType.neighbor_allreduce
        )
        peers = bf.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())
        for step in range(21):
            _, sources = next(peers)
            opt.self_weights = 1 / (len(sources) + 1)
            opt.src_weights = dict.fromkeys(sources, 1 / (len(sources) + 1))
            opt.enable_topo_check = True
            every_20 = step % 20 == 0
            kind = bf.CommunicationType
            opt.communication_type = kind.allreduce if every_20 else kind.neighbor_allreduce
            loss_of(model, bf.rank(), step).backward()
            opt.step()
            opt.zero_grad()
        return flat(model), bf.allreduce(flat(model))

    for own, mean in fleet(SIZE).run(run):
        assert torch.allclose(own, mean, atol=1e-12)  # step 20 averaged over all


def test_consensus_averages_and_restores(fleet: Fleets) -> None:
    def run() -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
        with torch.no_grad():
            for one in (*model.parameters(), model[1].running_mean):
                one.fill_(float(shoal.rank()))
            model[1].num_batches_tracked.fill_(shoal.rank())
        before = deepcopy(model.state_dict())
        mean = (SIZE - 1) / 2
        with shoal.consensus(model) as averaged:
            assert averaged is model
            assert all((one == mean).all() for one in (*model.parameters(), model[1].running_mean))
            assert model[1].num_batches_tracked == shoal.rank()
        assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
        with pytest.raises(ZeroDivisionError), shoal.consensus(model):
            _ = 1 / 0
        assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
        count = sum(parameter.numel() for parameter in model.parameters())
        spread = torch.arange(SIZE, dtype=torch.float64).std(correction=0).item()
        assert shoal.consensus_distance(model) == pytest.approx(spread * count**0.5)

    fleet(SIZE).run(run)


def test_the_consensus_of_many_small_tensors_is_a_few_all_reduces(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[str] = []
    submit = Engine.submit

    def counted(engine: Engine, op: str, *args: Any, **options: Any) -> Any:
        submitted.append(op)
        return submit(engine, op, *args, **options)

    monkeypatch.setattr(Engine, "submit", counted)

    def run() -> None:
        rank = shoal.rank()
        tensors = [nn.Parameter(torch.full((n % 4,), float(rank + n))) for n in range(300)]
        model = nn.ParameterList([*tensors, nn.Parameter(torch.full((90_000,), float(rank)))])
        with shoal.consensus(model):
            assert all(bool((one == n + 1).all()) for n, one in enumerate(tensors))
            assert bool((model[-1] == 1).all())
        assert all(bool((one == n + rank).all()) for n, one in enumerate(tensors))

    fleet(3).run(run)
    assert sum("allreduce" in op for op in submitted) == 3 * 2


def test_one_agent_trains_like_the_plain_optimizer() -> None:
    def run() -> Tensor:
        model = deepcopy(MODEL)
        optimizer = ATC(LOCAL["adam"](model.parameters()), model)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            optimizer.step()
        return flat(model)

    model = deepcopy(MODEL)
    plain = LOCAL["adam"](model.parameters())
    for step in range(3):
        plain.zero_grad()
        loss_of(model, 0, step).backward()
        plain.step()
    assert torch.equal(shoal.Fleet(1).run(run)[0], flat(model))


def test_missing_gradients_count_as_zero(fleet: Fleets) -> None:
    def run() -> Tensor:
        model = deepcopy(MODEL)
        optimizer = shoal.bluefog.DistributedGradientAllreduceOptimizer(sgd(model), model)
        if shoal.rank() == 0:
            loss_of(model, 0, 0).backward()
        optimizer.step()
        return flat(model)

    model = deepcopy(MODEL)
    x = flat(model)
    expected = x - LR * gradient(model, x, 0, 0) / SIZE
    assert (torch.stack(fleet(SIZE).run(run)) - expected).abs().max() < 1e-12
