"""The property suite over the catalog, and the promises of the catalog itself."""

import inspect

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.topology import CATALOG, Circulant, OnePeer, Schedule, Static, Topology, find, register
from support.topology_suite import CHECKS, run_all, sizes_for


@pytest.fixture
def catalog(monkeypatch):
    """The catalog; what a test enters is gone after it."""
    monkeypatch.setattr("shoal.topology.families.catalog.CATALOG", dict(CATALOG))


APPLICABLE = [
    pytest.param(topology, check, numbers, id=f"{topology.name}-{check.__name__}")
    for check in CHECKS
    for topology in CATALOG.values()
    if (numbers := sizes_for(check, topology))
]


@pytest.mark.parametrize(("topology", "check", "numbers"), APPLICABLE)
def test_every_topology(topology, check, numbers):
    @settings(max_examples=4, database=None)
    @given(size=st.sampled_from(numbers), round=st.integers(0, 100_000))
    def holds(size, round):
        check(topology, size, round)

    holds()


def test_every_check_applies_to_some_topology():
    assert {case.values[1] for case in APPLICABLE} == set(CHECKS)


@pytest.mark.parametrize("name", CATALOG)
def test_every_topology_is_created_or_refused_with_its_reason(name):
    topology = CATALOG[name]
    for size in (*range(1, 13), 16, 31, 36):
        reason = topology.refuses(size)
        if reason:
            with pytest.raises(ValueError, match=f"{name} for {size} agents: ") as caught:
                topology.schedule(size)
            assert reason in str(caught.value)
        else:
            assert topology.schedule(size).size == size


@pytest.mark.parametrize("name", CATALOG)
def test_no_topology_is_created_for_zero_agents(name):
    with pytest.raises(ValueError, match="at least 1"):
        CATALOG[name].schedule(0)
    with pytest.raises(TypeError, match="whole number"):
        CATALOG[name].schedule(4.0)


@pytest.mark.parametrize("name", [name for name, topology in CATALOG.items() if topology.agents_per_machine])
def test_the_number_of_agents_on_a_machine_is_an_option_where_it_is_declared(name):
    assert CATALOG[name].options["agents_per_machine"] is None
    assert CATALOG[name].schedule(32, agents_per_machine=8).size == 32
    with pytest.raises(ValueError, match="32 agents do not fill groups of 5"):
        CATALOG[name].schedule(32, agents_per_machine=5)


def test_options_reach_the_topology_and_its_description():
    assert CATALOG["binary-tree"].options == {"arity": 2}
    assert CATALOG["binary-tree"].schedule(8, arity=3).describe() == "binary-tree arity=3 of 8 agents"
    assert CATALOG["random-matchings"].schedule(8, seed=7).describe() == "random matchings of 8 agents, seed 7"


def test_options_are_numbers_only():
    assert CATALOG["torus"].options == {}
    assert CATALOG["d-cliques"].options == {"clique_size": 10}


def test_the_error_for_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"there is no topology 'rign'; there are .*ring"):
        find("rign")


def test_a_name_is_registered_once(catalog):
    with pytest.raises(ValueError, match="'ring' is already there"):
        register(CATALOG["ring"])


class ToTheMiddle(OnePeer):
    """In round t everybody averages with its mirror image about t: a topology of a user's own."""

    def __init__(self, size: int) -> None:
        self.size = self.period = size

    def _sources(self, round):
        return (2 * round - np.arange(self.size)) % self.size

    def describe(self):
        return f"mirror images of {self.size} agents"


def enter_mirror_images() -> Topology:
    return register(
        Topology(
            "mirror", ToTheMiddle, "mirror images", "here", symmetric=True, refuses=lambda n: "" if n % 2 else "even"
        )
    )


def test_a_new_topology_takes_twenty_lines_and_gets_every_test(catalog):
    lines = inspect.getsource(ToTheMiddle) + inspect.getsource(enter_mirror_images)
    assert len([line for line in lines.splitlines() if line.strip()]) <= 20
    run_all(enter_mirror_images())
    assert find("mirror").schedule(5).period == 5


class Wrong(Schedule):
    """The directed ring, with one thing at a time that is not as it should be."""

    period = 1

    def __init__(self, size, fault):
        self.size, self.fault, self.ring = size, fault, Circulant(size, [1])

    def mixing(self, round, rank):
        if self.fault == "deaf" and rank == 1:
            return type(self.ring.mixing(0, rank))(rank, 1.0, {}, self.ring.mixing(0, rank).destinations)
        return self.ring.mixing(0, rank)

    def edges(self, round):
        destination, source, weight = self.ring.edges(0)
        if self.fault == "weights":
            return type(self.ring.edges(0))(destination, source, weight * 0.9)
        if self.fault == "period" and round % 2:
            return self.ring.edges(0)._replace(weight=weight[::-1] + np.arange(len(weight)))
        return self.ring.edges(0)

    def describe(self):
        return "wrong" if self.fault == "name" else f"wrong of {self.size}"


@pytest.mark.parametrize(
    ("fault", "declared"),
    [
        ("weights", {}),
        ("deaf", {}),
        ("period", {}),
        ("name", {}),
        ("none", {"symmetric": True}),
        ("none", {"exact": True}),
    ],
)
def test_the_suite_detects_faults(fault, declared):
    with pytest.raises(AssertionError):
        run_all(Topology("wrong", lambda size: Wrong(size, fault), "", "", **declared))


def test_the_suite_accepts_correct_topologies():
    run_all(Topology("right", lambda size: Wrong(size, "none"), "", ""))


def test_the_suite_detects_agents_that_are_never_connected():
    def disconnected(size):
        graph = nx.DiGraph()
        graph.add_weighted_edges_from((rank, rank, 1.0) for rank in range(size))
        return Static(graph)

    with pytest.raises(AssertionError):
        run_all(Topology("apart", disconnected, "", ""))
