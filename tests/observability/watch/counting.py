"""Trains, and logs 1, 2, ... as its loss at moments that are drawn, until a file is there; rank 0 writes down when."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch

import shoal


def main(stop: Path) -> None:
    shoal.init()
    model = torch.nn.Linear(16, 4)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model)
    draw, number = random.Random(5), 0
    with stop.with_name("logged").open("w") as logged:
        while not shoal.allreduce(torch.tensor([float(stop.exists())])).item():
            for _ in range(draw.randrange(20, 60)):
                optimizer.zero_grad()
                model(torch.randn(32, 16)).square().mean().backward()
                optimizer.step()
                time.sleep(0.01)
            number += 1
            if shoal.rank() == 0:
                print(number, time.time(), file=logged, flush=True)
            shoal.metrics({"loss": number})
    shoal.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
