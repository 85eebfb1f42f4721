"""Messages through zstd: the same numbers, in fewer bytes, also on the wire, and no frame harms."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.compression import QSGD, Cast, Compressor, MinMaxUInt8, Sign, TopK, Zstd
from shoal.compression.random_numbers import Redrawn
from shoal.optim.factory import share_kept

Fleets = Callable[..., shoal.Fleet]
INNER: list[Compressor] = [MinMaxUInt8(), QSGD(7, chunk=64), Cast(torch.bfloat16), Sign(), TopK(0.1)]


def draws() -> Redrawn:
    return Redrawn(3, 1, 0)


def numbers(d: int = 20_000) -> torch.Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_a_vector_is_decoded_to_the_compressors_output_from_no_more_bytes(inner: Compressor) -> None:
    compressor = Zstd(inner)
    for x in (numbers(), numbers(3), torch.zeros(5000), torch.full((7,), torch.nan), torch.empty(0)):
        message = compressor.encode(x, draws())
        assert message.dtype == torch.uint8 and message.dim() == 1
        assert len(message) <= inner.nbytes(len(x), x.dtype) == compressor.nbytes(len(x), x.dtype)
        expected = inner(x, draws())
        assert torch.equal(compressor(x, draws()).nan_to_num(7), expected.nan_to_num(7))
        result = compressor.decode(message, len(x), x.dtype, draws())
        assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))
        total = torch.ones(len(x))
        assert compressor.add_decoded(total, message, 0.5, draws()) is total
        assert torch.equal(total.nan_to_num(7), torch.ones(len(x)).add(expected, alpha=0.5).nan_to_num(7))


def test_fine_messages_get_shorter() -> None:
    x = numbers()
    shares = [len(Zstd(inner).encode(x, draws())) / inner.nbytes(len(x), x.dtype) for inner in INNER]
    assert all(share < limit for share, limit in zip(shares, [0.95, 0.8, 0.85, 1.01, 1.0], strict=True)), shares


def test_properties_are_those_of_the_compressor() -> None:
    for inner in INNER:
        compressor = Zstd(inner)
        assert (compressor.unbiased, compressor.encodes) == (inner.unbiased, True)
        assert (compressor.omega(100), compressor.delta(100)) == (inner.omega(100), inner.delta(100))
        assert share_kept(compressor, 1000) == share_kept(inner, 1000)


FRAMES = [
    b"",
    b"no frame at all",
    zstandard.ZstdCompressor().compress(bytes(10**9)),  # a gigabyte of zeros in 30 KB
    zstandard.ZstdCompressor().compress(bytes(100)),
    zstandard.ZstdCompressor().compress(bytes(20_008))[:-2],
    zstandard.ZstdCompressor(write_content_size=False).compress(bytes(20_008)),
]


@pytest.mark.parametrize("frame", FRAMES, ids=["empty", "text", "a bomb", "too short", "cut off", "no size"])
def test_an_invalid_frame_is_refused(frame: bytes) -> None:
    data = torch.frombuffer(bytearray(frame or b"x"), dtype=torch.uint8)[: len(frame)]
    for d in (20_000, 100_000):
        with pytest.raises(ValueError, match=r"it should be Zstd\(.* of \d+ numbers|not of \d+ bytes"):
            Zstd(MinMaxUInt8()).decode(data, d, torch.float32, draws())


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(made: bytes) -> None:
    data = torch.tensor(list(made), dtype=torch.uint8)
    with pytest.raises(ValueError):
        Zstd(MinMaxUInt8()).decode(data, 1000, torch.float32, draws())


@pytest.mark.parametrize("level", [0, 23, -1])
def test_an_unsupported_level_is_refused(level: int) -> None:
    with pytest.raises(ValueError, match=f"level={level}"):
        Zstd(Sign(), level=level)


def test_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "zstandard":
            raise ModuleNotFoundError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .shoal\[zstd\]"):
        Zstd(Sign())


# Between agents


def test_an_exchange_is_the_same_and_sends_less(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_COMPRESS_LOCALLY", "1")

    def run() -> tuple[list[float], int, int]:
        shoal.set_topology(shoal.topology.RingGraph(3))
        x = numbers() + shoal.rank()
        result, sent = [], []
        for compressor in (MinMaxUInt8(), Zstd(MinMaxUInt8())):
            before = shoal.observability.bytes_sent()
            result.append(shoal.neighbor_allreduce(x, compression=compressor, name="the same draws"))
            sent.append(shoal.observability.bytes_sent() - before)
        assert torch.equal(*result)
        return result[0][:3].tolist(), sent[0], sent[1]

    for _, full, short in fleet(3).run(run):
        assert full == 2 * 20_008
        assert short < 0.95 * full


@pytest.mark.parametrize("changes", [False, True])
def test_an_optimizer_trains_to_the_same_bits_and_sends_less(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    monkeypatch.setenv("SHOAL_COMPRESS_LOCALLY", "1")

    def run(compressor: Compressor) -> tuple[list[float], int]:
        model = torch.nn.Linear(100, 30, dtype=torch.float64)
        torch.nn.init.constant_(model.weight, 0.1)
        torch.nn.init.constant_(model.bias, 0.1)
        topology: Any = shoal.topology.OnePeerHypercube(4) if changes else shoal.topology.RingGraph(4)
        optimizer = shoal.DecentralizedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), model, topology=topology, compression=compressor
        )
        before = shoal.observability.bytes_sent()
        for step in range(5):
            chance = torch.Generator().manual_seed(10 * step + shoal.rank())
            optimizer.zero_grad()
            model(torch.randn(8, 100, generator=chance, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        sent = shoal.observability.bytes_sent() - before
        optimizer.close()
        return model.weight.detach().flatten().tolist(), sent

    agents = fleet(4)
    plain, packed = agents.run(run, QSGD(7, chunk=64)), agents.run(run, Zstd(QSGD(7, chunk=64)))
    assert [x for x, _ in plain] == [x for x, _ in packed]
    assert all(short < 0.9 * full for (_, full), (_, short) in zip(plain, packed, strict=True))


def test_pairs_through_windows_take_messages_of_one_length() -> None:
    def run() -> None:
        model = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match="take the compressor in it"):
            shoal.optim.DistributedADPSGDOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model, compression=Zstd(MinMaxUInt8())
            )

    shoal.Fleet(1).run(run)
