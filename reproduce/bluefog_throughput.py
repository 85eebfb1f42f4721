"""BlueFog paper, figure 12 and the times of table II: throughput of training beside Horovod's.

    python reproduce/bluefog_throughput.py                             # the cluster of the paper, by the network model
    python benchmarks/training.py --only table2 --json out/table2.json    # measured in small: needs root, ip and tc
    python reproduce/bluefog_throughput.py --measured out/table2.json

The model plays the messages of ResNet-50, VGG-16 and BERT-large on machines of 8 GPUs with 25 Gbit/s between them, and
on the same network where a connection gets 10 Gbit/s at most (Ying et al. 2021, arXiv:2111.04287, section VII-B). A
measurement with ``--measured`` has four hosts of two agents, and NICs of 200 Mbit/s; DDP over Gloo stands for Horovod.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from _common import Claim, Interval, Report, arguments

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import _ways
from papers.clusters import AWS_FLOW, FIGURE_12_ASSUMPTIONS, STYLES, Figure12, figure_12

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (8, 16, 32, 64, 128)
HOROVOD, ATC, AWC, H_ATC, H_AWC = (style.name for style in STYLES)
TABLE_2 = {H_ATC: 1.30, ATC: 1.40, H_AWC: 1.26, AWC: 1.43}
"""Speed-ups over Horovod of 90 epochs of ResNet-50 on ImageNet, as printed."""
TABLE_2_GPUS = 32
"""The paper does not say how many. 90 epochs take 32 GPUs of 367 images/s 9,800 s, which fits its fastest 10,229 s."""
TOLERANCE = 0.1
"""Of a speed-up."""
MEASURED = {ATC: _ways.ATC, AWC: _ways.AWC, H_ATC: _ways.HIERARCHICAL_ATC, H_AWC: _ways.HIERARCHICAL_AWC}
"""What ``benchmarks/training.py`` calls the styles."""
Modelled = dict[int, dict[str, Figure12]]
"""By the number of GPUs and the model."""


def speedups(one: Figure12) -> dict[str, float]:
    """Of BlueFog's styles over Horovod."""
    return {name: one.efficiency[name] / one.efficiency[HOROVOD] for name in TABLE_2}


def claims(full: Modelled, limited: Modelled) -> list[Claim]:
    """The paper's statements against the model: of the full network, and of 10 Gbit/s a connection."""
    most, several = max(full), [size for size in sorted(full) if size > 8]
    every = [speedups(one) for found in full.values() for one in found.values()]
    slowest = min(min(one.values()) for one in every)
    at_most = {name: speedups(one) for name, one in full[most].items()}
    low, high = min(min(one.values()) for one in at_most.values()), max(max(one.values()) for one in at_most.values())
    by_size = {name: [min(speedups(full[size][name]).values()) for size in several] for name in at_most}
    grows = all(after >= before - 1e-3 for line in by_size.values() for before, after in pairwise(line))
    share = {name: [full[most][name].efficiency[style] for style in TABLE_2] for name in at_most}
    half = [one for name in ("VGG-16", "BERT-large") for one in share[name]]
    drop = {name: full[16][name].efficiency[HOROVOD] / full[8][name].efficiency[HOROVOD] for name in at_most}
    table_2 = {
        network: speedups(found[TABLE_2_GPUS]["ResNet-50"]) for network, found in (("25", full), ("10", limited))
    }
    return [
        Claim("BlueFog is always faster than Horovod (figure 12)", f"least speed-up {slowest:.2f}", slowest > 1.01),
        Claim(
            f"With {most} GPUs the speed-up is 1.2 to 1.8 (figure 12)",
            f"{low:.2f} to {high:.2f} over the three models",
            low >= 1.2 - TOLERANCE and high <= 1.8 + TOLERANCE,
        ),
        Claim(
            f"The speed-up grows from 16 to {most} GPUs (figure 12)",
            "; ".join(f"{name} {line[0]:.2f} to {line[-1]:.2f}" for name, line in by_size.items()),
            grows and any(line[-1] > line[0] + 0.01 for line in by_size.values()),
        ),
        Claim(
            f"ResNet-50 scales with over 95% on {most} GPUs (figure 12, section VII-B)",
            f"least of BlueFog's styles {min(share['ResNet-50']):.2f}",
            min(share["ResNet-50"]) > 0.95,
        ),
        Claim(
            f"VGG-16 and BERT-large scale with 50 to 60% on {most} GPUs (figure 12, section VII-B)",
            f"{min(half):.2f} to {max(half):.2f}",
            min(half) >= 0.5 - TOLERANCE and max(half) <= 0.6 + TOLERANCE,
        ),
        Claim(
            "The efficiency of VGG-16 and BERT-large drops from one machine, 8 GPUs, to two (figure 12, section VII-B)",
            "Horovod: " + ", ".join(f"{name} to {one:.2f}" for name, one in drop.items()),
            max(drop["VGG-16"], drop["BERT-large"]) < 0.99,
        ),
        *(
            Claim(
                f"Speed-ups of ResNet-50 are 1.26 to 1.43 (table II), {network} Gbit/s a connection",
                ", ".join(f"{name.removeprefix('BlueFog ')} {one:.2f}" for name, one in found.items()),
                all(abs(found[name] - printed) <= TOLERANCE for name, printed in TABLE_2.items()),
            )
            for network, found in table_2.items()
        ),
    ]


def claims_of_measurement(seconds: dict[str, list[float]]) -> list[Claim]:
    """The paper's statement against measured steps, seconds of each repetition by way, DDP's best first."""
    ddp = min((values for name, values in seconds.items() if name.startswith("DDP")), key=median)
    found = []
    for style, way in MEASURED.items():
        if way in seconds:
            faster = Interval.of(before / after for before, after in zip(ddp, seconds[way], strict=True))
            words = f"{style} is faster than all-reduce (figure 12), measured in small"
            found.append(Claim(words, f"{faster:.2f} times as fast", faster.between(1)))
    return found


def read(path: Path) -> dict[str, list[float]]:
    """The steps that ``benchmarks/training.py --only table2 --json`` has measured.

    Raises:
        SystemExit: The file has none.
    """
    for figures in json.loads(path.read_text())["figures"]:
        if figures["kind"] == "table2":
            return dict(figures["values"])
    raise SystemExit(f"{path} has no steps of table2: write it by python benchmarks/training.py --only table2 --json")


def draw(figure: Figure, full: Modelled) -> None:
    names = list(next(iter(full.values())))
    for axes, name in zip(figure.subplots(1, len(names), sharey=True), names, strict=True):
        for style in (HOROVOD, *TABLE_2):
            values = [full[size][name].efficiency[style] * size for size in full]
            axes.plot(list(full), values, "o-", label=style, markersize=4, linewidth=1.4)
        axes.plot(list(full), list(full), ":", color="#9aa5b1", label="linear")
        axes.set(title=f"{name} (model)", xlabel="GPUs", xscale="log", yscale="log")
        axes.set_xticks(list(full), [str(size) for size in full])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("throughput, of one GPU alone")
    figure.axes[0].legend(frameon=False, fontsize=8)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, seeds=1)
    parser.add_argument("--measured", type=Path, metavar="FILE", help="also compare steps that training.py measured")
    args = parser.parse_args(argv)
    report = Report(__file__, "BlueFog: throughput (figure 12, times of table II)", args, "A prediction of the model")
    full: Modelled = {}
    for size in (8, 16, 32) if args.quick else SIZES:
        full[size] = {one.workload.name: one for one in figure_12(size)}
        report.say(f"{size} GPUs: " + "; ".join(_told(one) for one in full[size].values()))
    limited = {TABLE_2_GPUS: {one.workload.name: one for one in figure_12(TABLE_2_GPUS, AWS_FLOW)}}
    report.table(
        "Throughput of a GPU, as a share of that of one GPU alone, and the speed-up over Horovod",
        ["model", "GPUs", *(style.name for style in STYLES), "speed-up"],
        [
            [name, f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}", *cells]
            for name in full[8]
            for cells, sizes in _equal_rows({size: _cells(full[size][name]) for size in full})
        ],
    )
    report.note(
        f"Table II is taken for {TABLE_2_GPUS} GPUs, which the paper does not say. Assumptions: "
        + "; ".join(f"{one.what} {one.value} ({one.source})" for one in FIGURE_12_ASSUMPTIONS)
        + "."
    )
    report.claim(claims(full, limited))
    if args.measured:
        seconds = read(args.measured)
        report.table(
            "Seconds of a step, measured: four hosts of two agents, 200 Mbit/s",
            ["way", "seconds"],
            [[way, f"{Interval.of(values):.3f}"] for way, values in seconds.items()],
        )
        report.claim(claims_of_measurement(seconds))
    report.figure(lambda figure: draw(figure, full), (11, 4))
    return report.finish()


def _told(one: Figure12) -> str:
    return f"{one.workload.name} {_range(one)} times Horovod"


def _cells(one: Figure12) -> list[str]:
    return [*(f"{value:.2f}" for value in one.efficiency.values()), _range(one)]


def _equal_rows(rows: dict[int, list[str]]) -> Iterator[tuple[list[str], list[int]]]:
    """Rows without repetitions, and the numbers of GPUs that have each."""
    for cells, sizes in groupby(rows, rows.__getitem__):
        yield cells, list(sizes)


def _range(one: Figure12) -> str:
    low, high = one.speedup
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


if __name__ == "__main__":
    sys.exit(main())
