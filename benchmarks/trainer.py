"""Does a decentralized Trainer learn as much as DistributedDataParallel in as many steps, at its learning rate?

    python benchmarks/trainer.py
    python benchmarks/trainer.py --lr 0.003 --seeds 0 1 2

A small GPT-2 from random weights on a text, by the Trainer of Transformers, with the same batches in each way:

- ddp: Transformers' own Trainer, which averages gradients over Gloo
- default: ShoalTrainer as it is; one neighbour at a time, AccumAdamW
- adamw: the same with plain AdamW
- root: with plain AdamW at a rate that is the root of the number of agents times as large
- gradients: ShoalTrainer with averaged gradients

The figure is the loss of the mean model on the part of the text that nobody trains on, in nats a character.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

WAYS = ("ddp", "default", "adamw", "root", "gradients")


def loss_of(way: str, seed: int, args: argparse.Namespace) -> float:
    shape = {name: getattr(args, name) for name in ("steps", "batch", "context", "width", "layers", "lr")}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", "shoal", "run", "-n", str(args.agents), "--no-prefix"]
        command += [str(Path(__file__).with_name("_trainer_agent.py")), "--way", way, "--json", str(found)]
        command += [f"--seed={seed}", f"--text={args.text}", *(f"--{name}={value}" for name, value in shape.items())]
        done = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{way}: {done.stdout}{done.stderr}")
        loss: float = json.loads(found.read_text())["loss"]
    return loss


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="the first is compared with")
    parser.add_argument("--text", default="", help="a file; without one, the language reference of Python's help()")
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=8, help="pieces of the text in a step of one agent")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    return parser.parse_args()


def main() -> None:
    args, console = parse(), Console(highlight=False)
    rates = args.lr
    table = Table(
        "learning rate", "way", "loss", f"than {args.ways[0]}", title=f"{args.agents} agents, {args.steps} steps"
    )
    for rate in rates:
        args.lr, first = rate, []
        for way in args.ways:
            began = time.perf_counter()
            losses = [loss_of(way, seed, args) for seed in args.seeds]
            first = first or losses
            more = [f"{100 * (loss / base - 1):+.1f}%" for loss, base in zip(losses, first, strict=True)]
            table.add_row(f"{rate:g}", way, f"{mean(losses):.3f}", ", ".join(more))
            console.print(f"{rate:g} {way}: {losses} {more} ({time.perf_counter() - began:.0f} s)", soft_wrap=True)
    console.print(table)


if __name__ == "__main__":
    main()
