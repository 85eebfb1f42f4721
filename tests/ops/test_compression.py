"""Averages with compressed messages: against the equation, over every transport, and with messages that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.compression import QSGD, Cast, Compressor, MinMaxUInt8, RandomK, Shrunk, Sign, TopK
from shoal.compression.random_numbers import Draws, Redrawn
from shoal.ops import encoded as encoding
from shoal.ops.encoded import Encoded
from shoal.transport.shared_regions import Arena

Fleets = Callable[..., shoal.Fleet]
SIZE = 4
COMPRESSORS = [Sign(), MinMaxUInt8(), QSGD(7), TopK(0.1), RandomK(0.2), Shrunk(QSGD(1)), Cast(torch.bfloat16)]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


def own_tensor(numel: int = 1001, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(shoal.rank())).to(dtype)


@pytest.fixture(params=["as the transport has it", "encoded"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within a machine, too, messages travel encoded; and as it is without that."""
    if request.param == "encoded":
        monkeypatch.setenv("SHOAL_COMPRESS_LOCALLY", "1")
    yield


# What it computes


def deterministic(compressor: Compressor) -> bool:
    return isinstance(compressor, (Sign, MinMaxUInt8, TopK, Cast))


FORMS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "static": lambda rank: {},
    "push": lambda rank: {"self_weight": 0.5, "dst_weights": {(rank + 1) % SIZE: 0.5}},
    "pull": lambda rank: {"self_weight": 0.5, "src_weights": {(rank - 1) % SIZE: 0.5}},
    "push-pull": lambda rank: {
        "self_weight": 0.5,
        "src_weights": {(rank - 1) % SIZE: 2.0},
        "dst_weights": {(rank + 1) % SIZE: 0.25},
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "compressor", [compressor for compressor in COMPRESSORS if deterministic(compressor)], ids=repr
)
def test_the_compressed_average_is_its_equation(
    fleet: Fleets, anywhere: None, compressor: Compressor, form: str
) -> None:
    """x_i + sum_j w_ij C(x_j) - C(x_i), one agent at a time, with numpy."""

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        x = own_tensor()
        before = x.clone()
        results = shoal.neighbor_allreduce(x, compression=compressor, **FORMS[form](shoal.rank()))
        assert torch.equal(x, before)
        return x, results

    both = fleet(SIZE).run(run)
    x = np.stack([one.numpy() for one, _ in both])
    sent = np.stack([compressor(one, Redrawn(0, 0, 0)).numpy() for one, _ in both])
    for rank, (_, result) in enumerate(both):
        around = {"static": (-1, 1)}.get(form, (-1,))
        share = 1 / 3 if form == "static" else 0.5
        averaged = share * sent[rank] + sum(share * sent[(rank + one) % SIZE] for one in around)
        assert np.allclose(result.numpy(), x[rank] - sent[rank] + averaged, rtol=0, atol=1e-14)


@every_compressor
def test_the_mean_is_preserved(fleet: Fleets, anywhere: None, compressor: Compressor) -> None:
    """Also with random compressors, whose messages differ in each round."""

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        x = own_tensor()
        return (
            x,
            shoal.neighbor_allreduce(x, compression=compressor),
            shoal.neighbor_allreduce(x, compression=compressor),
        )

    x, once, again = (torch.stack(list(one)) for one in zip(*fleet(SIZE).run(run), strict=True))
    assert (once.mean(0) - x.mean(0)).abs().max() < 1e-14
    assert (again.mean(0) - x.mean(0)).abs().max() < 1e-14
    assert (once - x).abs().max() > 0.1
    assert torch.equal(once, again) == deterministic(compressor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_compressor
def test_encoding_changes_no_bits(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, compressor: Compressor, dtype: torch.dtype
) -> None:
    def run() -> list[bytes]:
        shoal.set_topology(shoal.topology.ExponentialTwoGraph(SIZE))
        results = [
            shoal.neighbor_allreduce(own_tensor(n, dtype), compression=compressor) for n in (0, 1, 1001, 300_000)
        ]
        return [one.view(torch.uint8).numpy().tobytes() for one in results]

    plain = fleet(SIZE).run(run)
    monkeypatch.setenv("SHOAL_COMPRESS_LOCALLY", "1")
    assert fleet(SIZE).run(run) == plain


def test_only_data_that_others_read_is_published(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all neighbours receive messages, the readable memory holds messages: 125 kB instead of 4 MB."""
    sizes: list[int] = []
    allocate = Arena.allocate

    def counting(arena: Arena, nbytes: int) -> Any:
        sizes.append(nbytes)
        return allocate(arena, nbytes)

    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        shoal.neighbor_allreduce(own_tensor(1_000_000, torch.float32), compression=Sign())

    monkeypatch.setenv("SHOAL_COMPRESS_LOCALLY", "1")
    monkeypatch.setattr(Arena, "allocate", counting)
    fleet(SIZE).run(run)
    assert sizes
    assert max(sizes) < 200_000


def test_a_nonblocking_call_uses_the_tensor_as_submitted_and_writes_to_out(fleet: Fleets, anywhere: None) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        x, out = own_tensor(), torch.zeros(1001, dtype=torch.float64)
        expected = shoal.neighbor_allreduce(x, compression=Sign())
        handle = shoal.nonblocking.neighbor_allreduce(x, compression=Sign(), out=out)
        x.fill_(torch.nan)
        assert shoal.bluefog.wait(handle) is out
        assert torch.equal(out, expected)

    fleet(SIZE).run(run)


def test_a_robust_rule_uses_the_decoded_messages(fleet: Fleets, anywhere: None) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        x = own_tensor()
        if shoal.rank() == 2:
            x[5] = torch.nan
        result = shoal.neighbor_allreduce(x, compression=MinMaxUInt8(), robust=shoal.robust.FiniteOnly())
        assert bool(result.isfinite().all()) == (shoal.rank() != 2)

    fleet(SIZE).run(run)


def test_messages_are_compressed_between_machines_and_not_within_one(transport: str) -> None:
    def run() -> int:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        shoal.neighbor_allreduce(own_tensor(100_000, torch.float32), compression=MinMaxUInt8())
        return shoal.observability.bytes_sent()

    full, short = 2 * 400_000, 2 * (100_000 + 8)
    assert set(shoal.Fleet(SIZE, transport=transport).run(run)) == {
        full if transport in ("threads", "shared_memory") else short
    }


# What is refused


def test_other_compressors_shapes_and_dtypes_are_a_mismatch(fleet: Fleets, anywhere: None) -> None:
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: shoal.neighbor_allreduce(own_tensor(), compression=Sign() if shoal.rank() else TopK(0.1)),
        lambda: shoal.neighbor_allreduce(own_tensor(), compression=Sign() if shoal.rank() else None),
        lambda: shoal.neighbor_allreduce(own_tensor(1001 + 7 * shoal.rank()), compression=Sign()),
        lambda: shoal.neighbor_allreduce(own_tensor().view(-1, 7 if shoal.rank() else 13), compression=Sign()),
        lambda: shoal.neighbor_allreduce(
            own_tensor(1001, (torch.float16, torch.bfloat16)[shoal.rank()]), compression=Sign()
        ),
    ]

    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(2))
        for number, call in enumerate(calls):
            with pytest.raises(shoal.Mismatch, match="a different topology, form") as caught:
                call()
            assert set(caught.value.ranks) == {0, 1}, number
            both = shoal.neighbor_allreduce(own_tensor(), compression=Sign(), name=f"after {number}")
            assert both.isfinite().all()

    fleet(2).run(run)


class CustomHalving(Compressor):
    """Halves, without a wire format."""

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        return x / 2

    def nbytes(self, d: int, dtype: torch.dtype) -> int:
        return 2 * d


def test_tensors_that_cannot_be_compressed_are_refused_before_anything_is_sent(fleet: Fleets) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(2))
        for wrong, compressor, output in [
            (own_tensor(), CustomHalving(), "no wire format"),
            (own_tensor(), "Sign", "is no compressor"),
            (own_tensor(), Sign, "is no compressor"),
            (own_tensor().long(), Sign(), "takes float"),
            (own_tensor().to(torch.complex64), Sign(), "takes float"),
            ([1.0], Sign(), "tensor"),
        ]:
            with pytest.raises(TypeError, match=output):
                shoal.neighbor_allreduce(wrong, compression=compressor)  # type: ignore[arg-type]
        assert torch.equal(shoal.neighbor_allreduce(torch.ones(3), compression=Sign()), torch.ones(3))

    fleet(2).run(run)


def spoiled(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Encoded]:
    """Makes messages as always, but those of rank 1 are changed on their way."""
    make = Encoded.of.__func__  # type: ignore[attr-defined]

    def of(
        cls: type[Encoded], tensor: torch.Tensor, compressor: Compressor, rank: int, *rest: Any, **named: Any
    ) -> Any:
        result = make(cls, tensor, compressor, rank, *rest, **named)
        if rank == 1 and len(tensor) == 1001:
            object.__setattr__(result, "message", change(result.message.clone()))
        return result

    return of


def with_scale(message: torch.Tensor) -> torch.Tensor:
    message[:8] = torch.tensor([-3.0], dtype=torch.float64).view(torch.uint8)
    return message


@pytest.mark.parametrize(
    ("compressor", "change", "expected_message"),
    [
        (Sign(), with_scale, "scale"),
        (Sign(), lambda message: message[:-1], "neither a message"),
        (Sign(), lambda message: torch.cat([message, message]), "neither a message"),
        (TopK(0.1), lambda message: message.fill_(255), "no message of TopK"),
        (QSGD(7), lambda message: message.fill_(0), "its step is"),
    ],
    ids=["a negative scale", "too short", "too long", "positions beyond the end", "no step"],
)
def test_a_message_that_is_never_sent_names_its_sender_and_the_next_call_works(
    fleet: Fleets,
    monkeypatch: pytest.MonkeyPatch,
    compressor: Compressor,
    change: Callable[[torch.Tensor], torch.Tensor],
    expected_message: str,
) -> None:
    monkeypatch.setenv("SHOAL_COMPRESS_LOCALLY", "1")
    monkeypatch.setattr(encoding.Encoded, "of", classmethod(spoiled(change)))

    def run() -> str:
        shoal.set_topology(shoal.topology.RingGraph(3))
        message = ""
        try:
            shoal.neighbor_allreduce(own_tensor(), compression=compressor, name="spoiled")
        except shoal.Mismatch as error:
            message = str(error)
            assert 1 in error.ranks, error
        shoal.barrier()
        x = own_tensor(1000)
        assert shoal.neighbor_allreduce(x, compression=compressor).isfinite().all()
        return message

    messages = fleet(3).run(run)
    for rank in (0, 2):
        assert expected_message in messages[rank] and "rank 1" in messages[rank]


# Between machines


@pytest.mark.parametrize(
    "compressor", [compressor for compressor in COMPRESSORS if deterministic(compressor)], ids=repr
)
def test_between_machines_shares_of_means_are_compressed(fleet: Fleets, anywhere: None, compressor: Compressor) -> None:
    """mean_m - C(mean_m) + sum_k w_mk C(mean_k), for each share alone, with numpy."""
    given = {"self_weight": 0.75, "src_machine_weights": {0: 0.25}, "dst_machine_weights": {0: 1.0}}
    others = {"self_weight": 0.75, "src_machine_weights": {1: 0.5}, "dst_machine_weights": {1: 1.0}}

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        x = own_tensor(500)
        weights = others if shoal.bluefog.machine_rank() == 0 else given
        return x, shoal.bluefog.hierarchical_neighbor_allreduce(x, **weights, compression=compressor)

    both = fleet(SIZE, agents_per_machine=2).run(run)
    means = np.stack([one.numpy() for one, _ in both]).reshape(2, 2, -1).mean(axis=1)
    shares = means.reshape(4, -1)
    sent = np.stack([compressor(torch.from_numpy(share), Redrawn(0, 0, 0)).numpy() for share in shares]).reshape(2, -1)
    expected = means - sent + 0.75 * sent + np.array([[0.5], [0.25]]) * sent[::-1]
    for rank, (_, result) in enumerate(both):
        assert np.allclose(result.numpy(), expected[rank // 2], rtol=0, atol=1e-14)


@every_compressor
def test_the_mean_of_machines_is_preserved(fleet: Fleets, anywhere: None, compressor: Compressor) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        shoal.bluefog.set_machine_topology(shoal.topology.RingGraph(2), is_weighted=True)
        x = result = own_tensor()
        for _ in range(3):
            result = shoal.bluefog.hierarchical_neighbor_allreduce(result, compression=compressor, name="x")
        return x, result

    both = fleet(SIZE, agents_per_machine=2).run(run)
    before, after = (torch.stack(list(one)).mean(0) for one in zip(*both, strict=True))
    assert (before - after).abs().max() < 1e-12


def test_between_machines_compressors_must_be_the_same(fleet: Fleets, anywhere: None) -> None:
    def run() -> None:
        shoal.bluefog.set_machine_topology(shoal.topology.RingGraph(2), is_weighted=True)
        one = Sign() if shoal.bluefog.machine_rank() else MinMaxUInt8()
        shoal.bluefog.hierarchical_neighbor_allreduce(own_tensor(), compression=one, name="x")

    with pytest.raises(shoal.Mismatch, match="different shape, machine topology or compression"):
        fleet(SIZE, agents_per_machine=2).run(run)
    with pytest.raises(TypeError, match="hierarchical_neighbor_allreduce: compression=8 is no compressor"):
        fleet(SIZE, agents_per_machine=2).run(
            lambda: shoal.bluefog.hierarchical_neighbor_allreduce(own_tensor(), compression=8)
        )
