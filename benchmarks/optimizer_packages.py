"""How optimizers of torch and of packages do in each of Shoal's ways, where agents' data differ.

    pip install 'shoal[optimizers]'
    python benchmarks/optimizer_packages.py               # digits, four agents on a ring, three seeds: minutes
    python benchmarks/optimizer_packages.py --only Muon   # those whose name has that in it

Every way has the same weights, batches and learning rates, tuned for none. Accuracy is of the agents' mean model on
images that nobody trains on, and of the agent whose own model is worst; the first column is data-parallel training with
averaged gradients, which the others are to come near. Each agent has its own share of the labels (Dirichlet, 0.1).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.algorithms import ExactDiffusion, GradientDescent

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from _data import load, seeded

Make = Callable[[nn.Module], torch.optim.Optimizer]


def of_all(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda model: make(model.parameters(), **options)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Of matrices alone: this perceptron has no biases."""
    return torch.optim.Muon(model.parameters(), lr=0.02)


def optimizers() -> dict[str, tuple[Make, tuple[str, ...]]]:
    """Each with the state that is averaged beside the parameters where `mix_state` is on."""
    import pytorch_optimizer
    import schedulefree

    warm = {"warmup_steps": 10}
    return {
        "SGD, momentum": (of_all(torch.optim.SGD, lr=0.1, momentum=0.9), ("momentum_buffer",)),
        "AdamW": (of_all(torch.optim.AdamW, lr=3e-3), ("exp_avg_sq",)),
        "Adafactor": (of_all(torch.optim.Adafactor, lr=3e-2), ()),
        "Muon": (muon, ("momentum_buffer",)),
        "schedule-free SGD": (of_all(schedulefree.SGDScheduleFree, lr=0.5, **warm), ("z",)),
        "schedule-free AdamW": (of_all(schedulefree.AdamWScheduleFree, lr=1e-2, **warm), ("z", "exp_avg_sq")),
        "Lion": (of_all(pytorch_optimizer.Lion, lr=3e-3), ("exp_avg",)),
        "SOAP": (of_all(pytorch_optimizer.SOAP, lr=3e-3, precondition_frequency=5), ()),
        "Shampoo": (of_all(pytorch_optimizer.Shampoo, lr=0.1, preconditioning_compute_steps=5), ()),
        "Prodigy": (of_all(pytorch_optimizer.Prodigy, lr=1.0), ()),
    }


WAYS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "gradients": lambda inner, model, ring, mixed: shoal.bluefog.DistributedGradientAllreduceOptimizer(inner, model),
    "adapt, then combine": lambda inner, model, ring, mixed: shoal.DecentralizedOptimizer(
        inner, model, topology=ring, mix_state=()
    ),
    "with mix_state": lambda inner, model, ring, mixed: shoal.DecentralizedOptimizer(
        inner, model, topology=ring, mix_state=mixed
    ),
    "adapt with combine": lambda inner, model, ring, mixed: shoal.DecentralizedOptimizer(
        inner, model, GradientDescent(1.0, atc=False), topology=ring, mix_state=mixed
    ),
    "exact diffusion": lambda inner, model, ring, mixed: shoal.DecentralizedOptimizer(
        inner, model, ExactDiffusion(1.0, lazy=True), topology=ring
    ),
}


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 10, bias=False))


def train(make: Make, mixed: tuple[str, ...], way: str, steps: int, seed: int, agents: int) -> tuple[float, float]:
    """The accuracy of the mean model, and the worst agent's."""
    digits = load(agents, alpha=0.1, seed=seed)

    def agent() -> tuple[float, float]:
        model = seeded(seed, perceptron)
        optimizer = WAYS[way](make(model), model, shoal.topology.RingGraph(agents), mixed)
        mode = getattr(optimizer.optimizer, "train", None)  # type: ignore[attr-defined]
        if mode is not None:
            mode()
        own = digits.shards[shoal.rank()]
        draws = torch.Generator().manual_seed(1000 * seed + shoal.rank())
        for _ in range(steps):
            chosen = torch.randint(len(own), (16,), generator=draws)
            optimizer.zero_grad()
            cross_entropy(model(own.images[chosen]), own.labels[chosen]).backward()
            optimizer.step()
        if mode is not None:
            optimizer.optimizer.eval()  # type: ignore[attr-defined]

        def accuracy() -> float:
            with torch.no_grad():
                return (model(digits.test.images).argmax(1) == digits.test.labels).double().mean().item()

        alone = accuracy()
        with shoal.consensus(model):
            return accuracy(), alone

    found = shoal.Fleet(agents, timeout=60.0).run(agent)
    return found[0][0], min(alone for _, alone in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--only", default="", metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = {name: row for name, row in optimizers().items() if args.only in name}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    cells = [(name, way) for name, way in itertools.product(rows, WAYS) if rows[name][1] or way != "with mix_state"]
    said: dict[tuple[str, str], str] = {}
    for name, way in track(cells, console=Console(stderr=True)):
        make, mixed = rows[name]
        try:
            runs = [train(make, mixed, way, args.steps, seed, args.agents) for seed in range(args.seeds)]
        except Exception as error:
            said[name, way] = "refused" if isinstance(error, ValueError) else type(error).__name__
            print(f"{name}, {way}: {error}", file=sys.stderr)
            continue
        found[name, way] = runs
    table = Table("mean model / worst agent, %", *WAYS)
    for name in rows:
        texts = []
        for way in WAYS:
            runs = found.get((name, way), [])
            of_mean, worst = (100 * mean(one) for one in zip(*runs, strict=True)) if runs else (0.0, 0.0)
            texts.append(f"{of_mean:.1f} / {worst:.1f}" if runs else said.get((name, way), ""))
        table.add_row(name, *texts)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
