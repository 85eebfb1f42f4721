"""Replicas that are sharded over two processes each, and average between them: as if each were one process."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard

import shoal
from support.limits import scaled
from support.optimizers import batch
from support.packing import packed, unpacked
from support.sharded import (
    MODEL,
    OF_TENSORS,
    REPLICAS,
    SGD,
    SHARDS,
    STEPS,
    UNEVEN,
    WAYS,
    among_replicas,
    begin,
    end,
    full_parameters,
    halved,
    mesh,
    of_process,
    of_replica,
    sharded,
    train,
    wrapped,
)
from support.world import World

pytestmark = pytest.mark.transport("shared_memory")
ATC = WAYS["adapt then combine"]
USUAL, WITH_ADAM = ("adapt then combine", "gradients", "exact diffusion"), "Adam, its second moments too"
"""The ways that are tested always; that the others shard alike, slow tests say."""
EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Four processes with a process group: two replicas of two."""
    made = World(REPLICAS * SHARDS, init=False)
    try:
        made.results(begin)
        yield made
        made.results(end)
    finally:
        made.destroy()  # what Gloo leaves behind is not ours to judge


def unsharded(way: str, model: nn.Module, batches: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """The same with each replica in one process: the parameters, a row for each."""

    def run() -> torch.Tensor:
        own = deepcopy(model)
        optimizer = WAYS[way](own)
        train(own, optimizer, partial(batches, shoal.rank()), *range(STEPS))
        return full_parameters(own)

    return torch.stack(shoal.Fleet(REPLICAS, timeout=20.0).run(run))


def train_sharded(way: str) -> bytes:
    index = mesh()
    with among_replicas(index):
        assert (shoal.rank(), shoal.size()) == (dist.get_rank() // SHARDS, REPLICAS)
        model = sharded(index["shard"])
        optimizer = WAYS[way](model)
        train(model, optimizer, of_process, *range(STEPS))
        return packed(full_parameters(model))


@pytest.mark.parametrize("way", [way if way in USUAL else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_sharded_replicas_train_like_unsharded_ones(world: World, way: str) -> None:
    """With gradients clipped by their norm over all shards, and layers of odd size on two ranks."""
    result = torch.stack([unpacked(one) for one in world.results(train_sharded, way)])
    expected = unsharded(way, MODEL, of_replica)
    apart = (result - expected.repeat_interleave(SHARDS, 0)).abs().max()
    assert apart < (1e-12 if way != "compressed" else 5e-4)  # what is quantised is a shard, not the whole
    if way != "gradients":
        assert (expected[0] - expected[1]).abs().max() > 1e-3, "replicas that are equal would prove little"


def train_halved(way: str) -> bytes:
    index = mesh("tensor")
    with among_replicas(index):
        model = halved(index["tensor"])
        optimizer = WAYS[way](model)
        train(model, optimizer, partial(batch, shoal.rank()), *range(STEPS))
        result = packed(full_parameters(model))
        with pytest.raises(ValueError, match=r"has a copy of '2.bias'. MinMaxUInt8 looks at several numbers together"):
            wrapped(
                SGD, shoal.DecentralizedOptimizer, halved(index["tensor"]),
                topology=UNEVEN, compression=shoal.compression.MinMaxUInt8(),
            )  # fmt: skip
        if way == "adapt then combine":
            optimizer.robust = shoal.robust.ClippedGossip()  # type: ignore[attr-defined]
            with pytest.raises(ValueError, match=r"robust: several processes of a replica have a copy of '2.bias'"):
                optimizer.step()
        return result


@pytest.mark.parametrize("way", ["adapt then combine", "gradients"])
def test_tensor_parallel_replicas_train_like_unsharded_ones(world: World, way: str) -> None:
    result = torch.stack([unpacked(one) for one in world.results(train_halved, way)])
    expected = unsharded(way, OF_TENSORS, batch)
    assert (result - expected.repeat_interleave(SHARDS, 0)).abs().max() < 1e-12


# The mean model


def look_at_the_mean() -> tuple[bytes, bytes, float]:
    index = mesh()
    with among_replicas(index):
        model = sharded(index["shard"])
        train(model, ATC(model), of_process, 0, 1)
        apart = shoal.consensus_distance(model)
        with torch.no_grad(), shoal.consensus(model):
            inside = model(batch(0, 9))
            assert torch.equal(model(batch(0, 9)), inside)
        with torch.no_grad():
            after = model(batch(0, 9))
        return packed(inside), packed(after), apart


def test_the_mean_of_sharded_models_is_that_of_unsharded_ones(world: World) -> None:
    """Also after a forward pass without a backward pass has left unsharded parameters."""
    models = deepcopy(MODEL), deepcopy(MODEL)

    def run() -> None:
        model = models[shoal.rank()]
        train(model, ATC(model), partial(of_replica, shoal.rank()), 0, 1)

    shoal.Fleet(REPLICAS).run(run)
    x = torch.stack([full_parameters(model) for model in models])
    mean = deepcopy(MODEL)
    nn.utils.vector_to_parameters(x.mean(0), mean.parameters())
    distance = (x - x.mean(0)).square().sum(1).mean().sqrt()
    for rank, (inside, after, apart) in enumerate(world.results(look_at_the_mean)):
        own = models[rank // SHARDS](batch(0, 9))
        assert (unpacked(inside) - mean(batch(0, 9))).abs().max() < 1e-12
        assert (unpacked(after) - own).abs().max() < 1e-12
        assert abs(apart - distance) < 1e-12


def begin_alike() -> tuple[bytes, bytes]:
    index = mesh()
    with among_replicas(index):
        model = sharded(index["shard"])
        sgd = SGD(model.parameters())
        train(model, sgd, of_process, 0)
        shoal.broadcast_parameters(model.state_dict(), root_rank=1)
        shoal.bluefog.broadcast_optimizer_state(sgd, root_rank=1)
        train(model, sgd, partial(batch, 7), 1)
        momentum = [value["momentum_buffer"].full_tensor() for value in sgd.state.values()]
        return packed(full_parameters(model)), packed(momentum)


def test_replicas_can_start_from_equal_parameters(world: World) -> None:
    assert len(set(world.results(begin_alike))) == 1


# Checkpoints


def save_after(folder: Path, way: str, steps: int) -> bytes:
    index = mesh()
    with among_replicas(index):
        model = sharded(index["shard"])
        optimizer = WAYS[way](model)
        train(model, optimizer, of_process, *range(steps))
        checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer)
        with pytest.raises(ValueError, match=r"Checkpoint.save: .* torch.distributed.checkpoint ensures: dcp.save"):
            checkpoint.save(folder, 1)
        dcp.save({"training": checkpoint}, checkpoint_id=folder)
        train(model, optimizer, of_process, *range(steps, STEPS))
        return packed(full_parameters(model))


def load_and_resume(folder: Path, way: str, steps: int) -> bytes:
    index = mesh()
    with among_replicas(index):
        model = sharded(index["shard"])
        optimizer = WAYS[way](model)
        dcp.load({"training": shoal.Checkpoint(model=model, optimizer=optimizer)}, checkpoint_id=folder)
        train(model, optimizer, of_process, *range(steps, STEPS))
        return packed(full_parameters(model))


@pytest.mark.parametrize(
    "way", ["exact diffusion", *(pytest.param(way, marks=pytest.mark.slow) for way in (USUAL[0], WITH_ADAM))]
)
def test_a_resumed_run_equals_an_uninterrupted_one(world: World, way: str, tmp_path: Path) -> None:
    whole_run = world.results(save_after, tmp_path, way, 2)
    assert whole_run[0] != whole_run[-1], "replicas that are equal would prove little"
    assert world.results(load_and_resume, tmp_path, way, 2) == whole_run


def read_one_model(folder: Path) -> bytes:
    """The model of one replica, by all processes, sharded over all four."""
    model = sharded(dist.device_mesh.init_device_mesh("cpu", (REPLICAS * SHARDS,)))
    state = {"training": {"agent1of2": {"model": model.state_dict()}}}
    dcp.load(state, checkpoint_id=folder)
    return packed(full_parameters(model))


def test_a_saved_model_can_be_loaded_with_another_number_of_shards(world: World, tmp_path: Path) -> None:
    saved = world.results(save_after, tmp_path, "adapt then combine", STEPS)
    assert set(world.results(read_one_model, tmp_path)) == {saved[-1]}


# What is refused


class Flat(FullyShardedDataParallel):
    """One without what needs a GPU."""

    named_parameters = nn.Module.named_parameters  # type: ignore[assignment]

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = model


def refused() -> dict[str, str]:
    """The error message for each invalid configuration."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns

    index = mesh()
    output: dict[str, str] = {}

    def record_error(what: str, attempt: Callable[[], Any]) -> None:
        try:
            attempt()
            output[what] = "nothing"
        except (ValueError, TypeError, RuntimeError) as error:
            output[what] = f"{type(error).__name__}: {error}"

    record_error("two dimensions", lambda: shoal.init(mesh=index))
    record_error("no mesh", lambda: shoal.init(mesh=2))
    record_error("continue", lambda: shoal.init(mesh=index["replicate"], on_loss="continue"))
    with among_replicas(index):
        model = sharded(index["shard"])
        record_error("HSDP", lambda: ATC(sharded(index)))
        record_error("windows", lambda: wrapped(SGD, shoal.optim.DistributedWinPutOptimizer, model))
        record_error("pairs", lambda: wrapped(SGD, shoal.optim.DistributedADPSGDOptimizer, model))
        record_error("overlap", lambda: wrapped(SGD, shoal.DecentralizedOptimizer, model, overlap="backward"))
        record_error("tensor", lambda: shoal.neighbor_allreduce(next(model.parameters())))
        flat = Flat(deepcopy(MODEL))
        record_error("flat", lambda: ATC(flat))
        plain = deepcopy(MODEL)
        zero = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.SGD, index["shard"].get_group(), lr=0.1)
        record_error("ZeRO", lambda: shoal.DecentralizedOptimizer(zero, plain))

        def convert() -> None:
            with shoal.consensus(model):
                model.half()

        record_error("conversion", convert)
        record_error("others", lambda: shoal.init(mesh=index["shard"]))
    shoal.init(mesh=index["shard"])
    record_error("wrong dimension", lambda: ATC(sharded(index["shard"])))
    shoal.shutdown()
    shoal.init()
    record_error("no replicas", lambda: shoal.DecentralizedOptimizer(SGD(model.parameters()), model))
    shoal.shutdown()
    return output


@pytest.mark.filterwarnings("ignore")
def test_unsound_combinations_are_refused_with_the_reason(world: World) -> None:
    errors_by_case = world.results(refused)[1]
    for what, message in {
        "two dimensions": 'has 2 dimensions (replicate, shard). Give the one between the replicas, such as mesh["repl',
        "no mesh": "a DeviceMesh is wanted, not int",
        "continue": "a replica has 2 processes, and with one of them lost",
        "HSDP": "lies on ranks [0, 1, 2, 3], and this agent averages with ranks [3] of these",
        "windows": "is sharded over ranks [0, 1], which wait for each other in every pass",
        "pairs": "is sharded over ranks [0, 1], which wait for each other in every pass",
        "overlap": "only the code that sharded it knows when its gradient is complete",
        "tensor": "the tensor is a DTensor, of which a part lies here. Give the part, tensor.to_local()",
        "flat": "FullyShardedDataParallel makes one flat tensor",
        "ZeRO": "ZeroRedundancyOptimizer steps a part of the parameters here",
        "conversion": "a sharded model was converted inside",
        "others": "this agent has begun among others",
        "wrong dimension": "lies on ranks [0, 1], and this agent averages with ranks [0] of these",
        "no replicas": "is sharded over ranks [0, 1], each of which is an agent",
    }.items():
        assert message in errors_by_case[what], what


def other_shards() -> str:
    index = mesh()
    with among_replicas(index):
        model = nn.Linear(4, 4)
        dim = shoal.rank()  # of the weight, by which it is cut

        def place(param: nn.Parameter) -> Shard:
            return Shard(dim if param.dim() > 1 else 0)

        model = fully_shard(model, mesh=index["shard"], shard_placement_fn=place)
        optimizer = wrapped(SGD, shoal.DecentralizedOptimizer, model)
        model(torch.ones(2, 4)).sum().backward()
        try:
            optimizer.step()
        except shoal.Mismatch as error:
            return str(error)
        return "nothing"


def test_counterparts_with_other_shards_raise_a_mismatch(world: World) -> None:
    for rank, output in enumerate(world.results(other_shards)):
        assert "rank 0 has the parameter weight [2, 4] float32 of [4, 4]" in output or "weight [4, 2]" in output, output
        assert f"at {rank % SHARDS} of 2" in output


# A whole script, and its end


def example(traces: str, *options: str) -> str:
    """The example's output, in processes that have a process group already."""
    sys.path.append(EXAMPLES)
    import sharded_digits

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        patch.setattr(sys, "argv", ["sharded_digits.py", *options])
        patch.setenv("SHOAL_TIMELINE", traces)
        sharded_digits.main()
    return printed.getvalue()


@pytest.mark.slow
def test_the_example_trains_and_resumes_from_its_checkpoint(world: World, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    traces, folder = str(tmp_path / "traces"), str(tmp_path / "checkpoint")
    whole_run = world.results(example, traces, "--steps", "20")
    world.results(example, traces, "--steps", "10", "--checkpoint", folder)
    assert world.results(example, traces, "--steps", "20", "--checkpoint", folder) == whole_run
    result = re.match(r"step 20: the mean model of 2 replicas reads (\d+) of 449 images", whole_run[0])
    assert result is not None and int(result[1]) > 150
    written = {place.name: len(list(place.glob("*.json"))) for place in Path(traces).iterdir()}
    assert written == {"counterparts-of-rank0": 6, "counterparts-of-rank1": 6}  # of two agents, three runs


def train_until_it_fails(folder: str) -> None:
    """Write this process's error and its time, and end as a script does. Rank 3 is killed in its third step."""
    begin()
    index = mesh()
    shoal.init(mesh=index["replicate"])
    model = sharded(index["shard"])
    optimizer = ATC(model)
    rank = dist.get_rank()
    output = "nothing"
    try:
        for step in range(200):
            if (rank, step) == (3, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, of_process, step)
    except Exception as error:
        output = f"{type(error).__name__}: {error}"
    Path(folder, str(rank)).write_text(f"{time.monotonic()} {output}")
    shoal.shutdown()
    os._exit(1)  # Gloo closes its connections only now, and its other ranks wait for that


def test_all_processes_are_notified_when_one_is_killed(tmp_path: Path) -> None:
    """Shoal notifies its counterpart.

    The ranks of its model and of its counterpart's are notified by torch or Shoal.
    """
    made = World(REPLICAS * SHARDS, init=False)
    try:
        *others, killed = made.run(train_until_it_fails, str(tmp_path))
    finally:
        made.destroy()
    assert killed.error == "Died" and killed.rank == 3
    for one in others:
        received, _, output = (tmp_path / str(one.rank)).read_text().partition(" ")
        assert output != "nothing" and float(received) - killed.ended < scaled(10.0)
        if one.rank == 1:
            assert output.startswith("PeerLost: ") and "rank 1" in output
