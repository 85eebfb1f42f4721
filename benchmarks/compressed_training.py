"""What compressed messages cost in accuracy: agents train on digits, or CIFAR-10, with ``compression=`` and without.

    python benchmarks/compressed_training.py                                     # digits, four agents on a ring
    python benchmarks/compressed_training.py --topology matchings --size 8       # whose topology changes
    python benchmarks/compressed_training.py --task cifar10 --data FOLDER --epochs 10

Each row has the same epochs, batches and learning rates, tuned for none of them. Accuracy is of the agents' own models
on images that nobody trains on, the mean over agents and seeds; beside it, how much lower than without compression, and
one standard error of that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.compression import QSGD, Cast, Compressor, MinMaxUInt8, RandomK, Sign, TopK
from shoal.topology import RandomMatchings

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

COMPRESSORS: dict[str, Compressor | None] = {
    "none": None,
    "bfloat16": Cast(torch.bfloat16),
    "8 bits": MinMaxUInt8(),
    "4 bits": QSGD(7, chunk=64),
    "1 bit": Sign(),
    "top 10%": TopK(0.1),
    "top 1%": TopK(0.01),
    "random 10%": RandomK(0.1),
}
TOPOLOGIES: dict[str, Callable[[int], Any]] = {"ring": shoal.topology.RingGraph, "matchings": RandomMatchings}
Data = tuple[TensorDataset, tuple[Tensor, Tensor]]


def digits(seed: int) -> Data:
    """Scikit-learn's 1797 images, a quarter for the test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(found.images, dtype=torch.float32).flatten(1)[order] / 16
    labels = torch.tensor(found.target)[order]
    return TensorDataset(images[449:], labels[449:]), (images[:449], labels[:449])


def cifar10(folder: str) -> Data:
    from _cifar10 import load  # type: ignore[import-not-found]

    train, test = load(folder)
    inputs, held = (one.pixels.float().sub_(120).div_(64) for one in (train, test))
    return TensorDataset(inputs, train.labels), (held[:2000], test.labels[:2000])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def models(make: Callable[[], nn.Module], size: int, seed: int) -> list[nn.Module]:
    """Equal ones, made in one thread: those of a fleet share torch's generator."""
    found = []
    for _ in range(size):
        torch.manual_seed(seed)
        found.append(make())
    return found


def train(
    own: list[nn.Module], data: Data, compressor: Compressor | None, seed: int, args: Any
) -> tuple[float, float, str]:
    """This agent's accuracy, the bytes that its messages of a step have, and the algorithm."""
    train_set, (images, labels) = data
    model = own[shoal.rank()]
    shards = shoal.data.dirichlet_shards(train_set.tensors[1], alpha=args.alpha, seed=seed)
    sampler = shoal.data.AgentSampler(train_set, shards[shoal.rank()], seed=seed)
    loader = DataLoader(train_set, batch_size=args.batch, sampler=sampler)
    local: torch.optim.Optimizer
    if args.one_bit_adam:
        local = shoal.optim.OneBitAdam(model.parameters(), args.lr, warmup=args.epochs * len(loader) // 8)
    elif args.adam:
        local = torch.optim.AdamW(model.parameters(), lr=args.lr)
    else:
        local = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    if args.gradients:
        optimizer = shoal.bluefog.DistributedGradientAllreduceOptimizer(local, model, compression=compressor)
    else:
        topology = TOPOLOGIES[args.topology](shoal.size())
        optimizer = shoal.DecentralizedOptimizer(
            local, model, topology=topology, compression=compressor, mix_state=None if compressor else ()
        )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            (sampler.weight * cross_entropy(model(inputs), targets)).backward()
            optimizer.step()
            schedule.step()
    numbers = sum(one.numel() for one in model.parameters())
    nbytes = 4.0 * numbers if compressor is None else float(compressor.nbytes(numbers, torch.float32))
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).double().mean().item()
    taken = optimizer.algorithm
    optimizer.close()
    gamma = getattr(taken, "gamma", None)
    return 100 * right, nbytes, type(taken).__name__ + ("" if gamma is None else f", gamma {gamma:.2g}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=["digits", "cifar10"], default="digits")
    parser.add_argument("--data", default="", help="the folder cifar-10-batches-py")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="ring")
    parser.add_argument("--size", type=int, default=4, help="agents")
    parser.add_argument("--alpha", type=float, default=1.0, help="of the Dirichlet distribution; small: data differ")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD")
    parser.add_argument("--gradients", action="store_true", help="average gradients and not parameters")
    parser.add_argument("--adam", action="store_true", help="AdamW and not SGD")
    parser.add_argument("--one-bit-adam", action="store_true", help="OneBitAdam, an eighth of the steps warming up")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--compressors", nargs="+", choices=COMPRESSORS, default=list(COMPRESSORS))
    return parser.parse_args()


def main() -> None:
    args, console = parse(), Console(highlight=False)
    found: dict[str, list[float]] = {}
    told: dict[str, tuple[float, str]] = {}
    runs = [(name, seed) for name in args.compressors for seed in range(args.seeds)]
    for name, seed in track(runs, "training", console=Console(stderr=True)):
        data = digits(seed) if args.task == "digits" else cifar10(args.data)
        own = models(perceptron if args.task == "digits" else convolutions, args.size, seed)
        try:
            agents = shoal.Fleet(args.size).run(train, own, data, COMPRESSORS[name], seed, args)
        except shoal.ShoalError as error:
            console.print(f"{name}: {error.__cause__ or error}", soft_wrap=True)
            continue
        found.setdefault(name, []).append(mean(accuracy for accuracy, *_ in agents))
        told[name] = agents[0][1:]
    where = "averaged gradients" if args.gradients else args.topology
    title = f"{args.task}, {args.size} agents, {where}, Dirichlet {args.alpha:g}, {args.epochs} epochs"
    table = Table("messages", "algorithm", "of the bytes", "accuracy", "less by", title=title)
    for name, accuracies in found.items():
        nbytes, algorithm = told[name]
        less = [whole - one for whole, one in zip(found[args.compressors[0]], accuracies, strict=True)]
        apart = f" ± {stdev(less) / len(less) ** 0.5:.2f}" if len(less) > 1 else ""
        share = nbytes / told[args.compressors[0]][0]
        table.add_row(name, algorithm, f"{share:.3f}", f"{mean(accuracies):.2f}%", f"{mean(less):.2f}{apart}")
    console.print(table)


if __name__ == "__main__":
    main()
