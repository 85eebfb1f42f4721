"""Replicas of two processes each: models sharded inside them, agents that average between them, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from functools import partial
from typing import Any

import networkx as nx
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shoal
from shoal.algorithms import ExactDiffusion

from .optimizers import batch

REPLICAS, SHARDS, STEPS, CLIP = 2, 2, 4, 0.05
UNEVEN = nx.DiGraph(
    [(0, 0, {"weight": 0.75}), (1, 1, {"weight": 0.75}), (0, 1, {"weight": 0.25}), (1, 0, {"weight": 0.25})]
)
"""Weights that leave the replicas different."""


def made(width: int) -> nn.Module:
    """A small model, the same in every process."""
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).double()
    draws = torch.Generator().manual_seed(width)
    for param in model.parameters():
        nn.init.normal_(param, std=0.4, generator=draws)
    return model


MODEL, OF_TENSORS = made(7), made(8)
"""Of layers that two ranks cannot halve; and the one for tensor parallelism, whose layers they can."""

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.01)
Make = Callable[[nn.Module], torch.optim.Optimizer]


def wrapped(local: Callable[..., torch.optim.Optimizer], how: Any, model: nn.Module, **options: Any) -> Any:
    return how(local(model.parameters()), model, **options)


WAYS: dict[str, Make] = {
    "adapt then combine": partial(wrapped, SGD, shoal.DecentralizedOptimizer, topology=UNEVEN),
    "adapt with combine": partial(
        wrapped,
        SGD,
        partial(shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)),
        topology=UNEVEN,
    ),
    "gradients": partial(wrapped, SGD, shoal.bluefog.DistributedGradientAllreduceOptimizer),
    "exact diffusion": partial(
        wrapped, SGD, shoal.DecentralizedOptimizer, algorithm=ExactDiffusion(1.0, lazy=True), topology=UNEVEN
    ),
    "Adam, its second moments too": partial(
        wrapped, ADAM, shoal.DecentralizedOptimizer, topology=UNEVEN, mix_state=("exp_avg_sq",)
    ),
    "compressed": partial(
        wrapped,
        SGD,
        shoal.DecentralizedOptimizer,
        topology=UNEVEN,
        compression=shoal.compression.MinMaxUInt8(),
    ),
}


def begin(seconds: float = 30.0) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))


def end() -> None:
    dist.destroy_process_group()


def mesh(inside: str = "shard") -> DeviceMesh:
    return init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicate", inside))


@contextmanager
def among_replicas(of: DeviceMesh) -> Iterator[None]:
    shoal.init(mesh=of["replicate"])
    try:
        yield
    finally:
        shoal.shutdown()


def sharded(over: DeviceMesh, model: nn.Module = MODEL) -> nn.Module:
    """A copy of the model with its first layer and its root sharded: FSDP keeps the root's parameters whole after a
    forward pass."""
    model = deepcopy(model)
    fully_shard(model[0], mesh=over)
    return fully_shard(model, mesh=over)


def halved(over: DeviceMesh) -> nn.Module:
    """The second model, its layers tensor-parallel."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(deepcopy(OF_TENSORS), over, plan)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Callable[[int], torch.Tensor], *steps: int
) -> None:
    """With clipped gradients, so that their norm counts, too."""
    for step in steps:
        optimizer.zero_grad()
        model(batches(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def of_process(step: int) -> torch.Tensor:
    return batch(dist.get_rank(), step)


def of_replica(replica: int, step: int) -> torch.Tensor:
    """The batches of its processes, concatenated."""
    return torch.cat([batch(replica * SHARDS + shard, step) for shard in range(SHARDS)])


def full_parameters(model: nn.Module) -> torch.Tensor:
    """All parameters, put together; the processes of a replica call it together."""
    tensors = [
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters()
    ]
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
