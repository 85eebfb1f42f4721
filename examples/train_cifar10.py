"""Agents train ResNet-20 on CIFAR-10: evaluation, checkpoints, exact resumption, and a comparison with all-reduce.

    shoal run --no-prefix -n 4 examples/train_cifar10.py --data cifar-10-batches-py --compare

What is particular to a job of agents that each have a model of their own: the optimizer's wrapper, batches for each
agent, evaluation of their consensus, and a checkpoint for each agent. For a model of your own, start from `train`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from math import cos, pi
from pathlib import Path
from statistics import median
from typing import Any

import networkx as nx
import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, relu

import _cifar10
import shoal
from _checkpoint import Checkpoints

WRAPPERS: dict[str, Callable[..., shoal.DecentralizedOptimizer]] = {
    "atc": shoal.DistributedAdaptThenCombineOptimizer,
    "awc": shoal.DistributedAdaptWithCombineOptimizer,
    "allreduce": shoal.DistributedGradientAllreduceOptimizer,
}
TITLES = {"atc": "adapt, then combine", "awc": "adapt with combine", "allreduce": "all-reduce"}
TOPOLOGIES: dict[str, Callable[[int], nx.DiGraph | shoal.topology.Schedule]] = {
    "one-peer": shoal.topology.OnePeerExponential,
    "exponential": shoal.ExponentialTwoGraph,
    "ring": shoal.RingGraph,
    "star": shoal.StarGraph,
    "full": shoal.FullyConnectedGraph,
}
USUAL_BATCH = 128
"""Images in all agents' batches together for which `--lr` is meant."""


class Block(nn.Module):
    """Two convolutions, and what went in added to what comes out."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride, self.more = (2, after - before) if after > before else (1, 0)
        self.conv1 = nn.Conv2d(before, after, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        # Option A of the paper, without parameters: every other pixel, and channels of zeros.
        shortcut = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return relu(y + shortcut)


def resnet20(seed: int) -> nn.Module:
    """ResNet-20 for images of 32 x 32 pixels (He et al. 2015, arXiv:1512.03385, section 4.2): 269,722 parameters."""
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Block(before, after) for before, after in pairwise(widths)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, _cifar10.LABELS)),
    )
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@dataclass
class Run:
    """What one way of training has come to, the same on all agents. Lists are over evaluations unless they say else."""

    algorithm: str
    done: int = 0
    """Epochs so far."""
    epochs: list[int] = field(default_factory=list)
    """How many there had been."""
    accuracy: list[list[float]] = field(default_factory=list)
    """[evaluations][agents], each agent's own model on the test images."""
    of_consensus: list[float] = field(default_factory=list)
    """Of the average of all models."""
    distance: list[float] = field(default_factory=list)
    """`shoal.consensus_distance`."""
    seconds: list[float] = field(default_factory=list)
    """Of each epoch, without evaluation; the mean over agents."""
    megabytes: list[float] = field(default_factory=list)
    """Sent in each epoch; the mean over agents."""


def train(
    algorithm: str, model: nn.Module, args: argparse.Namespace, data: tuple[_cifar10.Images, ...], console: Console
) -> Run:
    rank, size = shoal.rank(), shoal.size()
    images, test = data
    steps = len(images) // (size * args.batch)
    lr = args.lr * size * args.batch / USUAL_BATCH  # as many times larger as the batch of all (Goyal et al. 2017)
    sgd = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    peers = {} if algorithm == "allreduce" else {"topology": TOPOLOGIES[args.topology](size)}
    optimizer = WRAPPERS[algorithm](sgd, model, **peers)
    factor = partial(warm_up_and_fall, first=args.warm_up * steps, last=args.epochs * steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    checkpoints = Checkpoints(args.checkpoint and Path(args.checkpoint) / algorithm, settings(args, algorithm))
    run = Run(algorithm)
    done, state = checkpoints.restore(args.resume)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        run = Run(**state["run"])
    last = min(args.epochs, done + args.stop_after) if args.stop_after else args.epochs

    with Progress(console=console, transient=True, disable=console.quiet or not console.is_terminal) as progress:
        bar = progress.add_task(TITLES[algorithm], total=args.epochs * steps, completed=done * steps)
        for epoch in range(done, last):
            began, sent = time.perf_counter(), shoal.bytes_sent()
            for inputs, labels in images.batches(args.batch, rank, size, seed=args.seed * 10_000 + epoch):
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                scheduler.step()
                progress.advance(bar)
            spent = torch.tensor([time.perf_counter() - began, (shoal.bytes_sent() - sent) / 1e6])
            seconds, megabytes = shoal.allreduce(spent).tolist()
            run.seconds.append(seconds)
            run.megabytes.append(megabytes)
            run.done = epoch + 1
            if run.done % args.evaluate_every == 0 or run.done == args.epochs:
                evaluate(model, test, run)
                console.print(_line(run, args.epochs), soft_wrap=True)
            checkpoints.save(
                run.done,
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "run": asdict(run),
                },
            )
    optimizer.close()
    return run


def warm_up_and_fall(step: int, first: int, last: int) -> float:
    """What the learning rate is multiplied by: up as a line during the first steps, and down to 0 as a cosine."""
    return min(1.0, (step + 1) / max(1, first)) * (1 + cos(pi * step / last)) / 2


@torch.no_grad()
def evaluate(model: nn.Module, test: _cifar10.Images, run: Run) -> None:
    """Each agent's own model, the consensus of all (each agent tests it on a part of the images), and how far apart."""
    model.eval()
    own = correct(model, test) / len(test)
    with shoal.consensus(model):
        found = correct(model, test.part(shoal.rank(), shoal.size()))
    model.train()
    run.epochs.append(run.done)
    run.accuracy.append(shoal.allgather(torch.tensor([own], dtype=torch.float64)).tolist())
    run.of_consensus.append(shoal.allreduce(torch.tensor(found), average=False).item() / len(test))
    run.distance.append(shoal.consensus_distance(model))


def correct(model: nn.Module, images: _cifar10.Images) -> int:
    """How many images it reads."""
    return sum(int((model(inputs).argmax(dim=1) == labels).sum()) for inputs, labels in images.in_order())


def main(args: argparse.Namespace) -> list[Run]:
    """One agent's part; also `shoal.Fleet(4).run(main, parse([...]))`."""
    torch.set_num_threads(args.threads)
    shoal.init()
    console = Console(quiet=shoal.rank() != 0, highlight=False)
    data = _cifar10.load(args.data, args.limit_train, args.limit_test)
    total = shoal.size() * args.batch
    if len(data[0]) < total:
        raise SystemExit(f"{len(data[0])} images are fewer than one batch of {args.batch} for {shoal.size()} agents")
    console.print(
        f"{shoal.size()} agents, topology {args.topology}; {len(data[0])} images in batches of {total}, "
        f"{args.batch} for each agent; {len(data[1])} images to test with",
        soft_wrap=True,
    )
    start = resnet20(args.seed)
    shoal.broadcast_parameters(start.state_dict(), root_rank=0)
    runs: list[Run] = []
    for algorithm in dict.fromkeys([args.algorithm, *(["allreduce"] if args.compare else [])]):
        runs.append(train(algorithm, deepcopy(start), args, data, console))
        if runs[-1].done < args.epochs:
            console.print(f"Stopped after epoch {runs[-1].done}; the same command with --resume goes on.")
            return runs
    if shoal.rank() == 0:
        report(runs, args, console)
    return runs


def _line(run: Run, epochs: int) -> str:
    return (
        f"{TITLES[run.algorithm]:19}  epoch {run.epochs[-1]:{len(str(epochs))}}/{epochs}  "
        f"accuracy {_span(run.accuracy[-1])}, of the consensus {run.of_consensus[-1]:.2%}  "
        f"consensus distance {run.distance[-1]:.2g}  {run.seconds[-1]:.0f} s"
    )


def _span(accuracy: list[float]) -> str:
    low, high = f"{min(accuracy):.2%}", f"{max(accuracy):.2%}"
    return low if low == high else f"{low} to {high}"


def report(runs: list[Run], args: argparse.Namespace, console: Console) -> None:
    """The table, the verdict and the picture."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for run in runs:
        table.add_column(TITLES[run.algorithm], justify="right")
    table.add_row("test accuracy of the agents", *(_span(run.accuracy[-1]) for run in runs))
    table.add_row("  of their consensus", *(f"{run.of_consensus[-1]:.2%}" for run in runs))
    table.add_row("consensus distance", *(f"{run.distance[-1]:.2g}" for run in runs))
    table.add_row("sent by an agent in an epoch", *(f"{median(run.megabytes):.1f} MB" for run in runs))
    table.add_row("time of an epoch", *(f"{median(run.seconds):.1f} s" for run in runs))
    console.print(table)
    if len(runs) == 2:
        console.print(verdict(runs[0], runs[1], args.topology), soft_wrap=True)
    if args.picture:
        draw(Path(args.picture), runs)
        console.print(f"Picture: {args.picture}", soft_wrap=True)


def verdict(run: Run, reference: Run, topology: str) -> str:
    points = 100 * (run.of_consensus[-1] - reference.of_consensus[-1])
    compared = f"{abs(points):.2f} points {'below' if points < 0 else 'above'}"
    return (
        f"Verdict: {TITLES[run.algorithm]} over {topology} reads {run.of_consensus[-1]:.2%} of the test images, "
        f"{compared} all-reduce from the same start on the same batches ({reference.of_consensus[-1]:.2%})."
    )


def draw(path: Path, runs: list[Run]) -> None:
    """Accuracy over epochs: each run's consensus, and its agents in thin lines."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run, colour in zip(runs, ("#1f77b4", "#1b1f23"), strict=False):
        axes.plot(run.epochs, run.of_consensus, ".-", color=colour, label=f"{TITLES[run.algorithm]}, consensus")
        for curve in zip(*run.accuracy, strict=True):
            axes.plot(run.epochs, curve, color=colour, linewidth=0.6, alpha=0.6)
    axes.set(title="CIFAR-10, ResNet-20: test accuracy", xlabel="epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def settings(args: argparse.Namespace, algorithm: str) -> dict[str, Any]:
    """What a job that goes on must have in common with the one that began."""
    names = ("topology", "epochs", "batch", "lr", "warm_up", "seed", "limit_train", "limit_test", "evaluate_every")
    return {"algorithm": algorithm} | {name: getattr(args, name) for name in names}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="cifar-10-batches-py", help="that folder, or the one that it lies in")
    parser.add_argument("--algorithm", choices=WRAPPERS, default="atc", help="what is averaged, and when")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="one-peer", help="who averages with whom")
    parser.add_argument("--compare", action="store_true", help="train with all-reduce, too, on the same batches")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="images in a batch of one agent")
    parser.add_argument("--lr", type=float, default=0.1, help=f"learning rate for {USUAL_BATCH} images in all batches")
    parser.add_argument("--warm-up", type=int, default=1, help="epochs until the learning rate is reached")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the batches")
    parser.add_argument("--limit-train", type=int, default=0, help="train on so many images only")
    parser.add_argument("--limit-test", type=int, default=0, help="test with so many images only")
    parser.add_argument("--evaluate-every", type=int, default=1, help="epochs between two evaluations")
    parser.add_argument("--checkpoint", default="", help="save here after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    parser.add_argument("--stop-after", type=int, default=0, help="end after so many epochs, to go on another time")
    parser.add_argument("--threads", type=int, default=1, help="of one agent")
    parser.add_argument("--picture", default="", help="where to write a picture of the accuracy")
    args = parser.parse_args(arguments)
    for name in ("epochs", "batch", "evaluate_every", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    for name in ("warm_up", "limit_train", "limit_test", "stop_after"):
        if getattr(args, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative")
    if (args.resume or args.stop_after) and not args.checkpoint:
        parser.error("--resume and --stop-after need --checkpoint")
    return args


if __name__ == "__main__":
    main(parse())
    shoal.shutdown()
