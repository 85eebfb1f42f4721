"""Draws docs/images/windows.png: what one put and one get leave in the windows of three agents.

    python docs/windows_picture.py

The numbers are not typed in: three agents make the calls, and the picture shows what they then hold. (The BlueFog
paper's figure 4 shows the same two calls; the drawing is our own.)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import shoal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = Path(__file__).parent / "images" / "windows.png"
INK, PALE, CHANGED = "#1b1f23", "#eef1f4", "#e07b39"
TITLES = (
    'windows.create(x, "x", zero_init=True), by all',
    "window.put(10), by agent 0 alone",
    "window.get(), by agent 0 alone",
)
PLACES = [(0.0, 1.0), (-0.9, -0.6), (0.9, -0.6)]
Held = dict[str, float]


def states() -> list[list[Held]]:
    """What each of three agents holds, [3 moments][3 agents]: its tensor "x", and the slot "from j" for each other."""

    def held(window: shoal.windows.Window) -> Held:
        shoal.barrier()
        found = {"x": window.update(1.0, {}, clone=True).item()}
        for source in window.sources:
            found[f"from {source}"] = window.update(0.0, {source: 1.0}, clone=True).item()
        shoal.barrier()
        return found

    def run() -> list[Held]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        window = shoal.windows.create(torch.tensor(float(shoal.rank())), "x", zero_init=True)
        moments = [held(window)]
        if shoal.rank() == 0:
            window.put(torch.tensor(10.0))
        moments.append(held(window))
        if shoal.rank() == 0:
            window.get()
        return [*moments, held(window)]

    return [list(moment) for moment in zip(*shoal.Fleet(3).run(run), strict=True)]


def draw(path: Path = PICTURE) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.5), layout="constrained")
    moments = states()
    for axes, title, before, now in zip(figure.subplots(1, 3), TITLES, [moments[0], *moments], moments, strict=False):
        for rank, held in enumerate(now):
            _agent(axes, rank, held, before[rank])
        axes.set_title(title, fontsize=10)
        axes.set(xlim=(-1.6, 1.6), ylim=(-1.15, 1.55), aspect="equal")
        axes.axis("off")
        for other in (1, 2) if title != TITLES[0] else ():
            _arrow(axes, *((0, other) if "put" in title else (other, 0)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _agent(axes: Axes, rank: int, held: Held, before: Held) -> None:
    """A box with a line for the tensor and each slot; what has just changed stands out."""
    x, y = PLACES[rank]
    axes.text(x, y + 0.41, f"agent {rank}", ha="center", fontsize=9, color=INK)
    for line, (what, value) in enumerate(held.items()):
        changed = value != before[what]
        axes.text(
            x,
            y + 0.22 - 0.26 * line,
            f" {what:<6} {value:4.0f} ",
            ha="center",
            va="center",
            family="monospace",
            fontsize=9,
            color="white" if changed else INK,
            bbox={"facecolor": CHANGED if changed else PALE, "edgecolor": INK if what == "x" else "none", "pad": 2.5},
        )


def _arrow(axes: Axes, source: int, destination: int) -> None:
    (x0, y0), (x1, y1) = PLACES[source], PLACES[destination]
    length = math.hypot(x1 - x0, y1 - y0)
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    axes.annotate(
        "",
        xytext=(x0 + 0.62 * dx, y0 + 0.62 * dy),
        xy=(x1 - 0.66 * dx, y1 - 0.66 * dy),
        arrowprops={"arrowstyle": "-|>", "color": CHANGED, "linewidth": 1.8},
    )


if __name__ == "__main__":
    draw()
    print(PICTURE)
