"""Every agent takes as many samples, and over time every sample counts alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal

Fleets = Callable[..., shoal.Fleet]
SIZE, TOTAL = 3, 20
SHARDS = [[0], list(range(1, 4)), list(range(4, TOTAL))]
"""An epoch has 7 samples for each agent: one again and again, one twice and a little, one in parts."""


def epochs(sampler: shoal.data.AgentSampler, count: int) -> list[list[int]]:
    results = []
    for epoch in range(count):
        sampler.set_epoch(epoch)
        results.append(list(sampler))
    return results


def of_all(size: int, count: int, **options: Any) -> list[list[list[int]]]:
    """The samples of each agent in each epoch."""
    return shoal.Fleet(size).run(lambda: epochs(shoal.data.AgentSampler(range(TOTAL), **options), count))


def of_shards(count: int) -> list[list[list[int]]]:
    return shoal.Fleet(SIZE).run(lambda: epochs(shoal.data.AgentSampler(range(TOTAL), SHARDS[shoal.rank()]), count))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_common_dataset_is_distributed_evenly_without_duplicates(size: int) -> None:
    for dealt in zip(*of_all(size, 3), strict=True):
        assert {len(one) for one in dealt} == {TOTAL // size}
        everything = list(chain(*dealt))
        assert len(set(everything)) == len(everything) and set(everything) <= set(range(TOTAL))


def test_samples_left_over_in_one_epoch_are_used_in_another() -> None:
    result = of_all(SIZE, 10)
    left_over = [set(range(TOTAL)) - set(chain(*dealt)) for dealt in zip(*result, strict=True)]
    assert {len(one) for one in left_over} == {2} and len(set(map(frozenset, left_over))) > 1


def test_each_epoch_has_another_order_and_the_same_seed_the_same() -> None:
    first, second = of_all(2, 2, seed=5)[0]
    assert first != second
    assert of_all(2, 2, seed=5)[0] == [first, second]
    assert of_all(2, 2, seed=6)[0] != [first, second]
    assert of_all(2, 2, seed=6)[0][0] != second, "the seed is not merely added to the epoch"


def test_an_agents_samples_change_from_epoch_to_epoch() -> None:
    first, second = of_all(2, 2)[0]
    assert set(first) != set(second)


@pytest.mark.parametrize("size", [3, 8, 30])
def test_padding_duplicates_some_and_omits_none(size: int) -> None:
    for dealt in zip(*of_all(size, 2, pad=True), strict=True):
        assert {len(one) for one in dealt} == {-(-TOTAL // size)}
        counts = Counter(chain(*dealt))
        assert set(counts) == set(range(TOTAL)) and max(counts.values()) == 2


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    assert of_all(2, 2, shuffle=False) == [[list(range(0, TOTAL, 2))] * 2, [list(range(1, TOTAL, 2))] * 2]


def test_uneven_shards_contribute_equally_many_samples() -> None:
    for shard, result in zip(SHARDS, of_shards(4), strict=True):
        assert [len(one) for one in result] == [7] * 4
        assert set(chain(*result)) <= set(shard)


def test_a_shard_is_exhausted_before_it_repeats() -> None:
    for shard, result in zip(SHARDS, of_shards(16), strict=True):
        stream = list(chain(*result))
        passes = [stream[at : at + len(shard)] for at in range(0, len(stream), len(shard))]
        full = [one for one in passes if len(one) == len(shard)]
        assert all(sorted(one) == shard for one in full) and len(full) >= 7
        assert len(shard) < 3 or len(set(map(tuple, full))) > 1, "a pass is shuffled anew"


def test_an_epoch_is_computed_independently_of_earlier_ones() -> None:
    def run() -> bool:
        sampler = shoal.data.AgentSampler(range(TOTAL), SHARDS[shoal.rank()])
        third = epochs(sampler, 3)[2]
        sampler.set_epoch(2)
        return list(sampler) == third

    assert all(shoal.Fleet(SIZE).run(run))


def test_the_weighted_mean_over_agents_is_the_mean_over_all_samples(fleet: Fleets) -> None:
    """Exactly, over as many epochs as take each shard a whole number of times: 48 epochs of 7 samples."""
    values = torch.randn(TOTAL, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run() -> torch.Tensor:
        sampler = shoal.data.AgentSampler(range(TOTAL), torch.tensor(SHARDS[shoal.rank()]))
        own = torch.stack([values[epoch].mean() for epoch in epochs(sampler, 48)]).mean()
        return shoal.allreduce(sampler.weight * own)

    for mean in fleet(SIZE).run(run):
        assert mean.item() == pytest.approx(values.mean().item(), abs=1e-12)


def test_without_shards_the_weight_is_one() -> None:
    assert shoal.Fleet(SIZE).run(lambda: shoal.data.AgentSampler(range(TOTAL)).weight) == [1.0] * SIZE


@pytest.mark.parametrize("sharded", [False, True], ids=["common", "shards"])
@pytest.mark.parametrize("stop", [0, 1, 4, 6, 7, 9])
def test_the_sampler_resumes_within_an_epoch(sharded: bool, stop: int) -> None:
    """An epoch has 6 samples, or 7. ``set_epoch`` of the current epoch does not restart it."""

    def make() -> shoal.data.AgentSampler:
        return shoal.data.AgentSampler(range(TOTAL), SHARDS[shoal.rank()] if sharded else None)

    def run() -> None:
        full = list(chain(*epochs(make(), 4)))
        first, seen = make(), list[int]()
        for epoch in range(2):
            first.set_epoch(epoch)
            seen += islice(first, stop - len(seen))
            if len(seen) == stop:
                break
        second = make()
        second.load_state_dict(first.state_dict())
        for epoch in range(second.epoch, 4):
            second.set_epoch(epoch)
            seen += second
        assert seen == full

    shoal.Fleet(SIZE).run(run)


def test_epochs_advance_without_set_epoch() -> None:
    def run() -> bool:
        sampler = shoal.data.AgentSampler(range(TOTAL))
        return [list(sampler) for _ in range(3)] == epochs(shoal.data.AgentSampler(range(TOTAL)), 3)

    assert all(shoal.Fleet(2).run(run))


def test_an_interrupted_epoch_restarts() -> None:
    def run() -> None:
        sampler = shoal.data.AgentSampler(range(TOTAL))
        next(iter(sampler))
        assert list(sampler) == epochs(shoal.data.AgentSampler(range(TOTAL)), 1)[0]

    shoal.Fleet(2).run(run)


def test_the_start_may_be_set() -> None:
    def run() -> None:
        sampler = shoal.data.AgentSampler(range(TOTAL))
        full = epochs(sampler, 2)[1]
        sampler.set_epoch(1, start=4)
        assert sampler.state_dict()["position"] == 4
        assert list(sampler) == full[4:]

    shoal.Fleet(2).run(run)


def test_with_another_number_of_agents_a_common_dataset_continues_after_the_used_samples() -> None:
    data = range(24)

    def begin() -> tuple[list[int], dict[str, Any]]:
        sampler = shoal.data.AgentSampler(data)
        return list(islice(sampler, 3)), sampler.state_dict()

    before = shoal.Fleet(4).run(begin)
    state = before[0][1]

    def resume() -> list[int]:
        sampler = shoal.data.AgentSampler(data)
        sampler.load_state_dict(state)
        return list(sampler)

    after = shoal.Fleet(2).run(resume)
    used = [*chain(*(indices for indices, _ in before)), *chain(*after)]
    assert sorted(used) == list(data)


def test_a_state_of_other_data_is_refused() -> None:
    def run() -> None:
        state = shoal.data.AgentSampler(range(TOTAL)).state_dict()
        with pytest.raises(ValueError, match=r"10 samples .* now there are 11"):
            shoal.data.AgentSampler(range(TOTAL + 2)).load_state_dict(state)

    shoal.Fleet(2).run(run)


def test_a_resumed_run_keeps_its_order_with_another_seed() -> None:
    def run() -> None:
        first = shoal.data.AgentSampler(range(TOTAL), seed=5)
        second = shoal.data.AgentSampler(range(TOTAL))
        second.load_state_dict(first.state_dict())
        assert list(second) == list(first) != list(shoal.data.AgentSampler(range(TOTAL)))

    shoal.Fleet(2).run(run)


def test_a_data_loader_accepts_it() -> None:
    def run() -> tuple[int, int]:
        dataset = TensorDataset(torch.arange(TOTAL))
        sampler = shoal.data.AgentSampler(dataset, SHARDS[shoal.rank()])
        loader = DataLoader(dataset, batch_size=3, sampler=sampler)
        used = [number for [batch] in loader for number in batch.tolist()]
        assert used == epochs(shoal.data.AgentSampler(dataset, SHARDS[shoal.rank()]), 1)[0]
        return len(loader), len(list(loader))

    assert shoal.Fleet(SIZE).run(run) == [(3, 3)] * SIZE


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: shoal.data.AgentSampler(range(10 + rank)), "a dataset of the length: 1"),
        (lambda rank: shoal.data.AgentSampler(range(10), seed=rank), "seed"),
        (lambda rank: shoal.data.AgentSampler(range(10), range(5) if rank else None), "a shard: 0|a shard: 1"),
        (lambda rank: shoal.data.AgentSampler(range(10), shuffle=bool(rank)), "shuffle"),
        (lambda rank: shoal.data.AgentSampler(range(10), pad=bool(rank)), "pad"),
    ],
)
def test_agents_with_different_settings_raise_a_mismatch(
    fleet: Fleets, make: Callable[[int], object], message: str
) -> None:
    def run() -> None:
        with pytest.raises(shoal.Mismatch, match=message):
            make(shoal.rank())

    fleet(2).run(run)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: shoal.data.AgentSampler(range(10), range(rank)), r"ranks \[0\] are empty"),
        (lambda rank: shoal.data.AgentSampler(range(1)), "cannot be dealt out"),
        (lambda rank: shoal.data.AgentSampler(range(10), []), r"ranks \[0, 1\] are empty"),
        (lambda rank: shoal.data.AgentSampler(range(10), seed=-1), "AgentSampler: seed=-1"),
        (lambda rank: shoal.data.AgentSampler(range(10), seed=2**63), "seed=9223372036854775808 .* below"),
        (lambda rank: shoal.data.AgentSampler(range(10), seed=1.5), "AgentSampler: seed must be an int, got 1.5"),  # type: ignore[arg-type]
        (lambda rank: shoal.data.AgentSampler(range(10), torch.ones(2, 1).long()), r"shard has shape \[2, 1\]"),
    ],
)
def test_an_empty_dataset_and_invalid_arguments_are_errors(make: Callable[[int], object], message: str) -> None:
    def run() -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            make(shoal.rank())

    shoal.Fleet(2).run(run)


def test_a_shard_that_changes_later_does_not_change_the_samples() -> None:
    def run() -> tuple[list[int], list[int]]:
        shard = torch.arange(4)
        sampler = shoal.data.AgentSampler(range(100), shard, shuffle=False)
        before = list(sampler)
        shard.add_(50)
        return before, list(sampler)

    assert shoal.Fleet(2).run(run) == [([0, 1, 2, 3], [0, 1, 2, 3])] * 2


def counts_of(shards: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.bincount(labels[shard], minlength=10) for shard in shards]).double()


def test_random_shards_contain_every_sample_once_and_none_is_empty() -> None:
    labels = torch.arange(200) % 10
    for seed in range(20):
        shards = shoal.data.dirichlet_shards(labels, 50, alpha=0.05, seed=seed)
        assert sorted(chain(*(shard.tolist() for shard in shards))) == list(range(200))
        assert min(map(len, shards)) >= 1


def test_a_small_alpha_leaves_an_agent_few_labels_and_a_large_one_all() -> None:
    labels = torch.arange(2000) % 10
    few = counts_of(shoal.data.dirichlet_shards(labels, 8, alpha=0.05), labels)
    all_ = counts_of(shoal.data.dirichlet_shards(labels, 8, alpha=1e4), labels)
    assert (few.max(dim=0).values > 100).sum() >= 8, "most of a label is with one agent"
    assert (all_ - 25).abs().max() <= 3
    same = counts_of(shoal.data.dirichlet_shards(labels, 8, alpha=1e308), labels)
    assert (same - 25).abs().max() <= 1


def test_the_same_seed_gives_the_same_shards_on_every_agent() -> None:
    labels = [number % 3 for number in range(60)]
    first, second = shoal.Fleet(2).run(lambda: shoal.data.dirichlet_shards(labels, seed=1))
    assert len(first) == 2 and all(map(torch.equal, first, second))
    assert not torch.equal(first[0], shoal.data.dirichlet_shards(labels, 2, seed=2)[0])


@pytest.mark.parametrize(
    ("labels", "agents", "alpha", "message"),
    [
        ([0], 2, 0.5, "1 samples for 2 agents"),
        ([0, 1, 2], 0, 0.5, "3 samples for 0 agents"),
        ([0, 1, 2], 2, 0.0, "alpha=0.0 must be above 0"),
        ([0, 1, 2], 2, -1.0, "alpha=-1.0 must be above 0"),
        ([0, 1, 2], 2, float("inf"), "alpha=inf must be above 0 and finite"),
        ([0, 1, 2], 2, float("nan"), "alpha=nan must be above 0 and finite"),
    ],
)
def test_impossible_shards_are_refused(labels: list[int], agents: int, alpha: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"dirichlet_shards: {message}"):
        shoal.data.dirichlet_shards(labels, agents, alpha=alpha)


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (iter([0, 1, 2]), {}, "labels is a list_iterator; give a list or tensor"),
        (torch.zeros(10, 3), {}, r"labels is of shape \[10, 3\]; give a list or tensor of one label"),
        ([0, 1, 2], {"agents": 2.0}, "agents must be an int, got 2.0"),
        ([0, 1, 2], {"seed": -1}, "seed=-1 must be 0 or more"),
        ([0, 1, 2], {"seed": 0.5}, "seed must be an int, got 0.5"),
    ],
)
def test_invalid_arguments_of_shards_are_refused(labels: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^dirichlet_shards: {message}"):
        shoal.data.dirichlet_shards(labels, **{"agents": 2, **options})
