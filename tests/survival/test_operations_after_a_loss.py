"""``on_loss="continue"``: the result of each operation on the survivors, and the operations that are still refused."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

import shoal
from shoal import topology_util
from shoal.compression import Identity
from shoal.topology import Static, Without

SIZE, GONE = 4, 1
LEFT = [0, 2, 3]
Fleets = Callable[..., shoal.Fleet]


@pytest.fixture(autouse=True)
def continue_on_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ON_LOSS", "continue")


def value(rank: int) -> torch.Tensor:
    return torch.tensor([10.0**rank], dtype=torch.float64)


def after_a_loss(does: Callable[[], Any]) -> Any:
    """The result of a call once rank 1 has left a ring, twice; and averages still work after it."""
    shoal.set_topology(topology_util.RingGraph(SIZE), is_weighted=True)
    shoal.barrier()
    if shoal.rank() == GONE:
        shoal.shutdown()
        return None
    while GONE in shoal.allgather(torch.tensor([shoal.rank()])).tolist():
        pass
    results = [does(), does()]
    assert float(shoal.allreduce(value(shoal.rank()), average=False)) == 1 + 100 + 1000
    assert results[0] == results[1]
    return results[0]


def results(fleet: Fleets, does: Callable[[], Any]) -> dict[int, Any]:
    results = fleet(SIZE).run(after_a_loss, does)
    return {rank: results[rank] for rank in LEFT}


def test_neighbor_allgather_uses_the_healed_topology(fleet: Fleets) -> None:
    def does() -> list[float]:
        return shoal.neighbor_allgather(value(shoal.rank())).tolist()

    assert results(fleet, does) == {0: [100, 1000], 2: [1, 1000], 3: [1, 100]}


def test_neighbor_allgather_from_explicit_ranks_omits_failed_ones(fleet: Fleets) -> None:
    def does() -> list[float]:
        others = [index for index in range(SIZE) if index != shoal.rank()]
        return shoal.neighbor_allgather(value(shoal.rank()), src_ranks=others, dst_ranks=others).tolist()

    assert results(fleet, does) == {0: [100, 1000], 2: [1, 1000], 3: [1, 100]}


def test_pair_gossip_with_a_failed_agent_keeps_the_own_value(fleet: Fleets) -> None:
    def does() -> float:
        partner = {0: 1, 2: 3, 3: 2}[shoal.rank()]
        return shoal.pair_gossip(value(shoal.rank()), partner).item()

    assert results(fleet, does) == {0: 1.0, 2: 550.0, 3: 550.0}


def test_a_pull_adds_a_failed_agents_weight_to_the_own(fleet: Fleets) -> None:
    def does() -> float:
        sources = {index: 0.25 for index in range(SIZE) if index != shoal.rank()}
        return shoal.neighbor_allreduce(value(shoal.rank()), self_weight=0.25, src_weights=sources).item()

    total = 1 + 100 + 1000
    assert results(fleet, does) == {rank: (total + 10**rank) / 4 for rank in LEFT}


def test_a_push_to_a_failed_agent_is_dropped(fleet: Fleets) -> None:
    def does() -> float:
        to = {0: [1, 2], 2: [3], 3: [0]}[shoal.rank()]
        return shoal.neighbor_allreduce(value(shoal.rank()), self_weight=1.0, dst_weights=to).item()

    assert results(fleet, does) == {0: 1 + 1000, 2: 100 + 1, 3: 1000 + 100}


@pytest.mark.parametrize("form", ["push", "pull"])
def test_calls_within_the_topology_without_a_check_are_the_same(fleet: Fleets, form: str) -> None:
    def does() -> float:
        weights = {(shoal.rank() + hop) % SIZE: 0.5 for hop in (1, -1)}
        to, of = (weights, None) if form == "push" else (None, weights)
        x = value(shoal.rank())
        return shoal.neighbor_allreduce(
            x, self_weight=2.0, src_weights=of, dst_weights=to, enable_topo_check=False
        ).item()

    failed = 0.0 if form == "push" else 0.5
    assert results(fleet, does) == {
        0: (2 + failed) * 1 + 500,
        2: (2 + failed) * 100 + 500,
        3: 2000 + 0.5 + 50,
    }


def test_alltoall_names_the_failed_agent_only_to_agents_that_need_its_row(fleet: Fleets) -> None:
    def does() -> Any:
        ranks = {0: [1, 2], 2: [0, 3], 3: [2]}[shoal.rank()]
        rows = torch.tensor([[100.0 * shoal.rank() + rank] for rank in ranks])
        try:
            return shoal.neighbor_alltoall(rows, ranks).flatten().tolist()
        except shoal.PeerLost as error:
            return error.ranks

    assert results(fleet, does) == {0: (1,), 2: [2.0, 302.0], 3: [203.0]}


def test_metrics_are_of_the_survivors_by_their_ranks(fleet: Fleets) -> None:
    def does() -> Any:
        result = shoal.metrics({"loss": float(shoal.rank())}, weight=1.0 + shoal.rank())["loss"]
        return (
            result.mean,
            result.worst_rank,
            result.worst,
            [math.isnan(value) for value in result.values],
            result.values[2],
        )

    expected = (0 * 1 + 2 * 3 + 3 * 4) / 8, 3, 3.0, [False, True, False, False], 2.0
    assert results(fleet, does) == dict.fromkeys(LEFT, expected)


def test_consensus_is_the_mean_of_the_survivors(fleet: Fleets) -> None:
    def does() -> float:
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(model.weight, 10.0 ** shoal.rank())
        with shoal.consensus(model):
            return model.weight.item()

    assert results(fleet, does) == dict.fromkeys(LEFT, 1101 / 3)


def test_an_epoch_is_distributed_among_the_survivors(fleet: Fleets) -> None:
    def run() -> tuple[list[int], list[int]]:
        sampler = shoal.data.AgentSampler(range(20), seed=3)
        first = list(sampler)
        if shoal.rank() == GONE:
            shoal.shutdown()
            return first, []
        while GONE in shoal.allgather(torch.tensor([shoal.rank()])).tolist():
            pass
        return first, list(sampler)

    results = fleet(SIZE).run(run)
    assert sorted(index for first, _ in results for index in first) == list(range(20))
    later = [second for rank, (_, second) in enumerate(results) if rank != GONE]
    assert [len(one) for one in later] == [5, 5, 5], "as many as before, so that schedules stay"
    assert len({index for one in later for index in one}) == 15


def test_unequal_shards_are_redistributed(fleet: Fleets) -> None:
    def run() -> tuple[int, float, list[int]]:
        own = range(10 * shoal.rank(), 10 * shoal.rank() + 4 + 2 * shoal.rank())  # 4, 6, 8, 10 samples
        sampler = shoal.data.AgentSampler(range(100), shard=list(own))
        assert len(sampler) == 7
        list(sampler)
        if shoal.rank() == GONE:
            shoal.shutdown()
            return 0, 0.0, []
        while GONE in shoal.allgather(torch.tensor([shoal.rank()])).tolist():
            pass
        indices = list(sampler)
        assert set(indices) <= set(own)
        return len(indices), sampler.weight, indices

    results = fleet(SIZE).run(run)
    assert [results[rank][0] for rank in LEFT] == [7, 7, 7]  # as many as before, of 22 samples
    assert [results[rank][1] for rank in LEFT] == [3 * count / 22 for count in (4, 8, 10)]


@pytest.mark.parametrize("departed", [(1,), (2, 3), (0, 2, 3)])
@pytest.mark.parametrize("numel", [3, 200_000])
def test_machines_average_over_their_survivors(fleet: Fleets, departed: tuple[int, ...], numel: int) -> None:
    def run() -> Any:
        rank = shoal.rank()
        shoal.bluefog.set_machine_topology(topology_util.RingGraph(3), is_weighted=True)
        x = torch.full((numel,), 10.0**rank, dtype=torch.float64)
        shoal.bluefog.hierarchical_neighbor_allreduce(x)
        if rank in departed:
            shoal.shutdown()
            return None
        while set(departed) & set(shoal.allgather(torch.tensor([rank])).tolist()):
            pass
        result = shoal.bluefog.hierarchical_neighbor_allreduce(x)
        assert bool((result == result[0]).all())
        assert torch.equal(shoal.bluefog.hierarchical_neighbor_allreduce(x, compression=Identity()), result)
        machine = shoal.bluefog.machine_rank()
        weights = {(machine + 1) % 3: 0.25, (machine - 1) % 3: 0.25}
        by_hand = shoal.bluefog.hierarchical_neighbor_allreduce(x, 0.5, weights, dict.fromkeys(weights, 1.0))
        return result[0].item(), by_hand[0].item()

    results = fleet(6, agents_per_machine=2).run(run)
    means = {}
    for machine in range(3):
        left = [rank for rank in (2 * machine, 2 * machine + 1) if rank not in departed]
        if left:
            means[machine] = sum(10.0**rank for rank in left) / len(left)
    for rank in set(range(6)) - set(departed):
        own = means[rank // 2]
        others = [mean for machine, mean in means.items() if machine != rank // 2]
        assert results[rank][0] == pytest.approx(sum(means.values()) / len(means))  # what is left of a ring of three
        assert results[rank][1] == pytest.approx(own * (1 - 0.25 * len(others)) + 0.25 * sum(others))


def test_new_windows_use_the_healed_topology(fleet: Fleets) -> None:
    def does() -> list[float]:
        x = value(shoal.rank())
        assert shoal.bluefog.win_create(x, "w", zero_init=True)
        shoal.bluefog.win_put(x, "w")
        shoal.barrier()
        results = shoal.bluefog.win_update("w").tolist()
        shoal.barrier()
        shoal.bluefog.win_free("w")
        return results

    result = results(fleet, does)
    weights = Without(Static(topology_util.RingGraph(SIZE)), [GONE]).matrix(0)
    x = np.array([10.0**rank for rank in range(SIZE)])
    for rank in LEFT:
        assert result[rank] == pytest.approx([(weights @ x)[rank]])


def is_left_with_another_machine_topology() -> bool:
    """False on rank 5, which leaves. Machine 0 has another machine topology than the others."""
    graph = nx.DiGraph(topology_util.RingGraph(3))
    if shoal.bluefog.machine_rank() == 0:
        graph.edges[2, 1]["weight"] = 0.75
    shoal.bluefog.set_machine_topology(graph, is_weighted=True)
    shoal.barrier()
    if shoal.rank() == 5:
        shoal.shutdown()
        return False
    while 5 in shoal.allgather(torch.tensor([shoal.rank()])).tolist():
        pass
    return True


def test_machine_topologies_that_differ_are_a_mismatch_after_a_machine_has_lost_an_agent(fleet: Fleets) -> None:
    """The first agents of the machines exchange then, and compare the topologies with each other."""

    def run() -> str:
        if not is_left_with_another_machine_topology():
            return ""
        try:
            return str(shoal.bluefog.hierarchical_neighbor_allreduce(value(shoal.rank()), name="x", timeout=3))
        except shoal.ShoalError as error:  # other agents may also find those lost whose call has failed
            return f"{type(error).__name__}: {error}"

    results = fleet(6, agents_per_machine=2).run(run)
    # Agents whose call has failed count as lost. The last ones may be alike, and have an average among themselves.
    assert any(one.startswith("Mismatch: ") for one in results), results


def test_such_a_mismatch_has_one_outcome_on_all_agents_long_before_the_deadline(fleet: Fleets) -> None:
    """Also on agents that are not the first of their machine, which exchange nothing with other machines.

    No agent leaves during the test: that would be another event.
    """
    failed = threading.Barrier(5)

    def run() -> tuple[str, float]:
        if not is_left_with_another_machine_topology():
            return "", 5.0
        # A deadline would end the call of some with DeadlineExceeded.
        with pytest.raises(shoal.ShoalError) as caught:
            shoal.bluefog.hierarchical_neighbor_allreduce(value(shoal.rank()), name="x", timeout=60)
        failed.wait(90.0)
        return type(caught.value).__name__, float(shoal.allreduce(torch.ones(1), average=False))

    assert fleet(6, agents_per_machine=2, timeout=100.0).run(run)[:5] == [("Mismatch", 5.0)] * 5
