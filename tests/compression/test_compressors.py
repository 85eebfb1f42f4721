"""What each compressor promises: its error, its mean, its bytes, and that an agent and a fleet compress alike."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import shoal
from shoal.algorithms import Exchange
from shoal.compression import QSGD, Compressor, Identity, MinMaxUInt8, RandomK, Shrunk, Sign, TopK
from shoal.compression.random_numbers import _between_0_and_1
from shoal.sim.stacked import StackedMix
from shoal.topology.families.static import ring

ALL: list[Compressor] = [
    Identity(),
    TopK(0.25),
    RandomK(0.25),
    RandomK(0.25, scaled=True),
    QSGD(),
    QSGD(7),
    QSGD(7, "euclidean"),
    QSGD(7, chunk=9),
    Sign(),
    MinMaxUInt8(),
    MinMaxUInt8(chunk=3),
    MinMaxUInt8(dyadic=True),
    Shrunk(QSGD(7)),
]
every_compressor = pytest.mark.parametrize("compressor", ALL, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
SAMPLES = 20_000


def mix(agents: int, round_: int = 0) -> StackedMix:
    made = StackedMix(ring(agents), seed=11)
    made.begin(round_)
    return made


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(dtype)


def energy(x: torch.Tensor) -> float:
    return float(x.square().sum())


# Numbers whose squares neither vanish nor overflow.
numbers = st.one_of(st.just(0.0), st.floats(1e-100, 1e100), st.floats(-1e100, -1e-100))
vectors = st.lists(numbers, min_size=1, max_size=24).map(lambda row: torch.tensor([row], dtype=torch.float64))


@given(vectors, st.sampled_from([one for one in ALL if not one.unbiased and not isinstance(one, RandomK | Shrunk)]))
def test_a_deterministic_contraction_is_within_its_stated_error(x: torch.Tensor, compressor: Compressor) -> None:
    error = energy(compressor(x, mix(1)) - x)
    assert error <= energy(x) * (1 + 1e-12)
    if isinstance(compressor, MinMaxUInt8) and any(
        float(part.max() - part.min()) < 1e-7 for part in x[0].split(compressor.chunk or 24)
    ):
        return  # in it small numbers become zero
    assert error <= (1 - compressor.delta(x.shape[-1])) * energy(x) * (1 + 1e-12)


@given(vectors, st.integers(0, 1000))
def test_random_k_never_increases_the_error(x: torch.Tensor, round_: int) -> None:
    assert energy(RandomK(0.25)(x, mix(1, round_)) - x) <= energy(x)


@pytest.mark.parametrize(
    "compressor",
    [
        RandomK(0.25),
        RandomK(0.75, scaled=True),
        QSGD(7),
        QSGD(7, "euclidean"),
        QSGD(3, "euclidean", chunk=7),
        Shrunk(QSGD(1)),
        Shrunk(RandomK(0.25, True)),
    ],
    ids=str,
)
def test_a_random_contraction_is_within_its_stated_mean_error(compressor: Compressor) -> None:
    x = normal(12)
    failed = (compressor(x.expand(SAMPLES, -1), mix(SAMPLES)) - x).square().sum(-1) / energy(x)
    # Hoeffding: the mean of numbers between 0 and their largest is off by more with a chance below 1e-9.
    margin = float(failed.max()) * math.sqrt(math.log(1e9) / (2 * SAMPLES))
    assert 0 < float(failed.mean()) <= 1 - compressor.delta(12) + margin


@pytest.mark.parametrize("norm", ["max", "euclidean"])
@pytest.mark.parametrize("levels", [1, 2, 7])
def test_qsgd_is_within_omega_on_its_worst_case(levels: int, norm: Literal["max", "euclidean"]) -> None:
    """One large number, and many of the size at which the relative error is largest."""
    d, compressor = 400, QSGD(levels, norm)
    worst = 0.0
    for small in (0.001, 0.01, 0.03, 0.1, 0.3, 1.0):
        x = torch.full((1, d), small, dtype=torch.float64)
        x[0, 0] = 1.01  # its step is the next power of two above
        failed = (compressor(x.expand(500, -1), mix(500)) - x).square().sum(-1).mean() / energy(x)
        worst = max(worst, float(failed))
    assert 0.2 * compressor.omega(d) < worst <= 1.05 * compressor.omega(d)


@pytest.mark.parametrize("norm", ["max", "euclidean"])
@pytest.mark.parametrize("d", [7, 8, 9, 15, 16, 17])
def test_each_chunk_has_its_own_step_also_a_short_last_one(d: int, norm: Literal["max", "euclidean"]) -> None:
    """Every number is a multiple of its chunk's step, so none is rounded."""
    x = torch.full((1, d), 0.25, dtype=torch.float64)
    x[:, 8:16], x[:, 16:] = 1024.0, 2.0**-20
    full, chunked = QSGD(64, norm), QSGD(64, norm, chunk=8)
    assert torch.equal(chunked(x, mix(1)), x)
    assert torch.equal(chunked.decode(chunked.encode(x, mix(1)), d, x.dtype, mix(1)), x)
    assert torch.equal(full(x, mix(1)), x) == (d <= 8)


def test_shrunk_is_for_unbiased_compressors_with_a_known_error() -> None:
    with pytest.raises(ValueError, match=r"TopK\(share=0\.1\) is biased"):
        Shrunk(TopK(0.1))

    class Unknown(Identity):
        def omega(self, d: int) -> float:
            return math.inf

    with pytest.raises(ValueError, match="no omega is known"):
        Shrunk(Unknown())(normal(1, 3), mix(1))


def test_random_k_has_the_error_of_the_lemmas() -> None:
    x = normal(12)
    for compressor, expected in ((RandomK(0.25), 1 - 0.25), (RandomK(0.25, scaled=True), 1 / 0.25 - 1)):
        failed = (compressor(x.expand(SAMPLES, -1), mix(SAMPLES)) - x).square().sum(-1) / energy(x)
        margin = float(failed.max()) * math.sqrt(math.log(1e9) / (2 * SAMPLES))
        assert float(failed.mean()) == pytest.approx(expected, abs=margin)


@every_dtype
@pytest.mark.parametrize("compressor", [one for one in ALL if one.unbiased], ids=str)
def test_the_mean_of_an_unbiased_compressor_is_the_vector(compressor: Compressor, dtype: torch.dtype) -> None:
    x = normal(12, dtype=dtype)
    drawn = compressor(x.expand(SAMPLES, -1), mix(SAMPLES)).double()
    # Hoeffding, for each number: what it can be lies within the range that was seen.
    margin = (drawn.amax(0) - drawn.amin(0)) * math.sqrt(math.log(1e9) / (2 * SAMPLES))
    assert ((drawn.mean(0) - x).abs() <= margin + 1e-12).all()


class EvenDraws:
    """Random numbers that have every share of [0, 1) equally often, one for each row."""

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        bits = ((torch.arange(len(like), dtype=torch.float64) + 0.5) * (2**53 / len(like))).long()
        return _between_0_and_1(bits, torch.empty(len(like), dtype=like.dtype))[:, None].expand(like.shape)


@given(
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.floats(-1.0, 1.0, width=32),
    st.integers(0, 20),
    st.sampled_from([1, 7, 100, 127]),
)
@example(torch.bfloat16, -1.0, 15, 127)  # far below a step: rounded to a multiple, it would always become zero
@example(torch.bfloat16, 0.99609375, 0, 127)  # 127.5 steps: the largest multiple has to be above it
def test_qsgd_of_16_bits_has_no_bias(dtype: torch.dtype, share: float, halvings: int, levels: int) -> None:
    """The mean over all random numbers, to the distance of two of them. The largest number of the vector is 128."""
    count = 1 << 13
    x = torch.tensor([128.0 * share * 0.5**halvings, 128.0], dtype=torch.float64).to(dtype)
    empirical_mean = QSGD(levels)(x.expand(count, -1), EvenDraws()).double().mean(0)
    assert ((empirical_mean - x.double()).abs() <= 256 / levels / count).all(), (empirical_mean - x.double()).tolist()


@pytest.mark.parametrize(("levels", "scale"), [(127, 3e-6), (1000, 1e-5), (1 << 26, 1e-3)])
def test_a_step_that_float16_would_round_to_zero_is_its_smallest_number(levels: int, scale: float) -> None:
    x = (scale * normal(2, 40).clamp(-1, 1)).to(torch.float16)
    compressor = QSGD(levels)
    assert torch.equal(compressor(x, mix(2)), x)
    message = compressor.encode(x, mix(2))
    assert torch.equal(compressor.decode(message, 40, torch.float16, mix(2)), x)


@pytest.mark.parametrize("levels", [1 << 17, 1 << 26])
def test_more_levels_than_float16_has_numbers_cut_nothing_off(levels: int) -> None:
    x = normal(2, 40).clamp(-1, 1).to(torch.float16)
    assert (QSGD(levels)(x, mix(2)).double() - x.double()).abs().max() <= 2**-15


@every_compressor
def test_a_vector_without_numbers_loses_nothing(compressor: Compressor) -> None:
    assert compressor.omega(0) == 0


def test_compressors_declared_biased_are_biased() -> None:
    x = normal(12)
    for compressor in ALL:
        if not compressor.unbiased:
            drawn = compressor(x.expand(SAMPLES, -1), mix(SAMPLES))
            assert (drawn.mean(0) - x).abs().max() > 1e-4, compressor


@every_compressor
@every_dtype
def test_an_agent_compresses_its_row_as_the_fleet_does(compressor: Compressor, dtype: torch.dtype) -> None:
    rows = normal(4, 37, dtype=dtype)

    def on_agent() -> list[float]:
        exchange = Exchange(ring(4), seed=11)
        exchange.begin(5)
        return [float(one) for one in compressor(rows[shoal.rank()], exchange)]

    results = torch.tensor(shoal.Fleet(4).run(on_agent), dtype=torch.float64)
    together = compressor(rows, mix(4, 5))
    assert together.dtype == dtype
    assert torch.equal(results, together.double())


@every_compressor
@every_dtype
def test_zeros_stay_zeros(compressor: Compressor, dtype: torch.dtype) -> None:
    zeros = torch.zeros(3, 8, dtype=dtype)
    assert torch.equal(compressor(zeros, mix(3)), zeros)


@every_compressor
@every_dtype
def test_a_single_number_can_be_compressed(compressor: Compressor, dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0], [-3.0]], dtype=dtype)
    result = compressor(x, mix(2))
    assert result.shape == x.shape
    # A power of two next to it, or a step of at most an eighth of it.
    assert ((result / x >= 2 / 3) & (result / x <= 4 / 3)).all()


@every_compressor
def test_the_argument_is_not_changed(compressor: Compressor) -> None:
    x = normal(3, 9)
    before = x.clone()
    compressor(x, mix(3))
    assert torch.equal(x, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_compressor
def test_non_finite_values_stay_in_their_row(compressor: Compressor, bad: float) -> None:
    x = normal(64, 8)
    clean = compressor(x, mix(64))
    x[::2, 5] = bad
    result = compressor(x, mix(64))
    seen = ~result.isfinite().all(-1)
    assert torch.equal(result[1::2], clean[1::2])
    if isinstance(compressor, RandomK):
        assert torch.equal(seen[::2], clean[::2, 5] != 0)  # where it was drawn
        assert seen.any()
    else:
        assert seen[::2].all()


def test_top_k_takes_the_first_of_equal_values() -> None:
    x = torch.tensor([[1.0, -2.0, 2.0, 2.0, -1.0, 2.0]])
    assert TopK(0.5)(x, mix(1)).tolist() == [[0.0, -2.0, 2.0, 2.0, 0.0, 0.0]]


@given(vectors, st.floats(0.01, 1.0))
def test_top_k_takes_the_largest(x: torch.Tensor, share: float) -> None:
    d = x.shape[-1]
    count = max(1, round(share * d))
    places = sorted(range(d), key=lambda place: (-abs(float(x[0, place])), place))[:count]
    expected = torch.zeros_like(x)
    expected[0, places] = x[0, places]
    assert torch.equal(TopK(share)(x, mix(1)), expected)


def test_random_k_sends_its_number_of_entries_at_changing_positions() -> None:
    first, second = (RandomK(0.3)(torch.ones(50, 10), mix(50, round_)) for round_ in (0, 1))
    assert (first.sum(-1) == 3).all()
    assert not torch.equal(first, second)
    assert len(first.unique(dim=0)) > 25


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_random_k_sends_every_position_equally_often(dtype: torch.dtype) -> None:
    """And the same positions of all dtypes with 32 bits or fewer, also by its wire format."""
    agents, d, share = 500, 1000, 0.004
    compressor, x = RandomK(share), torch.ones(agents, d, dtype=dtype)
    sent = compressor(x, mix(agents))
    assert torch.equal(compressor.decode(compressor.encode(x, mix(agents)), d, dtype, mix(agents)), sent)
    if dtype != torch.float64:
        assert torch.equal(sent.float(), compressor(x.float(), mix(agents)))
    # Each of ten parts of the vector has a tenth of the places: 200 are expected, with a standard deviation of 13.
    assert (sent.double().view(agents, 10, -1).sum((0, 2)) - 200).abs().max() < 6 * 13.5


def test_random_k_draws_pairs_of_positions_independently() -> None:
    """The positions of an agent do not determine those of another agent or of another round."""
    d, count = 200, 40
    first = RandomK(count / d)(torch.ones(400, d), mix(400, 0))
    second = RandomK(count / d)(torch.ones(400, d), mix(400, 1))
    expected = count * count / d  # places that two messages have in common; its variance is 5.1
    for one, other in ((first[:-1], first[1:]), (first, second)):
        common = (one * other).sum(-1)
        assert abs(float(common.mean()) - expected) < 6 * math.sqrt(5.2 / len(common))
        assert 3.5 < float(common.var()) < 7


def test_qsgd_gives_multiples_of_a_power_of_two_next_to_the_number() -> None:
    x = normal(50, 30)
    step = 2.0 ** torch.log2(x.abs().amax(-1, keepdim=True) / 127).ceil()
    result = QSGD(127)(x, mix(50))
    assert torch.equal(result / step, (result / step).round())
    assert ((result - x).abs() < step).all()
    assert ((result / step).abs() <= 127).all()


def test_qsgd_keeps_multiples_of_its_step() -> None:
    x = torch.randint(-127, 128, (20, 30), generator=torch.Generator().manual_seed(1)).double()
    x[:, 0] = 127
    assert torch.equal(QSGD(127)(x, mix(20)), x)


def test_sign_has_one_magnitude_the_power_of_two_nearest_to_the_mean() -> None:
    x = normal(50, 30)
    mean = x.abs().mean(-1, keepdim=True)
    result = Sign()(x, mix(50))
    magnitude = result.abs().amax(-1, keepdim=True)
    assert torch.equal(result, magnitude * torch.where(x < 0, -1.0, 1.0))
    assert torch.equal(torch.log2(magnitude), torch.log2(magnitude).round())
    assert ((magnitude / mean >= 2 / 3) & (magnitude / mean <= 4 / 3)).all()


@every_dtype
@pytest.mark.parametrize("chunk", [None, 7, 30])
def test_min_max_is_within_half_a_step_and_keeps_the_maximum(chunk: int | None, dtype: torch.dtype) -> None:
    x = normal(50, 30, dtype=dtype)
    result = MinMaxUInt8(chunk)(x, mix(50))
    for part, own in zip(x.split(chunk or 30, -1), result.split(chunk or 30, -1), strict=True):
        width = part.amax(-1, keepdim=True) - part.amin(-1, keepdim=True) + 1e-7
        assert ((own - part).abs() <= width / 510 * (1 + 1e-4)).all()


def kernel_of_bagua(x: np.ndarray) -> tuple[np.ndarray, bool]:
    """The decoded float32 or float16 vector, and whether all its codes fit into a byte, as BAGUA's kernel needs."""
    wide = x.astype(np.float32)
    least, greatest = wide.min(), wide.max()
    width = np.float32(np.float32(greatest - least) + np.float32(1e-7))
    scale = np.float32(np.float64(255) / np.float64(width))
    top = np.rint(greatest * scale)
    bottom = np.float32(np.float64(top) - 255)
    code = np.minimum(np.rint(wide * scale), top) - bottom
    fits = bool(((code >= 0) & (code <= 255)).all())
    return ((np.clip(code, 0, 255) + bottom) / scale).astype(x.dtype), fits


def many_vectors(dtype: type) -> list[np.ndarray]:
    """Of many lengths, sizes and distances from zero; constants; numbers that are nearly zero."""
    draw = np.random.default_rng(3)
    sizes = (1e-9, 1e-6, 1e-3, 1.0, 50.0, *([] if dtype == np.float16 else [1e4, 1e9]))
    results = [
        draw.normal(offset, 1, length) * size
        for size in sizes
        for offset in (0.0, 0.1, 3.0, -40.0, 500.0)
        for length in (1, 2, 5, 30, 200)
        for _ in range(8)
    ]
    results += [np.full(7, one) for one in (0.0, 1.0, -1.0, 0.1, -0.3, 1e-7, 3.0, 1e4)]
    results += [
        np.array([5e-8, -5e-8, 1e-8]),
        np.arange(256.0),
        np.arange(-128.0, 128.0) / 255,
        np.array([0.5, -254.5]),
    ]
    if dtype == np.float32:
        results += [draw.normal(size=20) * 1e-40, np.array([1e-45, 0.0, -1e-45]), np.array([1e30, -1e30, 1.0, 0.0])]
    return [one.astype(dtype) for one in results]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_min_max_is_the_kernel_of_bagua_bit_for_bit(dtype: type) -> None:
    vectors, fitted = many_vectors(dtype), 0
    for x in vectors:
        expected, fits = kernel_of_bagua(x)
        result = MinMaxUInt8()(torch.from_numpy(x.copy()).unsqueeze(0), mix(1))
        # Zero has one sign where it travels as a byte.
        assert result.numpy()[0].tobytes() == expected.tobytes(), (x, result, expected)
        fitted += fits
    assert fitted > 0.95 * len(vectors)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=24))
def test_min_max_is_the_kernel_of_bagua_on_any_vector(row: list[float]) -> None:
    x = np.array(row, dtype=np.float32)
    result = MinMaxUInt8()(torch.from_numpy(x.copy()).unsqueeze(0), mix(1))
    assert result.numpy()[0].tobytes() == kernel_of_bagua(x)[0].tobytes()


def test_dyadic_min_max_has_a_power_of_two_for_a_step() -> None:
    x = normal(50, 30)
    width = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    step = 2.0 ** -torch.log2(254 / width).floor()
    result = MinMaxUInt8(dyadic=True)(x, mix(50))
    codes = result / step
    assert torch.equal(codes, (x / step).round())
    assert (codes.amax(-1) - codes.amin(-1) <= 255).all()


def test_the_bytes_are_those_of_the_message() -> None:
    assert Identity().nbytes(1000, torch.float32) == 4000
    assert TopK(0.5).nbytes(1000, torch.float64) == 500 * 8 + 125  # a bit for each place
    assert TopK(0.2).nbytes(1000, torch.float64) == 200 * 8 + 50 + 57  # two bits each, and 200 + 249 bits
    assert TopK(0.01).nbytes(1000, torch.float64) == 10 * 8 + 8 + 4  # six bits each, and 10 + 15 bits
    assert TopK(1.0).nbytes(1000, torch.float64) == 1000 * 8
    assert RandomK(0.2).nbytes(1000, torch.float32) == 200 * 4
    assert QSGD(127).nbytes(1000, torch.float32) == 1000 + 4
    assert QSGD(7).nbytes(1001, torch.float32) == 501 + 4
    assert QSGD(7, chunk=64).nbytes(1001, torch.float32) == 501 + 16 * 4
    assert QSGD(1).nbytes(1000, torch.float32) == 250 + 4
    assert Sign().nbytes(1001, torch.float16) == 126 + 2
    assert MinMaxUInt8().nbytes(1000, torch.float32) == 1000 + 8
    assert MinMaxUInt8(chunk=300).nbytes(1000, torch.float32) == 1000 + 4 * 8


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, math.nan])
def test_an_invalid_share_is_refused(share: float) -> None:
    for make in (TopK, RandomK):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            make(share)


def test_invalid_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="levels=0"):
        QSGD(0)
    with pytest.raises(ValueError, match="norm='one'"):
        QSGD(norm="one")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk=0"):
        MinMaxUInt8(chunk=0)
    with pytest.raises(ValueError, match=r"eps=0\.0"):
        MinMaxUInt8(eps=0.0)


@pytest.mark.parametrize("norm", ["max", "euclidean"])
def test_each_chunk_is_quantised_independently(norm: Literal["max", "euclidean"]) -> None:
    """Like a vector of its own, with the draws of its positions."""
    x = normal(50, 47)
    full = QSGD(7, norm, chunk=10)(x, mix(50))
    draws = mix(50).uniform(x)
    for start in range(0, 47, 10):
        part = x[..., start : start + 10]

        class Drawn:
            def uniform(self, like: torch.Tensor, start: int = start) -> torch.Tensor:
                return draws[..., start : start + like.shape[-1]]

        assert torch.equal(full[..., start : start + 10], QSGD(7, norm)(part, Drawn()))  # type: ignore[arg-type]


def test_four_bits_with_chunks_are_a_contraction_for_any_length() -> None:
    assert QSGD(7, chunk=64).delta(10**9) == QSGD(7).delta(64) > 0.2
    assert QSGD(7).delta(10**9) == 0
