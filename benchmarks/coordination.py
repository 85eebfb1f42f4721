"""One order for 160 all-reduces: the time that it takes to agree on it.

    python benchmarks/coordination.py                          # 2, 4 and 8 agents, half an hour
    python benchmarks/coordination.py --picture out/coordination.png

The messages and bytes of it are counted by reproduce/horovod_caching.py.

160 tensors (the shapes of ResNet-50's gradients, or 64 floats each) are given to an all-reduce by every agent in an
order of its own, and waited for. Beside Shoal, in the same processes and in turn, Gloo: all 160 in one order that
nobody had to agree on (``async_op=True``, waited for at the end), which is the floor; ``all_reduce_coalesced`` of all;
and one ``all_reduce`` of all, joined and cut apart again.

Shoal over process groups of Gloo: *coordinated*, every call decided by the coordinator (``SHOAL_CACHE_CAPACITY=0``);
*cached*, decided once and then agreed on by bits; *grouped*, in 1 to 20 groups of equally many tensors; and by its own
transport, shared memory: *edge-matched*, in which nobody agrees on an order, in random order and in sorted order.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import shoal
from shoal.bench.measurement import Figures, LoadWatch, Reporter, compare, run_job

OPERATIONS = 160
AGENTS = (2, 4, 8)
REPETITIONS = 15
GROUPS = (1, 2, 5, 10, 20)
FLOOR, COALESCED, JOINED = "Gloo, sorted", "Gloo, all_reduce_coalesced", "Gloo, one all_reduce of all"
WAYS = {
    "coordinated": {"SHOAL_CACHE_CAPACITY": "0"},
    "cached": {},
    "edge-matched": {"SHOAL_TRANSPORT": "shared_memory"},
}
SIZES = ("64 floats each", "ResNet-50")


def resnet_50() -> list[int]:
    """How many numbers each parameter of ResNet-50 has, from the first layer to the last: 161, of which the last, the
    bias, is left out."""
    found = [3 * 64 * 49, 64, 64]
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers = ((inside * width, width), (9 * width * width, width), (4 * width * width, 4 * width))
            for numel, channels in layers:
                found += [numel, channels, channels]
            if not block:
                found += [4 * inside * width, 4 * width, 4 * width]
            inside = 4 * width
    return [*found, 2048 * 1000]


def numels(size: str) -> list[int]:
    return resnet_50() if size == SIZES[1] else [64] * OPERATIONS


# Times


def drawn(tensors: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
    """An order of its own for each agent, another one each time."""
    draw = random.Random(shoal.rank())
    return lambda: draw.sample(range(len(tensors)), len(tensors))


def one_by_one(tensors: list[torch.Tensor], order: Callable[[], Sequence[int]]) -> Callable[[], None]:
    outs = [torch.empty_like(one) for one in tensors]

    def act() -> None:
        handles = [
            shoal.nonblocking.allreduce(tensors[place], name=f"gradient {place}", out=outs[place]) for place in order()
        ]
        for handle in handles:
            handle.wait()

    return act


def in_groups(tensors: list[torch.Tensor], count: int) -> Callable[[], None]:
    cut = [len(tensors) * number // count for number in range(count + 1)]
    groups = [tensors[low:high] for low, high in itertools.pairwise(cut)]
    outs = [[torch.empty_like(one) for one in group] for group in groups]
    draw = random.Random(shoal.rank())

    def act() -> None:
        handles = [
            shoal.nonblocking.grouped_allreduce(groups[place], name=f"group {place} of {count}", out=outs[place])
            for place in draw.sample(range(count), count)
        ]
        for handle in handles:
            handle.wait()

    return act


def with_gloo(tensors: list[torch.Tensor]) -> dict[str, Callable[[], None]]:
    def floor() -> None:
        works = [dist.all_reduce(one, async_op=True) for one in tensors]
        for work, one in zip(works, tensors, strict=True):
            work.wait()
            one.div_(dist.get_world_size())

    def coalesced() -> None:
        dist.all_reduce_coalesced(tensors)
        torch._foreach_div_(tensors, dist.get_world_size())

    def joined() -> None:
        flat = torch.cat(tensors)
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        torch._foreach_copy_(tensors, list(flat.split([one.numel() for one in tensors])))

    return {FLOOR: floor, COALESCED: coalesced, JOINED: joined}


def agent(size: str, way: str, repetitions: int) -> None:
    reporter = Reporter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shoal.init()
    numbers = torch.Generator().manual_seed(shoal.rank())
    tensors = [torch.randn(numel, generator=numbers) for numel in numels(size)]
    acts = with_gloo([one.clone() for one in tensors])
    acts[f"{way}, random order"] = one_by_one(tensors, drawn(tensors))
    if way == "edge-matched":
        acts[f"{way}, sorted"] = one_by_one(tensors, lambda: range(len(tensors)))
    for count in GROUPS:
        acts[f"{way}, {count} group{'s' * (count > 1)}"] = in_groups(tensors, count)
    seconds = compare(reporter, f"{way}, {size}", acts, repetitions)
    check(tensors)
    figures = Figures(f"{way}, {size}", sum(one.nbytes for one in tensors), shoal.size(), seconds)
    reporter.send({"figures": [asdict(figures)]})
    shoal.shutdown()
    dist.destroy_process_group()


def check(tensors: list[torch.Tensor]) -> None:
    """What Shoal makes of them is what Gloo makes of them."""
    ours = shoal.grouped_allreduce(tensors)
    for one, mean in zip(tensors, ours, strict=True):
        theirs = one.clone()
        dist.all_reduce(theirs)
        assert torch.allclose(theirs / shoal.size(), mean, atol=1e-5), "a mean is wrong"


def times(
    console: Console, agents: Sequence[int], repetitions: int, sizes: Sequence[str]
) -> dict[str, dict[int, dict[str, float]]]:
    """Milliseconds of each way, by size and number of agents; the floor is that of the same processes."""
    found: dict[str, dict[int, dict[str, float]]] = {size: {} for size in sizes}

    def progress(doing: str, done: int, total: int) -> None:
        print(f"{doing}: {done} of {total}", file=sys.stderr)

    for size in sizes:
        table = Table(
            "way", *(f"{count} agents, ms" for count in agents), *(f"of the floor, {count}" for count in agents)
        )
        rows: dict[str, list[tuple[float, float]]] = {}
        for count in agents:
            of_count = found[size][count] = {}
            for way, environment in WAYS.items():
                script = [__file__, "--agent", size, way, "--repetitions", str(repetitions)]
                launch = [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(count), *script]
                (one,) = run_job([launch], {"SHOAL_TRANSPORT": "process-group", **environment}, progress)
                medians = {name: 1e3 * statistics.median(values) for name, values in one.values.items()}
                for name, milliseconds in medians.items():
                    if name in (COALESCED, JOINED, FLOOR) and way != "cached":
                        continue
                    of_count[name] = milliseconds
                    rows.setdefault(name, []).append((milliseconds, milliseconds / medians[FLOOR]))
        for name, values in rows.items():
            table.add_row(name, *(f"{value:.1f}" for value, _ in values), *(f"{ratio:.2f}" for _, ratio in values))
        table.title = f"160 all-reduces, {size}"
        console.print(table)
    return found


def draw(path: Path, found: dict[str, dict[int, dict[str, float]]]) -> None:
    from matplotlib.figure import Figure

    sizes = [size for size in found if found[size]]
    figure = Figure(figsize=(5 * len(sizes), 4), layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    for axes, size in zip(panels, sizes, strict=True):
        agents = sorted(found[size])
        most = max(agents)
        for way in ("coordinated", "cached", "edge-matched"):
            of_groups = [found[size][most][f"{way}, {count} group{'s' * (count > 1)}"] for count in GROUPS]
            alone = found[size][most][f"{way}, random order"]
            axes.plot([*GROUPS, OPERATIONS], [*of_groups, alone], "o-", label=way)
        axes.axhline(found[size][most][FLOOR], color="gray", linestyle="--", label="Gloo, sorted (floor)")
        axes.axhline(found[size][most][JOINED], color="gray", linestyle=":", label="Gloo, one of all")
        axes.set(xscale="log", yscale="log", xlabel="groups (160: none)", ylabel="ms", title=f"{size}, {most} agents")
        axes.set_xticks([*GROUPS, OPERATIONS], [str(count) for count in (*GROUPS, OPERATIONS)])
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=list(AGENTS), help="how many (2 4 8)")
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--picture", type=Path, help="where to draw it (matplotlib)")
    parser.add_argument("--quick", action="store_true", help="to see that everything works")
    parser.add_argument("--agent", nargs=2, metavar=("SIZE", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        agent(*args.agent, args.repetitions)
        return
    console, watch = Console(width=160), LoadWatch()
    repetitions = 2 if args.quick else args.repetitions
    agents = args.agents[:1] if args.quick else args.agents
    found = times(console, agents, repetitions, args.sizes)
    if args.picture:
        draw(args.picture, found)
    console.print(str(watch.load()))


if __name__ == "__main__":
    main()
