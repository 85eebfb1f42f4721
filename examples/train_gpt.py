"""Agents train a small GPT on a text, each on its own part of it: evaluation, checkpoints, exact resumption, a sample.

    shoal run --no-prefix -n 4 examples/train_gpt.py --text FILE --compare

What a language model's loop adds to `train_cifar10.py`: AdamW, clipping, a batch in several passes (the exchange comes
once for all of them), a weight that two layers share, and a random generator whose state is in the checkpoint. For a
model of your own, start from `train`.
"""

from __future__ import annotations

import argparse
import time
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from math import cos, log, pi
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import _text
import _training
import shoal
from _training import ALGORITHMS, TITLES, TOPOLOGIES


class Block(nn.Module):
    """Attention to what has been read, then a layer for each place; each is normalised before, and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, places, width = x.shape
        by_head = self.attend(self.norm1(x)).view(batch, places, 3, self.heads, width // self.heads)
        query, key, value = by_head.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, places, width))
        return x + self.narrow(gelu(self.widen(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder (Radford et al. 2019): learned positions, and one table that reads characters in and writes them out.

    Args:
        alphabet: How many characters there are.
        context: How many it reads at most.
        width, layers, heads: Of the blocks.
        seed: Of the first weights.
    """

    def __init__(self, alphabet: int, context: int, width: int, layers: int, heads: int, seed: int) -> None:
        super().__init__()
        self.context = context
        self.characters, self.positions = nn.Embedding(alphabet, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, alphabet, bias=False)
        self.head.weight = self.characters.weight
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                # What is added to the sum of all layers starts smaller, as there are two such in each of them.
                added = name.endswith(("mix.weight", "narrow.weight"))
                nn.init.normal_(param, std=0.02 / (2 * layers) ** 0.5 if added else 0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, read: Tensor) -> Tensor:
        """Logits [batch, places, alphabet] of what comes after each place of `read`, int64 [batch, places]."""
        places = torch.arange(read.shape[1])
        logits: Tensor = self.head(self.norm(self.blocks(self.characters(read) + self.positions(places))))
        return logits


@dataclass
class Run(_training.Run):
    """What is evaluated is the bits per character of the test."""

    milliseconds: list[float] = field(default_factory=list)
    """Of a step since the evaluation before; the mean over agents. For each evaluation."""
    sample: str = ""
    """What the consensus writes, at the end."""


def train(algorithm: str, model: GPT, args: argparse.Namespace, text: _text.Text, console: Console) -> Run:
    rank, size = shoal.rank(), shoal.size()
    decayed = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.95))
    mixed = ("exp_avg_sq",) if args.mix_state else ()
    peers = {} if algorithm == "allreduce" else {"topology": TOPOLOGIES[args.topology](size), "mix_state": mixed}
    optimizer = shoal.DecentralizedOptimizer(
        adamw, model, ALGORITHMS[algorithm], num_steps_per_communication=args.accumulate, **peers
    )
    factor = partial(warm_up_and_fall, first=args.warm_up, last=args.steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    part = text.shard(rank, size)
    chance = torch.Generator().manual_seed(args.seed * size + rank)

    run = Run(algorithm, settings(args, algorithm, text))
    checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, chance=chance, run=run)
    folder = Path(args.checkpoint) / algorithm if args.checkpoint else None
    done = 0
    if folder:
        _training.check(folder, run, args.resume)
        done = checkpoint.load(folder, missing_ok=True)
    last = min(args.steps, done + args.stop_after) if args.stop_after else args.steps

    with _training.progress(console) as progress:
        bar = progress.add_task(TITLES[algorithm], total=args.steps, completed=done)
        began, since = time.perf_counter(), done
        for step in range(done, last):
            optimizer.zero_grad()
            for _ in range(args.accumulate):
                read, following = _text.windows(part, args.batch, args.context, chance)
                loss = cross_entropy(model(read).flatten(0, 1), following.flatten())
                (loss / args.accumulate).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            progress.advance(bar)
            run.done = step + 1
            due = run.done % args.evaluate_every == 0 or run.done == args.steps
            if due:
                spent = torch.tensor(1000 * (time.perf_counter() - began) / (run.done - since))
                run.milliseconds.append(shoal.allreduce(spent).item())
                evaluate(model, text, args, run)
                console.print(_line(run, args.steps, text.unit), soft_wrap=True)
                began, since = time.perf_counter(), run.done
            if folder and (due or run.done == last):
                checkpoint.save(folder, run.done)
    if run.done == args.steps:
        with shoal.consensus(model):
            run.sample = text.decode(write(model, text.test[: args.context], args.sample, args.seed))
    optimizer.close()
    return run


def warm_up_and_fall(step: int, first: int, last: int) -> float:
    """What the learning rate is multiplied by: up as a line during the first steps, and down to a 10th as a cosine."""
    return min(1.0, (step + 1) / max(1, first)) * (0.55 + 0.45 * cos(pi * step / last))


@torch.no_grad()
def evaluate(model: GPT, text: _text.Text, args: argparse.Namespace, run: Run) -> None:
    """Each agent's own model, and the consensus of all, on the same places of the test."""
    own = bits(model, text, args)
    with shoal.consensus(model):
        run.of_consensus.append(bits(model, text, args))
    run.evaluated.append(run.done)
    run.of_agents.append(shoal.allgather(torch.tensor([own], dtype=torch.float64)).tolist())
    run.distance.append(shoal.consensus_distance(model))


def bits(model: GPT, text: _text.Text, args: argparse.Namespace) -> float:
    """Bits per character that the model needs to write the test, or its first part, down."""
    read, following = _text.tiles(text.test, args.context, args.test_windows)
    model.eval()
    pieces = zip(torch.split(read, 16), torch.split(following, 16), strict=True)
    nats = sum(
        cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum").item()
        for inputs, targets in pieces
    )
    model.train()
    return nats / following.numel() / log(2)


@torch.no_grad()
def write(model: GPT, begin: Tensor, count: int, seed: int) -> Tensor:
    """What the model writes after `begin`, int64 [length]: int64 [count], drawn as likely as it finds them."""
    generator = torch.Generator().manual_seed(seed)
    written = begin
    model.eval()
    for _ in range(count):
        likely = model(written[None, -model.context :])[0, -1].softmax(dim=0)
        written = torch.cat([written, torch.multinomial(likely, 1, generator=generator)])
    model.train()
    return written[len(begin) :]


def main(args: argparse.Namespace) -> list[Run]:
    """One agent's part; also `shoal.Fleet(4).run(main, parse([]))`."""
    torch.set_num_threads(args.threads)
    shoal.init()
    console = Console(quiet=shoal.rank() != 0, highlight=False)
    text = _text.load(args.text, args.context)
    start = GPT(len(text.alphabet), args.context, args.width, args.layers, args.heads, args.seed)
    shoal.broadcast_parameters(start.state_dict(), root_rank=0)
    console.print(
        f"{shoal.size()} agents, topology {args.topology}; {text.name}: {len(text.train)} {text.unit}s, of which each "
        f"agent has {len(text.train) // shoal.size()}, and {len(text.test)} to test with; "
        f"{sum(param.numel() for param in start.parameters())} parameters",
        soft_wrap=True,
    )
    runs: list[Run] = []
    for algorithm in dict.fromkeys([args.algorithm, *(["allreduce"] if args.compare else [])]):
        runs.append(train(algorithm, deepcopy(start), args, text, console))
        if runs[-1].done < args.steps:
            console.print(f"Stopped after step {runs[-1].done}; the same command with --resume goes on.")
            return runs
    if shoal.rank() == 0:
        report(runs, args, text.unit, console)
    return runs


def _line(run: Run, steps: int, unit: str) -> str:
    return (
        f"{TITLES[run.algorithm]:19}  step {run.evaluated[-1]:{len(str(steps))}}/{steps}  "
        f"bits per {unit} {_training.span(run.of_agents[-1], '.3f')}, of the consensus {run.of_consensus[-1]:.3f}  "
        f"consensus distance {run.distance[-1]:.2g}"
    )


def report(runs: list[Run], args: argparse.Namespace, unit: str, console: Console) -> None:
    """The table, a sample, the verdict and the picture."""
    rows = {
        f"bits per {unit}, the agents": [_training.span(run.of_agents[-1], ".3f") for run in runs],
        "  their consensus": [f"{run.of_consensus[-1]:.3f}" for run in runs],
        "consensus distance": [f"{run.distance[-1]:.2g}" for run in runs],
        "time of a step": [f"{median(run.milliseconds):.0f} ms" for run in runs],
    }
    console.print(_training.table(runs, rows))
    if args.sample:
        console.print(f"The consensus of {TITLES[runs[0].algorithm]} writes:\n")
        console.print(runs[0].sample, markup=False, soft_wrap=True)
        console.print()
    if len(runs) == 2:
        console.print(verdict(runs[0], runs[1], args.topology, unit), soft_wrap=True)
    if args.picture:
        title = "a small GPT, on text that nobody trains on"
        _training.draw(
            Path(args.picture), runs, lambda axes: axes.set(title=title, xlabel="step", ylabel=f"bits per {unit}")
        )
        console.print(f"Picture: {args.picture}", soft_wrap=True)


def verdict(run: Run, reference: Run, topology: str, unit: str) -> str:
    more = run.of_consensus[-1] - reference.of_consensus[-1]
    compared = f"{abs(more):.3f} {'more' if more > 0 else 'less'}"
    return (
        f"Verdict: {TITLES[run.algorithm]} over {topology} needs {run.of_consensus[-1]:.3f} bits per {unit} of the "
        f"test, {compared} than all-reduce from the same start on the same batches "
        f"({reference.of_consensus[-1]:.3f})."
    )


def settings(args: argparse.Namespace, algorithm: str, text: _text.Text) -> dict[str, Any]:
    """What a job that goes on must have in common with the one that began."""
    names = ("topology", "steps", "batch", "accumulate", "lr", "mix_state", "warm_up", "seed")
    names = (*names, "evaluate_every", "test_windows")
    shape = ("context", "width", "layers", "heads")
    length = f"{len(text.train) + len(text.test)} {text.unit}s"
    return {"algorithm": algorithm, "text": length} | {name: getattr(args, name) for name in (*names, *shape)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", default="", help=f"a file; without one {_text.HELP}")
    _training.options(parser, "step")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8, help="windows of the text in one pass of one agent")
    parser.add_argument("--accumulate", type=int, default=2, help="passes in one step")
    parser.add_argument("--context", type=int, default=128, help="characters in a window")
    parser.add_argument("--width", type=int, default=128, help="numbers for each character, between layers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4, help="of the attention; they share the width")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate, whatever the number of agents")
    parser.add_argument("--mix-state", action="store_true", help="average AdamW's second moments, too: twice the bytes")
    parser.add_argument("--warm-up", type=int, default=50, help="steps until the learning rate is reached")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights, the batches and the sample")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps between two evaluations")
    parser.add_argument("--test-windows", type=int, default=128, help="how many windows of the test to read")
    parser.add_argument("--sample", type=int, default=300, help="how much to write at the end")
    positive = ("steps", "batch", "accumulate", "context", "layers", "heads", "evaluate_every", "test_windows")
    args = _training.parsed(parser, arguments, positive, ("warm_up", "sample"))
    if args.width < 1 or args.width % args.heads:
        parser.error("--width must be a multiple of --heads")
    return args


if __name__ == "__main__":
    main(parse())
    shoal.shutdown()
