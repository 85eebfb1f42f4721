"""DistributedDataParallel inside a machine, and gossip between machines: real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from test_optimizer import LR, MODEL, SIZE, batch, flat, gradient
from torch.nn.parallel import DistributedDataParallel

import shoal

STEPS = 4
UNEVEN = nx.DiGraph(
    [(0, 0, {"weight": 0.75}), (1, 1, {"weight": 0.75}), (0, 1, {"weight": 0.25}), (1, 0, {"weight": 0.25})]
)


def train(folder: Path) -> None:
    """An agent of one of two machines with two agents each."""
    shoal.init()
    machine = dist.FileStore(f"{folder}/machine{shoal.machine_rank()}", 2)
    dist.init_process_group("gloo", store=machine, rank=shoal.local_rank(), world_size=2)
    shoal.set_machine_topology(UNEVEN, is_weighted=True)
    model = DistributedDataParallel(deepcopy(MODEL))
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(ValueError, match="DistributedDataParallel averages gradients after"):
        shoal.DistributedAdaptThenCombineOptimizer(sgd, model, overlap="backward")
    optimizer = shoal.DistributedAdaptThenCombineOptimizer(
        sgd, model, shoal.CommunicationType.hierarchical_neighbor_allreduce
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(shoal.rank(), step)).square().mean().backward()
        optimizer.step()
    (folder / f"agent{shoal.rank()}.json").write_text(json.dumps([flat(MODEL).tolist(), flat(model).tolist()]))
    optimizer.close()
    shoal.shutdown()
    dist.destroy_process_group()


@pytest.mark.transport("shared_memory")
def test_gradients_inside_a_machine_and_parameters_between(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "shoal", "run", "-n", str(SIZE), __file__, str(tmp_path)]
    environ = {**os.environ, "SHOAL_AGENTS_PER_MACHINE": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, env=environ, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"agent{rank}.json").read_text()) for rank in range(SIZE)]
    starts, ends = torch.tensor(told, dtype=torch.float64).unbind(1)
    W = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)
    model = deepcopy(MODEL)
    x = starts[::2]
    for step in range(STEPS):
        rows = [gradient(model, x[k // 2], k, step) for k in range(SIZE)]
        x = W @ (x - LR * torch.stack([(rows[0] + rows[1]) / 2, (rows[2] + rows[3]) / 2]))
    assert (x[0] - x[1]).abs().max() > 1e-4
    assert (ends - x.repeat_interleave(2, 0)).abs().max() < 1e-12


if __name__ == "__main__":
    train(Path(sys.argv[1]))
