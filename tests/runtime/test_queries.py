"""Queries of an agent about itself, its machine and its topology, and the setters of these."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import networkx as nx
import pytest
import torch

import shoal
from support.leftovers import wait_until

Fleets = Callable[..., shoal.Fleet]


def where_am_i() -> tuple[int, ...]:
    return (
        shoal.rank(),
        shoal.size(),
        shoal.local_rank(),
        shoal.local_size(),
        shoal.bluefog.machine_rank(),
        shoal.bluefog.machine_size(),
        int(shoal.bluefog.is_homogeneous()),
    )


def test_a_fleet_is_one_machine_by_default(fleet: Fleets) -> None:
    assert fleet(4).run(where_am_i) == [(rank, 4, rank, 4, 0, 1, 1) for rank in range(4)]


def test_agents_per_machine_group_ranks_in_order(fleet: Fleets) -> None:
    expected = [(rank, 6, rank % 2, 2, rank // 2, 3, 1) for rank in range(6)]
    assert fleet(6, agents_per_machine=2).run(where_am_i) == expected


def test_a_last_machine_with_fewer_agents_makes_the_fleet_inhomogeneous(fleet: Fleets) -> None:
    results = fleet(5, agents_per_machine=3).run(where_am_i)
    assert results == [
        (0, 5, 0, 3, 0, 2, 0),
        (1, 5, 1, 3, 0, 2, 0),
        (2, 5, 2, 3, 0, 2, 0),
        (3, 5, 0, 2, 1, 2, 0),
        (4, 5, 1, 2, 1, 2, 0),
    ]


def test_the_variable_for_agents_per_machine_is_read_at_init(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_AGENTS_PER_MACHINE", "2")
    assert fleet(4).run(shoal.bluefog.machine_size) == [2] * 4
    assert fleet(4, agents_per_machine=4).run(shoal.bluefog.machine_size) == [1] * 4


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_an_invalid_number_of_agents_per_machine_is_refused(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("SHOAL_AGENTS_PER_MACHINE", text)
    with pytest.raises(ValueError, match="SHOAL_AGENTS_PER_MACHINE"):
        fleet(2).run(shoal.rank)


@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan"])
def test_an_invalid_timeout_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SHOAL_TIMEOUT", text)
    with pytest.raises(ValueError, match="SHOAL_TIMEOUT"):
        shoal.Fleet(2).run(shoal.rank)


def test_the_variable_for_the_timeout_is_the_deadline_of_calls(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TIMEOUT", "0.4")
    done = threading.Event()

    def run() -> None:
        if shoal.rank() == 0:
            with pytest.raises(shoal.DeadlineExceeded, match=r"0\.4 s"):
                shoal.barrier()
            done.set()
        assert done.wait(30)

    shoal.Fleet(2, transport=transport).run(run)


def test_init_starts_with_the_unweighted_exponential_graph(fleet: Fleets) -> None:
    def run() -> tuple[bool, bool, bool, object, list[int], list[int]]:
        return (
            shoal.topology.IsTopologyEquivalent(shoal.load_topology(), shoal.topology.ExponentialTwoGraph(6)),
            shoal.bluefog.is_topo_weighted(),
            shoal.bluefog.is_machine_topo_weighted(),
            shoal.bluefog.load_machine_topology(),
            shoal.in_neighbor_ranks(),
            shoal.out_neighbor_ranks(),
        )

    for rank, result in enumerate(fleet(6).run(run)):
        sources, destinations = (sorted((rank + sign * hop) % 6 for hop in (1, 2, 4)) for sign in (-1, 1))
        assert result == (True, False, False, None, sources, destinations)


def test_init_accepts_a_function_from_the_size_to_a_graph(fleet: Fleets) -> None:
    def run() -> tuple[bool, bool]:
        shoal.init(shoal.topology.RingGraph, is_weighted=True)
        return shoal.topology.IsTopologyEquivalent(
            shoal.load_topology(), shoal.topology.RingGraph(5)
        ), shoal.bluefog.is_topo_weighted()

    assert fleet(5).run(run) == [(True, True)] * 5


def test_a_second_init_keeps_the_users_settings(fleet: Fleets) -> None:
    """Topology, weights and windows: a library that calls it to be sure changes nothing for an earlier caller."""

    def run() -> tuple[list[int], bool, list[str], float]:
        graph = shoal.topology.RingGraph(4, connect_style=2)
        shoal.set_topology(graph, is_weighted=True)
        shoal.bluefog.set_machine_topology(shoal.topology.FullyConnectedGraph(1))
        shoal.init()
        assert nx.utils.graphs_equal(shoal.load_topology(), graph) and shoal.bluefog.is_topo_weighted()
        x = torch.tensor(float(shoal.rank()))
        shoal.bluefog.win_create(x, "x")
        shoal.init()
        assert nx.utils.graphs_equal(shoal.load_topology(), graph) and shoal.bluefog.is_topo_weighted()
        shoal.init(lambda size: shoal.topology.RingGraph(size, connect_style=2), is_weighted=True)  # what is set
        assert nx.utils.graphs_equal(shoal.load_topology(), graph) and shoal.bluefog.load_machine_topology() is not None
        shoal.bluefog.win_put(x, "x")
        shoal.barrier()
        value = shoal.bluefog.win_update("x", 0.0, {shoal.in_neighbor_ranks()[0]: 1.0}, clone=True).item()
        shoal.barrier()
        return (
            shoal.in_neighbor_ranks(),
            shoal.bluefog.is_topo_weighted(),
            shoal.bluefog.get_current_created_window_names(),
            value,
        )

    assert fleet(4).run(run) == [([(r - 1) % 4], True, ["x"], float((r - 1) % 4)) for r in range(4)]


def test_a_second_init_with_a_topology_sets_it_unless_there_are_windows(
    fleet: Fleets, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> tuple[list[int], list[int], list[int]]:
        shoal.init(shoal.topology.RingGraph)
        ring = shoal.in_neighbor_ranks()
        shoal.bluefog.win_create(torch.zeros(2), "x")
        shoal.init(shoal.topology.FullyConnectedGraph)
        kept = shoal.in_neighbor_ranks()
        shoal.barrier()
        shoal.bluefog.win_free("x")
        shoal.init(shoal.topology.FullyConnectedGraph)
        return ring, kept, shoal.in_neighbor_ranks()

    for rank, (ring, kept, full) in enumerate(fleet(5).run(run)):
        assert ring == kept == sorted([(rank - 1) % 5, (rank + 1) % 5])
        assert full == [other for other in range(5) if other != rank]
    assert caplog.text.count("does nothing while there are windows") == 5


@pytest.mark.parametrize("wrong", [lambda size: shoal.topology.RingGraph(size + 1), lambda size: "a ring"])
def test_a_second_init_with_an_invalid_topology_is_refused_and_changes_nothing(
    fleet: Fleets, wrong: Callable[[int], nx.DiGraph]
) -> None:
    def run() -> list[int]:
        shoal.set_topology(shoal.topology.RingGraph(4, connect_style=2))
        with pytest.raises((TypeError, ValueError), match="topology"):
            shoal.init(wrong)
        return shoal.in_neighbor_ranks()

    assert fleet(4).run(run) == [[(rank - 1) % 4] for rank in range(4)]


def test_a_schedule_as_static_topology_is_refused_with_the_places_that_take_one(fleet: Fleets) -> None:
    schedule = shoal.topology.OnePeerExponential(4)

    def run() -> list[int]:
        for set_it in (shoal.set_topology, shoal.bluefog.set_machine_topology, lambda it: shoal.init(lambda _: it)):
            with pytest.raises(TypeError, match=r"one-peer exponential .* is a schedule.*topology= .*\.mixing\(round"):
                set_it(schedule)
        return shoal.in_neighbor_ranks()

    assert fleet(4).run(run) == [sorted([(rank - 2) % 4, (rank - 1) % 4]) for rank in range(4)]


def test_init_after_shutdown_starts_with_the_default_topology(fleet: Fleets) -> None:
    def run() -> list[int]:
        shoal.set_topology(shoal.topology.RingGraph(8, connect_style=2))
        shoal.barrier()
        shoal.shutdown()
        shoal.init()
        shoal.barrier()
        return shoal.in_neighbor_ranks()

    assert fleet(8).run(run)[0] == [4, 6, 7]


def test_load_topology_returns_the_graph_that_was_set(fleet: Fleets) -> None:
    graph, machines = shoal.topology.StarGraph(4), shoal.topology.RingGraph(2)

    def run() -> None:
        assert shoal.set_topology(graph, is_weighted=True) is True
        assert shoal.load_topology() is graph
        assert shoal.bluefog.is_topo_weighted()
        assert shoal.set_topology(graph) is True
        assert not shoal.bluefog.is_topo_weighted()
        assert shoal.bluefog.set_machine_topology(machines, True) is True
        assert shoal.bluefog.load_machine_topology() is machines
        assert shoal.bluefog.is_machine_topo_weighted()
        assert shoal.set_topology() is True  # nothing given: the exponential graph
        assert shoal.topology.IsTopologyEquivalent(shoal.load_topology(), shoal.topology.ExponentialTwoGraph(4))

    fleet(4, agents_per_machine=2).run(run)


def test_changing_a_graph_after_it_was_set_changes_nothing(fleet: Fleets) -> None:
    """Otherwise two agents that share the object, or a later change of it, would average over different graphs."""

    def run() -> tuple[list[int], float]:
        graph = nx.DiGraph(shoal.topology.FullyConnectedGraph(3))
        shoal.set_topology(graph)
        graph.remove_edges_from(list(graph.edges))
        return shoal.in_neighbor_ranks(), shoal.neighbor_allreduce(torch.tensor(float(shoal.rank()))).item()

    assert [result[1] for result in fleet(3).run(run)] == pytest.approx([1.0] * 3)


def test_neighbours_exclude_self_and_follow_the_direction_of_edges(fleet: Fleets) -> None:
    graph = nx.DiGraph([(0, 0), (0, 1), (0, 3), (2, 1), (3, 3), (3, 0), (1, 2)])

    def run() -> tuple[list[int], list[int]]:
        shoal.set_topology(graph)
        return shoal.in_neighbor_ranks(), shoal.out_neighbor_ranks()

    assert fleet(4).run(run) == [([3], [1, 3]), ([0, 2], [2]), ([1], [1]), ([0], [0])]


def test_machine_neighbours_are_machines(fleet: Fleets) -> None:
    def run() -> tuple[list[int], ...]:
        before = shoal.bluefog.in_neighbor_machine_ranks(), shoal.bluefog.out_neighbor_machine_ranks()
        shoal.bluefog.set_machine_topology(shoal.topology.RingGraph(3, connect_style=2))
        return (*before, shoal.bluefog.in_neighbor_machine_ranks(), shoal.bluefog.out_neighbor_machine_ranks())

    results = fleet(6, agents_per_machine=2).run(run)
    assert results == [([], [], [(rank // 2 - 1) % 3], [(rank // 2 + 1) % 3]) for rank in range(6)]


def test_setting_a_topology_before_init_is_false_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "shoal"):
        assert shoal.set_topology(shoal.topology.RingGraph(2)) is False
        assert shoal.bluefog.set_machine_topology(shoal.topology.RingGraph(2)) is False
    assert caplog.text.count("before shoal.init()") == 2


@pytest.mark.parametrize(
    ("graph", "warned"),
    [
        (shoal.topology.StarGraph(4), True),
        (shoal.topology.MeshGrid2DGraph(6), True),
        (shoal.topology.RingGraph(4), False),
        (nx.DiGraph([(0, 1), (1, 0), (1, 2)]), False),
    ],
)
def test_dropping_nonzero_weights_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, graph: nx.DiGraph, warned: bool
) -> None:
    monkeypatch.setattr("shoal.runtime.agent._warned", False)

    def run() -> None:
        for _ in range(3):
            shoal.set_topology(graph, is_weighted=False)
            shoal.set_topology(graph, is_weighted=True)

    with caplog.at_level(logging.WARNING, "shoal"):
        shoal.Fleet(graph.number_of_nodes()).run(run)
    assert caplog.text.count("is_weighted=False") == int(warned)


def test_membership_starts_with_all_agents_and_its_epoch_changes_with_a_departure(fleet: Fleets) -> None:
    departed, both = threading.Event(), threading.Barrier(2)

    def run() -> None:
        view = shoal.observability.membership()
        assert view.alive == (0, 1, 2)
        assert (view.left, view.died) == ((), {})
        shoal.barrier()
        if shoal.rank() == 1:
            shoal.shutdown()
            departed.set()
            return
        assert departed.wait(30)
        assert wait_until(lambda: 1 not in shoal.observability.membership().alive)
        later = shoal.observability.membership()
        assert later.epoch > view.epoch
        assert (later.alive, later.left, later.died) == ((0, 2), (1,), {})
        assert view.alive == (0, 1, 2)
        both.wait(30)

    fleet(3).run(run)


def test_events_report_the_engines_actions_until_unsubscribed(fleet: Fleets) -> None:
    both = threading.Barrier(2)

    def run() -> list[tuple[str, int, int]]:
        seen: list[shoal.observability.Event] = []
        unsubscribe = shoal.observability.events().subscribe(seen.append)
        both.wait(30)  # or the other agent's message could come before the subscription
        shoal.neighbor_allreduce(torch.ones(5000), "watched")
        unsubscribe()
        both.wait(30)  # or the other agent's next message could come before the end of the subscription
        shoal.neighbor_allreduce(torch.ones(5000), "unwatched")
        assert {event.name for event in seen} == {"watched"}
        assert {event.operation for event in seen} == {"neighbor_allreduce"}
        assert all(event.end >= event.start > 0 for event in seen)
        by_time = ("waited", "prepared", "arrived")  # it did not wait, was quick, or all came at once
        return sorted({(event.kind, event.peer, event.nbytes) for event in seen if event.kind not in by_time})

    for rank, result in enumerate(fleet(2).run(run)):
        expected = [("finished", -1, 0), ("received", 1 - rank, 20_000), ("sent", 1 - rank, 20_000)]
        assert result == [*expected, ("submitted", -1, 0), ("summed", -1, 0)]


def test_a_listener_that_raises_is_logged_once_and_has_no_other_effect(
    fleet: Fleets, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: shoal.observability.Event) -> None:
        raise ZeroDivisionError("of the test")

    def run() -> list[float]:
        shoal.observability.events().subscribe(fail)
        return [shoal.allreduce(torch.tensor(1.0)).item() for _ in range(3)]

    assert fleet(2).run(run) == [[1.0] * 3] * 2
    assert caplog.text.count("a listener of Shoal's events failed") == 2  # once for each agent


def test_empty_returns_memory_suitable_for_out(fleet: Fleets) -> None:
    def run() -> float:
        out = shoal.windows.empty(300, 400)
        assert (out.shape, out.dtype) == ((300, 400), torch.float32)
        assert shoal.windows.empty(2, dtype=torch.int64).dtype == torch.int64
        return shoal.allreduce(torch.ones(300, 400), out=out).mean().item()

    assert fleet(2).run(run) == [1.0, 1.0]


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables at all, as in a plain ``python script.py``."""
    for name in list(os.environ):
        if name.startswith(
            ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "SHOAL_", "TORCHELASTIC")
        ):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("world_of_one")
def test_without_a_launcher_every_operation_works_on_a_single_agent() -> None:
    shoal.init()
    try:
        assert where_am_i() == (0, 1, 0, 1, 0, 1, 1)
        assert (shoal.in_neighbor_ranks(), shoal.out_neighbor_ranks()) == ([], [])
        x = torch.tensor([1.0, 2.0, 3.0])
        kept = x.tolist()
        for result in (
            shoal.neighbor_allreduce(x),
            shoal.neighbor_allreduce(x, 1.0, {}, {}),
            shoal.bluefog.hierarchical_neighbor_allreduce(x),
            shoal.allreduce(x),
            shoal.allreduce(x, average=False),
            shoal.allreduce(x, is_hierarchical_local=True),
            shoal.broadcast(x, 0),
            shoal.allgather(x),
            shoal.bluefog.allreduce_(x.clone()),
            shoal.bluefog.broadcast_(x.clone(), 0),
            shoal.bluefog.wait(shoal.nonblocking.neighbor_allreduce(x)),
        ):
            assert result.tolist() == kept
            assert result.data_ptr() != x.data_ptr()
        assert shoal.neighbor_allreduce(x, 2.0, {}, {}).tolist() == [2.0, 4.0, 6.0]
        assert shoal.neighbor_allgather(x).shape == (0,)
        assert shoal.broadcast_object({"a": 1}) == {"a": 1}
        assert shoal.bluefog.InferSourceFromDestinationRanks([]) == []
        model = torch.nn.Linear(2, 2)
        shoal.broadcast_parameters(model.state_dict())
        shoal.bluefog.allreduce_parameters(model.parameters())
        shoal.bluefog.broadcast_optimizer_state(torch.optim.Adam(model.parameters()))
        shoal.barrier()
        for graph in (
            shoal.topology.RingGraph(1),
            shoal.topology.StarGraph(1),
            shoal.topology.MeshGrid2DGraph(1),
            shoal.topology.FullyConnectedGraph(1),
        ):
            assert shoal.set_topology(graph, is_weighted=True)
            assert shoal.neighbor_allreduce(x).tolist() == kept
    finally:
        shoal.shutdown()
    assert not shoal.is_initialized()


@pytest.mark.usefixtures("world_of_one")
def test_init_after_shutdown_gives_a_new_job() -> None:
    for _ in range(3):
        shoal.init()
        assert shoal.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
        shoal.shutdown()
        with pytest.raises(shoal.NotInitialized):
            shoal.rank()
