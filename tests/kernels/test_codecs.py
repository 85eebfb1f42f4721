"""Messages that programs make are those of the compressors, byte for byte; and so is what they add up to."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.compression import QSGD, Sign, TopK
from shoal.compression.bits import Packed, packed_bytes
from shoal.compression.draws import Redrawn, drawn, hashed
from shoal.kernels.codecs import add_quantised, add_signs, pack, quantise, signs, steps_of
from support.kernels import DEVICE, QUIET, REASON, same_numbers

if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)
pytestmark = QUIET
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SEED, ROUND, RANK = 5, 11, 3
LENGTHS = [1, 7, 8, 1000, 1024, 2051]


def numbers(n: int, dtype: torch.dtype, kind: str = "normal") -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x[n // 2] = -0.0
    if kind == "small":
        x = x * float(torch.finfo(dtype).smallest_normal) * 4
    if kind == "tiny":  # so small that no step is fine enough for the largest
        x = (200 * x / x.abs().max()).round() * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = x.to(dtype)
    if kind in ("nan", "inf"):
        x[n // 3] = math.nan if kind == "nan" else -math.inf
    return torch.zeros_like(x) if kind == "zero" else x


def key() -> torch.Tensor:
    """Of what the agent draws first in a round: HashStream's."""
    first = hashed(hashed(hashed(torch.tensor(SEED)) + ROUND) + 1)
    return hashed(first + torch.tensor([RANK])).to(DEVICE)


def quantised(x: torch.Tensor, levels: int, chunk: int | None) -> torch.Tensor:
    there = x.to(DEVICE)
    steps = steps_of(there, levels, chunk)
    header = steps.view(torch.uint8)
    message = torch.empty(QSGD(levels, chunk=chunk).nbytes(len(x), x.dtype), dtype=torch.uint8, device=DEVICE)
    message[: len(header)] = header
    quantise(there, steps, key(), message[len(header) :], levels, chunk)
    return message.cpu()


def test_the_key_is_the_one_that_agents_draw_with() -> None:
    like = torch.empty(9, dtype=torch.float64)
    stream = drawn(SEED, ROUND, 1, torch.tensor([RANK]), like)
    assert torch.equal(stream.fill(0, 0, like), Redrawn(SEED, ROUND, RANK).uniform(like))
    assert torch.equal(stream._keys.to(DEVICE), key())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", [127, 100, 64, 7, 1])
@pytest.mark.parametrize("chunk", [None, 1, 64, 300, 1500])
@pytest.mark.parametrize("n", LENGTHS)
def test_quantised_messages_are_those_of_qsgd(dtype: torch.dtype, levels: int, chunk: int | None, n: int) -> None:
    x = numbers(n, dtype)
    wanted = QSGD(levels, chunk=chunk).encode(x, Redrawn(SEED, ROUND, RANK))
    assert torch.equal(quantised(x, levels, chunk), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["zero", "nan", "inf", "small", "tiny"])
@pytest.mark.parametrize("chunk", [None, 64])
def test_also_of_awkward_numbers(dtype: torch.dtype, kind: str, chunk: int | None) -> None:
    x = numbers(1003, dtype, kind)
    wanted = QSGD(chunk=chunk).encode(x, Redrawn(SEED, ROUND, RANK))
    found = quantised(x, 127, chunk)
    header = -(-1003 // (chunk or 1003)) * x.itemsize
    assert same_numbers(found[:header].view(dtype), wanted[:header].view(dtype))
    assert torch.equal(found[header:], wanted[header:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_just_below_zero_are_rounded_up(dtype: torch.dtype) -> None:
    """What is above -1 rounds to 1, and no random number may: among so many there are some that would, of 16 bits."""
    x = torch.full((20_000,), -1e-6, dtype=torch.float64).to(dtype)
    x[0] = 1.0
    wanted = QSGD().encode(x, Redrawn(SEED, ROUND, RANK))
    assert torch.equal(quantised(x, 127, None), wanted)
    assert x.itemsize > 2 or not wanted[x.itemsize + 1 :].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_that_is_levels_times_a_power_of_two_has_that_as_its_step(dtype: torch.dtype) -> None:
    x = torch.tensor([127.0, -1.0, 3.5], dtype=dtype, device=DEVICE)
    assert steps_of(x, 127).tolist() == [1.0]
    assert steps_of(x * 2, 127).tolist() == [2.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "zero", "nan", "small", "tiny"])
@pytest.mark.parametrize("n", LENGTHS)
def test_signs_are_those_of_sign(dtype: torch.dtype, kind: str, n: int) -> None:
    x = numbers(n, dtype, kind)
    wanted = Sign().encode(x, Redrawn(SEED, ROUND, RANK))[x.itemsize :]
    out = torch.empty(packed_bytes(n, 1), dtype=torch.uint8, device=DEVICE)
    signs(x.to(DEVICE), out)
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize("bits", [1, 3, 4, 7, 8, 9, 13, 16, 31, 63])
@pytest.mark.parametrize("n", [0, *LENGTHS])
def test_codes_are_packed_as_in_messages(bits: int, n: int) -> None:
    codes = torch.randint(0, (1 << bits) - 1, (n,), generator=torch.Generator().manual_seed(bits))
    codes = codes.to(torch.uint8) if bits <= 8 else codes
    wanted = torch.empty(packed_bytes(n, bits), dtype=torch.uint8)
    Packed(wanted, n, bits).put(0, codes)
    out = torch.empty_like(wanted, device=DEVICE)
    pack(codes.to(DEVICE), bits, out)
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.01, 0.1, 0.4, 1.0])
def test_messages_of_the_largest_are_the_same_with_their_positions_packed_by_a_program(
    dtype: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, packed = numbers(2051, dtype), []
    wanted = TopK(share).encode(x, Redrawn(SEED, ROUND, RANK))

    def put(self: Packed, start: int, codes: torch.Tensor) -> None:
        out = torch.cat([self._planes.reshape(-1), self._packed]).to(DEVICE)
        pack(codes.to(DEVICE), self.bits, out)
        self._planes.copy_(out[: self._planes.numel()].view(self._planes.shape))
        self._packed.copy_(out[self._planes.numel() :])
        packed.append(self.bits)

    monkeypatch.setattr(Packed, "put", put)
    assert torch.equal(TopK(share).encode(x, Redrawn(SEED, ROUND, RANK)), wanted)
    assert packed or share == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", [127, 40, 7, 1])
@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("n", [1, 7, 2051])
def test_what_is_added_is_what_qsgd_adds(dtype: torch.dtype, levels: int, chunk: int | None, n: int) -> None:
    compressor, draws, total = QSGD(levels, chunk=chunk), Redrawn(SEED, ROUND, RANK), numbers(n, dtype, "normal")
    message = compressor.encode(numbers(n, dtype, "small") if n == 7 else numbers(n, dtype), draws)
    header = -(-n // (chunk or n)) * dtype.itemsize
    found, steps = total.clone().to(DEVICE), message[:header].view(dtype).to(DEVICE)
    add_quantised(found, message[header:].to(DEVICE), steps, 0.3, levels, chunk)
    assert same_numbers(found, compressor.add_decoded(total, message, 0.3, draws))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 2051])
def test_what_is_added_is_what_sign_adds(dtype: torch.dtype, n: int) -> None:
    compressor, draws, total = Sign(), Redrawn(SEED, ROUND, RANK), numbers(n, dtype)
    message = compressor.encode(numbers(n + 1, dtype)[:n].clone(), draws)
    found, magnitude = total.clone().to(DEVICE), message[: dtype.itemsize].view(dtype).to(DEVICE)
    add_signs(found, message[dtype.itemsize :].to(DEVICE), magnitude, -0.7)
    assert same_numbers(found, compressor.add_decoded(total, message, -0.7, draws))


def test_what_does_not_fit_is_an_error() -> None:
    x, byte = torch.ones(10, device=DEVICE), torch.empty(10, dtype=torch.uint8, device=DEVICE)
    steps = steps_of(x, 127)
    with pytest.raises(ValueError, match="1 to 127 levels"):
        quantise(x, steps, key(), byte, 128)
    with pytest.raises(ValueError, match="a flat tensor of 10"):
        quantise(x, steps, key(), byte[:9], 127)
    with pytest.raises(ValueError, match="a flat tensor of 2 of"):
        signs(x, byte)
    with pytest.raises(ValueError, match="pass a flat tensor of floating"):
        signs(x.int(), byte[:2])
    with pytest.raises(ValueError, match="1 to 63 bits"):
        pack(byte, 64, torch.empty(80, dtype=torch.uint8, device=DEVICE))
