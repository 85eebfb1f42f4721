"""A training run that others may join, until a file is there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import shoal


def main(stop: Path) -> None:
    shoal.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    optimizer = shoal.DecentralizedOptimizer(inner, model)
    run = shoal.Checkpoint(model=model, optimizer=optimizer)
    step = run.load(None, missing_ok=True)
    while not shoal.allreduce(torch.tensor([float(stop.exists())])).item():
        optimizer.zero_grad()
        loss = (model(torch.randn(32, 16)) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        shoal.metrics({"loss": loss.detach()})
        time.sleep(0.02)
        step += 1
        run.save(None, step)
    shoal.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
