"""Training through Shoal's optimizers beside DistributedDataParallel over Gloo at its best.

The same model, first weights and batches, in the same processes, in turn; the median of seven (of five over a wire).

    python benchmarks/training.py                      # what this machine allows; with root also the hosts
    python benchmarks/training.py --only mlp alone
    python benchmarks/training.py --quick              # tiny models, to see that everything works
    python benchmarks/training.py --json out/training.json --picture out/training.png
    python benchmarks/training.py --read out/training.json --markdown     # tables of what has been measured

Hosts are network namespaces whose NICs the kernel holds to a rate, which needs root, ip and tc. The machine must be
otherwise quiet: each part says whether it was. The exit status is 1 if a goal is not met.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich.console import Console

import _table2
import _training_agent
import shoal
from _machines import obstacle, run_on_machines
from _training_tables import tables_of
from _ways import GET, GRADIENTS, GRADIENTS_OVERLAP, LOCAL, PUSH_SUM, PUT, synchronous
from shoal.bench.measurement import Figures, LoadWatch, Progress, Reporter, here, run_job
from shoal.optim.malloc_trimming import keep_freed_memory

SCRIPT = str(Path(__file__).resolve())
SLOW, MIDDLE, FAST, FASTEST = 100e6 / 8, 200e6 / 8, 500e6 / 8, 1e9 / 8
"""Bytes a second of a host's NIC."""
VOLUMES = (21, 102, 574)
"""Megabytes of parameters, as in the Horovod paper's figure 10."""
TOGETHER = 200
"""Up to so many megabytes four agents time all ways in one job; above it their models do not fit beside each other."""
AGENT_PARTS: dict[str, Callable[..., list[Figures]]] = {
    **_training_agent.PARTS,
    "one-agent": _table2.one_agent,
    "table2": _table2.table2,
}


@dataclass(frozen=True)
class Job:
    """Something that is measured with agents of its own."""

    name: str
    run: Callable[[Progress], list[Figures]]


def on_one_machine(agents: int, quick: bool, *words: str) -> Job:
    run = [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(agents), *_script(quick, *words)]
    return Job(f"{' '.join(words)}, {agents} agents", partial(run_job, [run], {}))


def on_hosts(count: int, rate: float, per_host: int, quick: bool, *words: str, large_packets: bool = False) -> Job:
    name = f"{' '.join(words)}, {count} hosts of {per_host}"
    script = _script(quick, *words)
    return Job(name, partial(run_on_machines, count, rate, per_host, script, large_packets=large_packets))


def _script(quick: bool, *words: str) -> list[str]:
    return [SCRIPT, *(["--quick"] if quick else []), "--agent", *words]


def mlp(quick: bool) -> list[Job]:
    return [on_one_machine(agents, quick, "mlp") for agents in ((2,) if quick else (2, 4))]


def resnet20(quick: bool) -> list[Job]:
    return [on_one_machine(agents, quick, "resnet20") for agents in ((2,) if quick else (2, 4))]


def alone(quick: bool) -> list[Job]:
    return [on_one_machine(1, quick, "alone")]


def hosts(quick: bool) -> list[Job]:
    return [on_hosts(count, SLOW, 1, quick, "hosts") for count in ((2,) if quick else (4, 8))]


def volumes(quick: bool) -> list[Job]:
    """On one machine, and over a wire where that can be."""
    jobs = []
    for megabytes in (1,) if quick else VOLUMES:
        ways = synchronous()
        for together in [ways] if megabytes <= TOGETHER else [[way] for way in ways]:
            jobs.append(on_one_machine(2 if quick else 4, quick, "volumes", str(megabytes), *together))
        if not obstacle():
            jobs.append(on_hosts(2, FAST, 1, quick, "volumes-hosts", str(megabytes), *ways, large_packets=True))
    return jobs


def gradients(quick: bool) -> list[Job]:
    """Averaged gradients on one machine, and between hosts where that can be."""
    ways, count = [GRADIENTS, GRADIENTS_OVERLAP], 2 if quick else 4
    models = {"MLP": ("32", "256"), "VGG-16": ("4", "4")}
    jobs = [on_one_machine(count, quick, "gradients", f"machine, {model}", models[model][0], *ways) for model in models]
    if obstacle():
        return jobs
    for model, (_, batch) in models.items():
        words = ["gradients", f"hosts, {model}", batch, *ways]
        jobs.append(on_hosts(count, FASTEST, 1, quick, *words, large_packets=True))
    return jobs


def table2(quick: bool) -> list[Job]:
    return [on_one_machine(1, quick, "one-agent"), on_hosts(2 if quick else 4, MIDDLE, 2, quick, "table2")]


def memory(quick: bool) -> list[Job]:
    ways = [LOCAL, "DDP", GRADIENTS, *synchronous(), PUT, GET, PUSH_SUM]
    return [on_one_machine(2 if quick else 4, quick, "memory", way) for way in (ways[:3] if quick else ways)]


PARTS = {
    "mlp": mlp,
    "resnet20": resnet20,
    "alone": alone,
    "hosts": hosts,
    "volumes": volumes,
    "gradients": gradients,
    "table2": table2,
    "memory": memory,
}
NEED_HOSTS = ("hosts", "table2")


def agent(words: Sequence[str], quick: bool) -> None:
    """What each agent of a job runs."""
    reporter = Reporter()
    torch.set_num_threads(1)
    keep_freed_memory()  # Shoal's optimizers see to it; so does the peer have it from its first step
    dist.init_process_group("gloo")
    shoal.init()
    part, *more = words
    found = AGENT_PARTS[part](reporter, quick, *more)
    reporter.send({"figures": [asdict(one) for one in found]})
    shoal.shutdown()
    dist.destroy_process_group()


def measure(parts: Sequence[str], quick: bool) -> dict[str, Any]:
    """What was measured, where, and how busy the machine was meanwhile, by part; ready for JSON."""
    figures: list[Figures] = []
    loads = {}
    for part in parts:
        watch = LoadWatch()
        for job in PARTS[part](quick):
            print(f"measuring: {job.name}", file=sys.stderr)
            figures += job.run(_tell)
        load = watch.load()
        loads[part] = {"told": str(load), "quiet": load.quiet, **asdict(load)}
    return {
        "machine": str(here()),
        "quick": quick,
        "loads": loads,
        "figures": [asdict(one) for one in figures],
    }


def _tell(doing: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K  {doing}: {done} of {total}", end="\r", file=sys.stderr, flush=True)


def show(measured: dict[str, Any], as_markdown: bool) -> bool:
    """Print the tables; whether all goals are met."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    tables = tables_of([Figures(**one) for one in measured["figures"]], judged=not measured["quick"])
    for one in tables:
        if as_markdown:
            print(f"{one.title}\n\n{one.markdown()}\n")
        else:
            console.print(one.table())
    print(measured["machine"])
    for part, load in measured["loads"].items():
        print(f"{part}: {load['told']}; the machine was {'quiet' if load['quiet'] else 'busy'}")
    return not any(one.missed for one in tables)


def read(paths: Sequence[Path]) -> dict[str, Any]:
    """Measurements of several runs as one; a part that is in two is the later one's."""
    found: dict[str, Any] = {"loads": {}}
    figures: dict[str, list[Any]] = {}
    for path in paths:
        one = json.loads(path.read_text())
        found |= {name: one[name] for name in ("machine", "quick")}
        found["loads"] |= one["loads"]
        fresh: dict[str, list[Any]] = {}
        for figure in one["figures"]:
            fresh.setdefault(figure["kind"].partition(":")[0], []).append(figure)
        figures |= fresh
    return {**found, "figures": [figure for several in figures.values() for figure in several]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "figure12"], help="these parts (figure12 is table2)")
    parser.add_argument("--quick", action="store_true", help="tiny models and few repetitions, without the goals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every repetition")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw (needs matplotlib)")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="measure nothing: show what --json wrote")
    parser.add_argument("--agent", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        agent(args.agent, args.quick)
        return 0
    if args.read:
        measured = read(args.read)
    else:
        measured = measure(_parts(parser, args.only), args.quick)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(measured, indent=1) + "\n")
    met = show(measured, args.markdown)
    if args.picture:
        from _training_picture import draw

        draw(args.picture, [Figures(**one) for one in measured["figures"]], measured["machine"])
        print(f"picture: {args.picture}")
    return 0 if met else 1


def _parts(parser: argparse.ArgumentParser, only: Sequence[str] | None) -> list[str]:
    """What to measure; what cannot be is refused if it was asked for, and else left out with a word."""
    asked = dict.fromkeys("table2" if part == "figure12" else part for part in only or PARTS)
    left_out = [part for part in asked if part in NEED_HOSTS and obstacle()]
    if left_out and only:
        parser.error(f"{', '.join(left_out)}: {obstacle()}")
    if left_out:
        print(f"left out: {', '.join(left_out)}, and the volumes over a wire: {obstacle()}", file=sys.stderr)
    return [part for part in asked if part not in left_out]


def _leave(signum: int, frame: object) -> NoReturn:
    """End in good order, and the agents with us."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"training: {error}")
