"""BAGUA's names: each algorithm against a numpy version of BAGUA's, and the user's loop around it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
import shoal.compat.bagua as bagua
from shoal.compat.bagua.algorithms.async_model_average import AsyncModelAverageAlgorithm
from shoal.compat.bagua.algorithms.bytegrad import ByteGradAlgorithm
from shoal.compat.bagua.algorithms.decentralized import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm
from shoal.compat.bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from shoal.compat.bagua.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from support.fault_points import over_both
from support.optimizers import LR, MODEL, MOMENTUM, batch, flat, gradient
from support.world import World

STEPS = 12
Exchange = Callable[[int, Tensor], Tensor]
"""Of BAGUA's full precision: the k-th communication, and the rows of all agents; their new rows."""


def train(make: Callable[[], Any], steps: int = STEPS) -> Tensor:
    model = deepcopy(MODEL)
    if shoal.rank():
        torch.nn.init.ones_(model[0].weight)  # rank 0's counts
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    assert bagua.with_bagua(model, [optimizer], make()) is model
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(shoal.rank(), step)).square().mean().backward()
        optimizer.step()
    bagua.without_bagua(model)
    return flat(model)


def peer(rank: int, size: int, k: int) -> int:
    """BAGUA's pairing."""
    half = size // 2
    return (k + rank) % ((size + 1) // 2) + half if rank < half else (rank - half - k) % half


def with_peer(k: int, x: Tensor) -> Tensor:
    return torch.stack([(x[rank] + x[peer(rank, len(x), k)]) / 2 for rank in range(len(x))])


def with_all(k: int, x: Tensor) -> Tensor:
    return x.mean(0, keepdim=True).expand_as(x)


def of_machines(exchange: Exchange, per_machine: int) -> Exchange:
    def machine_exchange(k: int, x: Tensor) -> Tensor:
        means = x.view(-1, per_machine, x.shape[1]).mean(1)
        return exchange(k, means).repeat_interleave(per_machine, 0)

    return machine_exchange


def by_hand(size: int, exchange: Exchange, interval: int) -> Tensor:
    """The peers' tensors come during forward and backward, and the optimizer steps from them."""
    model, x, momentum, k = deepcopy(MODEL), flat(MODEL).repeat(size, 1), torch.zeros(size, len(flat(MODEL))), 0
    momentum = momentum.double()
    for step in range(STEPS):
        g = torch.stack([gradient(model, x[rank], rank, step) for rank in range(size)])
        if step % interval == 0:
            x, k = exchange(k, x), k + 1
        momentum = MOMENTUM * momentum + g
        x = x - LR * momentum
    return x


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(
    ("size", "per_machine", "hierarchical", "mode", "exchange"),
    [
        (4, 1, False, "shift_one", with_peer),
        (6, 1, False, "shift_one", with_peer),
        (3, 1, False, "all", with_all),
        (4, 2, True, "all", with_all),
        (4, 2, True, "shift_one", of_machines(with_peer, 2)),
        (4, 4, True, "shift_one", with_all),  # one machine: the mean of its agents
        (2, 1, True, "shift_one", with_peer),
    ],
    ids=["4", "6", "all of 3", "2 x 2, all", "2 x 2", "one machine", "2 machines"],
)
def test_full_precision(
    size: int, per_machine: int, hierarchical: bool, mode: Any, exchange: Exchange, interval: int
) -> None:
    def make() -> DecentralizedAlgorithm:
        return DecentralizedAlgorithm(hierarchical, mode, interval)

    fleet = shoal.Fleet(size, agents_per_machine=per_machine)
    assert torch.allclose(torch.stack(fleet.run(train, make)), by_hand(size, exchange, interval), rtol=0, atol=1e-12)


def quantised(v: Tensor) -> Tensor:
    """What 8 bits between the least and the greatest number make of a row."""
    scale = 255 / (v.max() - v.min() + 1e-7)
    top = torch.round(v.max() * scale)
    return (torch.minimum(torch.round(v * scale), top) - top + 255 + top - 255) / scale


def in_low_precision(size: int, per_machine: int, interval: int) -> Tensor:
    """With replicas of both neighbours, of the machines; the agents of one begin alike, average their steps, and send
    a share each."""
    machines = size // per_machine
    model, x = deepcopy(MODEL), flat(MODEL).repeat(size, 1)
    momentum = torch.zeros_like(x)
    own, left, right = (x[::per_machine].clone() for _ in range(3))
    for step in range(STEPS):
        g = torch.stack([gradient(model, x[rank], rank, step) for rank in range(size)])
        momentum = MOMENTUM * momentum + g
        x = x - LR * momentum
        if step % interval:
            continue
        mean = x.view(machines, per_machine, -1).mean(1)
        differences = mean + left / 3 + right / 3 - own * (5 / 3)
        shares = differences.tensor_split(per_machine, dim=1)
        sent = torch.cat([torch.stack([quantised(one) for one in share]) for share in shares], dim=1)
        left, right, own = left + sent.roll(1, 0), right + sent.roll(-1, 0), own + sent
        assert torch.equal(left, own.roll(1, 0))
        x = own.repeat_interleave(per_machine, 0)
    return x


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize(("size", "per_machine"), [(4, 1), (3, 1), (2, 1), (1, 1), (4, 2)])
def test_low_precision(size: int, per_machine: int, interval: int) -> None:
    def make() -> LowPrecisionDecentralizedAlgorithm:
        return LowPrecisionDecentralizedAlgorithm(per_machine > 1, interval)

    results = torch.stack(shoal.Fleet(size, agents_per_machine=per_machine).run(train, make))
    assert torch.allclose(results, in_low_precision(size, per_machine, interval), rtol=0, atol=1e-9)


def test_low_precision_on_one_machine_is_not_compressed() -> None:
    results = torch.stack(shoal.Fleet(4).run(train, LowPrecisionDecentralizedAlgorithm))
    model, x = deepcopy(MODEL), flat(MODEL).repeat(4, 1)
    momentum = torch.zeros_like(x)
    for step in range(STEPS):
        momentum = MOMENTUM * momentum + torch.stack([gradient(model, x[rank], rank, step) for rank in range(4)])
        x = with_all(0, x - LR * momentum)
    assert torch.allclose(results, x, rtol=0, atol=1e-12)


def what_is_kept(steps: int) -> list[list[float]]:
    """In float32, after the given steps: this agent's parameters, and its estimate of the mean of all three."""
    model = deepcopy(MODEL).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model.with_bagua([optimizer], LowPrecisionDecentralizedAlgorithm(hierarchical=False))
    for step in range(steps):
        optimizer.zero_grad()
        (model(batch(shoal.rank(), step % 50).float()) - 1).square().mean().backward()
        optimizer.step()
    around = model.__dict__["_shoal_bagua"][0]._around
    [part] = around.state_dict()["shoal"]["way"]["parts"]
    x, (kept,) = part["x"], part["state"]
    assert torch.equal(x.sort()[0], flat(model).sort()[0])
    return [x.tolist(), kept.tolist()]


@pytest.mark.timeout(240)
@over_both
@pytest.mark.parametrize("steps", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_sum_of_the_neighbours_stays_accurate(environment: dict[str, Any], steps: int) -> None:
    """Replicas could not differ. Their sum differs only by rounding."""
    with World(3, environment=environment) as world:
        result = torch.tensor(world.results(what_is_kept, steps), dtype=torch.float64)
    mean = result[:, 0].mean(0)
    apart = (result[:, 1] - mean).abs().max() / mean.abs().max() / torch.finfo(torch.float32).eps
    print(apart)
    assert apart < 100


def test_averaged_gradients() -> None:
    results = torch.stack(shoal.Fleet(3).run(train, GradientAllReduceAlgorithm))
    model, x = deepcopy(MODEL), flat(MODEL)
    momentum = torch.zeros_like(x)
    for step in range(STEPS):
        g = torch.stack([gradient(model, x, rank, step) for rank in range(3)]).mean(0)
        momentum = MOMENTUM * momentum + g
        x = x - LR * momentum
    assert torch.allclose(results, x.expand_as(results), rtol=0, atol=1e-12)


def test_averaged_gradients_in_eight_bits() -> None:
    """Chunks are sent to the agent that sums them, and their means back, in 8 bits both. The last layers come first."""
    size = 3
    results = torch.stack(shoal.Fleet(size).run(train, ByteGradAlgorithm))
    assert torch.equal(results, results[0].expand_as(results))
    model, x = deepcopy(MODEL), flat(MODEL)
    lengths = [param.numel() for param in model.parameters()]
    momentum, cut = torch.zeros_like(x), [len(x) * part // size for part in range(size + 1)]
    for step in range(STEPS):
        each = [torch.cat(gradient(model, x, rank, step).split(lengths)[::-1]) for rank in range(size)]
        chunks = [
            quantised(sum(quantised(g[low:high]) for g in each) / size)  # type: ignore[arg-type]
            for low, high in pairwise(cut)
        ]
        g = torch.cat(torch.cat(chunks).split(lengths[::-1])[::-1])
        momentum = MOMENTUM * momentum + g
        x = x - LR * momentum
    assert torch.allclose(results[0], x, rtol=0, atol=1e-12)


# Asynchronous


@pytest.mark.parametrize("compression", [None, pytest.param(shoal.compression.MinMaxUInt8(), marks=pytest.mark.slow)])
def test_at_any_pace_agents_converge_to_the_joint_optimum(
    compression: shoal.compression.Compressor | None,
) -> None:
    """The first agent to finish waits in ``abort`` and replies. Two optimizers have windows of their own."""
    target = [-1.0, 0.5, 4.0]

    def agent() -> list[float]:
        model = torch.nn.ParameterList([torch.full((2,), float(shoal.rank())), torch.zeros(3)])
        optimizers = [torch.optim.SGD([one], lr=0.02) for one in model]
        model.with_bagua(optimizers, AsyncModelAverageAlgorithm(compression=compression))
        algorithm: Any = model.bagua_algorithm
        for step in range(300):
            if step % 10 == 0:
                shoal.barrier()  # an agent that is far ahead of the others averages with models that do not move
                time.sleep(0.002 * (shoal.rank() == 0))
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum((one - target[shoal.rank()]).square().sum() for one in model).backward()
            for optimizer in optimizers:
                optimizer.step()
        algorithm.abort(model)
        algorithm.resume(model)
        bagua.without_bagua(model)
        return torch.cat([one.detach() for one in model]).tolist()

    results = torch.tensor(shoal.Fleet(3, timeout=30.0).run(agent))
    mean = sum(target) / 3
    assert (results.mean(0) - mean).abs().max() < 0.5, results
    assert (results - mean).abs().max() < 1.0, results  # alone each would be at its own target


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_asynchronous_averages_end_at_any_pace(how: str) -> None:
    """The slower agents still average with the first one, which is done."""

    def agent() -> None:
        model = deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        model.with_bagua([optimizer], AsyncModelAverageAlgorithm())
        for step in range(4):
            time.sleep(0.04 * shoal.rank())
            optimizer.zero_grad()
            model(batch(shoal.rank(), step)).square().mean().backward()
            optimizer.step()
        if how == "replaced":
            model.with_bagua([optimizer], GradientAllReduceAlgorithm())
        bagua.without_bagua(model)

    shoal.Fleet(3, timeout=20.0).run(agent)


def test_options_that_asynchronous_averages_lack_are_refused() -> None:
    with pytest.raises(ValueError, match="peer_selection_mode='shift_one'"):
        AsyncModelAverageAlgorithm("shift_one")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        AsyncModelAverageAlgorithm(warmup_steps=-1)


@pytest.mark.parametrize("warmup", [1, 5])
def test_a_warm_up_of_asynchronous_averages_averages_gradients(warmup: int) -> None:
    """The warm-up steps equal those of averaged gradients, to the bit. Later steps do not, and agents differ."""

    def run(make: Callable[[], Any], steps: int) -> Tensor:
        model = deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        bagua.with_bagua(model, [optimizer], make())
        for step in range(steps):
            optimizer.zero_grad()
            model(batch(shoal.rank(), step)).square().mean().backward()
            optimizer.step()
            schedule.step()
        if isinstance(model.bagua_algorithm, AsyncModelAverageAlgorithm):
            model.bagua_algorithm.abort(model)
        bagua.without_bagua(model)
        return flat(model)

    fleet = shoal.Fleet(3, timeout=30.0)
    warm = fleet.run(run, lambda: AsyncModelAverageAlgorithm(warmup_steps=warmup), warmup)
    averaged = fleet.run(run, GradientAllReduceAlgorithm, warmup)
    assert all(torch.equal(one, other) for one, other in zip(warm, averaged, strict=True))
    after = fleet.run(run, lambda: AsyncModelAverageAlgorithm(warmup_steps=warmup), warmup + 2)
    assert not torch.equal(after[0], after[1])


def test_a_failed_step_is_none_of_the_warm_up() -> None:
    """One agent's closure fails, and it takes the step again: all agents still end the warm-up in the same step."""

    def agent() -> Tensor:
        model, fails = deepcopy(MODEL), shoal.rank() == 1
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        model.with_bagua([optimizer], AsyncModelAverageAlgorithm(warmup_steps=2))

        def closure() -> Tensor:
            if fails:
                raise MemoryError("out of memory")
            optimizer.zero_grad()
            loss: Tensor = model(batch(shoal.rank(), 0)).square().mean()
            loss.backward()
            return loss

        if fails:
            with pytest.raises(MemoryError):
                optimizer.step(closure)
            fails = False
        for _ in range(2):
            optimizer.step(closure)
        bagua.without_bagua(model)
        return flat(model)

    first, *others = shoal.Fleet(3, timeout=20.0).run(agent)
    assert all(torch.equal(first, other) for other in others)


# The user's loop


def test_adam_with_momenta_in_eight_bits() -> None:
    """Its equation is in ``tests/optim/test_one_bit_adam.py``."""

    def run(way: str) -> Tensor:
        model = deepcopy(MODEL)
        if way == "bagua":
            adam: shoal.optim.OneBitAdam = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=4)
            model.with_bagua([adam], QAdamAlgorithm(adam))
            optimizer: Any = adam
        else:
            adam = shoal.optim.OneBitAdam(model.parameters(), 0.01, warmup=4)
            eight_bits = shoal.compression.MinMaxUInt8()
            optimizer = shoal.bluefog.DistributedGradientAllreduceOptimizer(adam, model, compression=eight_bits)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(shoal.rank(), step)).square().mean().backward()
            optimizer.step()
        return flat(model)

    fleet = shoal.Fleet(3)
    results = torch.stack(fleet.run(run, "bagua"))
    assert torch.equal(results, torch.stack(fleet.run(run, "shoal")))
    assert (results - flat(MODEL)).abs().max() > 0.01


def test_q_adam_requires_its_own_optimizer() -> None:
    def run() -> None:
        model = deepcopy(MODEL)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="both take the same QAdamOptimizer"):
            model.with_bagua([other], QAdamAlgorithm(QAdamOptimizer(model.parameters())))

    shoal.Fleet(1).run(run)


def test_a_grad_scaler_with_overflowing_gradients_does_not_deadlock() -> None:
    def agent() -> tuple[Tensor, float]:
        model = deepcopy(MODEL).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        model.with_bagua([optimizer], DecentralizedAlgorithm(hierarchical=False))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(batch(shoal.rank(), step).float()).square().mean()
            scaler.scale(loss * float("inf") if step == shoal.rank() == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert not hasattr(optimizer, "found_inf")
        bagua.without_bagua(model)
        return flat(model), scaler.get_scale()

    results = shoal.Fleet(3, timeout=20.0).run(agent)
    assert [scale for _, scale in results] == [8.0, 4.0, 8.0]
    assert all(x.isfinite().all() for x, _ in results)


def test_schedulers_closures_and_several_optimizers() -> None:
    def agent() -> list[Tensor]:
        model = deepcopy(MODEL)
        first, last = (torch.optim.SGD(layer.parameters(), lr=LR) for layer in (model[0], model[2]))
        early = torch.optim.lr_scheduler.StepLR(first, 1, 0.5)
        model.with_bagua([first, last], DecentralizedAlgorithm(hierarchical=False))
        late = torch.optim.lr_scheduler.StepLR(last, 1, 0.5)
        for step in range(3):

            def loss(step: int = step) -> Tensor:
                for one in (first, last):
                    one.zero_grad()
                result: Tensor = model(batch(shoal.rank(), step)).square().mean()
                result.backward()
                return result

            loss()
            first.step()
            assert last.step(loss) is not None
            early.step()
            late.step()
        assert first.param_groups[0]["lr"] == last.param_groups[0]["lr"] == LR / 8
        bagua.without_bagua(model)
        return [flat(model)]

    assert len(shoal.Fleet(2, timeout=20.0).run(agent)) == 2


def test_all_start_with_the_optimizer_state_of_rank_0() -> None:
    def agent() -> tuple[float, list[Tensor]]:
        model = deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR * (1 + shoal.rank()), momentum=MOMENTUM)
        model(batch(shoal.rank(), 0)).square().mean().backward()
        optimizer.step()
        model.with_bagua([optimizer], DecentralizedAlgorithm(hierarchical=False))
        bagua.without_bagua(model)
        return optimizer.param_groups[0]["lr"], [value["momentum_buffer"] for value in optimizer.state.values()]

    (lr, momenta), *others = shoal.Fleet(3, timeout=20.0).run(agent)
    assert lr == LR
    for other, remote in others:
        assert other == LR
        assert all(torch.equal(one, two) for one, two in zip(momenta, remote, strict=True))


def test_an_algorithm_is_removed_and_replaced() -> None:
    def agent() -> None:
        model = deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        model.with_bagua([optimizer], DecentralizedAlgorithm(hierarchical=False))
        model.with_bagua([optimizer], GradientAllReduceAlgorithm())
        model(batch(shoal.rank(), 0)).square().mean().backward()
        optimizer.step()
        assert len({tuple(one.tolist()) for one in shoal.allgather(flat(model)[None])}) == 1
        bagua.without_bagua(model)
        bagua.without_bagua(model)
        assert "step" not in vars(optimizer)
        optimizer.zero_grad()
        if shoal.rank() == 0:  # alone: nobody is waited for
            model(batch(0, 1)).square().mean().backward()
            optimizer.step()
        shoal.DecentralizedOptimizer(optimizer, model).close()

    shoal.Fleet(2, timeout=20.0).run(agent)


@pytest.mark.parametrize("copied", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_a_copy_of_the_model_is_not_attached(copied: Callable[[Any], Any]) -> None:
    def agent() -> None:
        model: Any = deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        model.with_bagua([optimizer], DecentralizedAlgorithm(hierarchical=False))
        model(batch(shoal.rank(), 0)).square().mean().backward()
        optimizer.step()
        copy = copied(model)
        assert torch.equal(flat(copy), flat(model))
        bagua.without_bagua(copy)
        assert "step" in vars(optimizer)
        bagua.without_bagua(model)

    shoal.Fleet(2, timeout=20.0).run(agent)


def test_ranks_are_shoals() -> None:
    def agent() -> tuple[int, ...]:
        bagua.init_process_group()
        return bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank(), bagua.get_local_size()

    assert shoal.Fleet(4, agents_per_machine=2).run(agent) == [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]


@pytest.mark.parametrize(
    ("size", "give", "error", "message"),
    [
        (3, {"algorithm": lambda: DecentralizedAlgorithm(False, "shift_one")}, ValueError, "odd|even"),
        (2, {"algorithm": lambda: "decentralized"}, TypeError, "'decentralized'"),
        (2, {"process_group": object()}, ValueError, "process_group"),
        (2, {"ignored": ["0.weight"]}, ValueError, "_bagua_params_and_buffers_to_ignore"),
        (2, {"optimizers": ["sgd"]}, TypeError, "optimizer"),
    ],
)
def test_unsupported_calls_are_refused(size: int, give: dict[str, Any], error: type[Exception], message: str) -> None:
    def agent() -> None:
        model: Any = deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        if "ignored" in give:
            model._bagua_params_and_buffers_to_ignore = give["ignored"]
        with pytest.raises(error, match=message):
            model.with_bagua(
                give.get("optimizers", [optimizer]),
                give.get("algorithm", DecentralizedAlgorithm)(),
                process_group=give.get("process_group"),
            )
        assert "step" not in vars(optimizer)
        shoal.barrier()

    shoal.Fleet(size, timeout=20.0).run(agent)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DecentralizedAlgorithm(peer_selection_mode="ring"), "'all' and 'shift_one'"),
        (lambda: DecentralizedAlgorithm(communication_interval=0), "communication_interval"),
        (lambda: LowPrecisionDecentralizedAlgorithm(communication_interval=0), "communication_interval"),
        (lambda: GradientAllReduceAlgorithm(average=False), "learning rate"),
        (lambda: ByteGradAlgorithm(average=False), "learning rate"),
    ],
)
def test_invalid_algorithms_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
