"""Horovod's response cache and groups, figures 2 and 6 to 11: negotiation, fused messages, waiting, scaling.

    python reproduce/horovod_caching.py                # 4 agents, messages counted for 2 to 8
    python reproduce/horovod_caching.py --share 1      # all of the 102 MB
    python reproduce/horovod_caching.py --only control --count-to 64  # messages of up to 64 agents, many minutes more

Romero et al., "Accelerating Collective Communication in Data Parallel Training across Deep Learning Frameworks", NSDI
2022. Shoal negotiates one order of operations for process groups (docs/coordination.md) as Horovod does: by a
coordinator, or by a response cache and an intersection of bits. Three parts:

1. A step with gradients in the shapes of ResNet-50's, a quarter of their length: they become ready one after the
   other, in an order of each agent's own, and are all-reduced by Gloo as single calls or in groups, with the cache and
   without. One job a seed. Back-propagation is a wait, because the cores are needed for the messages.
2. Control messages of a step with 160 calls, counted on agents that are threads.
3. Steps on Summit, by the network model, with the rounds of negotiation that part 1 has measured.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import shoal
from shoal.bench.measurement import Figures, Reporter, run_job
from shoal.coordination.ordering import CollectiveOrdering
from shoal.runtime.agent import current
from shoal.transport.process_group import ProcessGroups, flattened

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from _common import Claim, Interval, Report, arguments, exceeds
from _control_messages import KINDS, counted, modelled
from coordination import resnet_50
from papers.clusters import BACKWARD, RESNET_50, SUMMIT_BYTES, summit_allreduces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGENTS, SHARE, STEPS, WARMUPS = 4, 4, 4, 2
GROUPS = (0, 1, 5, 10, 20)
"""Numbers of groups, 0 for single calls."""
CACHE = {"cache": "1024", "no cache": "0"}
BACKWARD_SECONDS = 0.2
"""Of the emulated back-propagation."""
DISORDER = 4
"""How many places a gradient may be early or late in an agent's order."""
MEASURES = ("seconds", "all-reduce", "waiting", "rounds", "negotiations", "messages")
COUNTED_TO = 8
SUMMIT = (6, 96, 384, 768, 1536, 6000, 27_600)
STEMDL_SECONDS = 0.5
"""Of a step on one GPU alone, an assumption: the paper gives none."""


# 1. Steps of real agents


class Transfers:
    """Records the messages of this agent's process groups, and their times."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.busy = 0.0
        self.begun = 0.0
        start = ProcessGroups._start

        def recorded(groups: ProcessGroups, there: Any, group: Any, run: Any) -> Any:
            if not hasattr(groups, "_ended"):
                ended = groups._finished
                groups._ended = True  # type: ignore[attr-defined]
                groups._finished = lambda some: (self._end(), ended(some))[1]  # type: ignore[func-returns-value]
            self._at = time.monotonic()
            collectives = [one.collective.data for one in run if one.collective is not None]
            first = {min(rank for rank, _ in one.sends) for one in run if one.sends}
            sends = [tensor for one in run for rank, tensor in one.sends if rank in first]
            sizes = [sum(one.nbytes for one in some) for some in flattened(collectives or sends)]
            self.sizes += sizes
            self.begun += self._at * sum(sizes)
            return start(groups, there, group, run)

        ProcessGroups._start = recorded  # type: ignore[method-assign]

    def _end(self) -> None:
        self.busy += time.monotonic() - self._at

    def clear(self) -> None:
        self.sizes, self.busy, self.begun = [], 0.0, 0.0


def order_of(count: int, chance: random.Random) -> list[int]:
    """An agent's order of gradients: from the last to the first, each some places early or late."""
    return sorted(range(count), key=lambda number: -number + chance.uniform(0, DISORDER))


def step(tensors: list[torch.Tensor], groups: int, chance: random.Random, transfers: Transfers) -> dict[str, float]:
    """One step: seconds of it, of its transfers, and the mean wait of a byte from ready until its transfer begins."""
    count = len(tensors)
    members = [count * number // groups for number in range(groups + 1)] if groups else []
    group_of = [sum(number >= high for high in members[1:]) for number in range(count)]
    missing, handles = Counter(group_of), list[Any]()
    ordering = current().engine.backend
    assert isinstance(ordering, CollectiveOrdering)
    before = ordering.counts.rounds, ordering.counts.negotiations
    transfers.clear()
    began, ready = time.monotonic(), 0.0
    for place, number in enumerate(order_of(count, chance)):
        time.sleep(max(0.0, began + BACKWARD_SECONDS * (place + 1) / count - time.monotonic()))
        ready += time.monotonic() * tensors[number].nbytes
        if not groups:
            handles.append(shoal.nonblocking.allreduce(tensors[number], name=f"gradient {number}"))
            continue
        group = group_of[number]
        missing[group] -= 1
        if not missing[group]:
            some = tensors[members[group] : members[group + 1]]
            handles.append(shoal.nonblocking.grouped_allreduce(some, name=f"group {group} of {groups}"))
    for handle in handles:
        handle.wait()
    seconds = time.monotonic() - began
    nbytes = sum(one.nbytes for one in tensors)
    return {
        "seconds": seconds,
        "all-reduce": transfers.busy,
        "waiting": (transfers.begun - ready) / nbytes,
        "rounds": ordering.counts.rounds - before[0],
        "negotiations": ordering.counts.negotiations - before[1],
        "messages": len(transfers.sizes),
    }


def agent(steps: int, share: int) -> None:
    """Run the steps of all numbers of groups in turn, on each agent of a job; rank 0 reports them."""
    reporter, transfers = Reporter(), Transfers()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shoal.init()
    chance = random.Random(shoal.rank())
    numbers = torch.Generator().manual_seed(shoal.rank())
    tensors = [torch.randn(max(1, numel // share), generator=numbers) for numel in resnet_50()]
    found: dict[int, dict[str, list[float]]] = {groups: {} for groups in GROUPS}
    sizes: dict[int, list[float]] = {groups: [] for groups in GROUPS}
    for number in range(WARMUPS + steps):
        for groups in GROUPS:
            dist.barrier()
            values = step(tensors, groups, chance, transfers)
            slowest = torch.tensor([values[name] for name in MEASURES], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number >= WARMUPS:
                for name, value in zip(MEASURES, slowest.tolist(), strict=True):
                    found[groups].setdefault(name, []).append(value)
                sizes[groups] += [float(size) for size in transfers.sizes]
        reporter.progress("steps", number + 1, WARMUPS + steps)
    nbytes = sum(one.nbytes for one in tensors)
    figures = [
        Figures(f"{groups}", nbytes, shoal.size(), {**found[groups], "sizes": sizes[groups]}) for groups in GROUPS
    ]
    reporter.send({"figures": [asdict(one) for one in figures]})
    shoal.shutdown()
    dist.destroy_process_group()


Measured = dict[tuple[str, int], dict[str, list[float]]]
"""By cache and number of groups, for each measure a value for each seed; ``sizes`` and ``counts`` of all."""


def measure(report: Report, agents: int, steps: int, share: int, seeds: int) -> Measured:
    found: Measured = {}
    for seed in range(seeds):
        for cache, capacity in CACHE.items():
            script = [__file__, "--agent", f"{steps}", f"{share}"]
            launch = [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", f"{agents}", *script]
            environ = {"SHOAL_TRANSPORT": "process-group", "SHOAL_CACHE_CAPACITY": capacity}
            for one in run_job([launch], environ, lambda *_: None):
                values = found.setdefault((cache, int(one.kind)), {})
                for name in MEASURES:
                    values.setdefault(name, []).append(fmean(one.values[name]))
                values.setdefault("sizes", []).extend(one.values["sizes"])
                values.setdefault("counts", []).extend(one.values["messages"])
            single = found[cache, 0]["seconds"][-1]
            report.say(f"job {seed + 1} of {seeds}, {cache}: {1e3 * single:.0f} ms a step of single calls")
    return found


def step_claims(found: Measured) -> list[Claim]:
    """The statements of sections 2.2.2, 3.1 and 4.3.1 about a step, against the measured values."""
    single, grouped = found["cache", 0], found["cache", 5]
    sizes = torch.tensor(single["sizes"])
    spread = float(sizes.max() / sizes.min())
    counts = sorted(set(single["counts"]))
    later, without = fmean(single["negotiations"]), fmean(found["no cache", 0]["negotiations"])
    best = max((5, 10), key=lambda groups: fmean([1 / value for value in found["cache", groups]["seconds"]]))

    def rate(cache: str, groups: int) -> list[float]:
        return [1 / value for value in found[cache, groups]["seconds"]]

    log = [float(torch.tensor(one["sizes"]).log10().median()) for one in (single, grouped)]
    return [
        Claim(
            "Figure 2: message sizes of dynamic fusion differ by orders of magnitude, and from step to step",
            f"largest over smallest {spread:.2g}; {counts[0]:g} to {counts[-1]:g} messages a step",
            spread > 100 and len(counts) > 1,
        ),
        Claim(
            "Section 3.1: with the cache, the coordinator decides in the first step only",
            f"{later:g} negotiations in a later step with it, {without:.1f} without",
            later == 0 < without,
        ),
        Claim(
            "Figure 2, section 3.2: groups make messages larger",
            f"median {10 ** log[1] / 1e6:.2g} MB in 5 groups, {10 ** log[0] / 1e6:.2g} MB of single calls",
            log[1] > log[0],
        ),
        exceeds(
            f"Figure 8: with the cache, {best} groups give a higher throughput than none",
            *(rate("cache", best), rate("cache", 0)),
            unit=" steps/s",
        ),
        exceeds(
            "Figure 9: with 5 groups the all-reduces take less time",
            *(single["all-reduce"], grouped["all-reduce"]),
            unit=" s",
        ),
        exceeds("Figure 9: with 5 groups a gradient waits longer", grouped["waiting"], single["waiting"], unit=" s"),
    ]


def show_steps(report: Report, found: Measured, agents: int, share: int) -> None:
    nbytes = 4 * sum(max(1, numel // share) for numel in resnet_50())
    for cache in CACHE:
        rows = []
        for groups in GROUPS:
            values = found[cache, groups]
            of = {name: Interval.of(values[name]) for name in MEASURES}
            seconds = (f"{Interval(1e3 * of[name].mean, 1e3 * of[name].reach):.0f}" for name in MEASURES[:3])
            sizes = torch.tensor(values["sizes"]) / 1e6
            quartiles = ", ".join(f"{float(sizes.quantile(share)):.2g}" for share in (0.0, 0.5, 1.0))
            name = f"{groups} group{'s' * (groups > 1)}" if groups else "single calls"
            counts = (f"{of[name].mean:.1f}" for name in ("rounds", "negotiations", "messages"))
            rows.append([name, *seconds, *counts, quartiles])
        report.table(
            f"Figures 2, 8 and 9, {cache}: steps of {agents} agents with {nbytes / 1e6:.0f} MB of gradients, "
            f"{1e3 * BACKWARD_SECONDS:g} ms of which are back-propagation",
            [
                *(
                    "",
                    "step, ms",
                    "in all-reduces, ms",
                    "mean wait of a byte, ms",
                    "rounds",
                    "negotiations",
                    "messages",
                ),
                "MB of one: least, median, most",
            ],
            rows,
        )


# 2. Control messages

Control = dict[tuple[str, int], list[float]]
"""Messages of the busiest agent in a step, by kind and number of agents, one for each seed."""


def count_control(report: Report, sizes: Sequence[int], seeds: int) -> Control:
    found: Control = {}
    for size in sizes:
        for kind in KINDS:
            found[kind, size] = [counted(size, kind)[0] for _ in range(seeds)]
        shown = ", ".join(f"{kind} {fmean(found[kind, size]):.0f}" for kind in KINDS)
        report.say(f"control messages of {size} agents: {shown}")
    report.table(
        "Control messages of the busiest agent in a step with 160 averages on a ring",
        ["agents", *KINDS],
        [[f"{size}", *(f"{Interval.of(found[kind, size]):.0f}" for kind in KINDS)] for size in sizes],
    )
    decided = [kind for kind in KINDS if kind != "edge-matched"]
    report.table(
        "One negotiation of 160 calls on Summit by the network model, ms",
        ["agents", *decided],
        [[f"{size:,}", *(f"{1e3 * modelled(kind, size):.3f}" for kind in decided)] for size in SUMMIT],
    )
    return found


def control_claims(found: Control) -> list[Claim]:
    """The statement of sections 2.2.3 and 3.1 on the growth of control messages."""
    sizes = sorted({size for _, size in found})
    least, most = sizes[0], sizes[-1]

    def growth(kind: str) -> list[float]:
        return [b / a for a, b in zip(found[kind, least], found[kind, most], strict=True)]

    return [
        exceeds(
            f"Section 3.1: from {least} to {most} agents the coordinator's messages grow faster than the cache's",
            *(growth("coordinator"), growth("cached")),
            unit=" times",
        ),
        exceeds(
            f"Section 3.1: with {most} agents the cache has fewer messages",
            *(found["coordinator", most], found["cached", most]),
            spec=".0f",
        ),
    ]


# 3. Summit


def summit_step(size: int, nbytes: float, compute: float, rounds: float, kind: str) -> float:
    """Seconds of a step: rounds of negotiation and the faster all-reduce, beside the last part of the computation."""
    exchange = min(summit_allreduces(size, nbytes).values()) + rounds * modelled(kind, size)
    return max(compute, compute * (1 - BACKWARD) + exchange)


def summit(rounds: dict[str, float]) -> dict[str, dict[str, dict[int, float]]]:
    """Seconds of a step by model, way and number of GPUs.

    Args:
        rounds: of negotiation in a step, of single calls and in groups, as measured.
    """
    ways = {
        "no cache": ("coordinator", rounds["single"]),
        "cache": ("cached", rounds["single"]),
        "cache and groups": ("cached", rounds["groups"]),
    }
    models = {"ResNet-50": (102e6, RESNET_50.compute), "STEMDL": (SUMMIT_BYTES, STEMDL_SECONDS)}
    return {
        name: {
            way: {size: summit_step(size, nbytes, compute, count, kind) for size in SUMMIT}
            for way, (kind, count) in ways.items()
        }
        for name, (nbytes, compute) in models.items()
    }


def summit_claims(found: dict[str, dict[str, dict[int, float]]]) -> list[Claim]:
    """The statements of sections 4.2 to 4.4 on speed-ups and scaling."""

    def gain(model: str, size: int, way: str = "cache") -> float:
        return found[model]["no cache"][size] / found[model][way][size]

    def share(model: str, compute: float, size: int) -> float:
        return compute / found[model]["cache and groups"][size]

    small, large = gain("ResNet-50", 96), gain("ResNet-50", 768)
    scaled = share("ResNet-50", RESNET_50.compute, 1536)
    whole = share("STEMDL", STEMDL_SECONDS, 27_600)
    return [
        Claim(
            "Figure 7: the cache changes nothing with 96 GPUs, and is 1.6 to 2.5 times as fast with 768 (ResNet-50)",
            f"{small:.2f} and {large:.2f} times as fast",
            small < 1.05 and 1.6 <= large <= 2.5,
        ),
        Claim(
            "Figure 6: with 6,000 GPUs the cache is 1.64 times, and with groups 1.97 times as fast (STEMDL, by 20%)",
            f"{gain('STEMDL', 6000):.2f} and {gain('STEMDL', 6000, 'cache and groups'):.2f} times",
            abs(gain("STEMDL", 6000) / 1.64 - 1) <= 0.2
            and abs(gain("STEMDL", 6000, "cache and groups") / 1.97 - 1) <= 0.2,
        ),
        Claim(
            "Figure 10: at least 0.93 of linear scaling with 1,536 GPUs (ResNet-50)", f"{scaled:.2f}", scaled >= 0.93
        ),
        Claim("Figure 11: at least 0.93 of linear scaling with 27,600 GPUs (STEMDL)", f"{whole:.2f}", whole >= 0.93),
    ]


def show_summit(report: Report, found: dict[str, dict[str, dict[int, float]]], rounds: dict[str, float]) -> None:
    computes = {"ResNet-50": RESNET_50.compute, "STEMDL": STEMDL_SECONDS}
    for model, ways in found.items():
        report.table(
            f"Figures 6, 7, 10 and 11, {model} on Summit by the network model: the share of linear scaling",
            ["GPUs", *ways],
            [
                [f"{size:,}", *(f"{computes[model] / seconds[size]:.2f}" for seconds in ways.values())]
                for size in SUMMIT
            ],
        )
    report.note(
        f"Rounds of negotiation in a step are measured: {rounds['single']:.1f} of single calls, {rounds['groups']:.1f} "
        f"in 5 groups. Assumed: {RESNET_50.compute:.3f} s of computation in a step of ResNet-50, {STEMDL_SECONDS:g} s "
        "in one of STEMDL, of which the paper gives none; 1.5 us of latency and 1 us of processor time for a control "
        "message; two thirds of a step are back-propagation. Horovod negotiates once a millisecond, also if nothing "
        "was called, and Shoal only for calls."
    )


def draw(
    figure: Figure, found: Measured, control: Control, modelled_steps: dict[str, dict[str, dict[int, float]]]
) -> None:
    """Four panels; a panel without measurements is empty."""
    sizes, rates, messages, scaling = figure.subplots(2, 2).flat
    bins = torch.logspace(1, 8, 36).tolist()
    for groups, label in ((0, "single calls"), (5, "5 groups")) if found else ():
        sizes.hist(found["cache", groups]["sizes"], bins, alpha=0.6, label=label)
    sizes.set(xscale="log", yscale="log", xlabel="bytes of a message", ylabel="messages", title="figure 2")
    for cache in CACHE if found else ():
        one = [Interval.of(1 / value for value in found[cache, groups]["seconds"]) for groups in GROUPS]
        names = [str(groups) for groups in GROUPS]
        means, reaches = [value.mean for value in one], [value.reach for value in one]
        rates.errorbar(names, means, reaches, fmt="o-", capsize=3, label=cache)
    rates.set(xlabel="groups (0: single calls)", ylabel="steps a second", title="figure 8")
    for kind in KINDS if control else ():
        counted_on = sorted(size for name, size in control if name == kind)
        messages.plot(counted_on, [fmean(control[kind, size]) for size in counted_on], "o-", label=kind)
    messages.set(xscale="log", yscale="log", xlabel="agents", ylabel="messages", title="control, busiest agent")
    computes = {"ResNet-50": RESNET_50.compute, "STEMDL": STEMDL_SECONDS}
    for (model, ways), style in zip(modelled_steps.items(), ("-", "--"), strict=False):
        for way, seconds in ways.items():
            shares = [computes[model] / value for value in seconds.values()]
            scaling.plot(list(seconds), shares, f"o{style}", markersize=3, label=f"{model}, {way}")
    scaling.set(xscale="log", xlabel="GPUs", ylabel="share of linear scaling", title="figures 6, 7, 10, 11 (model)")
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=7)


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__, seeds=3)
    parts = ["steps", "control"]
    made.add_argument("--only", nargs="+", choices=parts, default=parts, help="parts of the experiment (all)")
    made.add_argument("--agents", type=int, default=AGENTS, help=f"of the measured steps ({AGENTS})")
    made.add_argument("--share", type=int, default=SHARE, help=f"divide the gradients' lengths by it ({SHARE})")
    made.add_argument(
        "--count-to", type=int, default=COUNTED_TO, help=f"count messages to so many agents ({COUNTED_TO})"
    )
    made.add_argument("--agent", nargs=2, type=int, metavar=("STEPS", "SHARE"), help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.agent:
        agent(*args.agent)
        return 0
    args.seeds = args.seeds or args.default_seeds[args.quick]
    report = Report(
        __file__, "Horovod: response cache and groups (figures 2, 6 to 11)", args, f"{args.seeds} jobs of each kind"
    )
    agents, steps, share = (2, 1, 100) if args.quick else (args.agents, STEPS, args.share)
    found: Measured = {}
    control: Control = {}
    steps_of: dict[str, dict[str, dict[int, float]]] = {}
    if "steps" in args.only:
        found = measure(report, agents, steps, share, args.seeds)
        show_steps(report, found, agents, share)
        report.claim(step_claims(found))
        rounds = {"single": fmean(found["cache", 0]["rounds"]), "groups": fmean(found["cache", 5]["rounds"])}
        steps_of = summit(rounds)
        show_summit(report, steps_of, rounds)
        report.claim(summit_claims(steps_of))
    if "control" in args.only:
        sizes = [2, 4] if args.quick else [2**power for power in range(1, args.count_to.bit_length())]
        control = count_control(report, sizes, args.seeds)
        report.claim(control_claims(control))
    report.figure(lambda figure: draw(figure, found, control, steps_of), (10, 7.5))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
