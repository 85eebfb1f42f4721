"""The results of ``shoal bench``: rows with verdicts, tables of them, and the picture of a call's growth.

A row has Shoal's figure, its peer's, their ratio, the limit, and the verdict. The limits are goals for an idle machine
of two cores. They hold for the full sizes; other sizes are shown without.

The picture shows how the time of a call grows with the number of agents: means, and the bands in which the true means
lie. matplotlib is imported only when it is drawn, and comes with the ``demo`` extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .measurement import Figures, wire_seconds
from .parts import SCALING_REPETITIONS

MIB = 1 << 20
GROWTH_LIMIT = MIB
"""Bytes that a process may grow by over the rounds; a leak of 100 bytes a round is 1 MB in 10,000."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: The measured task.
        shoal: Shoal's figure: the median over the repetitions.
        unit: ``s`` or ``B``.
        peer: The library it is compared with.
        peer_value: The peer's figure in the same unit.
        ratio: The two figures compared.
        limit: The limit of the ratio, or of the figure.
        met: Whether the limit is met; None without a limit.
    """

    what: str
    shoal: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: str = ""
    limit: str = ""
    met: bool | None = None


def rows_of(found: Iterable[Figures], judged: bool = True) -> list[Row]:
    """The table's rows, in the table's order. Unless ``judged`` they have no limits."""
    ordered = sorted(found, key=lambda figures: list(_ROWS).index(figures.kind))
    rows = [row for figures in ordered for row in _ROWS[figures.kind](figures)]
    return rows if judged else [replace(row, limit="", met=None) for row in rows]


def faster(what: str, shoal: float, peer: str, peer_value: float, least: float | None = None) -> Row:
    """How many times as fast as the peer, and at least how many it must be."""
    ratio = peer_value / shoal
    row = Row(what, shoal, "s", peer, peer_value, f"{ratio:.2f}x as fast")
    return row if least is None else replace(row, limit=f"≥ {least:g}x", met=ratio >= least)


def costs(what: str, shoal: float, peer: str, peer_value: float, most: float, unit: str = "s") -> Row:
    """How many times the peer's figure, and at most how many it may be."""
    ratio = shoal / peer_value
    return Row(what, shoal, unit, peer, peer_value, f"{ratio:.2f}x as much", f"≤ {most:g}x", ratio <= most)


def _large(figures: Figures) -> list[Row]:
    size, t = _size(figures.nbytes), _medians(figures)
    all_reduce = "Gloo all_reduce"
    rows = [
        faster(f"ring, {size}", t["ring"], all_reduce, t["all_reduce"], 1.6),
        costs(f"ring, {size}, a fresh result", t["fresh"], "the same with out=", t["ring"], 1.2),
    ]
    if "copies" in t:
        rows.append(costs(f"ring, {size}", t["ring"], "3 copies, all agents", t["copies"], 1.5))
    if "one-peer" in t:
        rows.append(faster(f"dynamic one-peer, {size}", t["one-peer"], all_reduce, t["all_reduce"], 2.3))
    return rows


def _small(figures: Figures) -> list[Row]:
    t, agents = _medians(figures), f"{figures.agents} agents"
    ring, one_peer = f"ring, {figures.nbytes} B, {agents}", f"dynamic one-peer, {figures.nbytes} B, {agents}"
    if figures.agents == 2:
        first = faster(ring, t["ring"], "Gloo all_reduce", t["all_reduce"])
        first = replace(first, limit="faster", met=t["ring"] < t["all_reduce"])
    else:
        first = costs(ring, t["ring"], "Gloo all_reduce", t["all_reduce"], 1.2)
    return [first, faster(one_peer, t["one-peer"], "Gloo all_reduce", t["all_reduce"])]


def _many(figures: Figures) -> list[Row]:
    t, what = _medians(figures), "100 operations in flight, 4 KB"
    # Compared with Gloo at its best, which is one operation for all; as many operations hinder each other there.
    best = min((case for case in t if case.startswith("all_reduce")), key=t.__getitem__)
    apart = min(("all_reduce, async", "all_reduce, in turn"), key=t.__getitem__)
    row = faster(what, t["ring"], f"Gloo {best}", t[best])
    return [
        replace(row, limit="< 8 ms", met=t["ring"] < 0.008),
        faster(what, t["ring"], f"Gloo {apart}, 100 of them", t[apart]),
        costs("100 tensors in one call, 4 KB", t["ring, grouped"], f"Gloo {best}", t[best], 1.5),
    ]


def _windows(figures: Figures) -> list[Row]:
    t = _medians(figures)
    what, all_reduce = f"win_put + win_update, {_size(figures.nbytes)}", "Gloo all_reduce"
    if figures.nbytes == 4:
        return [costs(what, t["window"], all_reduce, t["all_reduce"], 0.5)]
    rows = [faster(what, t["window"], all_reduce, t["all_reduce"])]
    rows = [replace(row, limit="faster", met=t["window"] < t["all_reduce"]) for row in rows]
    if "copies" in t:
        rows.append(costs(what, t["window"], "4 copies, all agents", t["copies"], 1.5))
    return rows


def _published(figures: Figures) -> list[Row]:
    [published], [flying], [neighbours] = (figures.values[key] for key in ("published", "in flight", "neighbours"))
    operations = "1 operation" if flying == 1 else f"{flying:g} operations"
    readers = "1 neighbour" if neighbours == 1 else f"{neighbours:g} neighbours"
    what, peer = f"published by {operations} for {readers}", "1 copy an operation"
    return [costs(what, published, peer, flying * figures.nbytes, 1.0, "B")]


def _rounds(figures: Figures) -> list[Row]:
    [rounds], [grown], [resident] = (figures.values[key] for key in ("rounds", "grown", "resident"))
    return [
        Row(
            f"memory that {rounds:,.0f} rounds add",
            grown,
            "B",
            "the whole process",
            resident,
            f"{grown / rounds:.1f} B a round",
            f"≤ {_size(GROWTH_LIMIT)}",
            grown <= GROWTH_LIMIT,
        )
    ]


def _wire(figures: Figures) -> list[Row]:
    t, what = _medians(figures), f"average {_size(figures.nbytes)} over 1 Gbit/s"
    return [
        costs(what, t["average"], "the wire's own time", wire_seconds(figures.nbytes), 1.06),
        faster(what, t["average"], "Gloo send/recv", t["gloo"]),
        faster(what, t["average"], "Gloo send/recv, mean", t["gloo and average"]),
    ]


def _latency(figures: Figures) -> list[Row]:
    rows = []
    for computes, limit in {"torch": 0.010, "Python": 0.050}.items():
        values = sorted(figures.values[computes])
        percentile = values[min(len(values) - 1, int(0.99 * len(values)))]
        what = f"win_put, {_size(figures.nbytes)}, to a machine busy in {computes}: 99%"
        typical = f"median of {len(values):,}"
        limited = f"< {1e3 * limit:g} ms"
        rows.append(Row(what, percentile, "s", typical, median(values), "", limited, percentile < limit))
    return rows


_ROWS: dict[str, Callable[[Figures], list[Row]]] = {
    "large": _large,
    "small": _small,
    "many": _many,
    "windows": _windows,
    "published": _published,
    "rounds": _rounds,
    "wire": _wire,
    "latency": _latency,
}


def _medians(figures: Figures) -> dict[str, float]:
    return {case: median(values) for case, values in figures.values.items()}


def _size(nbytes: int) -> str:
    if nbytes < 1000:
        return f"{nbytes} B"
    return f"{nbytes // MIB} MiB" if nbytes % MIB == 0 else f"{nbytes / 1e6:g} MB"


if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    "all_reduce": "all_reduce (Gloo)",
    "ring": "ring, one direction (Shoal)",
    "dynamic": "dynamic exponential (Shoal)",
}
_COLOURS = {"all_reduce": "#8a5a00", "ring": "#1f4e79", "dynamic": "#2b8a6e"}
_MARKS = {"all_reduce": "s", "ring": "o", "dynamic": "^"}

# Student's t for nine degrees of freedom: 90% lie within it.
_T = 1.833
assert SCALING_REPETITIONS == 10


@dataclass(frozen=True)
class Band:
    """A mean, and how far to either side its 90% confidence interval reaches."""

    mean: float
    reach: float


def band(values: Sequence[float]) -> Band:
    """The mean of ``SCALING_REPETITIONS`` values and its 90% band, taking them for normal.

    Raises:
        ValueError: There are more or fewer.
    """
    if len(values) != SCALING_REPETITIONS:
        raise ValueError(f"{len(values)} values; the band is that of {SCALING_REPETITIONS}")
    return Band(fmean(values), _T * stdev(values) / SCALING_REPETITIONS**0.5)


def draw_scaling(found: Sequence[Figures], path: Path, caption: str) -> None:
    """Write a picture with a panel for each size. The suffix of ``path`` decides its format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = sorted({figures.nbytes for figures in found})
    figure = Figure(figsize=(4.8 * len(sizes), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    for panel, nbytes in zip(panels, sizes, strict=True):
        _draw_panel(panel, [figures for figures in found if figures.nbytes == nbytes])
        panel.set_title(f"{nbytes / 1e6:g} MB")
    panels[0].set_ylabel("milliseconds")
    panels[0].legend(frameon=False)
    figure.supxlabel(f"agents, one process each; the mean of ten calls, shaded its 90% band\n{caption}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_panel(panel: Axes, found: list[Figures]) -> None:
    found = sorted(found, key=lambda figures: figures.agents)
    agents = [figures.agents for figures in found]
    for case, label in LABELS.items():
        bands = [band([1e3 * seconds for seconds in figures.values[case]]) for figures in found]
        means = [interval.mean for interval in bands]
        panel.plot(agents, means, color=_COLOURS[case], marker=_MARKS[case], markersize=5, label=label)
        low, high = (
            [interval.mean - interval.reach for interval in bands],
            [interval.mean + interval.reach for interval in bands],
        )
        panel.fill_between(agents, low, high, color=_COLOURS[case], alpha=0.2, linewidth=0)
    panel.set_xticks(agents)
    panel.set_ylim(bottom=0)
    panel.grid(axis="y", alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


_STYLES = {"met": "green", "not met": "bold red"}
_COLUMNS = ("what", "Shoal >", "compared with", "its figure >", "ratio", "limit", "")


def speed_table(rows: Sequence[Row]) -> Table:
    """Every row beside its peer and its limit."""
    table = _table("Averaging float32 tensors: the median, over repetitions, of the slowest agent's time")
    for column in _COLUMNS:
        # In a narrow terminal the words wrap, and the figures stay whole.
        is_words = column in ("what", "compared with")
        table.add_column(
            column.rstrip(" >"),
            justify="right" if column.endswith(">") else "left",
            no_wrap=not is_words,
            min_width=10 if is_words else None,
        )
    for row in rows:
        *cells, verdict = _cells(row)
        table.add_row(*cells, f"[{_STYLES[verdict]}]{verdict}[/]" if verdict else "")
    return table


def speed_markdown(rows: Sequence[Row]) -> str:
    """The same table in Markdown."""
    rules = ["---:" if column.endswith(">") else "---" for column in _COLUMNS]
    lines = [[column.rstrip(" >") for column in _COLUMNS], rules, *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def scaling_table(found: Sequence[Figures]) -> Table:
    """A line for each size and number of agents."""
    table = _table("Milliseconds of a call: the mean of ten, and its 90% band")
    table.add_column("tensor", justify="right")
    table.add_column("agents", justify="right")
    for label in LABELS.values():
        table.add_column(label, justify="right")
    for figures in sorted(found, key=lambda figure: (figure.nbytes, figure.agents)):
        bands = [band([1e3 * seconds for seconds in figures.values[case]]) for case in LABELS]
        cells = [f"{interval.mean:.2f} ± {interval.reach:.2f}" for interval in bands]
        table.add_row(f"{figures.nbytes / 1e6:g} MB", str(figures.agents), *cells)
    return table


def amount(value: float, unit: str) -> str:
    """A figure for people: milliseconds or mebibytes, with three digits or so."""
    scaled, name = (value * 1e3, "ms") if unit == "s" else (value / MIB, "MiB")
    digits = 1 if scaled >= 10 else 2 if scaled >= 1 else 3
    return f"{scaled:.{digits}f} {name}"


def _cells(row: Row) -> list[str]:
    peer_value = "" if row.peer_value is None else amount(row.peer_value, row.unit)
    verdict = "" if row.met is None else "met" if row.met else "not met"
    return [row.what, amount(row.shoal, row.unit), row.peer, peer_value, row.ratio, row.limit, verdict]


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
