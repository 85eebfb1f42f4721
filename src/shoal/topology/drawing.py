"""Pictures of a topology: agents on a circle, arrows the way the data flows; and of a schedule, one panel a round.

matplotlib is needed only here, is imported only when something is drawn, and comes with the ``demo`` extra.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, cos, pi, sin
from typing import TYPE_CHECKING

import networkx as nx

from ._validate import as_digraph, check_rank, check_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Circle

AGENT = "#1f4e79"
IDLE = "#c9d3dd"
EDGE = "#5b6770"
TEXT = "#1b1f23"

# Half the width of the picture; the circle of agents has radius one.
_REACH = 1.25


def draw(graph: nx.Graph, ax: Axes | None = None, title: str | None = None) -> Axes:
    """Draw `graph` into `ax` (a new figure by default), rank 0 at the top and the others clockwise.

    An arrow with one head is an edge from source to destination, one with two heads an edge each way. Its width grows
    with the weight; a negative weight is dashed. Self loops are left out: everybody keeps a share.

    Returns:
        The axes drawn into; ``.figure.savefig(path)`` writes the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    _require_matplotlib()
    digraph = as_digraph(graph)
    weights = {
        (source, destination): float(weight)
        for source, destination, weight in digraph.edges(data="weight", default=1.0)
        if source != destination
    }
    axes = _new_axes(1)[0] if ax is None else ax
    _draw_round(axes, digraph.number_of_nodes(), weights, title, show_idle=False)
    return axes


def draw_rounds(
    rounds: Sequence[Iterable[tuple[int, int]]],
    size: int,
    axes: Axes | Sequence[Axes] | None = None,
) -> list[Axes]:
    """Draw a time-varying schedule, one panel a round; agents that neither send nor receive in it are pale.

    Args:
        rounds: edges (source, destination) of each round, as :func:`~shoal.topology.collect_rounds` returns them.
        size: number of agents.
        axes: one for each round (a single one may stand alone); by default a new figure with a panel for each.

    Returns:
        The axes drawn into, one for each round.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a rank out of range, or another number of axes than of rounds.
    """
    _require_matplotlib()
    size = check_size(size)
    checked = [
        {
            (check_rank(source, size, "source"), check_rank(destination, size, "destination")): 1.0
            for source, destination in edges
        }
        for edges in rounds
    ]
    panels = _new_axes(len(checked)) if axes is None else _as_list(axes)
    if len(panels) != len(checked):
        raise ValueError(f"{len(checked)} rounds do not fit {len(panels)} axes. Pass one for each round, or none.")
    for t, (panel, weights) in enumerate(zip(panels, checked, strict=True)):
        _draw_round(panel, size, weights, f"round {t}", show_idle=True)
    return panels


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("drawing needs matplotlib, which is not installed. Run: pip install 'shoal[demo]'") from error


def _new_axes(panels: int) -> list[Axes]:
    from matplotlib import pyplot

    if panels == 0:
        return []
    columns = min(panels, 4)
    rows = ceil(panels / columns)
    side = 4.2 if panels == 1 else 2.4
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(side * columns, side * rows + 0.2), squeeze=False, layout="constrained"
    )
    axes = [axis for row in grid for axis in row]
    for spare in axes[panels:]:
        figure.delaxes(spare)
    return axes[:panels]


def _as_list(axes: Axes | Sequence[Axes]) -> list[Axes]:
    from matplotlib.axes import Axes as AxesType

    return [axes] if isinstance(axes, AxesType) else list(axes)


def _draw_round(
    axes: Axes, size: int, weights: dict[tuple[int, int], float], title: str | None, *, show_idle: bool
) -> None:
    from matplotlib.patches import Circle

    radius = min(0.17, 0.30 * 2 * sin(pi / size)) if size > 1 else 0.17
    places = [(sin(2 * pi * rank / size), cos(2 * pi * rank / size)) for rank in range(size)]
    if size == 1:
        places = [(0.0, 0.0)]
    busy = {rank for edge in weights for rank in edge}

    axes.set_aspect("equal")
    axes.set_xlim(-_REACH, _REACH)
    axes.set_ylim(-_REACH, _REACH)
    axes.set_axis_off()
    if title is not None:
        axes.set_title(title, color=TEXT, fontsize=11)

    agents = [
        Circle(place, radius, facecolor=AGENT if rank in busy or not show_idle else IDLE, edgecolor="white", zorder=2)
        for rank, place in enumerate(places)
    ]
    for agent in agents:
        axes.add_patch(agent)
    _draw_edges(axes, agents, weights, radius)
    _draw_labels(axes, places, radius, busy if show_idle else set(range(size)))


def _draw_edges(axes: Axes, agents: Sequence[Circle], weights: dict[tuple[int, int], float], radius: float) -> None:
    from matplotlib.patches import FancyArrowPatch

    heaviest = max((abs(weight) for weight in weights.values()), default=0.0) or 1.0
    unit = _points_per_unit(axes)
    # Crowded pictures get thinner lines, so that the arrows of a node remain apart.
    lines = sum(source < destination or (destination, source) not in weights for source, destination in weights)
    density = lines / len(agents)
    thickest = min(1.8, 0.13 * radius * unit) * (1.0 if density <= 6 else 0.6)
    for (source, destination), weight in weights.items():
        mutual = (destination, source) in weights
        if mutual and source > destination:
            continue
        heavier = max(abs(weight), abs(weights.get((destination, source), 0.0)))
        arrow = FancyArrowPatch(
            agents[source].center,
            agents[destination].center,
            arrowstyle="<|-|>" if mutual else "-|>",
            connectionstyle=f"arc3,rad={_bend(source, destination, len(agents), radius, mutual=mutual)}",
            patchA=agents[source],
            patchB=agents[destination],
            shrinkA=1.0,
            shrinkB=1.0,
            mutation_scale=max(3.0, min(12.0, 0.72 * radius * unit)),
            linewidth=thickest * (0.45 + 0.55 * heavier / heaviest),
            linestyle="--" if weight < 0 else "-",
            color=EDGE,
            alpha=0.9 if density <= 6 else 0.55,
            zorder=1,
        )
        axes.add_patch(arrow)


def _bend(source: int, destination: int, size: int, radius: float, *, mutual: bool) -> float:
    """Curvature of an edge, for ``arc3``: neighbours on the circle bow outwards, along it, the others inwards.

    Inwards far enough to pass below the agents in between, whose centres a straight line may come close to.
    """
    clockwise = (destination - source) % size
    inwards = 1.0 if 2 * clockwise <= size else -1.0
    if min(clockwise, size - clockwise) == 1:
        return 0.0 if mutual else -0.22 * inwards
    half_angle = pi * min(clockwise, size - clockwise) / size
    clearance = (1.6 * radius - (1.0 - cos(half_angle))) / sin(half_angle)
    return inwards * max(0.0 if mutual else 0.12, clearance)


def _draw_labels(axes: Axes, places: Sequence[tuple[float, float]], radius: float, busy: set[int]) -> None:
    widest = len(str(len(places) - 1))
    fontsize = radius * _points_per_unit(axes) * (1.0 if widest <= 2 else 0.75)
    if fontsize >= 5.0:
        for rank, (x, y) in enumerate(places):
            colour = "white" if rank in busy else TEXT
            axes.text(x, y, str(rank), color=colour, fontsize=fontsize, ha="center", va="center_baseline", zorder=3)
        return
    # Agents too small to hold a number are numbered around the circle, as many as there is room for.
    step = ceil(len(places) / 48)
    for rank in range(0, len(places), step):
        x, y = places[rank]
        axes.text(1.13 * x, 1.13 * y, str(rank), color=TEXT, fontsize=6.0, ha="center", va="center", zorder=3)


def _points_per_unit(axes: Axes) -> float:
    box = axes.get_window_extent()
    return float(min(box.width, box.height) / axes.figure.dpi * 72 / (2 * _REACH))
