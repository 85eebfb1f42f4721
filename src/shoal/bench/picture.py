"""Draws how the time of a call grows with the number of agents: means, and the bands in which the true means lie.

matplotlib is imported only when something is drawn, and comes with the ``demo`` extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from .figures import Figures
from .scaling import REPETITIONS

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
assert REPETITIONS == 10


@dataclass(frozen=True)
class Band:
    """A mean, and how far to either side its 90% confidence interval reaches."""

    mean: float
    reach: float


def band(values: Sequence[float]) -> Band:
    """The mean of ``REPETITIONS`` values and its 90% band, taking them for normal.

    Raises:
        ValueError: There are more or fewer.
    """
    if len(values) != REPETITIONS:
        raise ValueError(f"{len(values)} values; the band is that of {REPETITIONS}")
    return Band(fmean(values), _T * stdev(values) / REPETITIONS**0.5)


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
        means = [one.mean for one in bands]
        panel.plot(agents, means, color=_COLOURS[case], marker=_MARKS[case], markersize=5, label=label)
        low, high = [one.mean - one.reach for one in bands], [one.mean + one.reach for one in bands]
        panel.fill_between(agents, low, high, color=_COLOURS[case], alpha=0.2, linewidth=0)
    panel.set_xticks(agents)
    panel.set_ylim(bottom=0)
    panel.grid(axis="y", alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
