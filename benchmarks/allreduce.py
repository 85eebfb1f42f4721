"""``shoal.allreduce`` beside Gloo's ``all_reduce``: 4 B to 100 MB, 2 to 16 agents, on one machine and between hosts.

    python benchmarks/allreduce.py                                  # with root also the hosts; twenty minutes
    python benchmarks/allreduce.py --only machine --agents 2 4      # a part
    python benchmarks/allreduce.py --quick                          # few repetitions, to see that everything works
    python benchmarks/allreduce.py --json out/allreduce.json --picture out/allreduce.png
    python benchmarks/allreduce.py --read out/*.json --markdown     # tables of what has been measured

Both are called in the same processes, in turn, on float32; the figure is the median of the slowest agent's time. Gloo
works in place, Shoal into ``out=``. Hosts are network namespaces with a NIC of 1 Gbit/s each way, with one agent each,
or with four (``shared``), which needs root, ip and tc. Where there are more agents than cores a call takes what all
agents compute, so that is counted, too: processor time of all agents, and messages of one. The exit status is 1 where
Shoal is slower than Gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import shoal
from _machines import obstacle, run_on_machines
from _training_tables import Sheet
from shoal.bench.measurement import Case, Figures, LoadWatch, Reporter, compare, here, run_job
from shoal.runtime.agent import current

RATE = 1e9 / 8
SIZES = {4: 100, 1_000: 100, 16_000: 50, 256_000: 20, 1_000_000: 10, 16_000_000: 1, 100_000_000: 1}
"""Bytes of a tensor, and how many calls are timed together with two agents; fewer with more."""
AGENTS = (2, 4, 8, 16)
WHERE = ("machine", "hosts", "shared")
PER_HOST = {"hosts": 1, "shared": 4}
GLOO, SHOAL = "Gloo", "Shoal"
TITLES = {
    "machine": "One machine, shared memory",
    "hosts": "Hosts of one agent, NICs of 1 Gbit/s",
    "shared": "Hosts of four agents, NICs of 1 Gbit/s",
}
COLOURS = {2: "#1f77b4", 4: "#2a9d6f", 8: "#e07b39", 16: "#c0455e"}


class Tensors:
    """One agent's tensors of one size."""

    def __init__(self, nbytes: int) -> None:
        count = nbytes // 4
        self._x = torch.arange(count, dtype=torch.float32).remainder_(1024).add_(shoal.rank())
        self._out = torch.full_like(self._x, 0.0)
        # Sums of zero stay finite, however often they are taken in place; its pages have been written.
        self._zeros = torch.full_like(self._x, 0.0)

    def gloo(self) -> None:
        dist.all_reduce(self._zeros)

    def shoal(self) -> None:
        shoal.allreduce(self._x, False, out=self._out)

    def check(self) -> None:
        """Both are right: small whole numbers have one sum, in whatever order."""
        self.shoal()
        self._zeros.copy_(self._x)
        self.gloo()
        if not torch.equal(self._zeros, self._out):
            raise AssertionError(f"rank {shoal.rank()}: the sums differ, {self._out[:4].tolist()}...")


class Counted:
    """A case, called so many times in a row, and the processor time that they take on this agent."""

    def __init__(self, act: Case, calls: int) -> None:
        self._act, self._calls = act, calls
        self.seconds: list[float] = []

    def __call__(self) -> None:
        begin = time.process_time()
        for _ in range(self._calls):
            self._act()
        self.seconds.append((time.process_time() - begin) / self._calls)


def agent(where: str, sizes: Sequence[int], quick: bool) -> None:
    """What each agent of a job runs."""
    reporter = Reporter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shoal.init()
    found = []
    for nbytes in sizes:
        tensors = Tensors(nbytes)
        calls = max(1, (5 if quick else SIZES[nbytes]) * 2 // shoal.size())
        repetitions = 2 if quick else 5 if nbytes >= 16_000_000 else 11
        acts = {GLOO: Counted(tensors.gloo, calls), SHOAL: Counted(tensors.shoal, calls)}
        seconds = compare(reporter, size_of(nbytes), acts, repetitions)
        tensors.check()
        values = {name: [one / calls for one in several] for name, several in seconds.items()}
        values |= {processor(name): sum_over_agents(one.seconds[-repetitions:]) for name, one in acts.items()}
        values["messages"] = [sum_over_agents([messages_of(tensors.shoal)])[0] / shoal.size()]
        found.append(Figures(where, nbytes, shoal.size(), values))
        del tensors, acts
    reporter.send({"figures": [asdict(one) for one in found]})
    shoal.shutdown()
    dist.destroy_process_group()


def processor(way: str) -> str:
    return f"{way}: processor"


def sum_over_agents(values: Sequence[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return list(total.tolist())


def messages_of(act: Case) -> int:
    """Messages that this agent sends in a call, answers among them."""
    links = list(current("allreduce").engine.router.links.values())
    posts, count = [link.post for link in links], [0]

    def counting(post: Callable[..., None]) -> Callable[..., None]:
        def counted(*words: Any) -> None:
            count[0] += 1
            post(*words)

        return counted

    dist.barrier()
    for link, post in zip(links, posts, strict=True):
        setattr(link, "post", counting(post))  # noqa: B010 - a method for a while
    act()
    shoal.barrier()  # the answers to what was sent have come then; it sends few itself
    dist.barrier()
    for link in links:
        delattr(link, "post")
    return count[0] - (shoal.size() - 1).bit_length()


def size_of(nbytes: int) -> str:
    unit, name = next(((unit, name) for unit, name in ((1_000_000, "MB"), (1_000, "KB")) if nbytes >= unit), (1, "B"))
    return f"{nbytes // unit} {name}"


def amount(seconds: float) -> str:
    """Milliseconds with three digits."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.{2 if milliseconds < 10 else 1 if milliseconds < 100 else 0}f} ms"


def measure(where: Sequence[str], agents: Sequence[int], sizes: Sequence[int], quick: bool) -> dict[str, Any]:
    """What was measured, and how busy the machine was meanwhile, ready for JSON."""
    figures: list[Figures] = []
    loads = {}
    for place in where:
        for count in agents:
            per_host = PER_HOST.get(place, count)
            if count % per_host or (count == per_host and place != "machine"):
                continue
            name = f"{place}, {count} agents"
            print(f"measuring: {name}", file=sys.stderr)
            watch = LoadWatch()
            words = ["--agent", place, "--sizes", *map(str, sizes), *(["--quick"] if quick else [])]
            figures += run(place, count, per_host, [str(Path(__file__).resolve()), *words])
            load = watch.load()
            loads[name] = {"told": str(load), "quiet": load.quiet, **asdict(load)}
    return {"machine": str(here()), "quick": quick, "loads": loads, "figures": [asdict(one) for one in figures]}


def run(place: str, count: int, per_host: int, script: Sequence[str]) -> list[Figures]:
    if place != "machine":
        return run_on_machines(count // per_host, RATE, per_host, script, tell, large_packets=True)
    return run_job([[sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(count), *script]], {}, tell)


def tell(doing: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K  {doing}: {done} of {total}", end="\r", file=sys.stderr, flush=True)


def ratio(one: Figures) -> float:
    """Times as fast as Gloo."""
    return median(one.values[GLOO]) / median(one.values[SHOAL])


def tables(figures: Sequence[Figures]) -> Iterable[Sheet]:
    """By place: how many times as fast as Gloo, for each size and number of agents; then every figure."""
    for place in WHERE:
        found = [one for one in figures if one.kind == place]
        if not found:
            continue
        agents, sizes = sorted({one.agents for one in found}), sorted({one.nbytes for one in found})
        by = {(one.nbytes, one.agents): one for one in found}
        lines = [
            [size_of(nbytes), *(f"{ratio(by[nbytes, count]):.2f}" if (nbytes, count) in by else "" for count in agents)]
            for nbytes in sizes
        ]
        slower = any(ratio(one) < 1 for one in found)
        yield Sheet(f"{TITLES[place]}: times as fast as Gloo", ["", *(f"{n} agents >" for n in agents)], lines, slower)
        columns = ("agents >", "tensor >", "Shoal >", "Gloo >", "ratio >", "processor >", "Gloo's >", "messages >")
        yield Sheet(f"{TITLES[place]}: a call", columns, [line_of(one) for one in found])


def line_of(one: Figures) -> list[str]:
    t = {name: median(values) for name, values in one.values.items()}
    return [
        *(str(one.agents), size_of(one.nbytes), amount(t[SHOAL]), amount(t[GLOO]), f"{ratio(one):.2f}"),
        *(amount(t[processor(SHOAL)]), amount(t[processor(GLOO)]), f"{t['messages']:.1f}"),
    ]


def draw(path: Path, figures: Sequence[Figures], machine: str) -> None:
    """Write the picture: a panel for each place, a line for each number of agents."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    places = [place for place in WHERE if any(one.kind == place for one in figures)]
    figure = Figure(figsize=(1 + 4.6 * len(places), 4.2), layout="constrained")
    for axes, place in zip(figure.subplots(1, len(places), squeeze=False, sharey=True)[0], places, strict=True):
        axes.axhline(1, color="#6a737d", linewidth=1)
        for count, colour in COLOURS.items():
            line = sorted((one.nbytes, ratio(one)) for one in figures if (one.kind, one.agents) == (place, count))
            if line:
                axes.plot(*zip(*line, strict=True), "o-", color=colour, label=f"{count} agents", markersize=4)
        axes.set(xscale="log", yscale="log", title=TITLES[place], xlabel="bytes of the tensor")
        axes.xaxis.set_major_locator(FixedLocator(list(SIZES)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: size_of(int(nbytes))))
        axes.yaxis.set_major_locator(FixedLocator([0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda times, _: f"{times:g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
        axes.tick_params(axis="x", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e1e4e8")
    first = figure.axes[0]
    first.set_ylabel("times as fast as Gloo's all_reduce")
    first.legend(frameon=False)
    figure.supxlabel(machine, fontsize=7, color="#6a737d")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def read(paths: Sequence[Path]) -> dict[str, Any]:
    """Measurements of several runs as one; what is in two is the later one's."""
    found: dict[str, Any] = {"loads": {}}
    figures: dict[tuple[str, int, int], Any] = {}
    for path in paths:
        one = json.loads(path.read_text())
        found |= {name: one[name] for name in ("machine", "quick")}
        found["loads"] |= one["loads"]
        figures |= {(figure["kind"], figure["agents"], figure["nbytes"]): figure for figure in one["figures"]}
    order = sorted(figures, key=lambda key: (WHERE.index(key[0]), *key[1:]))
    return {**found, "figures": [figures[key] for key in order]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WHERE, nargs="+")
    parser.add_argument("--agents", type=int, choices=AGENTS, nargs="+")
    parser.add_argument("--sizes", type=int, choices=list(SIZES), nargs="+", default=list(SIZES), metavar="BYTES")
    parser.add_argument("--quick", action="store_true", help="few repetitions of 2 and 4 agents, without a verdict")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every repetition")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw (needs matplotlib)")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="measure nothing: show what --json wrote")
    parser.add_argument("--agent", choices=WHERE, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        agent(args.agent, args.sizes, args.quick)
        return 0
    if args.read:
        measured = read(args.read)
    else:
        places = args.only or WHERE
        if obstacle() and set(places) != {"machine"}:
            if args.only:
                parser.error(f"hosts: {obstacle()}")
            print(f"left out: hosts; {obstacle()}", file=sys.stderr)
            places = ["machine"]
        measured = measure(places, args.agents or (AGENTS[:2] if args.quick else AGENTS), args.sizes, args.quick)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(measured, indent=1) + "\n")
    figures = [Figures(**one) for one in measured["figures"]]
    console = Console(width=None if sys.stdout.isatty() else 160)
    found = list(tables(figures))
    for one in found:
        if args.markdown:
            print(f"{one.title}\n\n{one.markdown()}\n")
        else:
            console.print(one.table())
    print(measured["machine"])
    for name, load in measured["loads"].items():
        print(f"{name}: {load['told']}; the machine was {'quiet' if load['quiet'] else 'busy'}")
    if args.picture:
        draw(args.picture, figures, measured["machine"])
        print(f"picture: {args.picture}")
    return 1 if any(one.missed for one in found) and not measured["quick"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"allreduce: {error}")
