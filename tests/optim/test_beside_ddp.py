"""DistributedDataParallel inside a machine, and gossip between machines: real processes."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shoal
from support.optimizers import LR, MODEL, SIZE, batch, flat, gradient
from support.world import World

STEPS = 4
UNEVEN = nx.DiGraph(
    [(0, 0, {"weight": 0.75}), (1, 1, {"weight": 0.75}), (0, 1, {"weight": 0.25}), (1, 0, {"weight": 0.25})]
)


def train(folder: str) -> list[list[float]]:
    """An agent of one of two machines with two agents each: where its model began, and where it ended."""
    machine = dist.FileStore(f"{folder}/machine{shoal.bluefog.machine_rank()}", 2)
    dist.init_process_group("gloo", store=machine, rank=shoal.local_rank(), world_size=2)
    shoal.bluefog.set_machine_topology(UNEVEN, is_weighted=True)
    model = DistributedDataParallel(deepcopy(MODEL))
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(ValueError, match="DistributedDataParallel averages gradients after"):
        shoal.DecentralizedOptimizer(sgd, model, overlap="backward")
    optimizer = shoal.DecentralizedOptimizer(
        sgd, model, communication_type=shoal.optim.CommunicationType.hierarchical_neighbor_allreduce
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(shoal.rank(), step)).square().mean().backward()
        optimizer.step()
    optimizer.close()
    ended = flat(model).tolist()
    # As the last owner of the process group, the model would wait for its threads and hold the interpreter's lock, for
    # which one of them may wait.
    del model, optimizer, sgd
    dist.destroy_process_group()
    return [flat(MODEL).tolist(), ended]


@pytest.mark.transport("shared_memory")
def test_gradients_are_averaged_within_a_machine_and_parameters_between_machines(tmp_path: Path) -> None:
    with World(SIZE, environment={"SHOAL_AGENTS_PER_MACHINE": "2"}) as world:
        times = world.results(train, str(tmp_path))
    starts, ends = torch.tensor(times, dtype=torch.float64).unbind(1)
    W = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)
    model = deepcopy(MODEL)
    x = starts[::2]
    for step in range(STEPS):
        rows = [gradient(model, x[k // 2], k, step) for k in range(SIZE)]
        x = W @ (x - LR * torch.stack([(rows[0] + rows[1]) / 2, (rows[2] + rows[3]) / 2]))
    assert (x[0] - x[1]).abs().max() > 1e-4
    assert (ends - x.repeat_interleave(2, 0)).abs().max() < 1e-12
