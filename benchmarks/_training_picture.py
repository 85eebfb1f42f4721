"""The picture of what ``training.py`` has measured: speed beside DDP's, and the parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _training_tables import goal_of
from _ways import ATC, AWC, HIERARCHICAL_ATC, HIERARCHICAL_AWC, LOCAL, ONE_PEER, OVERLAP
from shoal.bench.measurement import Figures

COLOURS = {
    "DDP": "#1b1f23",
    ATC: "#1f77b4",
    AWC: "#e07b39",
    OVERLAP: "#2a9d6f",
    HIERARCHICAL_ATC: "#8e5fb0",
    HIERARCHICAL_AWC: "#c0455e",
}
COMPUTING = "#c9d1d9"
NAMES = {"mlp": "MLP, 50 million", "resnet20": "ResNet-20", "hosts": "VGG-16, 100 Mbit/s"}


def draw(path: Path, figures: Sequence[Figures], machine: str) -> None:
    """Write the picture to `path`; its suffix says the format. What has not been measured has no panel.

    Raises:
        RuntimeError: Nothing that can be drawn has been measured.
    """
    from matplotlib.figure import Figure

    against = [one for one in figures if one.kind in NAMES]
    steps = [one for one in figures if one.kind == "table2"]
    panels: list[tuple[Callable[..., None], Sequence[Figures]]] = []
    panels = [(panel, of) for panel, of in ((_against, against), (_steps, steps)) if of]
    if not panels:
        raise RuntimeError("there is nothing to draw: measure mlp, resnet20, hosts or table2")
    figure = Figure(figsize=(1 + 5 * len(panels), 4.6), layout="constrained")
    for axes, (panel, of) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes, of)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(machine, fontsize=7, color="#6a737d")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _against(axes: Any, figures: Sequence[Figures]) -> None:
    """Steps per second as times DDP's; a short line where the goal is."""
    labels, wide = [], 0.26
    ways = [way for way in (ATC, AWC, OVERLAP) if any(f"{way}, {ONE_PEER}" in one.values for one in figures)]
    goals = 0
    for place, one in enumerate(figures):
        labels.append(f"{NAMES[one.kind]}\n{one.agents} {'hosts' if one.kind == 'hosts' else 'agents'}")
        ddp = min(median(values) for name, values in one.values.items() if name.startswith("DDP"))
        for number, way in enumerate(ways):
            ratio = ddp / median(one.values[f"{way}, {ONE_PEER}"])
            at = place + (number - (len(ways) - 1) / 2) * wide
            axes.barh(at, ratio, wide, color=COLOURS[way], label=None if place else way)
            axes.text(ratio, at, f" {ratio:.2f}", va="center", fontsize=8)
        goal = goal_of(one)
        if goal is not None:
            label = None if goals else "goal"
            axes.plot(
                [goal] * 2, [place - 0.45, place + 0.45], color="black", linewidth=1.5, linestyle=":", label=label
            )
            goals += 1
    axes.axvline(1, color=COLOURS["DDP"], linewidth=1, label="DDP")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("steps per second, as a multiple of DDP's")
    axes.set_title("speed", loc="left", fontsize=10)
    _legend(axes)


def _steps(axes: Any, figures: Sequence[Figures]) -> None:
    """A step's computing and what shows of its communication."""
    [one] = figures
    t = {name: 1e3 * median(values) for name, values in one.values.items()}
    ways = [way for way in t if way != LOCAL]
    for place, way in enumerate(ways):
        axes.barh(place, t[LOCAL], color=COMPUTING, label=None if place else "computing")
        axes.barh(place, max(0.0, t[way] - t[LOCAL]), left=t[LOCAL], color=COLOURS[way], label=f"exchange of {way}")
    axes.set_yticks(range(len(ways)), ways, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title("time of a step: 8 agents on 4 hosts, 200 Mbit/s", loc="left", fontsize=10)
    _legend(axes, ncols=2)


def _legend(axes: Any, ncols: int = 3) -> None:
    """Below, where it hides nothing."""
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.13), ncols=ncols)
