"""BlueFog paper, figure 11: the time of allreduce, neighbor_allreduce and its dynamic form, as agents become more.

    python reproduce/bluefog_microbenchmark.py

Measured with real agents on this machine, 1 MB of float32: Gloo's all_reduce, Shoal's neighbor_allreduce on a ring in
one direction, and on the dynamic inner-outer exponential-2 graph. The cluster of GPUs, 10 MB on machines of 8 GPUs with
25 Gbit/s between them, is a prediction of Shoal's network model (Ying et al. 2021, arXiv:2111.04287, section VII-A).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from _common import Claim, Interval, Report, arguments, exceeds
from shoal.bench.measurement import LoadWatch, run_agents
from shoal.netmodel import simulate
from shoal.netmodel.messages import Messages, ring_allreduce, rounds_of
from shoal.topology import InnerOuterExponential

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from papers.clusters import figure_12_network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGENTS, GPUS = (2, 4, 8), (4, 8, 16, 32, 64)
NBYTES_GPU = 10_000_000
ALLREDUCE, RING, DYNAMIC = "all_reduce", "ring", "dynamic"
NAMES = {
    ALLREDUCE: "allreduce",
    RING: "neighbor_allreduce (ring)",
    DYNAMIC: "dynamic neighbor_allreduce",
}
Measured = dict[int, dict[str, list[float]]]
"""Seconds of each repetition, by the number of agents and the operation."""
Modelled = dict[int, dict[str, float]]
"""Seconds, by the number of GPUs and the operation."""


def measure(agents: Sequence[int], quick: bool, report: Report) -> Measured:
    """The smaller of the tensors that ``shoal bench --scaling`` measures: 1 MB, or 10 kB if ``quick``."""
    found = {}
    for count in agents:
        figures = run_agents(["scaling"], count, quick, lambda doing, done, total: None)
        found[count] = min(figures, key=lambda one: one.nbytes).values
        report.say(f"{count} agents: {_milliseconds(found[count])}")
    return found


def model(gpus: Sequence[int]) -> Modelled:
    """What the network model predicts for GPUs; each agent sends and receives whole tensors, or all-reduces one."""
    found: Modelled = {}
    for size in gpus:
        network = figure_12_network(size)
        ranks = list(range(size))
        ring = [[Messages.of(ranks, [(rank + 1) % size for rank in ranks], NBYTES_GPU)]]
        dynamic = list(rounds_of(InnerOuterExponential(size, min(8, size)), NBYTES_GPU, 16))
        steps = {ALLREDUCE: [ring_allreduce(size, NBYTES_GPU)], RING: ring, DYNAMIC: dynamic}
        found[size] = {name: simulate(network, plan).seconds_per_step() for name, plan in steps.items()}
    return found


def claims(measured: Measured, modelled: Modelled) -> list[Claim]:
    """The paper's statements: the first two of this machine, the others of the model."""
    few, many = min(measured), max(measured)
    gpus = sorted(modelled)
    slower = [
        size for size in gpus if min(modelled[size][ALLREDUCE] / modelled[size][way] for way in (RING, DYNAMIC)) <= 1
    ]
    jump = {way: modelled[16][way] / modelled[8][way] for way in NAMES}
    growth = {way: modelled[gpus[-1]][way] / modelled[16][way] for way in NAMES}

    def grown(way: str) -> list[float]:
        return [more / less for less, more in zip(measured[few][way], measured[many][way], strict=True)]

    return [
        *(
            exceeds(
                f"{NAMES[way]} is faster than allreduce on CPUs ({count} agents)",
                [1e3 * one for one in measured[count][ALLREDUCE]],
                [1e3 * one for one in measured[count][way]],
                unit=" ms",
            )
            for count in measured
            for way in (RING, DYNAMIC)
        ),
        *(
            exceeds(
                f"The time of allreduce grows more from {few} to {many} agents than that of {NAMES[way]}",
                grown(ALLREDUCE),
                grown(way),
                unit=" times",
            )
            for way in (RING, DYNAMIC)
        ),
        Claim(
            "Neighbor exchanges are faster than allreduce on GPUs (model)",
            f"not with {', '.join(map(str, slower))} GPUs" if slower else f"with {gpus[0]} to {gpus[-1]} GPUs",
            not slower,
        ),
        Claim(
            "Communication slows down much from 8 to 16 GPUs, for all three ways (section VII-A, model)",
            ", ".join(f"{name}: {jump[way]:.1f} times" for way, name in NAMES.items()) + "; least 2",
            min(jump.values()) > 2,
        ),
        Claim(
            "The time of allreduce grows more with the number of GPUs than that of the others (model)",
            f"from 16 to {gpus[-1]} GPUs "
            + ", ".join(f"{name}: {growth[way]:.2f} times" for way, name in NAMES.items()),
            growth[ALLREDUCE] > max(growth[RING], growth[DYNAMIC]),
        ),
    ]


def _milliseconds(values: dict[str, list[float]]) -> str:
    return ", ".join(f"{NAMES[way]} {Interval.of(1e3 * one for one in values[way]):.2f} ms" for way in NAMES)


def draw(figure: Figure, measured: Measured, modelled: Modelled) -> None:
    left, right = figure.subplots(1, 2)
    for way, name in NAMES.items():
        each = [Interval.of(1e3 * one for one in measured[count][way]) for count in measured]
        (line,) = left.plot(list(measured), [one.mean for one in each], "o-", label=name)
        left.fill_between(
            list(measured), [one.low for one in each], [one.high for one in each], alpha=0.2, color=line.get_color()
        )
        right.plot(list(modelled), [1e3 * one[way] for one in modelled.values()], "o-", label=name)
    left.set(title="measured: 1 MB, agents on this machine", xlabel="agents", ylabel="milliseconds")
    right.set(title="model: 10 MB, 8 GPUs a machine, 25 Gbit/s", xlabel="GPUs", yscale="log")
    for axes, counts in ((left, measured), (right, modelled)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(counts), [str(count) for count in counts])
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(__doc__, seeds=1).parse_args(argv)
    report = Report(__file__, "BlueFog: microbenchmark (figure 11)", args, "10 repetitions, as in the paper")
    watch = LoadWatch()
    measured = measure(AGENTS[:2] if args.quick else AGENTS, args.quick, report)
    load = watch.load()
    modelled = model(GPUS[:3] if args.quick else GPUS)
    report.table(
        f"Milliseconds of a call, measured, {'10 kB' if args.quick else '1 MB'}",
        ["agents", *NAMES.values()],
        [
            [count, *(f"{Interval.of(1e3 * one for one in values[way]):.2f}" for way in NAMES)]
            for count, values in measured.items()
        ],
    )
    report.table(
        "Milliseconds of a call, predicted, 10 MB",
        ["GPUs", *NAMES.values()],
        [[size, *(f"{1e3 * values[way]:.2f}" for way in NAMES)] for size, values in modelled.items()],
    )
    report.note(f"The machine was {'quiet' if load.quiet else 'busy'} during the measurement: {load}.")
    report.claim(claims(measured, modelled))
    report.figure(lambda figure: draw(figure, measured, modelled))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
