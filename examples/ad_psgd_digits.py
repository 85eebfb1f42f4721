"""Agents learn to read digits and average in pairs, without rounds; one of them is ten times slower than the others.

    shoal run -n 4 examples/ad_psgd_digits.py
    shoal run -n 4 examples/ad_psgd_digits.py --compress     # what travels takes a quarter of the bytes

AD-PSGD (Lian et al. 2018, arXiv:1710.06952). In each step an agent picks a neighbour, tells it its parameters, and
computes its gradient meanwhile; a thread of the neighbour's, slow or not, answers what its own are; and both go half of
the way to each other. It trains twice: with all agents equally fast, and with the last one slow. The pace of all is
made by sleeps, so that not the cores are measured.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import _data
import shoal
from _asynchrony import draw, gather, until_all_have

BATCH, SLOWNESS = 32, 10
SMOOTHING = 0.2
"""Seconds over which the losses of the picture are averaged."""


@dataclass(frozen=True)
class Run:
    """One training, the same on every agent; lists are by rank.

    Attributes:
        rates: steps a second.
        accuracy: of each agent's model on the test images; `of_mean` that of the mean of all models.
        losses: (seconds, loss on the agent's last batches), at each step.
        moved: how far averaging by itself has moved the mean of all models. It must not.
    """

    rates: list[float]
    accuracy: list[float]
    of_mean: float
    losses: list[list[tuple[float, float]]]
    moved: float


def train(args: argparse.Namespace, digits: _data.Digits, slowness: int) -> Run:
    rank, size = shoal.rank(), shoal.size()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    shoal.broadcast_parameters(model.state_dict(), root_rank=0)
    parameters = list(model.parameters())
    start = parameters_to_vector(parameters).detach()
    descended = torch.zeros_like(start)
    optimizer = shoal.optim.DistributedADPSGDOptimizer(
        torch.optim.SGD(parameters, lr=args.lr),
        model,
        compression=shoal.compression.MinMaxUInt8() if args.compress else None,
        seed=args.seed,
    )
    batches = digits.shards[rank].batches(BATCH, seed=args.seed * size + rank)
    slowness = slowness if rank == size - 1 else 1
    curve: list[tuple[float, float]] = []
    began = time.perf_counter()

    for _ in until_all_have(args.steps // slowness, args.interval * slowness):
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        descended += args.lr * torch.cat([one.grad.flatten() for one in parameters if one.grad is not None])
        now = time.perf_counter() - began
        before, smooth = curve[-1] if curve else (0.0, loss.item())
        curve.append((now, smooth + min(1.0, (now - before) / SMOOTHING) * (loss.item() - smooth)))
    shoal.barrier()  # until all have had their last answers
    optimizer.close()
    x = parameters_to_vector(parameters).detach()
    mean = shoal.allreduce(x)
    moved = torch.dist(mean, start - shoal.allreduce(descended)).item()
    accuracy = shoal.allgather(torch.tensor([measure(model, x, digits.test)])).tolist()
    shoal.bluefog.win_free()
    losses = gather(curve)
    return Run([len(one) / one[-1][0] for one in losses], accuracy, measure(model, mean, digits.test), losses, moved)


@torch.no_grad()
def measure(model: nn.Module, weights: Tensor, test: _data.Images) -> float:
    vector_to_parameters(weights, model.parameters())
    logits: Tensor = model(test.images)
    return (logits.argmax(dim=1) == test.labels).float().mean().item()


def main(args: argparse.Namespace) -> list[Run]:
    """One agent's part; also `shoal.Fleet(4).run(main, parse([]))`."""
    torch.set_num_threads(1)
    shoal.init()
    if shoal.size() < 2:
        raise SystemExit("pairs need two agents or more: shoal run -n 4 examples/ad_psgd_digits.py")
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    digits = _data.load(shoal.size(), args.alpha, args.seed)
    runs = [train(args, digits, slowness) for slowness in (1, SLOWNESS)]
    if shoal.rank() == 0:
        report(runs, Path(args.picture))
    return runs


def report(runs: list[Run], picture: Path) -> None:
    for run, what in zip(runs, ("all equally fast", f"the last agent {SLOWNESS} times slower"), strict=True):
        rates = ", ".join(f"{rate:.1f}" for rate in run.rates)
        accuracy = ", ".join(f"{100 * one:.1f}%" for one in run.accuracy)
        print(f"{what}: steps a second {rates}")
        print(f"    accuracy {accuracy}; the mean model {100 * run.of_mean:.1f}%; moved by averaging {run.moved:.0e}")
    without, with_slow = (sum(run.rates[:-1]) / len(run.rates[:-1]) for run in runs)
    print(f"the others beside the slow one: {100 * (with_slow / without - 1):+.1f}% steps a second")
    labels = [f"agent {rank}: {rate:.0f} steps a second" for rank, rate in enumerate(runs[-1].rates)]
    draw(picture, runs[-1].losses, labels, "AD-PSGD, the last agent ten times slower", "loss on the last batches")
    print(f"Picture: {picture}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600, help="of each agent, and a tenth for the slow one")
    parser.add_argument("--interval", type=float, default=0.01, help="seconds from step to step of a fast agent")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate")
    parser.add_argument("--compress", action="store_true", help="eight bits for each number that travels")
    parser.add_argument("--alpha", type=float, default=10.0, help="how alike the shards are (Dirichlet parameter)")
    parser.add_argument("--seed", type=int, default=0, help="of the shards, the batches and the pairs")
    parser.add_argument("--picture", default="out/ad_psgd_digits.png", help="where to write the picture")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
    shoal.shutdown()
