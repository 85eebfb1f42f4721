"""Drawing: every agent and every edge is there, and a missing matplotlib is named."""

import sys

import matplotlib
import networkx as nx
import numpy as np
import pytest

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.patches import ArrowStyle, Circle, FancyArrowPatch
from matplotlib.path import Path

from shoal.topology import (
    ExponentialTwoGraph,
    FullyConnectedGraph,
    GetDynamicOnePeerSendRecvRanks,
    RingGraph,
    StarGraph,
    SymmetricExponentialGraph,
    collect_rounds,
    draw,
    draw_rounds,
)
from shoal.topology.drawing import IDLE


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def agents(axes):
    return [patch for patch in axes.patches if isinstance(patch, Circle)]


def arrows(axes):
    return [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]


def ends(arrow):
    return arrow.patchA.center, arrow.patchB.center


@pytest.mark.parametrize("size", [1, 2, 8, 33])
def test_every_agent_is_drawn_and_numbered(size):
    axes = draw(ExponentialTwoGraph(size))
    axes.figure.canvas.draw()
    assert len(agents(axes)) == size
    assert {text.get_text() for text in axes.texts} == {str(rank) for rank in range(size)}


def test_agents_too_small_for_all_numbers_are_numbered_sparsely():
    axes = draw(RingGraph(150))
    assert len(agents(axes)) == 150
    assert 0 < len(axes.texts) <= 48


def test_a_one_way_edge_is_an_arrow_from_source_to_destination():
    axes = draw(nx.DiGraph([(0, 1), (2, 2)]))
    (arrow,) = arrows(axes)
    centres = [agent.center for agent in agents(axes)]
    assert ends(arrow) == (centres[0], centres[1])
    assert type(arrow.get_arrowstyle()) is ArrowStyle.CurveFilledB


def test_an_exchange_is_one_arrow_with_two_heads():
    axes = draw(RingGraph(6))
    assert len(arrows(axes)) == 6
    assert {type(arrow.get_arrowstyle()) for arrow in arrows(axes)} == {ArrowStyle.CurveFilledAB}


@pytest.mark.parametrize(
    "graph", [SymmetricExponentialGraph(16, base=2), FullyConnectedGraph(12), ExponentialTwoGraph(20)]
)
def test_no_arrow_crosses_an_agent_that_it_does_not_join(graph):
    axes = draw(graph)
    pixels = axes.transData
    for arrow in arrows(axes):
        others = [agent for agent in agents(axes) if agent.center not in ends(arrow)]
        for line in arrow.get_path().transformed(pixels).to_polygons(closed_only=False):
            points = pixels.inverted().transform(Path(line).interpolated(50).vertices)
            for agent in others:
                assert np.linalg.norm(points - agent.center, axis=1).min() > agent.radius


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


def test_another_number_of_axes_than_of_rounds_is_refused():
    _, grid = pyplot.subplots(1, 3)
    with pytest.raises(ValueError, match="2 rounds do not fit 3 axes"):
        draw_rounds([[(0, 1)], [(1, 0)]], 2, axes=grid)


def test_a_round_with_a_rank_out_of_range_is_refused():
    with pytest.raises(ValueError, match="destination 4 is out of range"):
        draw_rounds([[(0, 4)]], 4)


@pytest.mark.parametrize("call", [lambda: draw(RingGraph(3)), lambda: draw_rounds([[(0, 1)]], 2)])
def test_a_missing_matplotlib_is_named_with_what_to_install(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib.*pip install 'shoal\[demo\]'"):
        call()
