"""An object with ``__index__`` is a rank and one with ``__float__`` a weight, in every operation; no other is."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

import shoal
from shoal.topology import Mixing
from shoal.topology.families.static import Circulant

Fleets = Callable[..., shoal.Fleet]


class Index:
    """A whole number of somebody's own."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


RANKS: dict[str, Callable[[int], Any]] = {
    "numpy": np.int64,
    "numpy unsigned": np.uint8,
    "tensor": torch.tensor,
    "own": Index,
}
WEIGHTS: dict[str, Callable[[float], Any]] = {
    "numpy": np.float32,
    "array": np.array,
    "tensor": torch.tensor,
    "fraction": Fraction,
    "decimal": Decimal,
    "parameter": lambda value: torch.nn.Parameter(torch.tensor(value)),
}
every_rank = pytest.mark.parametrize("rank_of", RANKS.values(), ids=RANKS)
every_weight = pytest.mark.parametrize("weight_of", WEIGHTS.values(), ids=WEIGHTS)


@every_rank
def test_every_operation_accepts_ranks_with_an_index_method(fleet: Fleets, rank_of: Callable[[int], Any]) -> None:
    def run() -> None:
        rank = shoal.rank()
        x, other = torch.full((2,), float(rank)), rank_of(1 - rank)
        remote, mean = [1.0 - rank] * 2, [0.5, 0.5]
        assert shoal.neighbor_allgather(x, src_ranks=[other], dst_ranks=[other]).tolist() == remote
        assert shoal.neighbor_alltoall(x.view(1, 2), [other]).tolist() == [remote]
        assert shoal.pair_gossip(x, other).tolist() == mean
        assert shoal.neighbor_allreduce(x, 0.5, {other: 0.5}, [other]).tolist() == mean
        assert shoal.bluefog.hierarchical_neighbor_allreduce(x, 0.5, {other: 0.5}, [other]).tolist() == mean
        assert shoal.broadcast(x, rank_of(1)).tolist() == [1.0, 1.0]
        assert shoal.broadcast_object(rank, rank_of(1)) == 1
        assert shoal.bluefog.InferSourceFromDestinationRanks([other]) == [1 - rank]
        shoal.bluefog.win_create(x.clone(), "w", zero_init=True)
        shoal.bluefog.win_put(x, "w", dst_weights={other: 1.0})
        shoal.barrier()
        assert shoal.bluefog.win_update("w", 0.5, {other: 0.5}).tolist() == mean
        with shoal.bluefog.win_mutex("w", ranks=[other]):
            pass
        shoal.barrier()
        shoal.bluefog.win_free()

    fleet(rank_of(2), agents_per_machine=rank_of(1)).run(run)


@every_weight
def test_every_operation_accepts_weights_with_a_float_method(fleet: Fleets, weight_of: Callable[[float], Any]) -> None:
    half, quarter = weight_of(0.5), weight_of(0.25)

    def run() -> None:
        rank, other = shoal.rank(), 1 - shoal.rank()
        x = torch.full((2,), float(rank))
        mean = [0.5, 0.5]
        assert shoal.neighbor_allreduce(x, half, {other: half}).tolist() == mean
        assert shoal.neighbor_allreduce(x, half, dst_weights={other: half}).tolist() == mean
        assert shoal.pair_gossip(x, other, half, half).tolist() == mean
        shoal.bluefog.win_create(x.clone(), "w", zero_init=True)
        shoal.bluefog.win_put(x, "w", dst_weights={other: half})
        shoal.barrier()
        assert shoal.bluefog.win_update("w", quarter, {other: half}, clone=True).tolist() == [0.25] * 2
        shoal.bluefog.win_free()
        graph = nx.DiGraph()
        graph.add_weighted_edges_from((j, i, half) for j in (0, 1) for i in (0, 1))
        shoal.set_topology(graph, is_weighted=True)
        assert shoal.neighbor_allreduce(x).tolist() == mean

    fleet(2).run(run)


@pytest.mark.parametrize(
    "bad", [1.0, np.float64(1.0), torch.tensor(1.0), True, np.True_, torch.tensor(True), "1", None]
)
def test_non_integers_are_refused_as_ranks(bad: Any) -> None:
    with pytest.raises(TypeError, match="source must be an int, got"):
        Mixing(0, 0.5, {bad: 0.5})
    with pytest.raises(TypeError, match="hop must be an int, got"):
        Circulant(4, {bad: 1.0})
    with pytest.raises(ValueError, match="must be a positive integer"):
        shoal.Fleet(bad)


@pytest.mark.parametrize(
    "bad",
    [
        True,
        np.True_,
        torch.tensor(True),
        1j,
        np.complex64(1),
        "1",
        np.str_("1"),
        None,
        [0.5],
        torch.ones(2),
        np.ones(2),
    ],
)
def test_non_real_numbers_are_refused_as_weights(bad: Any) -> None:
    with pytest.raises(TypeError, match="the weight of source 1 must be a real number, got"):
        Mixing(0, 0.5, {1: bad})
    with pytest.raises(TypeError, match="the weight of hop 1 must be a real number, got"):
        Circulant(4, {0: 0.5, 1: bad})


@pytest.mark.parametrize("bad", [float("nan"), np.float32("inf"), torch.tensor(float("nan")), Decimal("inf"), 10**400])
def test_non_finite_weights_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"the weight of source 1 is .* must be finite"):
        Mixing(0, 0.5, {1: bad})


def test_integers_of_a_window_keep_all_their_digits(fleet: Fleets) -> None:
    large = (1 << 60) + 1

    def run() -> list[int]:
        x = torch.ones(1, dtype=torch.int64)
        shoal.bluefog.win_create(x, "w")
        shoal.bluefog.win_put(x, "w", dst_weights={1 - shoal.rank(): large})
        shoal.barrier()
        return shoal.bluefog.win_update("w", 0, {1 - shoal.rank(): 1}, clone=True).tolist()

    assert fleet(2).run(run) == [[large]] * 2
