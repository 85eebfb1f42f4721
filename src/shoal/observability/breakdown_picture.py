"""Draws the use of a step's time, by agent and step, and the sizes of messages.

matplotlib is imported only when something is drawn, and comes with the ``plot`` extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .breakdown import COMPUTING, COORDINATION, DATA, KINDS, OTHERS, SUMS, TRANSFER, Share
from .findings import size_of, sizes
from .run_report import RunReport
from .traces import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    COMPUTING: "#1f77b4",
    SUMS: "#2ca02c",
    COORDINATION: "#9467bd",
    DATA: "#f2c14e",
    OTHERS: "#d62728",
    TRANSFER: "#17becf",
}
INK, PALE = "#1b1f23", "#d5dade"
MOST_STEPS = 400
"""That are drawn one by one; of more, the last."""


def draw(report: RunReport, path: Path) -> None:
    """Write the picture. The suffix of ``path`` decides its format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    agents = len(report.typical)
    tall = 1.6 + 0.3 * agents
    if report.has_steps:
        figure = Figure(figsize=(11, 2 * tall + 0.4), layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=(2.2, 1))
        _draw_parts(figure.add_subplot(grid[0, 0]), report)
        _draw_steps(figure, figure.add_subplot(grid[1, 0]), report)
        _draw_sizes(figure.add_subplot(grid[:, 1]), report)
    else:
        figure = Figure(figsize=(11, tall + 0.4), layout="constrained")
        parts, messages = figure.subplots(1, 2, width_ratios=(2.2, 1))
        _draw_parts(parts, report)
        _draw_sizes(messages, report)
    figure.savefig(path, dpi=150)


def _draw_parts(axes: Axes, report: RunReport) -> None:
    """A bar for each agent, of a step's parts."""
    scale, unit = (1e3, "milliseconds") if report.has_steps else (1.0, "seconds")
    at = [0.0] * len(report.typical)
    for kind in KINDS:
        widths = [scale * agent.into[kind] for agent in report.typical]
        axes.barh(range(len(widths)), widths, left=at, height=0.7, color=COLOURS[kind], label=kind)
        at = [begin + width for begin, width in zip(at, widths, strict=True)]
    _name_agents(axes, report)
    axes.set_xlabel(unit)
    axes.set_title(
        "Mean time of a step, by what the agent does"
        if report.has_steps
        else "Time of the run, by what the agent does",
        loc="left",
        fontsize=10,
        color=INK,
    )
    axes.legend(ncols=3, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.08))
    _plain(axes)


def _draw_steps(figure: Figure, axes: Axes, report: RunReport) -> None:
    """A cell for each agent and step of the run, by how long it computes."""
    from matplotlib.ticker import MaxNLocator

    offsets = step_offsets(report.traces, report.shares)
    placed = [
        (share.trace, share.number + offsets[share.trace], share.into[COMPUTING] / 1e6) for share in report.shares
    ]
    last = max(step for _, step, _ in placed)
    first = max(min(step for _, step, _ in placed), last - MOST_STEPS + 1)
    rows = {number: row for row, number in enumerate(sorted({share.trace for share in report.shares}))}
    cells = [[float("nan")] * (last - first + 1) for _ in rows]
    for number, step, value in placed:
        if step >= first:
            cells[rows[number]][step - first] = value
    seen = sorted(value for _, step, value in placed if step >= first)
    image = axes.imshow(
        cells,
        aspect="auto",
        cmap="Blues",
        vmin=0.0,
        vmax=seen[int(0.98 * (len(seen) - 1))],
        interpolation="nearest",
        extent=(first - 0.5, last + 0.5, len(rows) - 0.5, -0.5),
    )
    _name_agents(axes, report)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_title("Time that each agent computes in each step", loc="left", fontsize=10, color=INK)
    scale = figure.colorbar(image, ax=axes, pad=0.01)
    scale.set_label("milliseconds of computing", fontsize=8)
    scale.ax.tick_params(labelsize=8)
    _plain(axes)


def step_offsets(traces: Sequence[Trace], shares: Sequence[Share]) -> list[int]:
    """The offsets from the step numbers of each trace to step numbers of the run.

    A restarted agent counts its steps from 1 again. Its first step is the others' step at that time.
    """
    first: dict[int, Share] = {}
    for share in sorted(shares, key=lambda share: share.start):
        first.setdefault(share.trace, share)
    offsets = [0] * len(traces)
    reached: list[tuple[int, int]] = []  # when each step of the agents before it began, and its number in the run
    for number, begin in first.items():
        if traces[number].incarnation:
            now = max((step for start, step in reached if start <= begin.start), default=begin.number)
            offsets[number] = max(0, now - begin.number)
        reached += [(share.start, share.number + offsets[number]) for share in shares if share.trace == number]
    return offsets


def _draw_sizes(axes: Axes, report: RunReport) -> None:
    """How many messages there are of each size, and how many of the bytes are in them."""
    by_size = sizes(report.flows)
    count, nbytes = (max(1, sum(counts[k] for counts in by_size.values())) for k in (0, 1))
    places = range(len(by_size))
    for shift, k, whole, label, colour in ((-0.2, 0, count, "messages", INK), (0.2, 1, nbytes, "bytes", COLOURS[DATA])):
        parts = [100 * counts[k] / whole for counts in by_size.values()]
        bars = axes.bar([place + shift for place in places], parts, width=0.38, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f%%", fontsize=8, padding=1)
    axes.set_xticks(list(places), [f"< {size_of(limit)}" for limit in by_size], fontsize=8, rotation=40, ha="right")
    axes.set_xlabel("size of a message", fontsize=8)
    axes.set_ylabel("share in %", fontsize=8)
    axes.set_title(f"Sizes of {count} messages", loc="left", fontsize=10, color=INK)
    axes.set_ylim(0, 108)
    axes.legend(frameon=False, fontsize=8, title="share of the", title_fontsize=8)
    _plain(axes)


def _name_agents(axes: Axes, report: RunReport) -> None:
    names: Sequence[str] = [f"rank {agent.name}" for agent in report.typical]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
