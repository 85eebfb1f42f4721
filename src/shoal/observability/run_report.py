"""The report of a folder of traces: read, aligned to one clock, matched, broken down, with the findings.

``merge`` writes one Chrome trace of a whole run: the traces of its agents on one clock, and an arrow for each message.
An arrow begins in the operation's bar at the sender, when the message was posted. It ends in the operation's bar at the
receiver, when the message arrived, or at the begin of that bar if the message arrived before. A viewer shows it when
either bar is selected. Messages without a bar, as of the rendezvous of process groups, or late messages, have no arrow.

``draw_breakdown`` draws the use of a step's time, by agent and step, and the sizes of messages. matplotlib is imported
only when something is drawn, and comes with the ``plot`` extra.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import breakdown, clock_alignment, findings, traces
from .breakdown import COMPUTING, COORDINATION, DATA, KINDS, OTHERS, SUMS, TRANSFER, Share
from .clock_alignment import ClockFit
from .findings import EdgeStatistics, Finding, Typical, size_of, sizes
from .run_files import open_own
from .traces import Flow, MessageKey, Trace, TracedCall, TracedMessage, TraceFolder, key_of, lines_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RunReport:
    """The report of one run.

    Attributes:
        found: The content of the folder.
        clocks: The clock of each trace.
        traces, flows: Aligned to one clock.
        shares: The use of time, by agent and step, without the first step of each.
    """

    found: TraceFolder
    clocks: list[ClockFit]
    traces: list[Trace]
    flows: list[Flow]
    shares: list[Share]

    @staticmethod
    def of(folder: Path) -> RunReport:
        """The report of the traces in a folder.

        Raises:
            FileNotFoundError, ValueError: See :func:`~.traces.read`.
        """
        found = traces.read(folder)
        known, laid = clock_alignment.aligned(found.traces)
        matched = traces.match(laid)
        shares = findings.without_the_first(breakdown.break_down(laid, matched))
        return RunReport(found, known, laid, matched, shares)

    @cached_property
    def typical(self) -> list[Typical]:
        """A step of each agent, on the average."""
        return findings.typical(self.traces, self.shares)

    @cached_property
    def links(self) -> list[EdgeStatistics]:
        """The throughput of the network's edges."""
        return findings.links(self.traces, self.flows)

    @cached_property
    def findings(self) -> list[Finding]:
        """The findings of the run."""
        return findings.findings(self.traces, self.shares, self.typical, self.links)

    @property
    def has_steps(self) -> bool:
        """An optimizer marked its steps."""
        return any(share.number for share in self.shares)

    @property
    def optimizer(self) -> str:
        """The optimizer of the steps."""
        for trace in self.traces:
            for name in (step.optimizer for step in trace.steps if (step.number, step.start) in self._marked):
                return name
        return ""

    @cached_property
    def _marked(self) -> set[tuple[int, int]]:
        return {(share.number, share.start) for share in self.shares}

    @property
    def unended(self) -> list[tuple[Trace, TracedCall]]:
        """The oldest call of each agent that its trace ends in."""
        found = []
        for trace in self.traces:
            begun = [call for call in trace.calls if call.end is None]
            if begun:
                found.append((trace, min(begun, key=lambda call: call.start)))
        return found

    def merge(self, path: Path) -> int:
        """Write one trace of all; how many messages are arrows in it."""
        return merge(self.found.traces, self.clocks, self.flows, path)


_ID_BYTES = 6
"""Viewers count with numbers of 53 bits."""
_Bars = dict[MessageKey, tuple[int, int, int]]
"""Of one agent's calls: the row, the beginning and the end of their bars."""
_NONE = (0, 0, 0)


def merge(traces: Sequence[Trace], clocks: Sequence[ClockFit], flows: Sequence[Flow], path: Path) -> int:
    """Write it. Times begin with the first of all.

    Args:
        traces: The traces, unchanged since they were read.
        clocks: The clock of each.
        flows: Between them, by these clocks.
        path: The file to write; its folder must exist.

    Returns:
        How many arrows there are.
    """
    begins = min(clock.corrected(trace.start) for trace, clock in zip(traces, clocks, strict=True))
    with os.fdopen(open_own(path), "w", encoding="utf-8") as file:
        file.write("[\n")
        for number, (trace, clock) in enumerate(zip(traces, clocks, strict=True)):
            for event in lines_of(trace.path):
                if event is not None:
                    file.write(_line(_moved(event, number, trace, clock, begins)))
        arrows = 0
        bars = [_bars_of(trace, clock) for trace, clock in zip(traces, clocks, strict=True)]
        for flow in flows:
            ends = _arrow(flow, traces, bars, begins)
            arrows += bool(ends)
            for event in ends:
                file.write(_line(event))
        # The last line has no comma, so it is an empty event.
        file.write(json.dumps({"name": "shoal", "ph": "M", "pid": 0, "tid": 0, "args": {"agents": len(traces)}}))
        file.write("\n]\n")
    return arrows


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + ",\n"


def _moved(event: dict[str, Any], number: int, trace: Trace, clock: ClockFit, begins: int) -> dict[str, Any]:
    """An event for the merged trace. A rank may occur twice, so processes get new numbers."""
    event["pid"] = number
    if event["ph"] == "M":
        if event["name"] == "process_name":
            event["args"] = {"name": f"agent {trace}".replace("agent rank", "agent")}
        elif event["name"] == "process_sort_index":
            event["args"] = {"sort_index": number}
        return event
    start = round(event["ts"] * 1000) + trace.shift
    event["ts"] = (clock.corrected(start) - begins) / 1000
    return event


def _bars_of(trace: Trace, clock: ClockFit) -> _Bars:
    found = {}
    for call in trace.calls:
        end = trace.end if call.end is None else call.end
        found[key_of(call)] = call.row, clock.corrected(call.start), clock.corrected(end)
    return found


def _in_bar(message: TracedMessage, bars: _Bars) -> tuple[int, int] | None:
    """The row of a message's own bar, and when it is there; just before the end at the latest, since a viewer ends a
    bar before it begins or ends an arrow."""
    whole = message.key._replace(stage=0)
    for key in (whole, whole._replace(calls=1)):  # an agent that fused other calls has a bar for the first of them
        row, start, end = bars.get(key, _NONE)
        if message.at <= end:  # else it arrived after the call had failed
            return row, max(start, min(message.at, end - 1))
    return None


def _arrow(flow: Flow, traces: Sequence[Trace], bars: Sequence[_Bars], begins: int) -> list[dict[str, Any]]:
    """The two ends of a message's arrow; empty if one of them is in no bar."""
    sent, received = _in_bar(flow.sent, bars[flow.source]), _in_bar(flow.received, bars[flow.destination])
    if sent is None or received is None:
        return []
    name = ident(traces[flow.source].rank, traces[flow.destination].rank, flow.key)
    ends = (("s", flow.source, sent), ("f", flow.destination, received))
    found: list[dict[str, Any]] = [
        {
            "ph": phase,
            "cat": "message",
            "name": "message",
            "id": name,
            "pid": number,
            "tid": row,
            "ts": (at - begins) / 1000,
        }
        for phase, number, (row, at) in ends
    ]
    found[1]["bp"] = "e"  # in the bar that is there at that time
    return found


def ident(source: int, destination: int, key: MessageKey) -> int:
    """A number for a message, made of its edge, name, round and stage."""
    text = json.dumps([source, destination, *key])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_ID_BYTES).digest(), "big")


COLOURS = {
    COMPUTING: "#1f77b4",
    SUMS: "#2ca02c",
    COORDINATION: "#9467bd",
    DATA: "#f2c14e",
    OTHERS: "#d62728",
    TRANSFER: "#17becf",
}
INK = "#1b1f23"
MOST_STEPS = 400
"""That are drawn one by one; of more, the last."""


def draw_breakdown(report: RunReport, path: Path) -> None:
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
