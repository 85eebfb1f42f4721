"""What fusing small calls gains, by their number and size: 1 to 200 calls of 64 B to 64 KiB, fused and one by one.

    python benchmarks/fusion.py                                # 4 agents, shared memory: two minutes
    python benchmarks/fusion.py --transport network            # TCP on loopback
    python benchmarks/fusion.py --picture out/fusion.png       # matplotlib

All calls are submitted before the first is waited for, in the same processes and in turn: averages on the static ring,
push-pull averages on it (weights on both sides), and all-reduces. *One by one* is the same code with fusion switched
off. Tensors above 16 KiB are not fused by themselves; here averages of them are, to see where the threshold should
stand (all-reduces of them have several owners, and would be others).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import shoal
from shoal.bench.measurement import Figures, LoadWatch, Reporter, compare, run_job
from shoal.ops import fused_ops

KINDS = ("static", "push-pull", "allreduce")
COUNTS = (1, 10, 50, 200)
SIZES = (64, 1 << 10, 4 << 10, 16 << 10, 64 << 10)
REPETITIONS = 15
ALL, NONE = 1 << 30, 0
Medians = dict[tuple[str, int, int], tuple[float, float]]
"""Milliseconds of all calls, fused and one by one, by kind, number and bytes."""


def begun(kind: str, tensor: torch.Tensor, out: torch.Tensor) -> shoal.Handle[torch.Tensor]:
    if kind == "static":
        return shoal.nonblocking.neighbor_allreduce(tensor, out=out)
    if kind == "allreduce":
        return shoal.nonblocking.allreduce(tensor, out=out)
    rank, size = shoal.rank(), shoal.size()
    sources = {(rank + hop) % size: 1 / 3 for hop in (1, -1)}
    return shoal.nonblocking.neighbor_allreduce(tensor, 1 / 3, sources, list(sources), out=out)


def all_of(kind: str, count: int, nbytes: int, threshold: int) -> Callable[[], None]:
    tensors = [torch.full((nbytes // 4,), float(shoal.rank() + place)) for place in range(count)]
    outs = [torch.empty_like(one) for one in tensors]

    def act() -> None:
        fused_ops.MOST_BYTES = threshold
        handles = [begun(kind, one, out) for one, out in zip(tensors, outs, strict=True)]
        for handle in handles:
            handle.wait()

    return act


def agent(repetitions: int, quick: bool) -> None:
    reporter = Reporter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shoal.init()
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    seconds: dict[str, list[float]] = {}
    for kind in KINDS:
        for nbytes in SIZES[:2] if quick else SIZES:
            if kind == "allreduce" and nbytes > 16 << 10:
                continue
            for count in COUNTS[:2] if quick else COUNTS:  # what comes after 200 calls has their aftermath
                acts = {
                    f"{kind} {count} {nbytes} {way}": all_of(kind, count, nbytes, threshold)
                    for way, threshold in (("fused", ALL), ("alone", NONE))
                }
                seconds |= compare(reporter, f"{count} {kind}, {nbytes} B", acts, repetitions)
    reporter.send({"figures": [asdict(Figures("fusion", 0, shoal.size(), seconds))]})
    shoal.shutdown()
    dist.destroy_process_group()


def measured(agents: int, transport: str, repetitions: int, quick: bool) -> Medians:
    def progress(doing: str, done: int, total: int) -> None:
        if not done:
            print(doing, file=sys.stderr)

    script = [__file__, "--agent", "--repetitions", str(repetitions), *(["--quick"] if quick else [])]
    launch = [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(agents), *script]
    (one,) = run_job([launch], {"SHOAL_TRANSPORT": transport}, progress)
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for name, values in one.values.items():
        kind, count, nbytes, way = name.split()
        found.setdefault((kind, int(count), int(nbytes)), {})[way] = 1e3 * statistics.median(values)
    return {key: (ways["fused"], ways["alone"]) for key, ways in found.items()}


def show(console: Console, medians: Medians, title: str) -> None:
    sizes = sorted({nbytes for _, _, nbytes in medians})
    table = Table("calls", *(said(nbytes) for nbytes in sizes), title=f"{title}: ms fused / one by one = ratio")
    for kind, count in dict.fromkeys((kind, count) for kind, count, _ in medians):
        pairs = [medians[kind, count, nbytes] for nbytes in sizes if (kind, count, nbytes) in medians]
        table.add_row(
            f"{count} {kind}", *(f"{fused:.2f} / {alone:.2f} = {fused / alone:.2f}" for fused, alone in pairs)
        )
    console.print(table)


def said(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < 1 << 10 else f"{nbytes >> 10} KiB"


def draw(path: Path, medians: Medians, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(KINDS), 4), layout="constrained")
    panels: list[Any] = list(figure.subplots(1, len(KINDS), sharey=True))
    for axes, kind in zip(panels, KINDS, strict=True):
        for count in sorted({count for _, count, _ in medians}):
            sizes = sorted({nbytes for of, _, nbytes in medians if of == kind})
            ratios = [medians[kind, count, nbytes][0] / medians[kind, count, nbytes][1] for nbytes in sizes]
            axes.plot(sizes, ratios, "o-", label=f"{count} calls")
        axes.axhline(1.0, color="gray", linestyle="--")
        axes.axvline(fused_ops.MOST_BYTES, color="gray", linestyle=":")
        axes.set(xscale="log", xlabel="bytes of each", title=f"{kind}, {title}")
        axes.set_xticks(SIZES, [said(nbytes) for nbytes in SIZES])
    panels[0].set_ylabel("fused, of the time one by one")
    panels[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--transport", default="shared_memory", choices=["shared_memory", "network"])
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--picture", type=Path, help="where to draw it (matplotlib)")
    parser.add_argument("--quick", action="store_true", help="to see that everything works")
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        agent(args.repetitions, args.quick)
        return
    console, watch = Console(width=160), LoadWatch()
    medians = measured(args.agents, args.transport, 2 if args.quick else args.repetitions, args.quick)
    title = f"{args.agents} agents, {args.transport}"
    show(console, medians, title)
    if args.picture:
        draw(args.picture, medians, title)
    console.print(str(watch.load()))


if __name__ == "__main__":
    main()
