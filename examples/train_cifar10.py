"""Agents train ResNet-20 on CIFAR-10: evaluation, checkpoints, exact resumption, and a comparison with all-reduce.

    shoal run --no-prefix -n 4 examples/train_cifar10.py --data cifar-10-batches-py --compare

What is particular to a job of agents that each have a model of their own: the optimizer's wrapper, batches for each
agent, evaluation of their consensus, and a checkpoint for each agent. For a model of your own, start from `train`.
"""

from __future__ import annotations

import argparse
import time
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, relu
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR

import _cifar10
import _training
import shoal
from _training import ALGORITHMS, TITLES, TOPOLOGIES

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
class Run(_training.Run):
    """What is evaluated is the accuracy on the test images; these lists are over epochs."""

    seconds: list[float] = field(default_factory=list)
    """Of each, without evaluation; the mean over agents."""
    megabytes: list[float] = field(default_factory=list)
    """Sent in each; the mean over agents."""


def train(
    algorithm: str, model: nn.Module, args: argparse.Namespace, data: tuple[_cifar10.Images, ...], console: Console
) -> Run:
    images, test = data
    sampler = shoal.data.AgentSampler(images, seed=args.seed)
    steps = len(sampler) // args.batch
    sgd = torch.optim.SGD(model.parameters(), args.lr * args.batch / USUAL_BATCH, momentum=0.9, weight_decay=1e-4)
    peers = {} if algorithm == "allreduce" else {"topology": TOPOLOGIES[args.topology](shoal.size())}
    optimizer = shoal.DecentralizedOptimizer(sgd, model, ALGORITHMS[algorithm], **peers)
    # From the rate for one agent's batch to that for all agents' together (Goyal et al. 2017), and to 0 in the end.
    warmup = shoal.optim.Warmup(optimizer, steps=max(1, args.warm_up * steps))
    scheduler = ChainedScheduler([warmup, CosineAnnealingLR(optimizer, T_max=args.epochs * steps)])

    run = Run(algorithm, settings(args, algorithm))
    checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, run=run)
    folder = Path(args.checkpoint) / algorithm if args.checkpoint else None
    done = 0
    if folder:
        _training.check(folder, run, args.resume)
        done = checkpoint.load(folder, missing_ok=True)
    last = min(args.epochs, done + args.stop_after) if args.stop_after else args.epochs

    with _training.progress(console) as progress:
        bar = progress.add_task(TITLES[algorithm], total=args.epochs * steps, completed=done * steps)
        for epoch in range(done, last):
            began, sent = time.perf_counter(), shoal.observability.bytes_sent()
            for inputs, labels in images.batches(sampler, args.batch, seed=args.seed * 10_000 + epoch):
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
                progress.advance(bar)
            spent = torch.tensor([time.perf_counter() - began, (shoal.observability.bytes_sent() - sent) / 1e6])
            seconds, megabytes = shoal.allreduce(spent).tolist()
            run.seconds.append(seconds)
            run.megabytes.append(megabytes)
            run.done = epoch + 1
            if run.done % args.evaluate_every == 0 or run.done == args.epochs:
                evaluate(model, test, run)
                console.print(_line(run, args.epochs), soft_wrap=True)
            if folder:
                checkpoint.save(folder, run.done)
    optimizer.close()
    return run


@torch.no_grad()
def evaluate(model: nn.Module, test: _cifar10.Images, run: Run) -> None:
    """Each agent's own model, the consensus of all (each agent tests it on a part of the images), and how far apart."""
    model.eval()
    own = correct(model, test) / len(test)
    with shoal.consensus(model):
        found = correct(model, test.part(shoal.rank(), shoal.size()))
    model.train()
    run.evaluated.append(run.done)
    run.of_agents.append(shoal.allgather(torch.tensor([own], dtype=torch.float64)).tolist())
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
        f"{TITLES[run.algorithm]:19}  epoch {run.evaluated[-1]:{len(str(epochs))}}/{epochs}  "
        f"accuracy {_training.span(run.of_agents[-1], '.2%')}, of the consensus {run.of_consensus[-1]:.2%}  "
        f"consensus distance {run.distance[-1]:.2g}  {run.seconds[-1]:.0f} s"
    )


def report(runs: list[Run], args: argparse.Namespace, console: Console) -> None:
    """The table, the verdict and the picture."""
    rows = {
        "test accuracy of the agents": [_training.span(run.of_agents[-1], ".2%") for run in runs],
        "  of their consensus": [f"{run.of_consensus[-1]:.2%}" for run in runs],
        "consensus distance": [f"{run.distance[-1]:.2g}" for run in runs],
        "sent by an agent in an epoch": [f"{median(run.megabytes):.1f} MB" for run in runs],
        "time of an epoch": [f"{median(run.seconds):.1f} s" for run in runs],
    }
    console.print(_training.table(runs, rows))
    if len(runs) == 2:
        console.print(verdict(runs[0], runs[1], args.topology), soft_wrap=True)
    if args.picture:
        _training.draw(Path(args.picture), runs, _adorn)
        console.print(f"Picture: {args.picture}", soft_wrap=True)


def verdict(run: Run, reference: Run, topology: str) -> str:
    points = 100 * (run.of_consensus[-1] - reference.of_consensus[-1])
    compared = f"{abs(points):.2f} points {'below' if points < 0 else 'above'}"
    return (
        f"Verdict: {TITLES[run.algorithm]} over {topology} reads {run.of_consensus[-1]:.2%} of the test images, "
        f"{compared} all-reduce from the same start on the same batches ({reference.of_consensus[-1]:.2%})."
    )


def _adorn(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set(title="CIFAR-10, ResNet-20: test accuracy", xlabel="epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def settings(args: argparse.Namespace, algorithm: str) -> dict[str, Any]:
    """What a job that goes on must have in common with the one that began."""
    names = ("topology", "epochs", "batch", "lr", "warm_up", "seed", "limit_train", "limit_test", "evaluate_every")
    return {"algorithm": algorithm} | {name: getattr(args, name) for name in names}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="cifar-10-batches-py", help="that folder, or the one that it lies in")
    _training.options(parser, "epoch")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="images in a batch of one agent")
    parser.add_argument("--lr", type=float, default=0.1, help=f"learning rate for {USUAL_BATCH} images in all batches")
    parser.add_argument("--warm-up", type=int, default=1, help="epochs until the learning rate is reached")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the batches")
    parser.add_argument("--limit-train", type=int, default=0, help="train on so many images only")
    parser.add_argument("--limit-test", type=int, default=0, help="test with so many images only")
    parser.add_argument("--evaluate-every", type=int, default=1, help="epochs between two evaluations")
    not_negative = ("warm_up", "seed", "limit_train", "limit_test")
    return _training.parsed(parser, arguments, ("epochs", "batch", "evaluate_every"), not_negative)


if __name__ == "__main__":
    main(parse())
    shoal.shutdown()
