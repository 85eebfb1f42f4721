"""What the network model says of clusters that papers report on, beside what they report.

A page, Markdown: figures of `clusters`, and the tables of costs that papers print (`tables`). Every assumption stands
beside the table that rests on it, and where the model and a paper differ the page says so. docs/topologies/papers.md is
this page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from shoal.netmodel.network import format_seconds

from . import clusters
from .clusters import Assumption, Figure12
from .protocols import Counted
from .tables import bluefog_table, busiest_node_table, ring_star_table

FIGURE_12_SIZES = (4, 8, 16, 32, 64, 128)
RING_STAR_SIZES = (16, 32, 64)
SUMMIT_SIZE = 27_600
SUMMIT_SHARE = 0.93
_SYNCHRONOUS_SHARE = 0.60
"""Of Kurth et al. 2018 on Summit without gradient lag, as the Horovod paper quotes it; above 0.90 with it."""

_WIDTH = 120
_AGENTS, _GROUP, _DEGREE = 64, 8, 2
_NETWORK = {"nbytes": 100e6, "latency": 50e-6, "bandwidth": 1.25e9}

_INTRODUCTION = (
    "# What papers report, and what the model says",
    "Printed by `python benchmarks/papers`; a test checks that this page is what it prints. The model is that of "
    "[network-model.md](../network-model.md). A prediction rests on the assumptions under its table: numbers that the "
    "paper does not give.",
)


def page() -> str:
    """The whole page; it takes a minute."""
    return text([*_INTRODUCTION, *figure_12(), *ring_star(), *summit(), *cost_tables()])


def text(parts: Iterable[str]) -> str:
    """Paragraphs, tables and lists as Markdown; paragraphs are wrapped."""
    return (
        "\n\n".join(part if "\n" in part else textwrap.fill(part, _WIDTH, break_on_hyphens=False) for part in parts)
        + "\n"
    )


def figure_12(sizes: Sequence[int] = FIGURE_12_SIZES) -> list[str]:
    """BlueFog's figure 12: throughput of a GPU as a share of one alone."""
    plain = {size: clusters.figure_12(size) for size in sizes}
    limited = clusters.figure_12(sizes[-1], clusters.AWS_FLOW)
    names = [style.name for style in clusters.STYLES]
    rows = [
        [one.workload.name, f"{size}", *(_share(one.efficiency[name]) for name in names), _speedup(one)]
        for index, _ in enumerate(clusters.FIGURE_12)
        for size, found in plain.items()
        for one in [found[index]]
    ]
    last = zip(plain[sizes[-1]], limited, strict=True)
    return [
        "## BlueFog's figure 12: ResNet-50, VGG-16 and BERT-large on 4 to 128 GPUs",
        "The throughput of a GPU as a share of that of one GPU alone, eight GPUs a machine and 25 Gbit/s between "
        "machines; and how much faster BlueFog's slowest and fastest styles are than Horovod.",
        _table(["model", "GPUs", *names, "speed-up"], rows, right=1),
        f"The paper reports of {sizes[-1]} GPUs, and the model says of the network above, and of one in which a "
        "connection gets 10 Gbit/s at most:",
        _table(
            ["", "the paper", "25 Gbit/s", "10 Gbit/s a connection"],
            [
                [
                    f"{one.workload.name}, BlueFog's share",
                    "over 0.95" if one.workload is clusters.RESNET_50 else "0.50 to 0.60",
                    _range(one),
                    _range(other),
                ]
                for one, other in last
            ]
            + [
                [
                    "speed-up over Horovod",
                    "1.2 to 1.8",
                    _speedups(plain[sizes[-1]]),
                    _speedups(limited),
                ]
            ],
        ),
        "**Where they differ.** ResNet-50 agrees with the paper's share. Of VGG-16 the paper has about half and the "
        "model all on the full network, where its steps are long enough to hide a model that goes once through the "
        "NIC. BERT-large comes out at the paper's share or above it on the full network, and in the hierarchical "
        "styles below it where a connection gets 10 Gbit/s: the paper lies between the two networks. The speed-up over "
        "Horovod comes out larger than the paper's for BERT-large. On the full network the model sees none for "
        "ResNet-50, as all of its messages hide behind back-propagation; the paper says that BlueFog is always faster. "
        "Not in the model: copies between GPU and host, the negotiation that comes before every operation, tensors "
        "that are sent one by one, and all-reduces over several connections at once.",
        _assumptions(clusters.FIGURE_12_ASSUMPTIONS),
    ]


def ring_star(sizes: Sequence[int] = RING_STAR_SIZES) -> list[str]:
    """Ring-Star's cluster: seconds of one averaging."""
    rows = []
    for name, nbytes in clusters.RING_STAR_MODELS.items():
        for size in sizes:
            played = list(clusters.ring_star_seconds(size, nbytes).values())
            printed = list(clusters.ring_star_formulas(size, nbytes).values())
            cells = (
                f"{format_seconds(model)} ({format_seconds(paper)})"
                for model, paper in zip(played, printed, strict=True)
            )
            rows.append([f"{name}, {nbytes / 1e6:g} MB", f"{size}", *cells])
    return [
        "## Ring-Star's cluster: 16 to 64 workers, four GPUs a node, 10 Gbit/s between nodes",
        "One averaging as the model plays it and, in brackets, by the formula of the paper's table 1. Groups are of "
        "four, as in the paper: a delegate a node.",
        _table(["model", "workers", "Allreduce", "Ring", "RingRandom", "Ring-Star"], rows, right=1),
        "The paper reports no seconds. Its figure 3 and text say that all-reduce takes the most time, that Ring and "
        "RingRandom take little, and that Ring-Star takes about as little as they do.",
        "**Where they differ.** For models of 1 MB the model says the same of all-reduce from 32 workers on: latencies "
        "are most of it. For larger models it does not. There the bytes count, and a ring all-reduce sends no more of "
        "them through a node's NIC than the ring does; RingRandom is the slowest, as four workers share a NIC, and "
        "Ring-Star pays for collecting models inside the node, which the formula leaves out. The paper ran mpi4py and "
        "does not say which all-reduce its MPI chose, or how long a step was.",
        _assumptions(clusters.RING_STAR_ASSUMPTIONS),
    ]


def summit(size: int = SUMMIT_SIZE) -> list[str]:
    """Horovod on all of Summit."""
    rows = []
    for kind, seconds in clusters.summit_allreduces(size).items():
        needs = [
            format_seconds(clusters.compute_for(seconds, SUMMIT_SHARE, overlap)) for overlap in (clusters.BACKWARD, 0.0)
        ]
        synchronous = clusters.compute_for(seconds, _SYNCHRONOUS_SHARE, 0.0)
        lagged = clusters.exposed(seconds, synchronous, 0.0, lag=1)
        rows.append([kind, format_seconds(seconds), *needs, format_seconds(seconds), _share(lagged)])
    return [
        f"## Horovod on Summit: {size:,} GPUs, 880 MB a GPU",
        "Six GPUs a node, 50 GB/s inside and 23 GB/s between. An all-reduce of the gradients, how long a step must at "
        f"least compute for the {SUMMIT_SHARE} that the paper reports, and what gradient lag would change.",
        _table(
            [
                "all-reduce",
                "takes",
                f"{SUMMIT_SHARE} needs steps of, gradients sent during back-propagation",
                "and after it",
                "with lag all is hidden by steps of",
                f"lag on steps that have {_SYNCHRONOUS_SHARE:.2f} without",
            ],
            rows,
            right=1,
        ),
        f"**What can be said.** The paper does not give the length of a step, so the model cannot predict its "
        f"{SUMMIT_SHARE}. It says which steps have it: some tenths of a second if gradients are sent while others are "
        "computed, as Horovod does, and seconds if not. Kurth et al. 2018, whom the paper quotes, had about "
        f"{_SYNCHRONOUS_SHARE:.2f} without gradient lag and above 0.90 with it: by the model, lag hides the whole "
        "all-reduce of steps that have as much without. Not in the model: stragglers, links that other jobs share, and "
        "Horovod's coordination, which is what the paper is about.",
        _assumptions(clusters.SUMMIT_ASSUMPTIONS),
    ]


def cost_tables() -> list[str]:
    """The tables of costs that papers print, with what one counts beside them."""
    millions = _NETWORK["nbytes"] / 1e6
    setting = f"{millions:g} MB, {format_seconds(_NETWORK['latency'])} and 10 Gbit/s"
    counted = ["messages", "MB"]
    printed = ring_star_table(_AGENTS, _GROUP, **_NETWORK)
    primitives = bluefog_table(_AGENTS, **_NETWORK)
    busiest = busiest_node_table(_AGENTS, _DEGREE, nbytes=_NETWORK["nbytes"])
    return [
        "## Tables of costs that papers print",
        "Formulas to the letter. Beside them what passes the busiest node, sent or received, when the messages of one "
        f"averaging are written down one by one; seconds are the formula's, for {setting}.",
        f"**The BlueFog paper's table I**, {_AGENTS} nodes.",
        _table(
            ["primitive", "cost", "seconds", "averaging", "needs", *counted, ""],
            [
                [
                    row.primitive,
                    row.formula,
                    format_seconds(row.seconds),
                    row.averaging,
                    row.needs,
                    f"{row.counted.messages}",
                    _megabytes(row.counted),
                    row.note,
                ]
                for row in primitives
            ],
        ),
        f"**BAGUA's table of the busiest node**, {_AGENTS} nodes and d = {_DEGREE}.",
        _table(
            ["pattern", "latency", "bandwidth", "steps", *counted, ""],
            [
                [
                    row.pattern,
                    row.latency,
                    row.bandwidth,
                    f"{row.counted.steps}",
                    f"{row.counted.messages}",
                    _megabytes(row.counted),
                    row.note,
                ]
                for row in busiest
            ],
        ),
        f"**The Ring-Star paper's table 1**, V = {_AGENTS} workers in groups of L = {_GROUP}, G = V / L.",
        _table(
            ["topology", "averaging", "cost", "seconds", "age", *counted, "counted age", ""],
            [
                [
                    row.topology,
                    row.averaging,
                    row.formula,
                    format_seconds(row.seconds),
                    row.age,
                    "" if row.counted is None else f"{row.counted.messages}",
                    "" if row.counted is None else _megabytes(row.counted),
                    "" if row.counted_age is None else f"{row.counted_age:.3g}",
                    row.note,
                ]
                for row in printed
            ],
        ),
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int | None = None) -> str:
    """A table; columns from number `right` on are aligned to the right."""
    rules = ["---:" if right is not None and index >= right else "---" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rules, *rows])


def _assumptions(made: Iterable[Assumption]) -> str:
    lines = [f"- {one.what}{f': {one.value}' if one.value else ''} ({one.source})" for one in made]
    return "\n".join(["Assumptions:", "", *lines])


def _megabytes(counted: Counted) -> str:
    megabytes = counted.bytes / 1e6
    return f"{megabytes:,.0f}" if megabytes >= 100 else f"{megabytes:.3g}"


def _share(value: float) -> str:
    return f"{value:.2f}"


def _speedup(one: Figure12) -> str:
    return _between(*one.speedup)


def _speedups(found: Sequence[Figure12]) -> str:
    return _between(min(one.speedup[0] for one in found), max(one.speedup[1] for one in found))


def _range(one: Figure12) -> str:
    ours = [share for name, share in one.efficiency.items() if name.startswith("BlueFog")]
    return _between(min(ours), max(ours))


def _between(low: float, high: float) -> str:
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
