"""Decentralized forms of Adam against all-reduce, where the agents' data differ: digits, CIFAR-10, a text.

    python benchmarks/adam.py                                    # digits; 16 agents, Dirichlet 0.1, one peer at a time
    python benchmarks/adam.py --topology ring --alpha 1
    python benchmarks/adam.py --task cifar10 --data FOLDER --agents 8 --steps 600 --seeds 2
    python benchmarks/adam.py --task text --data FILE --agents 4 --steps 600 --seeds 2

Each method has the learning rate that is best for it among the same ones, chosen on runs (``--tuned-on``) that are not
those of the table. The figure is the mean over runs, and within one over the agents' own models; behind it, one
standard error of the runs' mean. What an agent sends to each neighbour is in units of the model's bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from _adam_methods import METHODS, Local
from _adam_tasks import Task, Text, cifar10, digits, text
from shoal.algorithms.schedule_weights import ScheduleWeights
from shoal.topology.families.graphs import RingGraph
from shoal.topology.families.one_peer import OnePeerExponential
from shoal.topology.schedule import Schedule, Static

TOPOLOGIES: dict[str, Callable[[int], Schedule]] = {
    "one-peer": OnePeerExponential,
    "ring": lambda size: Static(RingGraph(size)),
}


def matrices(schedule: Schedule) -> list[torch.Tensor]:
    """W of each round of a period, ``[n, n]``."""
    found = []
    for number in range(schedule.period or 1):
        weights = ScheduleWeights(schedule)[number]
        W = torch.zeros(schedule.size, schedule.size)
        W[weights.destination.tolist(), weights.source.tolist()] = torch.tensor(weights.mix.tolist(), dtype=W.dtype)
        found.append(W)
    return found


def train(method: type[Local], task: Task, Ws: list[torch.Tensor], lr: float, args: argparse.Namespace) -> list[float]:
    """The scores of all runs of a task."""
    x = task.start()
    form = method(x, (args.beta1, args.beta2), args.decay)
    for step in range(args.steps):
        rate = lr * (1 + cos(pi * step / args.steps)) / 2
        x = form.step(x, task.gradient(x), Ws[step % len(Ws)], rate)
    return task.score(x)


def measure(name: str, make: Callable[[list[int]], Task], args: argparse.Namespace) -> dict[str, Any]:
    """The best learning rate of a method, and with it the scores of the runs of the table."""
    method, Ws = METHODS[name], matrices(TOPOLOGIES[args.topology](args.agents))
    rates = [10 * lr if name == "sgd" else lr for lr in args.lr]
    trial = make([1000 + number for number in range(args.tuned_on)])
    tuned = {lr: mean(train(method, trial, Ws, lr, args)) for lr in rates}
    best = max(rates, key=lambda lr: trial.better * tuned[lr])
    scores = train(method, make(list(range(args.seeds))), Ws, best, args)
    return {"method": name, "lr": best, "scores": scores, "tuned": tuned}


def show(rows: list[dict[str, Any]], unit: str, args: argparse.Namespace, console: Console) -> None:
    data = "a part of the text each" if args.task == "text" else f"Dirichlet {args.alpha:g}"
    title = f"{args.task}, {args.agents} agents, {args.topology}, {data}, {args.steps} steps, {args.seeds} runs"
    table = Table("method", "sent", unit, "learning rate", title=title)
    for row in rows:
        method, scores = METHODS[row["method"]], row["scores"]
        error = f" ± {stdev(scores) / len(scores) ** 0.5:.2f}" if len(scores) > 1 else ""
        edge = " (the edge)" if row["lr"] in (min(row["tuned"]), max(row["tuned"])) else ""
        sent = "" if row["method"] == "allreduce" else str(method.sent)
        table.add_row(method.title, sent, f"{mean(scores):.2f}{error}", f"{row['lr']:g}{edge}")
    console.print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=["digits", "cifar10", "text"], default="digits")
    parser.add_argument("--data", default="", help="the folder cifar-10-batches-py, or a file of text")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="one-peer")
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=0.1, help="of the Dirichlet distribution; small: data differ")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-3, 3e-3, 1e-2, 3e-2, 1e-1], help="ten times for sgd")
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--decay", type=float, default=0.0, help="AdamW's")
    parser.add_argument("--seeds", type=int, default=5, help="runs of the table")
    parser.add_argument("--tuned-on", type=int, default=2, help="runs that the learning rate is chosen on")
    parser.add_argument("--json", type=Path, help="keep every score")
    return parser.parse_args()


def main() -> int:
    args = parse()
    makers: dict[str, Callable[[list[int]], Task]] = {
        "digits": lambda seeds: digits(args.agents, seeds, args.alpha),
        "cifar10": lambda seeds: cifar10(args.agents, seeds, args.alpha, args.data),
        "text": lambda seeds: text(args.agents, seeds, args.data),
    }
    make, console, rows = makers[args.task], Console(highlight=False), []
    for name in args.methods:
        began = time.perf_counter()
        rows.append(measure(name, make, args))
        found = ", ".join(f"{lr:g}: {score:.2f}" for lr, score in rows[-1]["tuned"].items())
        console.print(f"{METHODS[name].title}: {found} ({time.perf_counter() - began:.0f} s)", soft_wrap=True)
    show(rows, Text.unit if args.task == "text" else Task.unit, args, console)
    if args.json:
        kept = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        args.json.write_text(json.dumps({"settings": kept, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
