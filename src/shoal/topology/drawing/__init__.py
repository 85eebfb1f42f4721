"""Pictures of a topology: agents placed by its shape or by machine; and of a schedule, one panel a round.

matplotlib is needed only here, is imported only when something is drawn, and comes with the ``plot`` extra.

``Sheet`` is the layout of a figure: how many panels are in a row, the size of each, and the space for titles, in
inches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx

from .._validate import as_digraph, as_int, check_rank, check_size
from ..schedule import Schedule, as_schedule
from .layout import AgentLayout, Edge, Line, Weights, arrange, is_directed, lines_of, weights_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle

# Told apart by all kinds of colour vision, and in grey: dark agents, pale idle ones, and orange between machines.
AGENT = "#1f4e79"
IDLE = "#c9d3dd"
EDGE = "#5b6770"
SKELETON = "#e3e8ed"
BETWEEN_MACHINES = "#d55e00"
MACHINE = "#eef1f4"
MACHINE_EDGE = "#ccd5dd"
TEXT = "#1b1f23"

SUFFIXES = (".pdf", ".png", ".svg")
_LONGEST_PERIOD = 8
_ROUNDS_OF_A_LONGER_ONE = 6
_ROUNDS_OF_A_RANDOM_ONE = 4
_SMALLEST_FONT = 4.2


def draw(
    graph: nx.Graph,
    ax: Axes | None = None,
    title: str | None = None,
    *,
    agents_per_machine: int | None = None,
    layout: str = "auto",
) -> Axes:
    """Draw `graph` into `ax` (a new figure by default).

    Where every edge has an edge back, edges are plain lines. Otherwise an arrow with one head is an edge from source to
    destination, one with two heads an edge each way. Width grows with the weight; a negative weight is dashed. Edges
    between machines are orange, and one thick line stands for all of them where every agent of a machine sends to every
    agent of another. Self loops are not drawn, because every agent has one.

    Args:
        graph: nodes 0 to n - 1.
        ax: axes to draw into.
        title: text above the picture.
        agents_per_machine: ranks 0 to k - 1 are drawn together as the first machine, and so on.
        layout: ``auto`` (by the shape of the graph), ``circle``, ``grid``, ``hypercube`` or ``tree``.

    Returns:
        The axes drawn into; ``.figure.savefig(path)`` writes the picture.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: machines that are not full, an unknown or unsuitable layout, or too many edges to see.
    """
    _require_matplotlib()
    digraph = as_digraph(graph)
    weights = weights_of(digraph)
    places = arrange(digraph.number_of_nodes(), weights, agents_per_machine=agents_per_machine, kind=layout)
    axes = _new_axes(1, places, titled=title is not None)[0] if ax is None else ax
    _draw_panel(axes, places, weights, title, directed=is_directed(weights), show_idle=False)
    return axes


def draw_rounds(
    rounds: Sequence[Iterable[Edge]],
    size: int,
    axes: Axes | Sequence[Axes] | None = None,
    *,
    agents_per_machine: int | None = None,
    layout: str = "auto",
) -> list[Axes]:
    """Draw rounds, one panel each; agents that neither send nor receive in a round are pale.

    Args:
        rounds: edges (source, destination) of each round, as :func:`~shoal.topology.collect_rounds` returns them.
        size: number of agents.
        axes: one for each round (a single one may stand alone); by default a new figure with a panel for each.
        agents_per_machine, layout: as for :func:`draw`.

    Returns:
        The axes drawn into, one for each round.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a rank out of range, another number of axes than of rounds, and what :func:`draw` raises.
    """
    _require_matplotlib()
    size = check_size(size)
    checked = [
        {
            (check_rank(source, size, "source"), check_rank(destination, size, "destination")): 1.0
            for source, destination in edges
            if source != destination
        }
        for edges in rounds
    ]
    places = arrange(size, set().union(*checked), agents_per_machine=agents_per_machine, kind=layout)
    panels = _new_axes(len(checked), places) if axes is None else _as_list(axes)
    _draw_panels(panels, places, checked)
    return panels


def draw_schedule(
    topology: nx.Graph | Schedule,
    *,
    rounds: int | None = None,
    width: float | None = None,
    agents_per_machine: int | None = None,
    layout: str = "auto",
) -> Figure:
    """A figure of a topology: one panel for a static topology, a panel for each round of a schedule.

    Args:
        topology: a graph or a schedule.
        rounds: how many; by default all of a period of up to 8, the first 6 of a longer one, and 4 without a period.
        width: inches. By default a paper's column (3.3) for one or two panels and its text (6.9) for more.
        agents_per_machine, layout: as for :func:`draw`. The positions suit all rounds of the period.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: too few or too many rounds, a width that no picture has, and as for :func:`draw`.
    """
    _require_matplotlib()
    schedule = as_schedule(topology)
    shown = _rounds_to_show(schedule) if rounds is None else as_int(rounds, "rounds")
    if not 1 <= shown <= MOST_PANELS:
        raise ValueError(f"rounds is {shown}, and a picture shows 1 to {MOST_PANELS}. Leave it out for a good number.")
    if width is not None and not 0 < width <= MOST_INCHES:
        raise ValueError(f"width is {width}: pass inches, above 0 and at most {MOST_INCHES}")
    weights = [weights_of(schedule.graph(t)) for t in range(shown)]
    unseen = range(shown, min(schedule.period or 0, _LONGEST_PERIOD))
    edges = {edge for t in unseen for edge in weights_of(schedule.graph(t))}.union(*weights)
    places = arrange(schedule.size, edges, agents_per_machine=agents_per_machine, kind=layout)
    panels = _new_axes(shown, places, width, titled=shown > 1)
    if shown > 1:
        _draw_panels(panels, places, weights)
    else:
        _draw_panel(panels[0], places, weights[0], None, directed=is_directed(weights[0]), show_idle=True)
    return panels[0].figure  # type: ignore[return-value]


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG (300 dots an inch), SVG or PDF (fonts embedded as publishers ask), and close it.

    The same figure gives the same bytes: no date is written.

    Raises:
        ValueError: another suffix.
    """
    from matplotlib import pyplot, rc_context

    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a picture is written as {', '.join(SUFFIXES)}, and {str(path)!r} is none of them.")
    metadata = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(path.suffix)
    with rc_context({"pdf.fonttype": 42, "svg.hashsalt": "shoal"}):
        figure.savefig(path, dpi=300, metadata=metadata)
    pyplot.close(figure)


def _rounds_to_show(schedule: Schedule) -> int:
    if schedule.period is None:
        return _ROUNDS_OF_A_RANDOM_ONE
    return schedule.period if schedule.period <= _LONGEST_PERIOD else _ROUNDS_OF_A_LONGER_ONE


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("drawing needs matplotlib, which is not installed. Run: pip install 'shoal[plot]'") from error


def _new_axes(panels: int, layout: AgentLayout, width: float | None = None, *, titled: bool = True) -> list[Axes]:
    from matplotlib import pyplot

    if panels == 0:
        return []
    aspect = layout.reach[1] / layout.reach[0]
    paper = sheet(panels, aspect, width, titled=titled, wide=bool(layout.machines))
    figure, grid = pyplot.subplots(
        paper.rows, paper.columns, figsize=(paper.width, paper.height), squeeze=False, gridspec_kw=paper.spacing()
    )
    axes = [axis for row in grid for axis in row]
    for spare in axes[panels:]:
        figure.delaxes(spare)
    return axes[:panels]


def _as_list(axes: Axes | Sequence[Axes]) -> list[Axes]:
    from matplotlib.axes import Axes as AxesType

    return [axes] if isinstance(axes, AxesType) else list(axes)


def _draw_panels(panels: Sequence[Axes], layout: AgentLayout, rounds: Sequence[Weights]) -> None:
    if len(panels) != len(rounds):
        raise ValueError(f"{len(rounds)} rounds do not fit {len(panels)} axes. Pass one for each round, or none.")
    directed = any(map(is_directed, rounds))
    for t, (panel, weights) in enumerate(zip(panels, rounds, strict=True)):
        _draw_panel(panel, layout, weights, f"round {t}", directed=directed, show_idle=True)


def _draw_panel(
    axes: Axes, layout: AgentLayout, weights: Weights, title: str | None, *, directed: bool, show_idle: bool
) -> None:
    from matplotlib.patches import Circle

    lines = lines_of(layout, weights)
    axes.set_aspect("equal")
    axes.set_xlim(-layout.reach[0], layout.reach[0])
    axes.set_ylim(-layout.reach[1], layout.reach[1])
    axes.set_axis_off()
    if title is not None:
        axes.set_title(title, color=TEXT, fontsize=8, pad=3)

    machines = [
        Circle(machine.centre, machine.radius, facecolor=MACHINE, edgecolor=MACHINE_EDGE, linewidth=0.6, zorder=0)
        for machine in layout.machines
    ]
    if show_idle:
        _draw_skeleton(axes, layout)
    busy = {rank for edge in weights for rank in edge} if show_idle else set(range(len(layout.places)))
    colours = [AGENT if rank in busy else IDLE for rank in range(len(layout.places))]
    agents = [
        Circle(place, layout.radius, facecolor=colour, edgecolor="white", linewidth=0.5, zorder=2)
        for place, colour in zip(layout.places, colours, strict=True)
    ]
    for circle in (*machines, *agents):
        axes.add_patch(circle)
    size = layout.radius * _points_per_unit(axes, layout)
    # Crowded pictures get thinner lines, so that the arrows of a node remain apart.
    crowded = len(lines) > 6 * len(agents)
    for line in lines:
        ends = machines if line.bundle else agents
        _draw_line(axes, line, ends[line.source], ends[line.destination], size, directed=directed, crowded=crowded)
    _draw_labels(axes, layout, busy)


def _draw_skeleton(axes: Axes, layout: AgentLayout) -> None:
    from matplotlib.patches import ConnectionStyle, PathPatch

    for source, destination in layout.skeleton:
        style = ConnectionStyle.Arc3(layout.bend(source, destination, one_way=False))
        path = style(layout.places[source], layout.places[destination], shrinkA=0.0, shrinkB=0.0)
        axes.add_patch(PathPatch(path, fill=False, edgecolor=SKELETON, linewidth=1.0, zorder=0.5))


def _draw_line(
    axes: Axes, line: Line, start: Circle, end: Circle, size: float, *, directed: bool, crowded: bool
) -> None:
    from matplotlib.patches import FancyArrowPatch

    thickest = max(0.4, min(1.8, 0.13 * size)) * (0.6 if crowded else 1.0)
    arrow = FancyArrowPatch(
        start.center,
        end.center,
        arrowstyle=("<|-|>" if line.mutual else "-|>") if directed else "-",
        connectionstyle=f"arc3,rad={line.bend}",
        patchA=start,
        patchB=end,
        shrinkA=1.0 if directed else 0.0,
        shrinkB=1.0 if directed else 0.0,
        mutation_scale=max(3.0, min(12.0, 0.72 * size)) * (1.6 if line.bundle else 1.0),
        linewidth=2.5 * thickest if line.bundle else thickest * (0.45 + 0.55 * line.share),
        linestyle="--" if line.negative else "-",
        color=BETWEEN_MACHINES if line.between else EDGE,
        alpha=0.55 if crowded else 0.9,
        zorder=1,
    )
    axes.add_patch(arrow)


def _draw_labels(axes: Axes, layout: AgentLayout, busy: Collection[int]) -> None:
    from matplotlib.patheffects import withStroke

    widest = len(str(len(layout.places) - 1))
    fontsize = min(9.0, layout.radius * _points_per_unit(axes, layout) * (1.0 if widest <= 2 else 0.75))
    if fontsize >= _SMALLEST_FONT:
        for rank, (x, y) in enumerate(layout.places):
            colour = "white" if rank in busy else TEXT
            axes.text(x, y, str(rank), color=colour, fontsize=fontsize, ha="center", va="center_baseline", zorder=3)
        return
    # Agents too small to hold a number are numbered beside their machine or around the circle, as many as there is
    # room for.
    small: dict[str, Any] = {"color": TEXT, "fontsize": 6.0, "ha": "center", "va": "center", "zorder": 3}
    small["path_effects"] = [withStroke(linewidth=1.5, foreground="white")]
    for machine in layout.machines:
        x, y = machine.centre
        above = machine.radius + 0.06
        axes.text(x, y + above if y > -0.01 else y - above, f"{machine.ranks[0]}\u2013{machine.ranks[-1]}", **small)
    if not layout.machines and len(layout.rings) == 1:
        for rank in layout.rings[0].ranks[:: ceil(len(layout.places) / 48)]:
            x, y = layout.places[rank]
            axes.text(1.13 * x, 1.13 * y, str(rank), **small)


def _points_per_unit(axes: Axes, layout: AgentLayout) -> float:
    box = axes.get_window_extent()
    return float(min(box.width / layout.reach[0], box.height / layout.reach[1]) / axes.figure.dpi * 72 / 2)


MOST_PANELS, MOST_INCHES = 1000, 100
"""Of a picture: beyond them matplotlib computes without an end in sight."""
COLUMN_WIDTH = 3.3
TEXT_WIDTH = 6.9
"""Inches: of a column and of the text of a paper with two columns."""

_TITLE = 0.22
_GAP = 0.14


@dataclass(frozen=True)
class Sheet:
    """A grid of panels.

    Attributes:
        rows, columns: of the grid.
        width, height: inches, of the whole.
        above: inches above each row, reserved for titles.
        gap: inches between two columns.
    """

    rows: int
    columns: int
    width: float
    height: float
    above: float
    gap: float

    def spacing(self) -> dict[str, float]:
        """The sizes for matplotlib's ``GridSpec``."""
        panel_width = (self.width + self.gap) / self.columns - self.gap
        panel_height = self.height / self.rows - self.above
        return {
            "left": 0.0,
            "right": 1.0,
            "bottom": 0.0,
            "top": 1.0 - self.above / self.height,
            "wspace": self.gap / panel_width,
            "hspace": self.above / panel_height,
        }


def sheet(panels: int, aspect: float, width: float | None, *, titled: bool, wide: bool = False) -> Sheet:
    """The grid for this many panels.

    Args:
        panels: at least one.
        aspect: height over width of a panel.
        width: inches. By default a column's for one or two panels and the text's for more.
        titled: whether panels have a title.
        wide: whether panels are so full that each needs a third of the text's width.
    """
    if width is None:
        width = _usual_width(panels, wide=wide)
    if panels == 1:
        above = _TITLE if titled else 0.0
        return Sheet(1, 1, width, width * aspect + above, above, 0.0)
    columns = _columns(panels, wide=wide)
    rows = ceil(panels / columns)
    panel_width = (width + _GAP) / columns - _GAP
    above = _TITLE if titled else _GAP
    return Sheet(rows, columns, width, rows * (panel_width * aspect + above), above, _GAP)


def _columns(panels: int, *, wide: bool) -> int:
    if wide:
        return 2 if panels in (2, 4) else 3
    if panels <= 5:
        return panels
    return 3 if panels in (6, 9) else 4


def _usual_width(panels: int, *, wide: bool) -> float:
    if panels == 1 or (panels == 2 and not wide):
        return COLUMN_WIDTH
    return TEXT_WIDTH * _columns(panels, wide=True) / 3 if wide else TEXT_WIDTH
