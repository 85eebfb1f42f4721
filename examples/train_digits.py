"""Agents learn to read handwritten digits, each from its own uneven share of the data, without a common model.

    shoal run -n 4 examples/train_digits.py        (or torchrun --nproc-per-node 4, or plain python for one agent)

A step is a step of SGD on the agent's own images, and then an average of its weights with those of one neighbour, in
each step another one. At the end all-reduce training, where every step averages the gradients of all, is run on the
same images for comparison, and training alone, without any communication. For a model of your own, start from `train`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import _data
import shoal
from _report import Report, Run

BATCH = 16
TOPOLOGIES = {
    "one-peer": shoal.topology.ExponentialTwoGraph,  # one neighbour on it at a time
    "exponential": shoal.topology.ExponentialTwoGraph,
    "ring": shoal.topology.RingGraph,
    "star": shoal.topology.StarGraph,
    "full": shoal.topology.FullyConnectedGraph,
}


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def rounds(topology: str) -> Iterator[dict[str, Any]]:
    """Whom to average with in each step, as arguments of `neighbor_allreduce`; none for the static topology."""
    while topology != "one-peer":
        yield {}
    for destinations, sources in shoal.topology.GetDynamicOnePeerSendRecvRanks(shoal.load_topology(), shoal.rank()):
        share = 1 / (len(sources) + 1)
        yield {"self_weight": share, "src_weights": dict.fromkeys(sources, share), "dst_weights": destinations}


def train(algorithm: str, model: nn.Module, args: argparse.Namespace, digits: _data.Digits, report: Report) -> Run:
    rank, size = shoal.rank(), shoal.size()
    parameters = list(model.parameters())
    weights = parameters_to_vector(parameters).detach()  # one vector is one message;
    vector_to_parameters(weights, parameters)  # from here on the parameters are views of it
    steps = -(-digits.total // (size * BATCH))  # in an epoch, all agents together see as many images as there are
    optimizer = torch.optim.SGD(parameters, lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * steps, eta_min=args.lr / 20)
    batches = digits.shards[rank].batches(BATCH, seed=args.seed * size + rank)
    peers = rounds(args.topology)

    run, seconds, sent = Run(algorithm), [], 0
    for _ in range(args.epochs):
        began, sent_before = time.perf_counter(), shoal.observability.bytes_sent()
        for _ in range(steps):
            images, labels = next(batches)
            optimizer.zero_grad()
            loss = digits.weight(rank) * cross_entropy(model(images), labels)
            if algorithm == "awc":  # adapt with combine: average while the gradient is computed, then add the step
                averaging = shoal.nonblocking.neighbor_allreduce(weights, **next(peers))
            loss.backward()
            if algorithm == "awc":
                weights.copy_(averaging.wait())
            if algorithm == "allreduce":
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                vector_to_parameters(shoal.allreduce(parameters_to_vector(gradients)), gradients)
            optimizer.step()
            if algorithm == "atc":  # adapt, then combine: the local step first, then average its result
                shoal.neighbor_allreduce(weights, **next(peers), out=weights)
            scheduler.step()
        seconds.append((time.perf_counter() - began) / steps)
        sent += shoal.observability.bytes_sent() - sent_before
        measure(model, weights, digits.test, run)
        report.show(run)
    run.milliseconds = 1000 * shoal.allreduce(torch.tensor(median(seconds))).item()
    run.bytes_sent = shoal.allgather(torch.tensor([sent])).tolist()
    return run


@torch.no_grad()
def measure(model: nn.Module, weights: Tensor, test: _data.Images, run: Run) -> None:
    """How well each agent does, how well their average model does, and how far they are from it."""

    def correct() -> Tensor:
        logits: Tensor = model(test.images)
        return logits.argmax(dim=1) == test.labels

    own = weights.clone()
    mean = shoal.allreduce(own)
    accuracy = [math.nan] * shoal.size()  # of an agent that is gone
    for rank, own_accuracy in shoal.allgather(torch.tensor([[shoal.rank(), correct().double().mean()]])).tolist():
        accuracy[int(rank)] = own_accuracy
    run.accuracy.append(accuracy)
    run.consensus_distance.append(shoal.allreduce((own - mean).square().sum()).sqrt().item())
    run.norm = mean.norm().item()
    weights.copy_(mean)
    run.correct = correct()
    weights.copy_(own)


def main(args: argparse.Namespace) -> list[Run]:
    """One agent's part; also `shoal.Fleet(4).run(main, args)`."""
    torch.set_num_threads(1)
    shoal.init(TOPOLOGIES[args.topology], is_weighted=True)
    model = _data.seeded(args.seed, make_model)
    shoal.broadcast_parameters(model.state_dict(), root_rank=0)
    digits = _data.load(shoal.size(), args.alpha, args.seed)
    with Report(args, digits, shoal.load_topology(), shoal.rank()) as report:
        baselines = [] if args.no_baselines or shoal.size() == 1 else ["allreduce", "alone"]
        algorithms = dict.fromkeys([args.algorithm, *baselines])
        runs = [train(algorithm, deepcopy(model), args, digits, report) for algorithm in algorithms]
    report.finish(runs)
    return runs


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topology", choices=TOPOLOGIES, default="one-peer", help="who averages with whom")
    parser.add_argument("--algorithm", choices=["atc", "awc", "allreduce"], default="atc", help="when they average")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.05, help="first learning rate; it falls to a 20th, as a cosine")
    parser.add_argument("--alpha", type=float, default=0.5, help="how alike the shards are (Dirichlet parameter)")
    parser.add_argument("--seed", type=int, default=0, help="of the shards, the first weights and the batches")
    parser.add_argument("--no-baselines", action="store_true", help="leave out all-reduce, and training alone")
    parser.add_argument("--picture", default="out/digits.png", help="where to write the picture")
    args = parser.parse_args(arguments)
    if args.epochs < 1 or not args.alpha > 0:
        parser.error("--epochs must be 1 or more, and --alpha above 0")
    return args


if __name__ == "__main__":
    main(parse())
    shoal.shutdown()
