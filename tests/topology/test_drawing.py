"""Drawing: every agent and every edge is there, no line runs over an agent, and a missing matplotlib is named."""

import sys

import matplotlib
import networkx as nx
import numpy as np
import pytest

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.colors import same_color, to_rgba
from matplotlib.patches import ArrowStyle, Circle, FancyArrowPatch, PathPatch
from matplotlib.path import Path

from shoal.topology import (
    ExponentialTwoGraph,
    FullyConnectedGraph,
    GetDynamicOnePeerSendRecvRanks,
    MeshGrid2DGraph,
    Mixing,
    RingGraph,
    Schedule,
    StarGraph,
    SymmetricExponentialGraph,
    collect_rounds,
    draw,
    draw_rounds,
    with_uniform_weights,
)
from shoal.topology.drawing import (
    BETWEEN_MACHINES,
    COLUMN_WIDTH,
    EDGE,
    IDLE,
    MACHINE,
    TEXT_WIDTH,
    draw_schedule,
    save,
)


class Dimensions(Schedule):
    """One dimension of a hypercube after the other, over and over, or with no end in sight."""

    def __init__(self, dimensions, period):
        self.size, self.period, self._dimensions = 2**dimensions, period, dimensions

    def mixing(self, round, rank):
        peer = rank ^ 1 << round % self._dimensions
        return Mixing(rank, 0.5, {peer: 0.5}, [peer])

    def describe(self):
        return f"dimensions of {self.size}, {self.period}"


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def agents(axes):
    patch = to_rgba(MACHINE)
    return [circle for circle in axes.patches if isinstance(circle, Circle) and circle.get_facecolor() != patch]


def machines(axes):
    return [
        circle for circle in axes.patches if isinstance(circle, Circle) and same_color(circle.get_facecolor(), MACHINE)
    ]


def arrows(axes):
    return [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]


def ends(arrow):
    return arrow.patchA.center, arrow.patchB.center


@pytest.mark.parametrize("size", [1, 2, 8, 33])
def test_every_agent_is_drawn_and_numbered(size):
    axes = draw(RingGraph(size))
    axes.figure.canvas.draw()
    assert len(agents(axes)) == size
    assert {text.get_text() for text in axes.texts} == {str(rank) for rank in range(size)}


def test_agents_too_small_for_all_numbers_are_numbered_sparsely():
    axes = draw(RingGraph(150))
    assert len(agents(axes)) == 150
    assert 0 < len(axes.texts) <= 48


def test_a_directed_edge_is_an_arrow_from_source_to_destination():
    axes = draw(nx.DiGraph([(0, 1), (2, 2)]))
    (arrow,) = arrows(axes)
    centres = [agent.center for agent in agents(axes)]
    assert ends(arrow) == (centres[0], centres[1])
    assert type(arrow.get_arrowstyle()) is ArrowStyle.CurveFilledB


def test_in_an_undirected_graph_an_edge_is_one_plain_line():
    axes = draw(RingGraph(6))
    assert len(arrows(axes)) == 6
    assert {type(arrow.get_arrowstyle()) for arrow in arrows(axes)} == {ArrowStyle.Curve}


def test_beside_directed_edges_an_exchange_is_one_arrow_with_two_heads():
    axes = draw(nx.DiGraph([(0, 1), (1, 0), (1, 2)]))
    styles = {ends(arrow): type(arrow.get_arrowstyle()) for arrow in arrows(axes)}
    first, second, third = (agent.center for agent in agents(axes))
    assert styles == {(first, second): ArrowStyle.CurveFilledAB, (second, third): ArrowStyle.CurveFilledB}


def torus(rows, columns):
    edges = nx.grid_2d_graph(rows, columns, periodic=True)
    return nx.relabel_nodes(edges, {(row, column): row * columns + column for row, column in edges})


def binary_tree(size):
    return nx.Graph([(rank, (rank - 1) // 2) for rank in range(1, size)])


def hypercube(dimensions):
    return nx.Graph([(rank, rank ^ 1 << bit) for rank in range(1 << dimensions) for bit in range(dimensions)])


@pytest.mark.parametrize(
    "graph",
    [
        SymmetricExponentialGraph(16, base=2),
        FullyConnectedGraph(12),
        ExponentialTwoGraph(20),
        torus(4, 4),
        torus(3, 5),
        torus(2, 4),
        MeshGrid2DGraph(12),
        hypercube(3),
        hypercube(4),
        hypercube(5),
        binary_tree(15),
        binary_tree(8),
        StarGraph(9),
        nx.path_graph(7),
    ],
)
def test_no_line_crosses_an_agent_that_it_does_not_join(graph):
    no_line_crosses_an_agent(draw(graph))


@pytest.mark.parametrize("machines", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("agents_per_machine", [2, 4, 5])
def test_a_ring_over_machines_crosses_no_agent(machines, agents_per_machine):
    no_line_crosses_an_agent(draw(RingGraph(machines * agents_per_machine), agents_per_machine=agents_per_machine))


def no_line_crosses_an_agent(axes):
    axes.figure.canvas.draw()
    pixels = axes.transData
    lines, drawn, back = arrows(axes), agents(axes), pixels.inverted()
    assert lines
    for arrow in lines:
        others = [agent for agent in drawn if agent.center not in ends(arrow)]
        centers, radii = np.array([agent.center for agent in others]), np.array([agent.radius for agent in others])
        for line in arrow.get_path().transformed(pixels).to_polygons(closed_only=False):
            points = back.transform(Path(line).interpolated(50).vertices)
            if others:
                assert (np.linalg.norm(points[:, None] - centers, axis=2).min(0) > radii).all()


def test_a_heavier_edge_is_thicker_and_a_negative_one_dashed():
    graph = nx.DiGraph()
    graph.add_nodes_from(range(3))
    graph.add_weighted_edges_from([(0, 1, 0.1), (1, 2, 0.9), (2, 0, -0.5)])
    light, heavy, negative = arrows(draw(graph))
    assert light.get_linewidth() < negative.get_linewidth() < heavy.get_linewidth()
    assert (light.get_linestyle(), negative.get_linestyle()) == ("-", "--")


def test_drawing_goes_into_the_axes_given_and_carries_the_title():
    _, axes = pyplot.subplots()
    assert draw(StarGraph(5), axes, title="star") is axes
    assert axes.get_title() == "star"
    assert len(pyplot.get_fignums()) == 1


def test_each_round_gets_a_panel_with_its_edges():
    generators = [GetDynamicOnePeerSendRecvRanks(ExponentialTwoGraph(8), rank) for rank in range(8)]
    panels = draw_rounds(collect_rounds(generators, 3), 8)
    assert [panel.get_title() for panel in panels] == ["round 0", "round 1", "round 2"]
    assert [len(arrows(panel)) for panel in panels] == [8, 8, 4]


def test_agents_without_a_partner_in_a_round_are_pale():
    (panel,) = draw_rounds([[(0, 2)]], 4)
    pale = matplotlib.colors.to_rgba(IDLE)
    assert [agent.get_facecolor() == pale for agent in agents(panel)] == [False, True, False, True]


def test_rounds_go_into_the_axes_given():
    _, grid = pyplot.subplots(1, 2)
    assert draw_rounds([[(0, 1)], [(1, 0)]], 2, axes=grid) == list(grid)
    _, single = pyplot.subplots()
    assert draw_rounds([[(0, 1)]], 2, axes=single) == [single]


def test_no_rounds_are_no_panels():
    assert draw_rounds([], 4) == []
    assert pyplot.get_fignums() == []


def test_a_number_of_axes_other_than_of_rounds_is_refused():
    _, grid = pyplot.subplots(1, 3)
    with pytest.raises(ValueError, match="2 rounds do not fit 3 axes"):
        draw_rounds([[(0, 1)], [(1, 0)]], 2, axes=grid)


def test_a_round_with_a_rank_out_of_range_is_refused():
    with pytest.raises(ValueError, match="destination 4 is out of range"):
        draw_rounds([[(0, 4)]], 4)


def places(axes):
    return np.array([agent.center for agent in agents(axes)])


def test_vertex_transitive_graphs_are_drawn_on_a_circle_clockwise_from_the_top():
    x, y = places(draw(ExponentialTwoGraph(8))).T
    assert np.hypot(x, y) == pytest.approx(1.0)
    assert np.arctan2(x, y) % (2 * np.pi) == pytest.approx(np.arange(8) * np.pi / 4)


@pytest.mark.parametrize("graph", [MeshGrid2DGraph(12), torus(3, 4)])
def test_a_grid_is_drawn_in_rows_and_columns(graph):
    x, y = places(draw(graph)).reshape(3, 4, 2).transpose(2, 0, 1)
    assert np.ptp(x, axis=0) == pytest.approx(0.0)
    assert np.ptp(y, axis=1) == pytest.approx(0.0)
    assert (np.diff(x, axis=1) > 0).all()
    assert (np.diff(y, axis=0) < 0).all()


@pytest.mark.parametrize("dimensions", [2, 3, 4, 5])
def test_edges_along_one_dimension_of_a_hypercube_are_parallel_and_of_equal_length(dimensions):
    place = places(draw(hypercube(dimensions)))
    ranks = np.arange(1 << dimensions)
    for bit in range(dimensions):
        below = ranks[ranks >> bit & 1 == 0]
        steps = place[below | 1 << bit] - place[below]
        assert np.ptp(steps, axis=0) == pytest.approx(0.0)


def test_a_tree_is_drawn_in_layers_with_parents_centred_above_their_children():
    x, y = places(draw(binary_tree(15))).T
    depth = np.floor(np.log2(np.arange(15) + 1))
    assert y == pytest.approx(y[0] + depth * (y[1] - y[0]))
    assert y[1] < y[0]
    for rank in range(7):
        assert x[rank] == pytest.approx((x[2 * rank + 1] + x[2 * rank + 2]) / 2)


def test_a_path_is_a_line_from_left_to_right_in_its_own_order():
    order = [1, 3, 0, 2]
    x, y = places(draw(nx.path_graph(order).to_directed())).T
    assert y == pytest.approx(0.0)
    assert np.diff(x[order]) == pytest.approx(2 / 3)


def test_a_path_too_long_for_a_line_follows_a_circle():
    assert np.linalg.norm(places(draw(nx.path_graph(13))), axis=1) == pytest.approx(1.0)


def test_the_hub_of_a_star_is_drawn_in_the_middle():
    place = places(draw(StarGraph(7, center_rank=2)))
    assert place[2] == pytest.approx((0.0, 0.0))
    assert np.linalg.norm(np.delete(place, 2, axis=0), axis=1) == pytest.approx(1.0)


def test_an_explicit_layout_replaces_the_detected_one():
    assert np.linalg.norm(places(draw(torus(3, 4), layout="circle")), axis=1) == pytest.approx(1.0)


def test_an_invalid_layout_is_refused():
    with pytest.raises(ValueError, match="the edges of these 6 agents do not make a tree"):
        draw(RingGraph(6), layout="tree")
    with pytest.raises(ValueError, match="no layout 'spiral'"):
        draw(RingGraph(6), layout="spiral")
    with pytest.raises(ValueError, match="no layout 'spiral'"):
        draw(RingGraph(6), agents_per_machine=2, layout="spiral")


@pytest.mark.parametrize(("size", "per_machine"), [(4, 4), (4, 2), (12, 3), (16, 4), (64, 8)])
def test_agents_are_drawn_on_the_patch_of_their_machine_only(size, per_machine):
    axes = draw(RingGraph(size), agents_per_machine=per_machine)
    patches = machines(axes)
    assert len(patches) == size // per_machine
    for rank, agent in enumerate(agents(axes)):
        far = np.array([np.hypot(*np.subtract(agent.center, patch.center)) for patch in patches])
        radii = np.array([patch.radius for patch in patches])
        assert np.flatnonzero(far + agent.radius <= radii).tolist() == [rank // per_machine]
        assert np.count_nonzero(far - agent.radius >= radii) == len(patches) - 1


def test_lines_between_machines_have_a_colour_of_their_own():
    axes = draw(RingGraph(8), agents_per_machine=4)
    colours = [arrow.get_edgecolor()[:3] for arrow in arrows(axes)]
    assert colours.count(to_rgba(BETWEEN_MACHINES)[:3]) == 2
    assert colours.count(to_rgba(EDGE)[:3]) == 6


def test_all_edges_from_one_machine_to_another_are_one_thick_line():
    everybody_to_the_next = nx.DiGraph([(a, b) for a in range(3) for b in range(3, 6)])
    everybody_to_the_next.add_edges_from([(3, 0), (6, 1), (7, 8)])
    axes = draw(everybody_to_the_next, agents_per_machine=3)
    first, second, _ = machines(axes)
    thick = [arrow for arrow in arrows(axes) if arrow.patchA is first]
    assert [arrow.patchB for arrow in thick] == [second]
    others = {ends(arrow) for arrow in arrows(axes) if arrow not in thick}
    centre = [agent.center for agent in agents(axes)]
    assert others == {(centre[3], centre[0]), (centre[6], centre[1]), (centre[7], centre[8])}
    assert thick[0].get_linewidth() > 2 * max(arrow.get_linewidth() for arrow in arrows(axes) if arrow not in thick)


def test_two_fully_connected_machines_have_one_line_for_both_directions():
    axes = draw(FullyConnectedGraph(6), agents_per_machine=3)
    thick = [arrow for arrow in arrows(axes) if arrow.patchA in machines(axes)]
    assert len(thick) == 1
    assert type(thick[0].get_arrowstyle()) is ArrowStyle.Curve
    assert len(arrows(axes)) == 1 + 2 * 3


def test_agents_too_small_for_numbers_are_numbered_beside_their_machine():
    axes = draw(RingGraph(128), agents_per_machine=16)
    assert [text.get_text() for text in axes.texts][:2] == ["0\N{EN DASH}15", "16\N{EN DASH}31"]
    assert len(axes.texts) == 8


def test_machines_that_are_not_full_are_refused():
    with pytest.raises(ValueError, match="10 agents do not fill machines of 4"):
        draw(RingGraph(10), agents_per_machine=4)


def test_a_static_topology_is_one_panel_as_wide_as_a_column():
    figure = draw_schedule(MeshGrid2DGraph(8))
    (axes,) = figure.axes
    assert axes.get_title() == ""
    assert figure.get_figwidth() == COLUMN_WIDTH


@pytest.mark.parametrize(("period", "panels"), [(3, 3), (6, 6), (9, 6), (None, 4)])
def test_a_schedule_shows_its_period_or_the_first_rounds_of_a_long_one(period, panels):
    figure = draw_schedule(Dimensions(3, period))
    assert [axes.get_title() for axes in figure.axes] == [f"round {t}" for t in range(panels)]
    assert [len(arrows(axes)) for axes in figure.axes] == [4] * panels
    assert figure.get_figwidth() == TEXT_WIDTH


def test_rounds_and_width_can_be_chosen():
    figure = draw_schedule(Dimensions(3, 3), rounds=2, width=5.0)
    assert len(figure.axes) == 2
    assert figure.get_figwidth() == 5.0
    for rounds in (0, 10**9):
        with pytest.raises(ValueError, match=f"rounds is {rounds}, and a picture shows 1 to 1000"):
            draw_schedule(RingGraph(4), rounds=rounds)
    for width in (0.0, -1.0, 1e9, float("nan")):
        with pytest.raises(ValueError, match=r"width is .*: pass inches"):
            draw_schedule(RingGraph(4), width=width)


def test_all_rounds_of_a_hypercube_use_its_layout_with_its_other_edges_pale():
    figure = draw_schedule(Dimensions(3, 3))
    full = places(draw(hypercube(3)))
    for axes in figure.axes:
        assert places(axes) == pytest.approx(full)
        assert sum(isinstance(patch, PathPatch) for patch in axes.patches) == 12
    (first,) = draw_schedule(Dimensions(3, 3), rounds=1).axes
    assert places(first) == pytest.approx(full)


def test_directed_rounds_are_arrows_in_every_panel():
    generators = [GetDynamicOnePeerSendRecvRanks(ExponentialTwoGraph(8), rank) for rank in range(8)]
    *_, last = draw_rounds(collect_rounds(generators, 3), 8)
    assert {type(arrow.get_arrowstyle()) for arrow in arrows(last)} == {ArrowStyle.CurveFilledAB}


def test_panels_do_not_overlap_and_fill_the_figure():
    figure = draw_schedule(Dimensions(3, 6))
    boxes = [axes.get_position() for axes in figure.axes]
    for k, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[k + 1 :])
    assert min(box.x0 for box in boxes) == 0.0
    assert max(box.x1 for box in boxes) == pytest.approx(1.0)


def test_a_picture_with_too_many_lines_is_refused():
    with pytest.raises(ValueError, match="a picture of 128 agents and 8128 lines shows nothing"):
        draw(FullyConnectedGraph(128))


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_figure_is_saved_to_the_same_bytes_each_time_and_closed(tmp_path, suffix, magic):
    paths = [tmp_path / f"{name}{suffix}" for name in ("first", "again")]
    for path in paths:
        save(draw_schedule(with_uniform_weights(nx.path_graph(3))), path)
    first, again = (path.read_bytes() for path in paths)
    assert first == again
    assert first.startswith(magic)
    assert pyplot.get_fignums() == []


def test_fonts_in_a_pdf_are_embedded_as_truetype(tmp_path):
    save(draw_schedule(RingGraph(3)), tmp_path / "ring.pdf")
    content = (tmp_path / "ring.pdf").read_bytes()
    assert b"/Type3" not in content.replace(b" ", b"")
    assert b"FontFile2" in content


def test_an_unknown_file_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"written as \.pdf, \.png, \.svg"):
        save(draw_schedule(RingGraph(3)), tmp_path / "ring.gif")


@pytest.mark.parametrize(
    "call",
    [lambda: draw(RingGraph(3)), lambda: draw_rounds([[(0, 1)]], 2), lambda: draw_schedule(RingGraph(3))],
)
def test_a_missing_matplotlib_is_named_with_what_to_install(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib.*pip install 'shoal\[plot\]'"):
        call()
