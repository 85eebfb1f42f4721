"""The layout of a picture: the positions of the agents, and the lines between them.

The positions follow from the edges: graphs that look the same from every rank are circles, a grid or torus has rows and
columns, a hypercube is drawn as one, a short path as a line, a tree in layers; if machines are named, each is a small
circle. Lines are curved so that none crosses a third agent. Two agents that exchange get one line for both directions.
Two machines get a single line if every agent of one sends to every agent of the other. Only geometry, in units of about
half a picture's width, and numbers of heads and widths; the package's ``__init__.py`` draws them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import cos, hypot, pi, sin

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from .._validate import check_size

Edge = tuple[int, int]
Point = tuple[float, float]

LARGEST_AGENT = 0.17
# Around an agent, and for a number beside it where it is too small to hold one.
_MARGIN = 0.06
_NUMBER_MARGIN = 0.25
_SMALL_AGENT = 0.1
# Of the distance between two neighbours, so that a line between them is longer than they are wide.
_AGENT_SHARE = 0.3
LONGEST_LINE = 12
"""Agents of a path that is drawn as a line. The agents of a longer line are too small for their numbers."""
# A line stays this many radii from the centre of an agent that it does not join, if any of the bends allows it.
_CLEARANCE = 1.5
_BENDS = (0.0, 0.12, -0.12, 0.22, -0.22, 0.33, -0.33, 0.45, -0.45)


@dataclass(frozen=True, eq=False)
class Ring:
    """Agents at equal distances on a circle."""

    ranks: tuple[int, ...]
    radius: float


@dataclass(frozen=True, eq=False)
class MachineShape:
    """The round patch that holds the agents of a machine."""

    ranks: tuple[int, ...]
    centre: Point
    radius: float


@dataclass(frozen=True, eq=False)
class AgentLayout:
    """The places of n agents.

    Attributes:
        places: centre (x, y) of each agent.
        radius: of each agent.
        reach: half the width and half the height of the picture, which is centred on (0, 0).
        rings: the circles that agents stand on, each clockwise.
        machines: the patches that agents stand in, if machines were named.
        skeleton: the edges that gave a grid, hypercube or tree its shape; one line for both directions.
    """

    places: tuple[Point, ...]
    radius: float
    reach: Point
    rings: tuple[Ring, ...] = ()
    machines: tuple[MachineShape, ...] = ()
    skeleton: tuple[Edge, ...] = ()

    def bend(self, source: int, destination: int, *, one_way: bool) -> float:
        """The curvature of an edge, as the ``rad`` of matplotlib's ``arc3``: 0 is straight, above 0 bows to the right.

        Between agents of one circle all edges of a length bend alike: one-way ones always a little, neighbours
        outwards and the others inwards, far enough to pass the agents in between. Elsewhere it is the smallest bend
        that keeps clear of all others.
        """
        (ring, start), (other, end) = self._on_ring.get(source, (-1, 0)), self._on_ring.get(destination, (-2, 0))
        if ring == other:
            there = self.rings[ring]
            return _bend_on_ring(len(there.ranks), end - start, self.radius / there.radius, one_way=one_way)
        return self._bend_clear_of_others(source, destination)

    def bend_between_machines(self, out: int, into: int, *, one_way: bool) -> float:
        """The curvature of a line from one machine to another that passes the machines in between."""
        patch = self.machines[out]
        return _bend_on_ring(len(self.machines), into - out, patch.radius / hypot(*patch.centre), one_way=one_way)

    def bundles(self, edges: Collection[Edge]) -> set[Edge]:
        """The pairs of machines of which every agent of the first sends to every agent of the second."""
        messages = Counter((self.machine_of[source], self.machine_of[destination]) for source, destination in edges)
        return {
            (out, into)
            for (out, into), count in messages.items()
            if out != into and count == len(self.machines[out].ranks) * len(self.machines[into].ranks)
        }

    @cached_property
    def machine_of(self) -> dict[int, int]:
        """The machine of an agent; all agents are on one machine if none were named."""
        if not self.machines:
            return dict.fromkeys(range(len(self.places)), 0)
        return {rank: k for k, machine in enumerate(self.machines) for rank in machine.ranks}

    @cached_property
    def _on_ring(self) -> dict[int, tuple[int, int]]:
        return {rank: (k, place) for k, ring in enumerate(self.rings) for place, rank in enumerate(ring.ranks)}

    @cached_property
    def _centres(self) -> NDArray[np.float64]:
        return np.array(self.places)

    def _bend_clear_of_others(self, source: int, destination: int) -> float:
        others = np.delete(self._centres, [source, destination], axis=0)
        if not len(others):
            return 0.0
        (x0, y0), (x1, y1) = self.places[source], self.places[destination]
        # Right of the line from source to destination is the outside of the picture, or its centre.
        outwards = 1.0 if (x0 + x1) * (y1 - y0) >= (y0 + y1) * (x1 - x0) else -1.0
        side = -outwards if self.machines else outwards
        bends = [side * bend for bend in _BENDS]
        distance = [_distance(self._curve(source, destination, rad), others) for rad in bends]
        clear = (rad for rad, room in zip(bends, distance, strict=True) if room >= _CLEARANCE * self.radius)
        return next(clear, bends[int(np.argmax(distance))])

    def _curve(self, source: int, destination: int, rad: float) -> NDArray[np.float64]:
        """Points of the quadratic Bezier curve that ``arc3`` draws, [25, 2]."""
        start, end = self._centres[source], self._centres[destination]
        across = end - start
        control = (start + end) / 2 + rad * np.array([across[1], -across[0]])
        t = np.linspace(0.0, 1.0, 25)[:, None]
        return np.asarray((1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end)


def _bend_on_ring(size: int, step: int, radius: float, *, one_way: bool) -> float:
    """For things of this radius, in radii of the ring that `size` of them stand on, `step` places apart."""
    clockwise = step % size
    inwards = 1.0 if 2 * clockwise <= size else -1.0
    hops = min(clockwise, size - clockwise)
    if hops == 1:
        return -0.22 * inwards if one_way else 0.0
    half_angle = pi * hops / size
    clearance = (1.6 * radius - (1.0 - cos(half_angle))) / sin(half_angle)
    return inwards * max(0.12 if one_way else 0.0, clearance)


def arrange(
    size: int, edges: Collection[Edge], *, agents_per_machine: int | None = None, kind: str = "auto"
) -> AgentLayout:
    """Places for `size` agents with these edges, of one round or of several together.

    Args:
        size: number of agents.
        edges: (source, destination), without self loops.
        agents_per_machine: ranks 0 to k - 1 are on the first machine, and so on; more than one is drawn as machines.
        kind: ``auto``, or one of :data:`KINDS`.

    Raises:
        ValueError: the agents do not fill the machines, there is no such kind, or the edges do not have this shape.
    """
    size = check_size(size)
    if kind != "auto" and kind not in KINDS:
        raise ValueError(f"there is no layout {kind!r}. Pass auto, {', '.join(KINDS)}.")
    if agents_per_machine is not None and check_size(agents_per_machine, "agents_per_machine") > 1:
        return _machines(size, agents_per_machine)
    present = set(edges)
    if kind == "circle" or (kind == "auto" and _is_circulant(size, present)):
        return _circle(size)
    found = (shape for name, find in _SHAPES.items() if kind in (name, "auto") and (shape := find(size, present)))
    layout = next(found, None)
    if layout is None and kind != "auto":
        raise ValueError(f"the edges of these {size} agents do not make a {kind}. Pass auto, or circle, which all can.")
    if layout is None:
        return _circle(size)
    return replace(layout, skeleton=tuple(sorted({(min(edge), max(edge)) for edge in present})))


def _circle(size: int, order: Sequence[int] | None = None) -> AgentLayout:
    if size == 1:
        return AgentLayout(((0.0, 0.0),), LARGEST_AGENT, (1.0, 1.0))
    ranks = tuple(range(size) if order is None else order)
    points = dict(zip(ranks, _around(size), strict=True))
    radius = min(LARGEST_AGENT, _AGENT_SHARE * 2 * sin(pi / size))
    places = tuple(points[rank] for rank in range(size))
    return AgentLayout(places, radius, _reach_of_circle(radius), (Ring(ranks, 1.0),))


def _reach_of_circle(radius: float) -> Point:
    side = 1.0 + (radius + _MARGIN if radius >= _SMALL_AGENT else _NUMBER_MARGIN)
    return side, side


def _around(count: int, turn: float = 0.0) -> list[Point]:
    """Points on the unit circle, clockwise from the top turned by the angle `turn`."""
    angles = (2 * pi * k / count + turn for k in range(count))
    return [(sin(angle), cos(angle)) for angle in angles]


def _is_circulant(size: int, edges: set[Edge]) -> bool:
    hops = {(destination - source) % size for source, destination in edges}
    return len(edges) == size * len(hops)


def _grid(size: int, edges: set[Edge]) -> AgentLayout | None:
    """Rows and columns, with wrap-around or without, ranks row by row."""
    lines = {frozenset(edge) for edge in edges}
    for rows in (rows for rows in range(2, size // 2 + 1) if size % rows == 0):
        columns = size // rows
        inner = _grid_lines(rows, columns, wrap=False)
        torus = _grid_lines(rows, columns, wrap=True)
        if lines in (inner, torus):
            scale = 2.0 / (max(rows, columns) - 1)
            x, y = scale * (columns - 1) / 2, scale * (rows - 1) / 2
            places = tuple((scale * column - x, y - scale * row) for row in range(rows) for column in range(columns))
            radius = min(LARGEST_AGENT, 0.24 * scale)
            # Lines around the torus bow beyond its outermost agents.
            margin = radius + _MARGIN if lines == inner else 0.62 * scale
            return AgentLayout(places, radius, (x + margin, y + margin))
    return None


def _grid_lines(rows: int, columns: int, *, wrap: bool) -> set[frozenset[int]]:
    found = set()
    for row in range(rows):
        for column in range(columns):
            if wrap or column + 1 < columns:
                found.add(frozenset((row * columns + column, row * columns + (column + 1) % columns)))
            if wrap or row + 1 < rows:
                found.add(frozenset((row * columns + column, (row + 1) % rows * columns + column)))
    return found


def _hypercube(size: int, edges: set[Edge]) -> AgentLayout | None:
    dimensions = size.bit_length() - 1
    lines = {frozenset(edge) for edge in edges}
    expected = {frozenset((rank, rank ^ 1 << bit)) for rank in range(size) for bit in range(dimensions)}
    if dimensions not in _HYPERCUBE_AXES or size != 1 << dimensions or lines != expected:
        return None
    axes = np.array(_HYPERCUBE_AXES[dimensions])
    bits = np.array([[rank >> bit & 1 for bit in range(dimensions)] for rank in range(size)])
    return _fitted((bits @ axes).tolist())


# Where the step along each dimension leads on paper.
_HYPERCUBE_AXES: dict[int, list[Point]] = {
    2: [(1.0, 0.0), (0.0, 1.0)],
    3: [(1.0, 0.0), (0.0, 1.0), (0.45, 0.38)],
    4: [(cos(pi * (k - 1.5) / 4), sin(pi * (k - 1.5) / 4)) for k in range(4)],
    # Found by search: no line is near a third agent.
    5: [(0.55, 0.72), (0.44, 0.32), (-0.35, 0.19), (-0.20, 1.50), (-1.62, 0.07)],
}


def _tree(size: int, edges: set[Edge]) -> AgentLayout | None:
    """A star around its hub, a path along a line, and any other tree in layers below its centre."""
    tree: nx.Graph = nx.Graph()
    tree.add_nodes_from(range(size))
    tree.add_edges_from(sorted(edges))
    if size < 3 or not nx.is_tree(tree):
        return None
    degrees = dict(tree.degree)
    hub = max(range(size), key=lambda rank: degrees[rank])
    if degrees[hub] == size - 1 and size > 3:
        return _star(size, hub)
    if degrees[hub] == 2 and size > 3:
        start = min(rank for rank in range(size) if degrees[rank] == 1)
        order = list(nx.dfs_preorder_nodes(tree, start))
        return _line(order) if size <= LONGEST_LINE else _circle(size, order)
    return _layers(tree, min(nx.center(tree)))


def _line(order: Sequence[int]) -> AgentLayout:
    """Agents from left to right, in this order."""
    across = {rank: float(place) for place, rank in enumerate(order)}
    return _fitted([(across[rank], 0.0) for rank in range(len(order))])


def _star(size: int, hub: int) -> AgentLayout:
    rim = [rank for rank in range(size) if rank != hub]
    points = dict(zip(rim, _around(size - 1), strict=True)) | {hub: (0.0, 0.0)}
    radius = min(LARGEST_AGENT, _AGENT_SHARE * 2 * sin(pi / (size - 1)))
    places = tuple(points[rank] for rank in range(size))
    return AgentLayout(places, radius, _reach_of_circle(radius), (Ring(tuple(rim), 1.0),))


def _layers(tree: nx.Graph, root: int) -> AgentLayout:
    children = {rank: sorted(below) for rank, below in nx.bfs_successors(tree, root)}
    depth = nx.single_source_shortest_path_length(tree, root)
    leaves = count(0.0, 1.0)
    across: dict[int, float] = {}
    for rank in nx.dfs_postorder_nodes(tree, root):
        below = children.get(rank, [])
        across[rank] = (across[below[0]] + across[below[-1]]) / 2 if below else next(leaves)
    widest = max(across.values()) or 1.0
    down = min(0.3 * widest, 0.9 * widest / max(depth.values()))
    return _fitted([(across[rank], -down * depth[rank]) for rank in tree])


def _fitted(points: Sequence[Point]) -> AgentLayout:
    """The points, moved and scaled into the picture."""
    given = np.array(points)
    low, high = given.min(axis=0), given.max(axis=0)
    scale = 2.0 / float((high - low).max())
    centred = (given - (low + high) / 2) * scale
    closest = min(_distance(centred[k : k + 1], centred[k + 1 :]) for k in range(len(centred) - 1))
    x, y = (high - low) / 2 * scale
    places = tuple((float(x), float(y)) for x, y in centred)
    radius = min(LARGEST_AGENT, _AGENT_SHARE * closest)
    return AgentLayout(places, radius, (float(x) + radius + _MARGIN, float(y) + radius + _MARGIN))


def _machines(size: int, agents_per_machine: int) -> AgentLayout:
    """Machines clockwise on a circle, and the agents of each on a small one, the first and the last towards the centre.

    So agent k is at the same place in every machine as seen from the centre, and the last is next to the machine that
    follows, as a ring through all agents wants it.
    """
    if size % agents_per_machine:
        raise ValueError(
            f"{size} agents do not fill machines of {agents_per_machine}. Pass a number that {size} is a multiple of."
        )
    machines = size // agents_per_machine
    # Neighbouring patches leave a gap of a third of their width, and the outermost points reach 1.
    distance = 1 / (1 + sin(pi / machines) / 1.35) if machines > 1 else 0.0
    patch = 1.0 - distance
    ring = 0.74 * patch
    first = {2: -pi / 2, 4: -pi / 4}.get(machines, 0.0)
    centres: list[tuple[float, float]] = []
    places: list[tuple[float, float]] = []
    for k, (x, y) in enumerate(_around(machines, first)):
        centres.append((distance * x, distance * y))
        inwards = first + 2 * pi * k / machines + pi
        around = _around(agents_per_machine, inwards + pi / agents_per_machine)
        places.extend((distance * x + ring * dx, distance * y + ring * dy) for dx, dy in around)
    groups = [tuple(range(k, k + agents_per_machine)) for k in range(0, size, agents_per_machine)]
    height = max(abs(y) for _, y in centres) + patch
    return AgentLayout(
        tuple(places),
        min(LARGEST_AGENT, 0.2 * patch, _AGENT_SHARE * 2 * ring * sin(pi / agents_per_machine)),
        (1.0 + _MARGIN, height + _NUMBER_MARGIN / 2),
        tuple(Ring(ranks, ring) for ranks in groups),
        tuple(MachineShape(ranks, centre, patch) for ranks, centre in zip(groups, centres, strict=True)),
    )


def _distance(points: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """The smallest between a point and another."""
    apart = points[:, None, :] - others[None, :, :]
    return float(np.sqrt((apart**2).sum(axis=-1)).min())


_SHAPES: dict[str, Callable[[int, set[Edge]], AgentLayout | None]] = {
    "grid": _grid,
    "hypercube": _hypercube,
    "tree": _tree,
}
KINDS = ("circle", *_SHAPES)


Weights = Mapping[Edge, float]
"""{(source, destination): weight}, without self loops."""

MOST = 4000
"""Agents and lines in a picture."""


@dataclass(frozen=True)
class Line:
    """The line for an edge, for the two edges of an exchange, or for all edges between two machines.

    Attributes:
        source, destination: agents; machines for a bundle.
        bundle: every agent of a machine sends to every agent of another.
        mutual: it represents both directions.
        between: the ends are on different machines.
        bend: curvature, see :meth:`Layout.bend`.
        share: its weight as a part of the largest, 0 to 1.
        negative: its weight is negative.
    """

    source: int
    destination: int
    bundle: bool
    mutual: bool
    between: bool
    bend: float
    share: float
    negative: bool


def weights_of(digraph: nx.DiGraph) -> Weights:
    """The edges of a graph with their weights, one where there is none."""
    return {
        (source, destination): float(weight)
        for source, destination, weight in digraph.edges(data="weight", default=1.0)
        if source != destination
    }


def is_directed(edges: Collection[Edge]) -> bool:
    """Whether an edge has no edge back."""
    return any(edge[::-1] not in edges for edge in edges)


def lines_of(layout: AgentLayout, weights: Weights) -> list[Line]:
    """All lines of a round.

    Raises:
        ValueError: too many agents and lines to be distinguishable.
    """
    heaviest = max(map(abs, weights.values()), default=0.0) or 1.0
    bundles = layout.bundles(weights)
    single = {edge: weight for edge, weight in weights.items() if _ends_by_machine(layout, edge) not in bundles}
    thick, thin = _one_of_each_pair(bundles), _one_of_each_pair(single)
    if len(thick) + len(thin) + len(layout.places) > MOST:
        raise ValueError(
            f"a picture of {len(layout.places)} agents and {len(thick) + len(thin)} lines shows nothing. Draw fewer "
            "agents: the shape remains."
        )
    found = []
    for source, destination in thick:
        mutual = (destination, source) in bundles
        bend = layout.bend_between_machines(source, destination, one_way=not mutual)
        found.append(Line(source, destination, True, mutual, True, bend, 1.0, False))
    for source, destination in thin:
        weight = single[source, destination]
        mutual = (destination, source) in single
        heavier = max(abs(weight), abs(single.get((destination, source), 0.0)))
        bend = layout.bend(source, destination, one_way=not mutual)
        out, into = _ends_by_machine(layout, (source, destination))
        found.append(Line(source, destination, False, mutual, out != into, bend, heavier / heaviest, weight < 0))
    return found


def _ends_by_machine(layout: AgentLayout, edge: Edge) -> Edge:
    return layout.machine_of[edge[0]], layout.machine_of[edge[1]]


def _one_of_each_pair(edges: Collection[Edge]) -> list[Edge]:
    return [edge for edge in edges if edge[0] < edge[1] or edge[::-1] not in edges]
