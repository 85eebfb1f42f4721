"""How soon training over a slow wire is accurate: short messages, beside DistributedDataParallel and its hooks.

    sudo python benchmarks/time_to_accuracy.py                      # four hosts at 100 Mbit/s, 13 minutes
    sudo python benchmarks/time_to_accuracy.py --rate 1000          # at 1 Gbit/s
    sudo python benchmarks/time_to_accuracy.py --picture out/time.png
    sudo python benchmarks/time_to_accuracy.py --data FOLDER --ways "DDP, PowerSGD of rank 4" "Shoal, low rank 4"

Each host is a network namespace with one agent, which has a quarter of scikit-learn's digits and a perceptron of 650
thousand parameters; with ``--data``, of 12,800 images of CIFAR-10, and a network of three convolutions. All ways take
the same batches, epochs and learning rates, tuned for none of them. Seconds are of training alone, of the slowest
agent; accuracy, on images that nobody trains on, is the mean of the agents' own models, and of seeds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from math import cos, inf, pi
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from _machines import obstacle, run_on_machines
from _models import nbytes_of
from _ways import Trainer
from compressed_steps import WAYS as EVERY_STEP
from compressed_steps import one_peer
from compressed_training import cifar10, convolutions, digits
from shoal.bench.measurement import Figures, Reporter
from shoal.compression import Compressor, MinMaxUInt8, Zstd
from shoal.optim.malloc_trimming import keep_freed_memory

HOSTS, WIDTH, BATCH, EPOCHS, SEEDS = 4, 768, 16, 10, 3
RATE, MOMENTUM = 0.1, 0.9
TARGETS = (95.0, 97.0)
CIFAR_IMAGES, CIFAR_BATCH, CIFAR_EPOCHS = 12_800, 32, 15
CIFAR_TARGETS = (45.0, 50.0)
LOCAL_STEPS = 4


def now_and_then(model: nn.Module, compression: Compressor | None = None) -> Trainer:
    """It averages in every fourth step."""
    trainer = one_peer(model, compression)
    trainer.optimizer.num_steps_per_communication = LOCAL_STEPS  # type: ignore[attr-defined]
    return trainer


WAYS = EVERY_STEP | {
    "Shoal, whole, every 4 steps": now_and_then,
    "Shoal, 8 bits, every 4 steps": partial(now_and_then, compression=MinMaxUInt8()),
    "Shoal, 8 bits, zstd, every 4 steps": partial(now_and_then, compression=Zstd(MinMaxUInt8())),
}
SHOWN = [
    "DDP",
    "DDP, a bfloat16 hook",
    "DDP, PowerSGD of rank 1",
    "DDP, PowerSGD of rank 4",
    "Shoal, whole",
    "Shoal, 8 bits, during backward",
    "Shoal, 8 bits, zstd, during backward",
    "Shoal, 4 bits",
    "Shoal, 1 bit",
    "Shoal, whole, every 4 steps",
    "Shoal, 8 bits, every 4 steps",
    "Shoal, 8 bits, zstd, every 4 steps",
]
LINES = {
    "DDP": ("#1b1f23", "-"),
    "DDP, a bfloat16 hook": ("#1b1f23", "--"),
    "DDP, PowerSGD of rank 1": ("#8e5fb0", "--"),
    "DDP, PowerSGD of rank 4": ("#8e5fb0", ":"),
    "Shoal, whole": ("#1f77b4", "-"),
    "Shoal, 8 bits, during backward": ("#2a9d6f", "-"),
    "Shoal, 1 bit": ("#c0455e", "-"),
    "Shoal, 8 bits, zstd, every 4 steps": ("#e07b39", "-"),
}
"""What is drawn, in which colour and style."""


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def train(way: str, seed: int, folder: str) -> tuple[list[float], list[float], int]:
    """The seconds until the end of each epoch, the accuracy there, and the bytes of the model."""
    train_set, (images, labels) = cifar10(folder) if folder else digits(seed)
    epochs, batch_size, make = (CIFAR_EPOCHS, CIFAR_BATCH, convolutions) if folder else (EPOCHS, BATCH, perceptron)
    torch.manual_seed(seed)
    trainer = WAYS[way](make())
    [group] = trainer.optimizer.param_groups
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(seed))
    mine = (order[:CIFAR_IMAGES] if folder else order).chunk(HOSTS)[shoal.rank()]
    chance = torch.Generator().manual_seed(100 * seed + shoal.rank())
    own = TensorDataset(*train_set[mine[: len(train_set) // HOSTS]])
    loader = DataLoader(own, batch_size, shuffle=True, generator=chance)
    seconds, accuracy, steps = [], [], epochs * len(loader)
    spent, step = 0.0, 0
    for _ in range(epochs):
        dist.barrier()
        began = time.monotonic()
        for batch in loader:
            group["lr"] = RATE * (1 + cos(pi * step / steps)) / 2
            trainer.step(batch)
            step += 1
        spent += slowest(time.monotonic() - began)
        seconds.append(spent)
        with torch.no_grad():
            right = (trainer.model(images).argmax(1) == labels).double().mean()
        dist.all_reduce(right)
        accuracy.append(100 * right.item() / HOSTS)
    trainer.close()
    return seconds, accuracy, nbytes_of(trainer.model)


def slowest(seconds: float) -> float:
    found = torch.tensor(seconds)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def agent(ways: list[str], seeds: int, folder: str) -> None:
    """What each host runs."""
    reporter = Reporter()
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    shoal.init()
    figures: list[Figures] = []
    for number, way in enumerate(ways):
        runs = []
        for seed in range(seeds):
            reporter.progress(way, number * seeds + seed, len(ways) * seeds)
            runs.append(train(way, seed, folder))
            gc.collect()
        seconds, accuracy = ([mean(column) for column in zip(*(run[i] for run in runs), strict=True)] for i in (0, 1))
        figures.append(Figures(way, runs[0][2], HOSTS, {"seconds": seconds, "accuracy": accuracy}))
    reporter.send({"figures": [asdict(one) for one in figures]})
    shoal.shutdown()
    dist.destroy_process_group()


def until(one: Figures, target: float) -> float:
    """Seconds until the first epoch whose accuracy is this; infinite if none's is."""
    epochs = zip(one.values["seconds"], one.values["accuracy"], strict=True)
    return next((seconds for seconds, accuracy in epochs if accuracy >= target), inf)


def table(title: str, targets: tuple[float, float], figures: list[Figures]) -> Table:
    shown = Table("way", *(f"seconds to {target:g}%" for target in targets), "seconds in all", "% at the end")
    shown.title = title
    for one in figures:
        times = [until(one, target) for target in targets]
        shown.add_row(
            one.kind,
            *("never" if seconds == inf else f"{seconds:.1f}" for seconds in times),
            f"{one.values['seconds'][-1]:.1f}",
            f"{one.values['accuracy'][-1]:.2f}",
        )
    return shown


def draw(path: Path, title: str, figures: list[Figures]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    for one in figures:
        if one.kind in LINES:
            colour, style = LINES[one.kind]
            axes.plot(one.values["seconds"], one.values["accuracy"], style, color=colour, linewidth=1.6, label=one.kind)
    axes.set(xscale="log", xlabel="seconds of training", ylabel="% of test images", ylim=(80, 100), title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def measured(args: argparse.Namespace) -> list[Figures]:
    def progress(doing: str, done: int, total: int) -> None:
        print(f"{doing}: {done} of {total}", file=sys.stderr)

    script = [__file__, "--agent", "--seeds", str(args.seeds), "--data", args.data, "--ways", *args.ways]
    return run_on_machines(HOSTS, args.rate * 1e6 / 8, 1, script, progress, large_packets=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100, help="of the hosts' NICs, Mbit/s")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=SHOWN, metavar="WAY", help="only these")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--data", default="", help="the folder cifar-10-batches-py; without it digits")
    parser.add_argument("--json", type=Path, help="where to keep the curves")
    parser.add_argument("--read", type=Path, help="take them from there, and measure nothing")
    parser.add_argument("--picture", type=Path, help="where to draw them")
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        agent(args.ways, args.seeds, args.data)
        return
    console = Console()
    if args.read:
        figures = [Figures(**one) for one in json.loads(args.read.read_text())]
    else:
        if obstacle():
            parser.error(obstacle())
        console.print(f"load average {os.getloadavg()[0]:.2f}")
        figures = measured(args)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(one) for one in figures]))
    title = f"{'CIFAR-10' if args.data else 'digits'}, {HOSTS} hosts, {args.rate:g} Mbit/s"
    console.print(table(title, CIFAR_TARGETS if args.data else TARGETS, figures))
    if args.picture:
        draw(args.picture, title, figures)


if __name__ == "__main__":
    main()
