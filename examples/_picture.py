"""The picture at the end of the digits example: accuracy, disagreement, who has what, and who talks to whom."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx

import shoal
from _data import LABELS, Digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from _report import Run

AGENTS = ("#1f77b4", "#e07b39", "#2a9d6f", "#8e5fb0")
REFERENCE, ALONE = "#1b1f23", "#9aa5b1"
KILLED = "#c0282d"
MARKS = "osDv"
MOST_ROUNDS = 4
ERRORS = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01)


def draw(path: Path, runs: list[Run], titles: dict[str, str], digits: Digits, topology: str, graph: nx.DiGraph) -> None:
    """Write the picture to `path`; its suffix says the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.4), layout="constrained")
    agents = f"{len(graph)} agents learn" if len(graph) > 1 else "An agent learns"
    figure.suptitle(f"{agents} to read handwritten digits, {len(runs[0].accuracy)} epochs")
    grid = figure.add_gridspec(2, 2, width_ratios=[1.25, 1], height_ratios=[1.25, 1])
    _accuracy(figure.add_subplot(grid[0, 0]), runs, titles, len(digits.test))
    _disagreement(figure.add_subplot(grid[0, 1]), runs, titles)
    _shards(figure.add_subplot(grid[1, 0]), digits)
    if topology == "one-peer":
        rounds = _rounds(graph)
        who = figure.add_subfigure(grid[1, 1])
        who.suptitle("who sends its weights to whom, in turn\n", x=0.02, ha="left", fontsize=11)
        shoal.topology.draw_rounds(rounds, len(graph), who.subplots(1, len(rounds), squeeze=False)[0])
    else:
        axes = shoal.topology.draw(graph, figure.add_subplot(grid[1, 1]))
        axes.set_title(f"who averages with whom: {topology}", loc="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _rounds(graph: nx.DiGraph) -> list[list[tuple[int, int]]]:
    """The one-peer rounds until they repeat, or as many as there is room for."""
    turns = [shoal.topology.GetDynamicOnePeerSendRecvRanks(graph, rank) for rank in range(len(graph))]
    period = max(1, len(set(graph.successors(0)) - {0}))
    return shoal.topology.collect_rounds(turns, min(period, MOST_ROUNDS))


def _style(axes: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _line(run: Run, rank: int) -> dict[str, Any]:
    if run.algorithm == "allreduce":
        return {"color": REFERENCE, "linestyle": "--", "linewidth": 1.6}
    if run.algorithm == "alone":
        return {"color": ALONE, "linestyle": ":", "linewidth": 1.4}
    if len(run.accuracy[-1]) > len(AGENTS):
        return {"color": AGENTS[0], "linewidth": 0.9}
    # Lines lie on each other where agents are as accurate: each has its marker, at epochs of its own.
    marked = {"marker": MARKS[rank], "markersize": 5, "markevery": (rank, len(AGENTS))}
    return {"color": AGENTS[rank], "linewidth": 1.6, **marked}


def _kills(run: Run) -> dict[int, int]:
    """The last epoch that each agent finished before it was lost, by rank; epochs count from 1."""
    return {
        rank: sum(not math.isnan(one) for one in curve)
        for rank, curve in enumerate(zip(*run.accuracy, strict=True))
        if math.isnan(curve[-1])
    }


def _mark_kills(axes: Axes, run: Run, height: Callable[[int, int], float], *, with_rank: bool) -> None:
    """A cross where an agent is lost, at the height that its rank and last epoch have."""
    from matplotlib.patheffects import withStroke

    for number, (rank, epoch) in enumerate(_kills(run).items()):
        if epoch:
            at = epoch, height(rank, epoch)
            label = None if number else "an agent is killed"
            axes.plot(*at, "x", color=KILLED, markersize=9, markeredgewidth=2.5, zorder=5, label=label)
            if with_rank:
                offset = {"xytext": (0, 9), "textcoords": "offset points", "zorder": 6}
                halo = [withStroke(linewidth=3, foreground="white")]  # lines of other agents run through the text
                axes.annotate(f"agent {rank}", at, ha="center", color=KILLED, fontsize=9, path_effects=halo, **offset)


def _accuracy(axes: Axes, runs: list[Run], titles: dict[str, str], images: int) -> None:
    """Errors on a logarithmic axis, upside down and read as accuracy: what is near 100% can be told apart."""
    for run in runs:
        together, alone = run.algorithm == "allreduce", run.algorithm == "alone"
        there = next(rank for rank, one in enumerate(run.accuracy[-1]) if not math.isnan(one))
        for rank, curve in enumerate(zip(*run.accuracy, strict=True)):
            if together and rank != there:
                continue  # all agents have the same model
            errors = [_error(accuracy, images) for accuracy in curve]
            label = titles[run.algorithm] if together or alone else f"agent {rank}"
            if len(run.accuracy[-1]) > len(AGENTS) and not together and not alone:
                label = f"agents 0 to {len(run.accuracy[-1]) - 1}"
            first = rank == there or (not alone and len(run.accuracy[-1]) <= len(AGENTS))
            axes.plot(range(1, len(errors) + 1), errors, label=label if first else None, **_line(run, rank))
        _mark_kills(
            axes, run, lambda rank, epoch, run=run: _error(run.accuracy[epoch - 1][rank], images), with_rank=True
        )
    _style(axes, "test accuracy of each agent")
    axes.set_ylabel(f"of {images} test images")
    axes.set_yscale("log")
    axes.invert_yaxis()
    axes.set_yticks(ERRORS, [f"{100 * (1 - error):g}%" for error in ERRORS])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9)


def _error(accuracy: float, images: int) -> float:
    """Above 0 for the logarithmic axis; NaN stays NaN."""
    return accuracy if math.isnan(accuracy) else max(1 - accuracy, 0.5 / images)


def _disagreement(axes: Axes, runs: list[Run], titles: dict[str, str]) -> None:
    for run in runs:
        if run.algorithm != "allreduce" and any(run.consensus_distance):
            line = {**_line(run, 0), "linewidth": 1.8, "marker": ".", "markevery": 1}
            axes.plot(range(1, len(run.accuracy) + 1), run.consensus_distance, label=titles[run.algorithm], **line)
            _mark_kills(axes, run, lambda _, epoch, run=run: run.consensus_distance[epoch - 1], with_rank=False)
    _style(axes, "consensus distance between the models")
    axes.set_ylabel("root mean square over agents")
    if axes.lines:
        axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=9)


def _shards(axes: Axes, digits: Digits) -> None:
    counts = digits.counts()
    most = max(map(max, counts))
    axes.imshow(counts, cmap="Blues", aspect="auto", vmax=1.3 * most)
    if len(counts) <= 16:
        for rank, row in enumerate(counts):
            for label, count in enumerate(row):
                colour = "white" if count > 0.7 * most else REFERENCE
                axes.text(label, rank, str(count), ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(LABELS))
    axes.set_xlabel("digit")
    axes.set_yticks(range(len(counts)), [f"agent {rank}" for rank in range(len(counts))])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("images of each digit that an agent trains on", loc="left", fontsize=11)
