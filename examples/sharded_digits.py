"""Replicas of two processes each read digits: FSDP inside a replica, averages with neighbours between replicas.

    shoal run --no-prefix -n 4 examples/sharded_digits.py
    shoal run --no-prefix -n 4 examples/sharded_digits.py --checkpoint FOLDER     # again with more --steps: goes on

What this adds to an FSDP script: `shoal.init(mesh=...)`, one line around the optimizer, and `shoal.consensus(model)`
where the mean model is looked at. See docs/sharded.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import shoal
from _data import load, seeded

SHARDS = 2


class Counter:
    """How many steps are done, for the checkpoint."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    replicas = dist.get_world_size() // SHARDS
    mesh = init_device_mesh("cpu", (replicas, SHARDS), mesh_dim_names=("replicate", "shard"))
    shoal.init(mesh=mesh["replicate"])  # an agent is a replica: shoal.rank() of shoal.size()

    model: nn.Module = seeded(0, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    fully_shard(model[1], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = shoal.DecentralizedOptimizer(adam, model, mix_state=("exp_avg_sq",))

    # Each process has images of its own, as under FSDP alone.
    digits, rank = load(dist.get_world_size(), alpha=1.0, seed=0), dist.get_rank()
    own, done = digits.shards[rank], Counter()
    draws = torch.Generator().manual_seed(rank)
    state = {"training": shoal.Checkpoint(model=model, optimizer=optimizer, done=done, draws=draws)}
    if args.checkpoint and args.checkpoint.exists():
        dcp.load(state, checkpoint_id=args.checkpoint)
    while done.steps < args.steps:
        chosen = torch.randint(len(own), (16,), generator=draws)
        optimizer.zero_grad()
        cross_entropy(model(own.images[chosen]), own.labels[chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # over all shards of the replica
        optimizer.step()
        done.steps += 1
    if args.checkpoint:
        dcp.save(state, checkpoint_id=args.checkpoint)

    with torch.no_grad(), shoal.consensus(model):
        right = int((model(digits.test.images).argmax(1) == digits.test.labels).sum())
    apart = shoal.consensus_distance(model)
    if rank == 0:
        print(f"step {done.steps}: the mean model of {replicas} replicas reads {right} of {len(digits.test)} images")
        print(f"a replica's model is {apart:.3g} from it")
    shoal.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
