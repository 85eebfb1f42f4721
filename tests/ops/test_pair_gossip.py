"""pair_gossip: two agents average, and nobody else takes part."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import shoal
from support.reference import same_bits, weighted
from support.samples import sample

Fleets = Callable[..., shoal.Fleet]


@pytest.mark.parametrize("numel", [1, 9000])
def test_without_weights_both_get_the_mean(fleet: Fleets, numel: int) -> None:
    def run() -> torch.Tensor:
        return shoal.pair_gossip(sample(shoal.rank(), (numel,)), 3 - shoal.rank())

    for rank, result in enumerate(fleet(4).run(run)):
        expected = weighted(sample(rank, (numel,)), 0.5, {0: (0.5, sample(3 - rank, (numel,)))})
        assert same_bits(result, expected)


def test_each_side_uses_its_own_weights(fleet: Fleets) -> None:
    def run() -> float:
        weights = [(2, 3), (-1, 0.5)][shoal.rank()]
        return shoal.pair_gossip(torch.tensor(float(shoal.rank() + 1)), 1 - shoal.rank(), *weights).item()

    assert fleet(2).run(run) == [8.0, -1.5]


def test_a_random_order_of_pairs_preserves_the_sum(fleet: Fleets) -> None:
    """All agents know the schedule. Each takes part in its own pairs only, so their counts differ."""
    chance = random.Random(1)
    pairs = [tuple(chance.sample(range(5), 2)) for _ in range(40)]

    def run() -> float:
        x = torch.tensor(float(shoal.rank()), dtype=torch.float64)
        for pair in pairs:
            if shoal.rank() in pair:
                x = shoal.pair_gossip(x, pair[0] + pair[1] - shoal.rank())
        return x.item()

    results = fleet(5).run(run)
    assert sum(results) == pytest.approx(10.0)
    assert max(results) - min(results) < 1.0


def test_agents_outside_the_pair_need_not_call(fleet: Fleets) -> None:
    def run() -> float | None:
        if shoal.rank() == 2:
            return None
        return shoal.pair_gossip(torch.tensor(float(shoal.rank())), 1 - shoal.rank()).item()

    assert fleet(3).run(run) == [0.5, 0.5, None]


def test_nonblocking_pairs_match_by_name(fleet: Fleets) -> None:
    def run() -> list[float]:
        names = ["a", "b"] if shoal.rank() else ["b", "a"]
        x = torch.tensor(float(shoal.rank()))
        handles = {n: shoal.nonblocking.pair_gossip(x + ord(n), 1 - shoal.rank(), name=n) for n in names}
        return [handles[n].wait().item() - ord(n) for n in "ab"]

    assert fleet(2).run(run) == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("weights", [(0.5, None), (None, 0.5)])
def test_one_weight_alone_is_refused(fleet: Fleets, weights: tuple[float | None, float | None]) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="both self_weight and pair_weight"):
            shoal.pair_gossip(torch.ones(1), 1 - shoal.rank(), *weights)

    fleet(2).run(run)


@pytest.mark.parametrize(("target", "error"), [(0, ValueError), (2, ValueError), (-1, ValueError), (1.0, TypeError)])
def test_an_invalid_target_is_refused(fleet: Fleets, target: int, error: type[Exception]) -> None:
    def run() -> None:
        if shoal.rank() == 0:
            with pytest.raises(error):
                shoal.pair_gossip(torch.ones(1), target)

    fleet(2).run(run)
