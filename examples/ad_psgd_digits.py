"""Agents learn to read digits and average in pairs, without rounds; one of them is ten times slower than the others.

    shoal run -n 4 examples/ad_psgd_digits.py

AD-PSGD (Lian et al. 2018, arXiv:1710.06952). Agents of even rank are active, those of odd rank passive. In each step an
active agent picks a passive one, both take the mean of their two models, and meanwhile the active one computes its
gradient on the model that it had before. It trains twice: with all agents equally fast, and with the last one slow. The
pace of all is made by sleeps, so that not the cores are measured.

What makes the average of a pair one step: the active agent puts its model into its slot at the passive one, and leaves
it alone until the answer is there. A second thread of the passive agent averages its model with one slot after another,
and puts the result into the slot of who asked; a lock keeps its own gradient step out meanwhile. So both end with the
mean of the very two models that went in, and averaging never moves the mean of all.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
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
LOOK_AGAIN = 0.0002
"""Seconds. A slot does not call out when something arrives in it; who waits for that looks from time to time."""


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


def average_as_active(peer: int) -> None:
    """Wait until the passive agent has answered, and take its answer."""
    deadline = time.monotonic() + 60
    while not shoal.get_win_version("x")[peer]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"agent {peer} does not answer agent {shoal.rank()}; is it still there?")
        time.sleep(LOOK_AGAIN)
    shoal.win_update("x", 0.0, {peer: 1.0})


def average_as_passive(x: Tensor, lock: threading.Lock, stop: threading.Event) -> None:
    """Average with whoever asks, one after another, until told to stop."""
    answered = dict.fromkeys(shoal.in_neighbor_ranks(), 0)
    while not stop.wait(LOOK_AGAIN):
        for peer, slot in shoal.win_slots("x").items():
            if slot.puts > answered[peer]:
                answered[peer] = slot.puts
                with lock:
                    shoal.win_update("x", 0.5, {peer: 0.5})
                    shoal.win_put(x, "x", dst_weights=[peer])


def train(args: argparse.Namespace, digits: _data.Digits, slowness: int) -> Run:
    rank, size = shoal.rank(), shoal.size()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    parameters = list(model.parameters())
    start = shoal.broadcast(parameters_to_vector(parameters).detach(), root_rank=0)
    x = shoal.empty(start.numel()).copy_(start)  # neighbours get and put where it lies
    descended = torch.zeros_like(x)
    shoal.win_create(x, "x", zero_init=True)
    chance = random.Random(args.seed * size + rank)
    batches = digits.shards[rank].batches(BATCH, seed=args.seed * size + rank)
    active, others = rank % 2 == 0, shoal.out_neighbor_ranks()
    lock, stop = threading.Lock(), threading.Event()
    helper = threading.Thread(target=shoal.bind(average_as_passive), args=(x, lock, stop))
    slowness = slowness if rank == size - 1 else 1
    curve: list[tuple[float, float]] = []
    began = time.perf_counter()

    with ExitStack() as running:
        if not active:
            helper.start()
            running.callback(helper.join)
            running.callback(stop.set)
        for _ in until_all_have(args.steps // slowness, args.interval * slowness):
            peer = chance.choice(others)
            if active:
                shoal.win_put(x, "x", dst_weights=[peer])
            with lock:
                vector_to_parameters(x.clone(), parameters)
            images, labels = next(batches)
            loss = cross_entropy(model(images), labels)
            gradient = parameters_to_vector(torch.autograd.grad(loss, parameters))
            if active:
                average_as_active(peer)
            with lock:
                x.sub_(gradient, alpha=args.lr)
            descended.add_(gradient, alpha=args.lr)
            now = time.perf_counter() - began
            before, smooth = curve[-1] if curve else (0.0, loss.item())
            curve.append((now, smooth + min(1.0, (now - before) / SMOOTHING) * (loss.item() - smooth)))
        shoal.barrier()  # until the active agents have their last answers
    mean = shoal.allreduce(x)
    moved = torch.dist(mean, start - shoal.allreduce(descended)).item()
    accuracy = shoal.allgather(torch.tensor([measure(model, x.clone(), digits.test)])).tolist()
    shoal.win_free()
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
    ranks = range(shoal.size())
    if len(ranks) < 2:
        raise SystemExit("pairs need two agents or more: shoal run -n 4 examples/ad_psgd_digits.py")
    shoal.set_topology(nx.DiGraph((i, j) for i in ranks for j in ranks if (i + j) % 2))
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
    parser.add_argument("--alpha", type=float, default=10.0, help="how alike the shards are (Dirichlet parameter)")
    parser.add_argument("--seed", type=int, default=0, help="of the shards, the batches and the pairs")
    parser.add_argument("--picture", default="out/ad_psgd_digits.png", help="where to write the picture")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
    shoal.shutdown()
