"""No agents, one, two, an odd number, a prime, parts without a way between: an error with its reason, or an answer."""

import networkx as nx
import numpy as np
import pytest

import shoal.topology
from shoal.topology import (
    CATALOG,
    ChainGraph,
    IsTopologyEquivalent,
    Matcha,
    MeshGrid2DGraph,
    SpanningTreeGraph,
    Static,
    analyse,
    classify,
    find,
    with_metropolis_hastings_weights,
)

CONSTRUCTORS = [
    "AllReduce",
    "BaseGraph",
    "Ceca",
    "CecaPairs",
    "ChainGraph",
    "DCliquesGraph",
    "DEquiStatic",
    "ExponentialGraph",
    "ExponentialTwoGraph",
    "FullyConnectedGraph",
    "GatewayRingGraph",
    "HyperHypercube",
    "Hypercube",
    "HypercubeGraph",
    "Idle",
    "MeshGrid2DGraph",
    "ODEquiDyn",
    "OUEquiDyn",
    "OnePeerExponential",
    "OnePeerGrid",
    "OnePeerHypercube",
    "RandomMatchings",
    "RingGraph",
    "RingRandom",
    "RingStar",
    "RingStarDelegates",
    "RingStarRandom",
    "ShiftOne",
    "SimpleBaseGraph",
    "SmallWorldGraph",
    "StarGraph",
    "SymmetricExponentialGraph",
    "Torus",
    "TorusGraph",
    "TreeGraph",
    "UEquiStatic",
]
NEED_EVEN = ["shift-one", "ring-random", "ring-star-random", "ceca-pairs"]
PARTS = nx.Graph([(0, 1), (2, 3)])


@pytest.mark.parametrize("name", CONSTRUCTORS)
@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-3, ValueError), (4.0, TypeError), (True, TypeError)])
def test_an_invalid_number_of_agents_is_refused(name: str, size: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"at least 1, got|must be an int, got"):
        getattr(shoal.topology, name)(size)


@pytest.mark.parametrize("name", CATALOG)
def test_one_agent_keeps_its_value_or_is_refused(name: str) -> None:
    topology = CATALOG[name]
    if topology.refuses(1):
        pytest.fail(f"{name} refuses one agent: {topology.refuses(1)}")
    schedule = topology.schedule(1)
    for round in range(3):
        np.testing.assert_array_equal(schedule.matrix(round), [[1.0]])
        assert schedule.mixing(round, 0).source_ranks == schedule.mixing(round, 0).destination_ranks == ()
    assert "One agent has nobody to average with." in analyse(schedule).notes


@pytest.mark.parametrize("name", CATALOG)
def test_two_agents_reach_consensus_or_are_refused_with_a_reason(name: str) -> None:
    topology = CATALOG[name]
    if topology.refuses(2):
        assert name == "torus" and "2 is prime" in topology.refuses(2)
        return
    result = analyse(topology.schedule(2), error=1e-3)
    assert result.connected
    assert result.rounds.at_most is not None and not result.rounds.never


@pytest.mark.parametrize("name", NEED_EVEN)
@pytest.mark.parametrize("size", [3, 7, 25])
def test_an_odd_number_that_must_be_paired_is_refused_with_an_alternative(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} for {size} agents: .*{size} is odd") as caught:
        find(name).schedule(size)
    assert "random-matchings lets one sit out" in str(caught.value) or "ceca" in str(caught.value)


def test_only_pairing_topologies_need_an_even_number() -> None:
    refusing = [name for name, topology in CATALOG.items() if topology.refuses(9) and not topology.refuses(10)]
    assert refusing == [name for name in CATALOG if name in NEED_EVEN]


@pytest.mark.parametrize("size", [5, 7, 13])
def test_a_prime_number_makes_a_grid_of_one_row_and_no_torus(size: int) -> None:
    assert IsTopologyEquivalent(MeshGrid2DGraph(size), ChainGraph(size))
    with pytest.raises(ValueError, match=f"{size} is prime"):
        find("torus").schedule(size)


@pytest.mark.parametrize("constructor", [shoal.topology.MeshGrid2DGraph, shoal.topology.TorusGraph])
@pytest.mark.parametrize("shape", [(3, 4), (0, 12), (-2, -5)])
def test_a_shape_that_does_not_hold_all_agents_is_refused(constructor, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="shape"):
        constructor(10, shape=shape)


def test_disconnected_graphs_are_reported_or_refused() -> None:
    result = analyse(with_metropolis_hastings_weights(PARTS))
    assert not result.connected
    assert "Not all agents hear of all others: they never agree." in result.notes
    assert result.rounds.never and result.exact_length is None and result.age.mean == float("inf")
    with pytest.raises(ValueError, match="not connected, so its parts never agree"):
        Matcha(PARTS)
    with pytest.raises(ValueError, match="no way leads from 0 to"):
        SpanningTreeGraph(PARTS)


@pytest.mark.parametrize("scale", [0.5, 1.1])
def test_rows_that_do_not_sum_to_one_are_classified_and_reported(scale: float) -> None:
    matrix = np.array([[0.5, 0.5], [0.5 * scale, 0.5 * scale]])
    assert not classify(matrix).row and not classify(matrix).column
    assert not classify(Static(matrix)).doubly
    assert any("do not sum to one in every round" in note for note in analyse(matrix).notes)


def test_columns_that_do_not_sum_to_one_are_reported_with_the_remedy() -> None:
    matrix = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    result = analyse(np.array([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.5, 0.5]]))
    assert result.weights.row and not result.weights.column
    assert any("Use push-sum, or Metropolis-Hastings weights." in note for note in result.notes)
    assert not analyse(matrix).connected
