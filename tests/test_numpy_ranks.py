"""Ranks may be numpy's integers wherever a rank is taken, as ``np.random.permutation`` gives them; no bool may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

import shoal
import shoal.bluefog as bf
import shoal.compat.horovod as hvd
from shoal.ops.gathering import alltoall_nonblocking

SIZE = 4
X = torch.ones(3)


def n(rank: int) -> np.int64:
    return np.int64(rank)


def ahead() -> np.int64:
    return n((shoal.rank() + 1) % SIZE)


def previous_rank() -> np.int64:
    return n((shoal.rank() - 1) % SIZE)


def pair() -> np.int64:
    return n(shoal.rank() ^ 1)


def own_group() -> list[np.int64]:
    return [n(shoal.rank()), pair()]


HALF = np.float64(0.5)
Op = Callable[[], object]

OPERATIONS: dict[str, Op] = {
    "neighbor_allreduce": lambda: shoal.neighbor_allreduce(X, 0.5, {previous_rank(): HALF}, {ahead(): 1.0}),
    "neighbor_allreduce, push": lambda: shoal.neighbor_allreduce(X, 0.5, dst_weights={ahead(): HALF}),
    "neighbor_allreduce, pull": lambda: shoal.neighbor_allreduce(X, 0.5, {previous_rank(): HALF}),
    "neighbor_allreduce, a list": lambda: shoal.neighbor_allreduce(X, 0.5, {previous_rank(): 0.5}, [ahead()]),
    "neighbor_allreduce, an array": lambda: shoal.neighbor_allreduce(
        X, 0.5, {previous_rank(): 0.5}, np.array([ahead()])
    ),
    "neighbor_allreduce, group": lambda: shoal.neighbor_allreduce(X, group=own_group()),
    "neighbor_allreduce_nonblocking": lambda: shoal.nonblocking.neighbor_allreduce(
        X, 0.5, {previous_rank(): HALF}, {ahead(): 1.0}
    ).wait(),
    "grouped_neighbor_allreduce": lambda: shoal.grouped_neighbor_allreduce(
        [X], 0.5, {previous_rank(): 0.5}, {ahead(): 1.0}
    ),
    "neighbor_allgather": lambda: shoal.neighbor_allgather(X, src_ranks=[previous_rank()], dst_ranks=[ahead()]),
    "neighbor_allgather, arrays": lambda: shoal.neighbor_allgather(
        X, src_ranks=np.array([previous_rank()]), dst_ranks=np.array([ahead()])
    ),
    "neighbor_alltoall": lambda: shoal.neighbor_alltoall(X[:1], [pair()]),
    "neighbor_alltoall, an array": lambda: shoal.neighbor_alltoall(X[:1], np.array([pair()])),  # type: ignore[arg-type]
    "alltoall": lambda: alltoall_nonblocking(torch.ones(SIZE), [n(1)] * SIZE).wait(),
    "alltoall, an array": lambda: alltoall_nonblocking(torch.ones(SIZE), np.ones(SIZE, dtype=np.int64)).wait(),
    "pair_gossip": lambda: shoal.pair_gossip(X, pair()),
    "pair_gossip_nonblocking": lambda: shoal.nonblocking.pair_gossip(X, pair()).wait(),
    "allreduce": lambda: shoal.allreduce(X, group=own_group()),
    "allreduce, an array": lambda: shoal.allreduce(X, group=np.array(own_group())),  # type: ignore[arg-type]
    "allreduce_": lambda: shoal.bluefog.allreduce_(X.clone(), group=own_group()),
    "grouped_allreduce": lambda: shoal.grouped_allreduce([X], group=own_group()),
    "broadcast": lambda: shoal.broadcast(X, n(1)),
    "broadcast_": lambda: shoal.bluefog.broadcast_(X.clone(), n(1)),
    "broadcast, group": lambda: shoal.broadcast(X, own_group()[0] & ~1, group=own_group()),
    "grouped_broadcast": lambda: shoal.grouped_broadcast([X], n(1)),
    "allgather": lambda: shoal.allgather(X, group=own_group()),
    "grouped_allgather": lambda: shoal.grouped_allgather([X], group=own_group()),
    "barrier": lambda: shoal.barrier(group=own_group()),
    "broadcast_object": lambda: shoal.broadcast_object({1: 2}, n(1)),
    "broadcast_parameters": lambda: shoal.broadcast_parameters({"x": X.clone()}, n(1)),
    "allreduce_parameters": lambda: shoal.bluefog.allreduce_parameters({"x": X.clone()}, group=own_group()),
    "broadcast_optimizer_state": lambda: shoal.bluefog.broadcast_optimizer_state(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), n(1)
    ),
    "InferSourceFromDestinationRanks": lambda: shoal.bluefog.InferSourceFromDestinationRanks([ahead()]),
    "InferDestinationFromSourceRanks": lambda: shoal.bluefog.InferDestinationFromSourceRanks(
        np.array([previous_rank()])
    ),
    "dynamic": lambda: shoal.neighbor_allreduce(
        X,
        0.5,
        **dict(
            zip(
                ("dst_weights", "src_weights"),
                ([r[0]] if not i else {r[0]: 0.5} for i, r in enumerate(_next())),
                strict=True,
            )
        ),
    ),
    "Mixing": lambda: shoal.topology.Mixing.from_graph(shoal.topology.RingGraph(SIZE), n(shoal.rank())),
    "GetRecvWeights": lambda: shoal.topology.GetRecvWeights(shoal.topology.RingGraph(SIZE), n(shoal.rank())),
    "GetSendWeights": lambda: shoal.topology.GetSendWeights(shoal.topology.RingGraph(SIZE), n(shoal.rank())),
    "set_topology": lambda: shoal.set_topology(numpy_graph(), is_weighted=True),
    "hvd": lambda: [hvd.broadcast(X, n(1)), hvd.broadcast_object([1], n(1)), hvd.alltoall(X[:0], [n(0)] * SIZE)],
    "ProcessSet": lambda: hvd.remove_process_set(hvd.add_process_set(np.array([3, 1]))),  # type: ignore[arg-type]
}


def _next() -> tuple[list[Any], list[Any]]:
    """A round of BlueFog's dynamic graph, of an agent that calls itself by numpy's number."""
    result = shoal.topology.GetDynamicOnePeerSendRecvRanks(shoal.topology.RingGraph(SIZE), n(shoal.rank()))
    send, receive = next(iter(result))
    return [n(one) for one in send], [n(one) for one in receive]


def numpy_graph() -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(np.arange(SIZE))
    graph.add_weighted_edges_from((n(index), n((index + 1) % SIZE), HALF) for index in range(SIZE))
    return graph


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_accepts_them(operation: Op) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        operation()
        assert shoal.allreduce(X).tolist() == [1.0] * 3

    shoal.Fleet(SIZE, timeout=10.0).run(run)


def test_operations_between_machines_accept_them() -> None:
    def run() -> None:
        shoal.bluefog.set_machine_topology(shoal.topology.RingGraph(2))
        other = n(1 - shoal.bluefog.machine_rank())
        result = shoal.bluefog.hierarchical_neighbor_allreduce(X, 0.5, {other: HALF}, {other: 1.0})
        assert result.tolist() == [1.0] * 3
        assert shoal.bluefog.hierarchical_neighbor_allreduce(X, 0.5, {other: 0.5}, [other]).tolist() == [1.0] * 3

    shoal.Fleet(SIZE, agents_per_machine=2, timeout=10.0).run(run)


def test_windows_accept_them() -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        x = torch.ones(3)
        assert bf.win_create(x, "w")
        both = {previous_rank(): HALF, ahead(): HALF}
        assert bf.win_put(x, "w", 1.0, both)
        assert bf.win_accumulate(x, "w", 1.0, both)
        assert bf.win_get("w", both)
        shoal.barrier()
        bf.win_update("w", 0.5, dict.fromkeys(both, HALF / 2))
        assert set(bf.get_win_version("w")) == {int(rank) for rank in both}
        with bf.win_mutex("w", ranks=[ahead()]):
            pass
        window = shoal.windows.create(torch.ones(2), "v")
        window.put(dst_weights={ahead(): HALF})
        window.put_nonblocking(dst_weights={ahead(): HALF}).wait()
        shoal.barrier()
        window.free()
        bf.win_free("w")

    shoal.Fleet(SIZE, timeout=10.0).run(run)


def test_an_optimizer_accepts_them() -> None:
    def run() -> None:
        model = torch.nn.Linear(2, 1)
        shoal.broadcast_parameters(model.state_dict(), n(0))
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        optimizer.self_weight = HALF
        optimizer.src_weights = {previous_rank(): HALF / 2, ahead(): HALF / 2}
        optimizer.dst_weights = np.array([ahead(), previous_rank()])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.close()

    shoal.Fleet(SIZE, timeout=10.0).run(run)


NO_RANKS: dict[str, Op] = {
    "root_rank": lambda: shoal.broadcast(X, True),
    "target_rank": lambda: shoal.pair_gossip(X, True),
    "group": lambda: shoal.allreduce(X, group=[False, True]),
    "src_ranks": lambda: shoal.neighbor_allgather(X, src_ranks=[True], dst_ranks=[True]),
    "src_weights": lambda: shoal.neighbor_allreduce(X, 0.5, {True: 0.5}, {True: 0.5}),
    "dst_weights": lambda: shoal.neighbor_allreduce(X, 0.5, dst_weights=[np.True_]),  # type: ignore[list-item]
    "ranks": lambda: shoal.neighbor_alltoall(X[:1], [np.True_]),  # type: ignore[list-item]
    "a fraction": lambda: shoal.broadcast(X, np.float64(1.0)),  # type: ignore[arg-type]
    "ProcessSet": lambda: hvd.ProcessSet([True, False]),
    "splits": lambda: hvd.alltoall(torch.ones(SIZE), [True] * SIZE),
}


@pytest.mark.parametrize("operation", NO_RANKS.values(), ids=NO_RANKS)
def test_invalid_ranks_are_refused(operation: Op) -> None:
    def run() -> None:
        with pytest.raises((TypeError, ValueError), match=r"True|False|True_|1\.0"):
            operation()

    shoal.Fleet(SIZE, timeout=10.0).run(run)
