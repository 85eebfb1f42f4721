"""The random numbers of algorithms: even, independent, and the same wherever an agent runs.

That a real agent draws what its row of a stacked fleet does is seen in test_mix.
"""

from __future__ import annotations

import pytest
import torch

from shoal.compression.random_numbers import HashStream, hashed
from shoal.sim import StackedMix
from shoal.topology.families.static import ring

SIZE = 8


def uniform(seed: int = 0, round_: int = 0, draws: int = 1, shape: tuple[int, ...] = (SIZE, 1000)) -> torch.Tensor:
    mix = StackedMix(ring(shape[0]), seed)
    mix.begin(round_)
    like = torch.empty(shape, dtype=torch.float64)
    return [mix.uniform(like) for _ in range(draws)][-1]


def test_uniform_numbers_are_evenly_distributed_over_zero_to_one() -> None:
    drawn = uniform(shape=(100, 1000)).flatten()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # Five standard deviations each; the numbers are the same in every run.
    assert abs(drawn.mean().item() - 0.5) < 5 * (1 / 12 / 1e5) ** 0.5
    assert abs(drawn.var().item() - 1 / 12) < 5 * (1 / 180 / 1e5) ** 0.5
    tenths = torch.histc(drawn, 10, 0.0, 1.0)
    assert (tenths - 1e4).abs().max() < 5 * (1e5 * 0.1 * 0.9) ** 0.5


def test_agents_positions_rounds_draws_and_seeds_are_independent() -> None:
    own = uniform()
    others = {
        "agent": own.roll(1, 0),
        "place": own.roll(1, 1),
        "agent and place": own.roll((1, 1), (0, 1)),
        "agent against place": own.roll((1, -1), (0, 1)),
        "round": uniform(round_=1),
        "draw": uniform(draws=2),
        "seed": uniform(seed=1),
        "draw against round": uniform(round_=1, draws=2),
        "seed against round": uniform(seed=1, round_=1),
    }
    for what, drawn in others.items():
        assert not (drawn == own).any(), what
        correlation = torch.corrcoef(torch.stack([own.flatten(), drawn.flatten()]))[0, 1].item()
        assert abs(correlation) < 5 / own.numel() ** 0.5, what


def test_no_number_repeats_in_a_long_run() -> None:
    """There are 2^53 of them, so a repetition among 800,000 would show a broken hash."""
    drawn = torch.cat([uniform(round_=number).flatten() for number in range(100)])
    assert len(drawn.unique()) == len(drawn)


def test_uniform_numbers_depend_only_on_seed_agent_round_draw_and_position() -> None:
    assert torch.equal(uniform(5, 3, 2), uniform(5, 3, 2))
    assert torch.equal(uniform(5, 3, 2)[:4, :10], uniform(5, 3, 2, (4, 10)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_of_shorter_dtypes_stay_below_one(dtype: torch.dtype) -> None:
    drawn = StackedMix(ring(SIZE)).uniform(torch.empty(SIZE, 200_000, dtype=dtype))
    assert drawn.dtype == dtype
    assert drawn.max() < 1
    assert drawn.min() >= 0
    assert abs(drawn.double().mean().item() - 0.5) < 0.005


def test_negative_and_large_seeds_are_accepted() -> None:
    results = [uniform(seed) for seed in (-1, 2**40, 0)]
    assert all(((one >= 0) & (one < 1)).all() for one in results)
    assert not any(torch.equal(results[a], results[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_slice_of_a_stream_equals_uniform(dtype: torch.dtype) -> None:
    """Also if it is longer than one block, starts anywhere, and is read in any order."""
    like = torch.empty((SIZE, 200_000), dtype=dtype)
    full, other = StackedMix(ring(SIZE), seed=3), StackedMix(ring(SIZE), seed=3)
    for _ in range(2):  # both count as a draw
        expected, stream = full.uniform(like), other.stream(like)
        for row, start, length in ((0, 0, 200_000), (7, 199_999, 1), (3, 65_000, 70_001), (0, 12, 0), (3, 1, 9)):
            result = stream.fill(row, start, torch.empty(length, dtype=dtype))
            assert torch.equal(result, expected[row, start : start + length])


@pytest.mark.parametrize("key", [0, -1, 2**30 - 1, -(2**63), 2**63 - 1, 7046029254386353131 - 5])
def test_the_hash_of_positions_is_that_of_their_sums_with_the_key(key: int) -> None:
    keys, like = torch.tensor([key]), torch.empty(70_000, dtype=torch.float64)
    stream = HashStream(keys, like)
    expected = (hashed(keys + torch.arange(70_000)) >> 11) & ((1 << 53) - 1)
    assert torch.equal(stream.fill(0, 0, like.clone()), expected.double() * 2.0**-53)
    assert torch.equal(stream.whole(), expected.double() * 2.0**-53)
