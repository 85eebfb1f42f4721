"""Agents find the mean of their vectors, each at its own pace, the fastest ten times as fast as the slowest.

    shoal run -n 4 examples/push_sum_async.py

Push-sum (Kempe, Dobra, Gehrke 2003; in this form Ying et al. 2021, arXiv:2111.04287, equations 19 to 21) works on any
directed graph in which a path leads from everybody to everybody. An agent keeps a share of its vector x and pushes
equal shares to its out-neighbours, and so it does with a weight p, which begins as 1. Pushes are added up, so nothing
is lost however unevenly agents proceed: the sums of x and of p over all agents and windows never change, and x / p
becomes the mean of all at every agent.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import torch

import shoal
from _asynchrony import draw, gather, interval, until_all_have

SMALLEST = 1e-9


@dataclass(frozen=True)
class Figures:
    """What came of it, the same on every agent; lists are by rank.

    Attributes:
        errors: the largest distance of an entry of x / p from the mean, when the agent stopped.
        steps: how many each has made.
        lost: how far the sums of x and p over all agents are from where they began, at the end.
    """

    errors: list[float]
    steps: list[int]
    lost: float


def irregular(size: int) -> nx.DiGraph:
    """A directed ring with chords from two agents in three, so that out-degrees are 1 to 3 and in-degrees differ."""
    edges = [(i, (i + hop) % size) for i in range(size) for hop in range(1, 2 + i % 3)]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from((i, j) for i, j in edges if i != j)
    return graph


def main(args: argparse.Namespace) -> Figures:
    """One agent's part; also `shoal.Fleet(4).run(main, parse([]))`."""
    torch.set_num_threads(1)
    shoal.init()
    shoal.set_topology(irregular(shoal.size()))
    shoal.bluefog.turn_on_win_ops_with_associated_p()
    x = torch.randn(args.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(shoal.rank()))
    mean = shoal.allreduce(x)
    shoal.bluefog.win_create(x, "x", zero_init=True)
    share = 1 / (len(shoal.out_neighbor_ranks()) + 1)
    shares = dict.fromkeys(shoal.out_neighbor_ranks(), share)

    curve = []
    began = time.perf_counter()
    for _ in until_all_have(args.steps, interval(args.interval)):
        if shoal.bluefog.win_associated_p("x") > SMALLEST:  # else it has heard nothing for long, and has little to give
            shoal.bluefog.win_accumulate(x, "x", self_weight=share, dst_weights=shares)
        shoal.bluefog.win_update_then_collect("x")
        error = (x / shoal.bluefog.win_associated_p("x") - mean).abs().max().item()
        curve.append((time.perf_counter() - began, error))

    shoal.barrier()  # agents end at different times; now nothing is on its way
    shoal.bluefog.win_update_then_collect("x")
    lost = (shoal.allreduce(x) - mean).abs().max().item() * shoal.size()
    total = shoal.allreduce(
        torch.tensor(shoal.bluefog.win_associated_p("x"), dtype=torch.float64), average=False
    ).item()
    shoal.bluefog.win_free()
    curves = gather(curve)
    figures = Figures([one[-1][1] for one in curves], [len(one) for one in curves], max(lost, abs(total - len(curves))))
    if shoal.rank() == 0:
        report(figures, curves, Path(args.picture))
    return figures


def report(figures: Figures, curves: list[list[tuple[float, float]]], picture: Path) -> None:
    for rank, (error, steps, curve) in enumerate(zip(figures.errors, figures.steps, curves, strict=True)):
        print(f"agent {rank}: {steps:6d} steps in {curve[-1][0]:.1f} s, error {error:.1e}")
    print(f"lost on the way: {figures.lost:.1e}")
    labels = [f"agent {rank}: {steps} steps" for rank, steps in enumerate(figures.steps)]
    draw(picture, curves, labels, "asynchronous push-sum on a directed graph", "distance from the mean")
    print(f"Picture: {picture}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="that every agent makes at least")
    parser.add_argument("--interval", type=float, default=0.004, help="seconds from step to step of the fastest agent")
    parser.add_argument("--numel", type=int, default=10, help="of the vectors")
    parser.add_argument("--picture", default="out/push_sum_async.png", help="where to write the picture")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
    shoal.shutdown()
