"""A small training run that can be watched: until a file exists, agents run slowly."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import shoal
from shoal import topology


def main(stop: Path) -> None:
    shoal.init()
    torch.manual_seed(shoal.rank())
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    shoal.broadcast_parameters(model.state_dict(), root_rank=0)
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    one_peer = topology.OnePeerExponential(shoal.size())
    optimizer = shoal.DecentralizedOptimizer(inner, model, topology=one_peer)
    truth = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))
    going = True
    while going:
        for _ in range(5):
            x = torch.randn(32, 16)
            optimizer.zero_grad()
            loss = (model(x) - x @ truth).square().mean()
            loss.backward()
            optimizer.step()
            time.sleep(0.06 if shoal.rank() == 1 else 0.03)  # one is slower, so that others wait
        shoal.metrics({"loss": loss.detach()})
        shoal.consensus_distance(model)
        going = not shoal.allreduce(torch.tensor([float(stop.exists())])).item()
    shoal.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
