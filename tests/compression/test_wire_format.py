"""Messages of compressors: what arrives and how long they are is what the compressor says, and no bytes harm."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.algorithms import Exchange
from shoal.compression import QSGD, Cast, Compressor, Draws, Identity, MinMaxUInt8, RandomK, Shrunk, Sign, TopK, Zstd
from shoal.compression.compressor import BLOCK
from shoal.sim.stacked import StackedMix
from shoal.topology.families.static import ring

ALL: list[Compressor] = [
    Identity(),
    Cast(torch.bfloat16),
    Cast(torch.float16),
    TopK(0.01),
    TopK(0.25),
    TopK(1.0),
    RandomK(0.25),
    RandomK(0.25, scaled=True),
    RandomK(1.0),
    *(QSGD(levels) for levels in (1, 3, 7, 9, 31, 63, 100, 127, 128, 511, 40_000, 2**30, 2**52)),
    QSGD(7, "euclidean"),
    QSGD(127, "euclidean"),
    QSGD(7, chunk=5),
    QSGD(100, "euclidean", chunk=64),
    Sign(),
    MinMaxUInt8(),
    MinMaxUInt8(3),
    MinMaxUInt8(16, eps=1e-3),
    MinMaxUInt8(dyadic=True),
    MinMaxUInt8(300, dyadic=True),
    Shrunk(QSGD(7)),
    Shrunk(RandomK(0.25, scaled=True)),
    Shrunk(Identity()),
    Zstd(MinMaxUInt8()),
    Zstd(QSGD(7, chunk=5), level=3),
    Zstd(Shrunk(RandomK(0.25, scaled=True))),
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
every_compressor = pytest.mark.parametrize("compressor", ALL, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def mix(agents: int, round_: int = 0) -> StackedMix:
    made = StackedMix(ring(agents), seed=11)
    made.begin(round_)
    return made


def same(values: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, but for what NaN have beside being one."""
    if values.dtype != expected.dtype or values.shape != expected.shape:
        return False
    integer = INTEGERS[values.itemsize]
    equal = values.contiguous().view(integer) == expected.contiguous().view(integer)
    return bool((equal | (values.isnan() & expected.isnan())).all())


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(dtype)


def samples(d: int, dtype: torch.dtype) -> torch.Tensor:
    """``[n, d]``, a row for each kind of numbers."""
    x = normal(d, dtype=dtype)
    results = [
        x,
        (x.double() + 1e4).to(dtype),
        (x.double() * torch.finfo(dtype).max / 2).to(dtype),
        (x.double() * torch.finfo(dtype).tiny / 16).to(dtype),
        x.round(),  # many that are equal, and zeros of both signs
    ]
    results += [torch.full_like(x, one) for one in (0.0, -0.0, -0.3)]
    for bad in (math.nan, math.inf, -math.inf):
        y = x.clone()
        y[d // 2 :: 5] = bad
        results.append(y)
    return torch.stack(results)


def check(compressor: Compressor, x: torch.Tensor, weight: float = 0.3) -> None:
    n, d = x.shape
    expected = compressor(x, mix(n))
    data = compressor.encode(x, mix(n))
    assert data.dtype == torch.uint8
    assert data.shape == (n, compressor.nbytes(d, x.dtype))
    assert same(compressor.decode(data, d, x.dtype, mix(n)), expected)
    total = normal(n, d, dtype=x.dtype)
    result = compressor.add_decoded(total.clone(), data, weight, mix(n))
    if x.itemsize == 2:
        assert same(result, total.float().add_(expected.float(), alpha=weight).to(x.dtype))
    else:
        assert same(result, total.add_(expected, alpha=weight))


@every_compressor
def test_a_negative_view_is_sent_by_value(compressor: Compressor) -> None:
    """The memory of such a view holds numbers of the other sign."""
    x = normal(1, 5000, dtype=torch.float32)
    view = torch._neg_view(-x)
    message = compressor.encode(x, mix(1))
    assert torch.equal(compressor.encode(view, mix(1)), message)
    assert torch.equal(compressor(view, mix(1)), compressor(x, mix(1)))


@every_dtype
@every_compressor
def test_decoded_messages_equal_the_compressors_output(compressor: Compressor, dtype: torch.dtype) -> None:
    for d, weight in ((1, 0.3), (8, 1.0), (33, -2.0), (250, 1 / 3)):
        check(compressor, samples(d, dtype), weight)


@every_compressor
def test_long_vectors_are_sent_in_blocks(compressor: Compressor) -> None:
    check(compressor, normal(1, BLOCK + 1005, dtype=torch.float32))


@every_dtype
@every_compressor
def test_empty_vectors_have_no_bytes(compressor: Compressor, dtype: torch.dtype) -> None:
    for shape in ((0,), (3, 0)):
        x = torch.empty(shape, dtype=dtype)
        draws = mix(3)
        assert compressor.nbytes(0, dtype) == 0
        assert compressor(x, draws).shape[-1] == 0
        data = compressor.encode(x, draws)
        assert data.shape == shape
        assert compressor.decode(data, 0, dtype, draws).shape == shape
        assert compressor.add_decoded(x, data, 1.0, draws) is x


@given(st.data())
def test_any_numbers_are_decoded_to_the_compressors_output(data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([32, 64]))
    row = data.draw(st.lists(st.floats(width=width), min_size=1, max_size=40))
    x = torch.tensor([row], dtype={32: torch.float32, 64: torch.float64}[width])
    check(data.draw(st.sampled_from(ALL)), x)


@every_compressor
def test_rows_may_have_any_memory_and_shape(compressor: Compressor) -> None:
    x = normal(37, 4, 3, dtype=torch.float32).permute(2, 1, 0)  # [3, 4, 37]
    expected = compressor(x, mix(4))
    data = compressor.encode(x, mix(4))
    assert data.shape == (3, 4, compressor.nbytes(37, x.dtype))
    # At an odd address, and not one after the other.
    moved = torch.empty(3, 4, 2 * data.shape[-1] + 1, dtype=torch.uint8)[..., 1::2]
    moved.copy_(data)
    assert same(compressor.decode(moved, 37, x.dtype, mix(4)), expected)
    total = torch.ones(37, 4, 3).permute(2, 1, 0)
    assert same(compressor.add_decoded(total, moved, 0.3, mix(4)), torch.ones(3, 4, 37).add_(expected, alpha=0.3))


@every_compressor
def test_a_message_may_start_anywhere_in_a_buffer(compressor: Compressor) -> None:
    x = normal(1, 37)
    [data] = compressor.encode(x, mix(1))
    for before in range(9):
        for at in (0, 3, 8):
            memory = torch.frombuffer(bytearray(len(data) + 32), dtype=torch.uint8, offset=before)
            message = memory[at : at + len(data)].copy_(data)
            result = compressor.decode(message.unsqueeze(0), 37, x.dtype, mix(1))
            assert same(result, compressor(x, mix(1)))


@pytest.mark.parametrize("compressor", [one for one in ALL if not one.varies], ids=str)
def test_an_agent_sends_the_message_of_its_row_of_the_fleet(compressor: Compressor) -> None:
    x = normal(4, 37, dtype=torch.float32)

    def on_agent() -> list[int]:
        exchange = Exchange(ring(4), seed=11)
        exchange.begin(5)
        result: list[int] = compressor.encode(x[shoal.rank()], exchange).tolist()
        return result

    assert shoal.Fleet(4).run(on_agent) == compressor.encode(x, mix(4, 5)).tolist()


@every_compressor
def test_encoding_does_not_change_its_argument_nor_decoding_the_message(compressor: Compressor) -> None:
    x = normal(2, 100, dtype=torch.float32)
    before, data = x.clone(), compressor.encode(x, mix(2))
    kept = data.clone()
    compressor.decode(data, 100, x.dtype, mix(2)).zero_()
    compressor.add_decoded(torch.zeros_like(x), data, 1.0, mix(2))
    assert torch.equal(x, before) and torch.equal(data, kept)


@every_compressor
def test_parameters_are_compressed_and_summed_like_other_tensors(compressor: Compressor) -> None:
    x = normal(2, 100, dtype=torch.float32)
    parameter, total = torch.nn.Parameter(x.clone()), torch.nn.Parameter(torch.ones(2, 100))
    data = compressor.encode(x, mix(2))
    assert same(compressor(parameter, mix(2)).detach(), compressor(x, mix(2)))
    assert torch.equal(compressor.encode(parameter, mix(2)), data)
    assert compressor.add_decoded(total, data, 1.0, mix(2)) is total
    assert same(total.detach(), compressor.add_decoded(torch.ones(2, 100), data, 1.0, mix(2)))


@every_compressor
def test_messages_of_one_dtype_add_to_a_sum_of_another(compressor: Compressor) -> None:
    x = normal(2, 100, dtype=torch.float16)
    data = compressor.encode(x, mix(2))
    total = compressor.add_decoded(torch.ones(2, 100), data, 0.3, mix(2), dtype=torch.float16)
    assert same(total, torch.ones(2, 100).add_(compressor(x, mix(2)).float(), alpha=0.3))


@pytest.mark.parametrize("compressor", [QSGD(7), RandomK(0.25), Shrunk(QSGD(7)), Sign(), TopK(0.1)], ids=str)
def test_encoding_and_decoding_draw_as_often_as_the_compressor(compressor: Compressor) -> None:
    x = normal(2, 100)
    counts = []
    for call in (
        lambda draws: compressor(x, draws),
        lambda draws: compressor.encode(x, draws),
        lambda draws: compressor.decode(compressor.encode(x, mix(2)), 100, x.dtype, draws),
        lambda draws: compressor.add_decoded(x.clone(), compressor.encode(x, mix(2)), 1.0, draws),
    ):
        draws = mix(2)
        call(draws)
        counts.append(draws.uniform(x).tolist())
    assert all(one == counts[0] for one in counts)


class Given:
    """Draws of one message."""

    def __init__(self, drawn: torch.Tensor) -> None:
        self.drawn = drawn

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        return self.drawn


@every_compressor
def test_any_draws_are_accepted(compressor: Compressor) -> None:
    x, draws = normal(2, 100), Given(mix(2).uniform(normal(2, 100)))
    data = compressor.encode(x, draws)
    assert same(compressor.decode(data, 100, x.dtype, draws), compressor(x, draws))


# Bytes that nobody has sent


def decoded(compressor: Compressor, data: torch.Tensor, d: int, dtype: torch.dtype) -> bool:
    """Whether it is taken for a message: else nothing is added, and the error says whose message it would be."""
    total = normal(*data.shape[:-1], d, dtype=torch.float32)
    before = total.clone()
    try:
        result = compressor.decode(data, d, dtype, mix(1))
    except ValueError as error:
        assert str(error)
        with pytest.raises(ValueError):
            compressor.add_decoded(total, data, 1.0, mix(1), dtype=dtype)
        assert torch.equal(total, before)
        return False
    assert result.shape == (*data.shape[:-1], d) and result.dtype == dtype
    added = compressor.add_decoded(total, data, 1.0, mix(1), dtype=dtype)
    assert same(added, before.add_(result.float()))
    return True


@every_compressor
def test_any_bytes_are_refused_or_decoded(compressor: Compressor) -> None:
    draw = torch.Generator().manual_seed(4)
    for dtype in DTYPES:
        for d in (1, 5, 250):
            n = compressor.nbytes(d, dtype)
            good = compressor.encode(normal(1, d, dtype=dtype), mix(1))
            for _ in range(2):
                decoded(compressor, torch.randint(0, 256, (1, n), dtype=torch.uint8, generator=draw), d, dtype)
                flipped = good.clone()
                at = int(torch.randint(0, n, (), generator=draw))
                flipped[0, at] ^= 1 << int(torch.randint(0, 8, (), generator=draw))
                decoded(compressor, flipped, d, dtype)
            for constant in (0, 127, 128, 255):
                decoded(compressor, torch.full((1, n), constant, dtype=torch.uint8), d, dtype)


@given(st.data())
def test_random_bytes_are_refused_or_decoded(data: st.DataObject) -> None:
    compressor, dtype = data.draw(st.sampled_from(ALL)), data.draw(st.sampled_from(DTYPES))
    d = data.draw(st.integers(1, 40))
    n = compressor.nbytes(d, dtype)
    made = data.draw(st.binary(min_size=n, max_size=n))
    decoded(compressor, torch.tensor([list(made)], dtype=torch.uint8), d, dtype)


@every_compressor
def test_a_message_of_another_length_or_kind_is_refused(compressor: Compressor) -> None:
    data = compressor.encode(normal(2, 20, dtype=torch.float32), mix(2))
    for bad in (data[:, :-1], torch.cat([data, data], dim=-1), data[:, :0], torch.tensor(3, dtype=torch.uint8)):
        with pytest.raises(
            ValueError, match=rf"not of {data.shape[-1]} bytes: it should be .* of 20 numbers in torch\.fl"
        ):
            compressor.decode(bad, 20, torch.float32, mix(2))
        with pytest.raises(ValueError, match=rf"not of {data.shape[-1]} bytes"):
            compressor.add_decoded(torch.zeros(2, 20), bad, 1.0, mix(2))
    with pytest.raises(ValueError, match=r"in torch\.int8, not in bytes"):
        compressor.decode(data.view(torch.int8), 20, torch.float32, mix(2))
    with pytest.raises(ValueError, match=r"torch\.int32: messages are made of"):
        compressor.decode(data, 20, torch.int32, mix(2))
    with pytest.raises(ValueError, match=r"torch\.int32: messages are made of"):
        compressor.encode(torch.ones(2, 20, dtype=torch.int32), mix(2))
    with pytest.raises(ValueError, match="d=-1"):
        compressor.decode(data, -1, torch.float32, mix(2))
    for total in (torch.zeros(3, 20), torch.zeros(20), torch.zeros(2, 20, device="meta")):
        with pytest.raises(ValueError, match="pass one for each row, on the same device"):
            compressor.add_decoded(total, data, 1.0, mix(2))


def test_no_multiple_is_above_the_levels_where_a_dtype_has_them_not() -> None:
    levels, most = (1 << 25) - 1, float(1 << 25)
    x = torch.tensor([[most, -most]])  # the quotient by the levels is one, and float32 rounds the levels to `most`
    assert QSGD(levels)(x, mix(1)).tolist() == [[most - 2, 2 - most]]
    check(QSGD(levels), x)


def test_the_step_of_16_bits_leaves_the_largest_number_within_the_levels() -> None:
    x = torch.tensor([[512.0, -512.0]], dtype=torch.bfloat16)  # 512 / 511 is one in bfloat16: the step would be, too
    assert torch.equal(QSGD(511)(x, mix(1)), x)
    check(QSGD(511), x)


def numbers(*values: float) -> list[int]:
    """The bytes of float32."""
    return torch.tensor(values, dtype=torch.float32).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("compressor", "data", "d", "match"),
    [
        (QSGD(127), [*numbers(3.0), 1], 1, "its step is 3.0, no power of two"),
        (QSGD(127), [*numbers(-2.0), 1], 1, "its step is -2.0"),
        (QSGD(127), [*numbers(0.0), 1], 1, "its step is 0.0"),
        (QSGD(127), [*numbers(-math.inf), 1], 1, "its step is -inf"),
        (QSGD(127), [*numbers(2.0), 0x80], 1, r"it has -128 times its step, and QSGD\(.* sends at most 127 times"),
        (QSGD(100), [*numbers(2.0), 101], 1, "it has 101 times its step"),
        (QSGD(7, chunk=1), [*numbers(2.0, 3.0), 0x11], 2, "its step is 3.0, no power of two"),
        (QSGD(7), [*numbers(2.0), 0x08], 1, "it has -8 times its step"),
        (QSGD(300), [*numbers(2.0), 0x2D, 0x01], 1, "it has 301 times its step"),
        (QSGD(7), [*numbers(2.0), 0x10], 1, "fill up its last byte are not zero"),
        (QSGD(1), [*numbers(2.0), 0, 4], 5, "fill up its last byte are not zero"),
        (Sign(), [*numbers(3.0), 0], 1, "its scale is 3.0, neither zero nor a power of two"),
        (Sign(), [*numbers(-1.0), 0], 1, "its scale is -1.0"),
        (Sign(), [*numbers(1.0), 2], 1, "fill up its last byte are not zero"),
        (MinMaxUInt8(), [*numbers(2.0, 1.0), 0], 1, "chunk 0 of 1, the minimum is 2.0 and the maximum 1.0"),
        (
            MinMaxUInt8(1),
            [*numbers(1.0, 1.0, 3.0, -3.0), 0, 0],
            2,
            "chunk 1 of 2, the minimum is 3.0 and the maximum -3",
        ),
        # Two of nine in a bitmap.
        (TopK(0.25), [*numbers(1.0, 1.0), 1, 0], 9, "it has 1 positions, and should have 2"),
        (TopK(0.25), [*numbers(1.0, 1.0), 7, 0], 9, "it has 3 positions"),
        (TopK(0.25), [*numbers(1.0, 1.0), 1, 2], 9, "fill up its last byte are not zero"),
        # Two of 100: five bits each, and which of the bits of 2 + 99 // 32 are set.
        (TopK(0.02), [*numbers(1.0, 1.0), 0b01100011, 0, 0b00011], 100, "do not ascend: 3 comes after 3"),
        (TopK(0.02), [*numbers(1.0, 1.0), 0b01000011, 0, 0b00011], 100, "do not ascend: 2 comes after 3"),
        (TopK(0.02), [*numbers(1.0, 1.0), 0b10000011, 0, 0b10001], 100, "position 100 of 100 numbers is out of range"),
        (TopK(0.02), [*numbers(1.0, 1.0), 0, 4, 0b00101], 100, "fill up its last byte are not zero"),
        (TopK(0.02), [*numbers(1.0, 1.0), 0, 0, 0b100001], 100, "fill up its last byte are not zero"),
        (TopK(0.02), [*numbers(1.0, 1.0), 0, 0, 0b00001], 100, "it has 1 positions, and should have 2"),
    ],
)
def test_errors_describe_the_fault_of_a_message(compressor: Compressor, data: list[int], d: int, match: str) -> None:
    message = torch.tensor(data, dtype=torch.uint8)
    with pytest.raises(ValueError, match=match):
        compressor.decode(message, d, torch.float32, mix(1))


def test_an_invalid_row_leaves_all_sums_unchanged() -> None:
    data = QSGD(7).encode(normal(3, 40, dtype=torch.float32), mix(3))
    data[2, 10] = 0x88
    total = normal(3, 40, dtype=torch.float32)
    before = total.clone()
    with pytest.raises(ValueError, match="-8 times"):
        QSGD(7).add_decoded(total, data, 1.0, mix(3))
    assert torch.equal(total, before)


# The layout of the bytes


def test_bytes_have_the_documented_layout() -> None:
    def encode(compressor: Compressor, *row: float) -> list[int]:
        result: list[int] = compressor.encode(torch.tensor([row], dtype=torch.float32), mix(1))[0].tolist()
        return result

    assert encode(Sign(), 1, -1, 1, 1, 1, 1, 1, 1, -1) == [*numbers(1), 0b10, 0b1]
    assert encode(QSGD(127), 127, -127, 1, 0) == [*numbers(1), 127, 129, 1, 0]
    assert encode(QSGD(7), 7, -7, 1) == [*numbers(1), 0x97, 0x01]
    assert encode(QSGD(3), 3, -3, 1) == [*numbers(1), 0b01101011, 0b0]
    assert encode(QSGD(300), 300, -1) == [*numbers(1), 44, 255, 0b1101]
    assert encode(MinMaxUInt8(), 0, 1, 0.499) == [*numbers(0, 1), 0, 255, 127]
    assert encode(MinMaxUInt8(2), 0, 1, 5) == [*numbers(0, 1, 5, 5), 0, 255, 0]
    assert encode(Cast(torch.bfloat16), 1) == [0x80, 0x3F]
    sparse = [0.0] * 37 + [5.0] + [0.0] * 61 + [-6.0]
    # Five bits each, then bits 37 // 32 and 99 // 32 + 1.
    assert encode(TopK(0.02), *sparse) == [*numbers(5, -6), 0b01100101, 0, 0b10010]
    assert encode(TopK(0.25), *sparse[30:39]) == [*numbers(0, 5), 0b10000001, 0]
    assert encode(RandomK(1.0), 2) == numbers(2)


@pytest.mark.parametrize("k", [1, 2, 3, 10, 99, 1000])
def test_positions_take_about_two_bits_more_than_the_minimum(k: int) -> None:
    for d in (k + 1, 2 * k + 1, 10 * k, 1000 * k):
        share = k / d
        result = TopK(share).nbytes(d, torch.float32) - 4 * k
        assert result <= min(-(-d // 8), k * (3 + math.log2(d / k)) / 8 + 2)
        assert result >= math.log2(math.comb(d, k)) / 8


def test_a_compressor_without_a_wire_format_raises() -> None:
    class WithoutEncoder(Compressor):
        def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
            return x

        def nbytes(self, d: int, dtype: torch.dtype) -> int:
            return d

    class WithoutDecoder(WithoutEncoder):
        def _encode(self, x: torch.Tensor, data: torch.Tensor, stream: object) -> None:
            data.zero_()

    data, output = torch.zeros(1, 3, dtype=torch.uint8), r"Without.* has no wire format: .* _encode and _pieces"
    assert not WithoutEncoder().encodes
    assert not WithoutDecoder().encodes
    with pytest.raises(TypeError, match=output):
        WithoutEncoder().encode(normal(1, 3), mix(1))
    assert torch.equal(WithoutDecoder().encode(normal(1, 3), mix(1)), data)
    for one in (WithoutEncoder(), WithoutDecoder()):
        with pytest.raises(TypeError, match=output):
            one.decode(data, 3, torch.float32, mix(1))
        with pytest.raises(TypeError, match=output):
            one.add_decoded(torch.zeros(1, 3), data, 1.0, mix(1))


# Cast


@pytest.mark.parametrize("compressor", [Cast(torch.bfloat16), Cast(torch.float16)], ids=str)
def test_a_cast_is_within_its_stated_error(compressor: Cast) -> None:
    for scale in (1e-4, 1.0, 1e4):
        x = normal(1, 20_000) * scale
        x = x[x.abs() > torch.finfo(compressor.dtype).tiny]
        failed = ((compressor(x, mix(1)) - x) / x).square().max()
        assert 0.9 * compressor.omega(1) < failed <= compressor.omega(1)
    # Halfway between two, the relative error is largest where numbers are just above a power of two.
    x = torch.tensor([1 + torch.finfo(compressor.dtype).eps / 2 * (1 - 2**-20)], dtype=torch.float64)
    assert float(((compressor(x, mix(1)) - x) / x).square()) <= compressor.omega(1)
    assert not compressor.unbiased and 0 < compressor.delta(3) < 1


def test_a_cast_overflows_to_infinity_and_underflows_to_zero() -> None:
    x = torch.tensor([65504.0, 65519.0, 65520.0, -1e5, 2.0**-24, 2.0**-25, -(2.0**-26)])
    result = Cast(torch.float16)(x, mix(1))
    assert result.tolist() == [65504.0, 65504.0, math.inf, -math.inf, 2.0**-24, 0.0, 0.0]
    assert result[-1].signbit()
    assert Cast(torch.bfloat16)(torch.tensor([3.4e38, 1e-40]), mix(1)).isinf().tolist() == [True, False]
    with pytest.raises(ValueError, match=r"pass torch\.bfloat16 or torch\.float16"):
        Cast(torch.float32)
