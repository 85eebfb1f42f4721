"""Inputs and outputs: strides, views, gradients, out=, NaN and infinity, for every operation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import shoal
from support.limits import scaled
from support.reference import averaged_over, bits, reduced, same_bits, same_reduction, weighted
from support.samples import WEIGHABLE, sample, samples

Fleets = Callable[..., shoal.Fleet]
View = Callable[[torch.Tensor], torch.Tensor]

# Each takes a tensor [40, 300] (48 KB and so more than travels inside a message) or [4, 6].
VIEWS: dict[str, View] = {
    "transposed": lambda t: t.t(),
    "every second column": lambda t: t[:, ::2],
    "a slice with an offset": lambda t: t[1:, 2:],
    "expanded": lambda t: t[:, :1].expand(-1, t.shape[1]),
    "expanded from one element": lambda t: t[0, 0].expand(t.shape),
    "flipped": lambda t: t.flip(0),
    "a diagonal": lambda t: t.diagonal(),
    "channels last": lambda t: t.view(1, 2, -1, t.shape[1]).to(memory_format=torch.channels_last),
    "empty slice": lambda t: t[:, 3:3],
}
AVERAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neighbor_allreduce": shoal.neighbor_allreduce,
    "hierarchical_neighbor_allreduce": shoal.bluefog.hierarchical_neighbor_allreduce,
    "allreduce": shoal.allreduce,
    "pair_gossip": lambda x: shoal.pair_gossip(x, 1 - shoal.rank()),
}


@pytest.mark.parametrize("shape", [(4, 6), (40, 300)], ids=["inline", "region"])
def test_any_strides_give_the_result_of_a_contiguous_copy(fleet: Fleets, shape: tuple[int, ...]) -> None:
    def run() -> None:
        x = sample(shoal.rank(), shape)
        for average in AVERAGES.values():
            for name, view in VIEWS.items():
                nonfinite_sample = view(x.clone())
                before = nonfinite_sample.clone()
                result = average(nonfinite_sample)
                assert same_bits(result, average(before.contiguous())), name
                assert same_bits(nonfinite_sample, before), name
                assert result.shape == nonfinite_sample.shape

    fleet(2).run(run)


@pytest.mark.parametrize("shape", [(4, 6), (40, 300)], ids=["inline", "region"])
def test_gathers_and_broadcasts_take_any_strides(fleet: Fleets, shape: tuple[int, ...]) -> None:
    def run() -> None:
        x = sample(shoal.rank(), shape)
        for name, view in VIEWS.items():
            other = view(sample(1 - shoal.rank(), shape))
            both = [view(sample(rank, shape)) for rank in range(2)]
            assert same_bits(shoal.neighbor_allgather(view(x)), other), name
            assert same_bits(shoal.allgather(view(x)), torch.cat(both)), name
            assert same_bits(shoal.broadcast(view(x), 1), both[1]), name

    fleet(2).run(run)


@pytest.mark.parametrize("numel", [5, 5000])
def test_conjugate_and_negative_views_count_by_value(fleet: Fleets, numel: int) -> None:
    """``x.conj()`` and its imaginary part are views whose memory holds other numbers than their values."""

    def run() -> list[torch.Tensor]:
        x = sample(shoal.rank(), (numel,), torch.complex64)
        conjugate, negative = x.conj(), x.conj().imag
        assert conjugate.is_conj()
        assert negative.is_neg()
        return [
            shoal.neighbor_allreduce(conjugate),
            shoal.neighbor_allreduce(negative),
            shoal.allreduce(negative, op="min"),
            shoal.broadcast(conjugate, 1),
            shoal.allgather(conjugate),
        ]

    inputs = samples(2, (numel,), torch.complex64)
    conjugates = [x.conj().resolve_conj() for x in inputs]
    negatives = [-x.imag for x in inputs]
    for rank, result in enumerate(fleet(2).run(run)):
        other = 1 - rank
        expected = [
            weighted(conjugates[rank], 0.5, {other: (0.5, conjugates[other])}),
            weighted(negatives[rank], 0.5, {other: (0.5, negatives[other])}),
            torch.minimum(*negatives),
            conjugates[1],
            torch.cat(conjugates),
        ]
        assert all(map(same_bits, result, expected))


@pytest.mark.filterwarnings("ignore:.*no gradient flows back")
def test_no_result_requires_grad_and_no_graph_is_recorded(fleet: Fleets) -> None:
    def run() -> None:
        leaf = sample(shoal.rank(), (2, 3)).requires_grad_()
        for x in (leaf, leaf * 2, torch.nn.Parameter(leaf.detach().clone())):
            before = x.detach().clone()
            results = [average(x) for average in AVERAGES.values()]
            results += [shoal.allgather(x), shoal.neighbor_allgather(x), shoal.broadcast(x, 0)]
            for result in results:
                assert not result.requires_grad
                assert result.grad_fn is None
            assert x.requires_grad
            assert same_bits(x, before)

    fleet(2).run(run)


def test_an_operation_on_a_leaf_that_requires_grad_can_be_written_in_place(fleet: Fleets) -> None:
    def run() -> float:
        parameter = torch.nn.Parameter(torch.tensor([float(shoal.rank())]))
        shoal.bluefog.allreduce_(parameter.detach())
        assert parameter.requires_grad
        return parameter.item()

    assert fleet(2).run(run) == [0.5, 0.5]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("numel", [0, 7, 4097, 70_000])
def test_out_takes_the_result_and_is_returned(fleet: Fleets, size: int, numel: int) -> None:
    def run() -> None:
        x = sample(shoal.rank(), (numel,))
        calls: list[Callable[..., torch.Tensor]] = [
            shoal.neighbor_allreduce,
            shoal.bluefog.hierarchical_neighbor_allreduce,
            shoal.allreduce,
            lambda x, out=None: shoal.broadcast(x, size - 1, out=out),
        ]
        for call in calls:
            expected = call(x)
            out = torch.full_like(x, 9.0)
            assert call(x, out=out) is out
            assert same_bits(out, expected)
            itself = x.clone()
            assert call(itself, out=itself) is itself
            assert same_bits(itself, expected)
            wide = torch.full((2 * numel,), 9.0)
            strided = wide[::2]
            assert call(x, out=strided) is strided
            assert same_bits(strided, expected)
            assert torch.equal(wide[1::2], torch.full((numel,), 9.0))

    fleet(size).run(run)


def test_out_may_partly_overlap_the_input(fleet: Fleets) -> None:
    """The input is copied when the call starts, so the position of the result has no effect."""

    def run() -> None:
        memory = sample(shoal.rank(), (30_001,))
        expected = shoal.neighbor_allreduce(memory[:-1].clone())
        shoal.neighbor_allreduce(memory[:-1], out=memory[1:])
        assert same_bits(memory[1:], expected)

    fleet(2).run(run)


def test_the_result_has_its_own_memory(fleet: Fleets) -> None:
    """Writing into a result changes neither another agent's result nor the input."""

    def run() -> tuple[float, float]:
        x = torch.ones(10_000)
        results = [average(x) for average in AVERAGES.values()]
        results += [shoal.broadcast(x, 0), shoal.allgather(x), shoal.neighbor_allgather(x)]
        shoal.barrier()
        for result in results:
            result.fill_(100.0 * (shoal.rank() + 1))
        shoal.barrier()
        return x.sum().item(), {result[0].item() for result in results} == {100.0 * (shoal.rank() + 1)}

    assert fleet(2).run(run) == [(10_000.0, True)] * 2


def test_the_input_may_change_as_soon_as_a_nonblocking_call_returns(fleet: Fleets) -> None:
    def run() -> list[float]:
        results = []
        for numel in (3, 50_000):
            x = torch.full((numel,), float(shoal.rank()))
            handles = [
                shoal.nonblocking.neighbor_allreduce(x),
                shoal.nonblocking.allreduce(x),
                shoal.nonblocking.allgather(x),
                shoal.nonblocking.broadcast(x, 1),
            ]
            x.fill_(1000.0)
            results += [handle.wait().mean().item() for handle in handles]
        return results

    assert fleet(2).run(run) == [[0.5, 0.5, 0.5, 1.0] * 2] * 2


@pytest.mark.parametrize("dtype", WEIGHABLE, ids=str)
@pytest.mark.parametrize("numel", [9, 9001])
def test_nan_and_infinity_propagate_by_arithmetic(
    fleet: Fleets, transport: str, dtype: torch.dtype, numel: int
) -> None:
    """Where one agent has NaN or infinity, the result has its arithmetic value. All other entries are finite."""
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0]

    def nonfinite_sample(rank: int) -> torch.Tensor:
        x = sample(rank, (numel,), dtype)
        if rank == 1:
            x[: len(special)] = torch.tensor(special).to(dtype)
        if rank == 2:
            x[2] = torch.tensor(float("inf")).to(dtype)
        return x

    def run() -> list[torch.Tensor]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        x = nonfinite_sample(shoal.rank())
        return [shoal.neighbor_allreduce(x), shoal.allreduce(x, average=False), shoal.broadcast(x, 1)]

    inputs = [nonfinite_sample(rank) for rank in range(3)]
    averages = averaged_over(shoal.topology.FullyConnectedGraph(3), inputs, is_weighted=False)
    total = reduced("sum", inputs)
    for rank, (average, sums, copy) in enumerate(fleet(3).run(run)):
        assert _same_numbers(average, averages[rank])
        assert _same_numbers(sums, total) or same_reduction(sums, total, transport)
        assert same_bits(copy, inputs[1])
        assert bool(average[len(special) :].isfinite().all())


def _same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, except that one NaN is as good as another: which of two NaNs survives a sum is the CPU's."""
    one, other = (torch.view_as_real(x) if x.is_complex() else x for x in (one, other))
    clean = ~other.isnan()
    return torch.equal(one.isnan(), ~clean) and torch.equal(bits(one[clean]), bits(other[clean]))


def test_an_infinite_complex_number_does_not_affect_its_other_part(fleet: Fleets) -> None:
    """Weights are real, so each part is summed separately. A complex product with w + 0i would make inf * 0 = NaN."""

    def run() -> torch.Tensor:
        return shoal.neighbor_allreduce(torch.tensor([complex(float("inf"), 1.0)]))

    for result in fleet(2).run(run):
        assert torch.equal(torch.view_as_real(result), torch.tensor([[float("inf"), 1.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bit_sums_are_rounded_once(fleet: Fleets, dtype: torch.dtype) -> None:
    """4096 + 1 + 1 + 1 + 1 summed in 16 bits stays 4096 (or loses more); in float32 it is 4100, and then rounded."""

    def run() -> list[float]:
        x = torch.tensor([4096.0 if shoal.rank() == 0 else 1.0], dtype=dtype)
        others = {rank: 1.0 for rank in range(5) if rank != shoal.rank()}
        mixed = shoal.neighbor_allreduce(x, 1.0, others, others)
        return [mixed.item(), shoal.allreduce(x, average=False).item()]

    assert fleet(5).run(run) == [[torch.tensor(4100.0).to(dtype).item()] * 2] * 5


def test_sixteen_bit_averages_do_not_overflow_in_between(fleet: Fleets) -> None:
    def run() -> list[float]:
        x = torch.full((5,), 60_000.0, dtype=torch.float16)
        return [shoal.allreduce(x)[0].item(), shoal.neighbor_allreduce(x)[0].item()]

    expected = torch.tensor(60_000.0, dtype=torch.float16).item()
    assert fleet(4).run(run) == [[expected, expected]] * 4


def test_many_dimensions_are_kept(fleet: Fleets) -> None:
    def run() -> torch.Size:
        return shoal.neighbor_allreduce(torch.ones([1] * 40 + [2])).shape

    assert fleet(2).run(run) == [torch.Size([1] * 40 + [2])] * 2


MOVED = (
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


def as_bytes(tensor: torch.Tensor) -> list[int]:
    flat = tensor.contiguous().view(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("rows", [2, 5000], ids=["inline", "region"])
def test_dtypes_without_sums_are_moved_bit_for_bit(fleet: Fleets, rows: int) -> None:
    def made(rank: int, dtype: torch.dtype) -> torch.Tensor:
        nonfinite_sample = torch.arange(rows * 8, dtype=torch.int64).view(rows, 8).mul(7).add(rank).to(torch.uint8)
        return (
            nonfinite_sample.view(torch.float16).view(torch.complex32)
            if dtype.is_complex
            else nonfinite_sample.view(dtype)
        )

    def run() -> None:
        for dtype in MOVED:
            every = [made(rank, dtype) for rank in range(2)]
            x, other = every[shoal.rank()], every[1 - shoal.rank()]
            both = as_bytes(every[0]) + as_bytes(every[1])
            assert as_bytes(shoal.broadcast(x, 1)) == as_bytes(every[1]), dtype
            assert as_bytes(shoal.allgather(x)) == both, dtype
            assert as_bytes(shoal.grouped_broadcast([x], 1)[0]) == as_bytes(every[1]), dtype
            assert as_bytes(shoal.grouped_allgather([x])[0]) == both, dtype
            assert as_bytes(shoal.neighbor_allgather(x)) == as_bytes(other), dtype
            assert shoal.allgather(x).dtype == dtype
            for average in AVERAGES.values():
                with pytest.raises(TypeError, match=r"not \w+, which only broadcast, allgather and their like move"):
                    average(x)
        with pytest.raises(shoal.Mismatch):
            shoal.broadcast(made(0, MOVED[-shoal.rank() - 1]), 0)

    fleet(2).run(run)


NO_NUMBERS = {
    "meta": (lambda: torch.ones(2, device="meta"), r"on the meta device and has no numbers; .*to_empty"),
    "lazy": (lambda: torch.nn.UninitializedParameter(), "of a lazy module; run one batch through the model first"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"not torch.sparse_coo; use tensor.to_dense\(\)"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "this one is nested; give tensor.to",
    ),
}
ENTRIES: dict[str, Callable[[torch.Tensor], object]] = {
    **AVERAGES,
    "pair_gossip": lambda x: shoal.pair_gossip(x, 0),
    "allreduce_": shoal.bluefog.allreduce_,
    "broadcast": lambda x: shoal.broadcast(x, 0),
    "broadcast_": lambda x: shoal.bluefog.broadcast_(x, 0),
    "allgather": shoal.allgather,
    "neighbor_allgather": shoal.neighbor_allgather,
    "neighbor_alltoall": lambda x: shoal.neighbor_alltoall(x, []),
    "grouped_allreduce": lambda x: shoal.grouped_allreduce([x]),
    "grouped_neighbor_allreduce": lambda x: shoal.grouped_neighbor_allreduce([x]),
    "grouped_broadcast": lambda x: shoal.grouped_broadcast([x], 0),
    "grouped_allgather": lambda x: shoal.grouped_allgather([x]),
    "broadcast_parameters": lambda x: shoal.broadcast_parameters([("x", x)]),
    "allreduce_parameters": lambda x: shoal.bluefog.allreduce_parameters([("x", x)]),
    "windows.create": lambda x: shoal.windows.create(x, "x"),
    "autograd.allreduce": lambda x: shoal.autograd.allreduce(x),
    "autograd.allgather": lambda x: shoal.autograd.allgather(x),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_a_tensor_without_data_raises_a_clear_error_in_every_function(kind: str) -> None:
    make, message = NO_NUMBERS[kind]

    def run() -> None:
        for name, entry in ENTRIES.items():
            with pytest.raises(TypeError, match=message) as raised:
                entry(make())
            assert str(raised.value).startswith(name.split(".")[-1].rstrip("_") if "win" not in name else name)

    shoal.Fleet(1).run(run)


def test_an_empty_tensor_is_sent_whatever_its_strides_are(fleet: Fleets) -> None:
    def run() -> None:
        for x in (torch.empty_strided((0,), (0,)), torch.empty_strided((0, 3), (0, 0)), torch.ones(1).expand(1)):
            assert shoal.grouped_broadcast([x], 0)[0].shape == x.shape
            assert shoal.grouped_allgather([x])[0].shape == (2 * len(x), *x.shape[1:])
            assert shoal.grouped_allreduce([x])[0].shape == x.shape
            assert shoal.allgather(x).shape == (2 * len(x), *x.shape[1:])
            assert shoal.broadcast(x, 0).shape == x.shape

    fleet(2).run(run)


def test_empty_accepts_shapes_like_torch() -> None:
    def run() -> None:
        x = torch.ones(2, 3)
        assert (
            shoal.windows.empty(x.shape).shape
            == shoal.windows.empty(2, 3).shape
            == shoal.windows.empty([2, 3]).shape
            == x.shape
        )
        assert shoal.windows.empty(()).shape == shoal.windows.empty().shape == ()
        assert shoal.windows.empty(4).shape == (4,)
        with pytest.raises(TypeError, match=r"empty\(\): a dimension must be an int, got 2.5"):
            shoal.windows.empty(2.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"shape \[-1\] has a negative dimension"):
            shoal.windows.empty(-1)

    shoal.Fleet(1).run(run)


ANOTHER_DEFAULT_DEVICE = """
import tempfile
import torch
import shoal
from shoal import algorithms, compression
from shoal.sim import StackedFleet

CPU = torch.device("cpu")
COMPRESSORS = [compression.QSGD(7), compression.TopK(0.1), compression.RandomK(0.1), compression.Sign(),
               compression.MinMaxUInt8()]
ALGORITHMS = [None, algorithms.GradientDescent(1.0, atc=False), algorithms.ParallelGradientDescent(1.0),
              algorithms.ExactDiffusion(1.0, lazy=True)]

def ones(*shape):
    return torch.ones(shape, device=CPU)

def operations():
    x, other = ones(20_000), 1 - shoal.rank()
    for op in (shoal.neighbor_allreduce, shoal.allreduce, shoal.allgather, shoal.neighbor_allgather):
        assert (op(x) == 1).all(), op
    shoal.allreduce(x, op="max")
    shoal.broadcast(x, 0)
    shoal.pair_gossip(x, other)
    shoal.grouped_neighbor_allreduce([x, ones(3)])
    shoal.grouped_allgather([x, ones(3)])
    assert shoal.broadcast_object({"x": x, "empty": ones(0)}, 0)["x"].is_cpu
    for compressor in COMPRESSORS:
        shoal.neighbor_allreduce(x, compression=compressor)

def windows():
    for x in (ones(20_000), shoal.windows.empty((5000,)).fill_(1)):
        with shoal.windows.create(x, "x", zero_init=True) as window:
            window.put()
            shoal.barrier()
            assert (window.update(clone=True) == 1).all()
            shoal.barrier()
            window.accumulate(self_weight=1.0)
            window.get()
            shoal.barrier()
            window.collect()
            shoal.barrier()

def optimizer(algorithm, compressor):
    model = torch.nn.Linear(64, 8, device=CPU)
    shoal.broadcast_parameters(model.state_dict(), 0)
    given = [algorithm] if algorithm else []
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    made = shoal.DecentralizedOptimizer(inner, model, *given, compression=compressor)
    for _ in range(2):
        made.zero_grad()
        model(ones(4, 64)).square().mean().backward()
        made.step()
    shoal.consensus_distance(model)
    saved = shoal.Checkpoint(model=model, optimizer=made)
    saved.save(folder, 1)
    saved.load(folder)

def agent():
    shoal.set_topology(shoal.topology.RingGraph(2))
    torch.set_default_device("meta")
    try:
        operations()
        windows()
        for algorithm in ALGORITHMS:
            optimizer(algorithm, None)
        for compressor in COMPRESSORS:
            optimizer(None, compressor)
    finally:
        torch.set_default_device(None)

with tempfile.TemporaryDirectory() as folder:
    shoal.Fleet(2).run(agent)
torch.set_default_device("meta")
for algorithm in (algorithms.GradientDescent(0.05), algorithms.ChocoSGD(0.05, 0.2, compression.TopK(0.2))):
    StackedFleet(shoal.topology.RingGraph(4)).run(algorithm, ones(3), lambda x: x - 1, 3)
print("done")
"""


@pytest.mark.parametrize("native", ["0", "1"])
def test_tensors_of_shoal_are_on_the_cpu_whatever_the_default_device_is(native: str) -> None:
    """The meta device stands for any other one. The script's own tensors are on the CPU."""
    environment = {**os.environ, "SHOAL_NATIVE": native}
    done = subprocess.run([sys.executable, "-c", ANOTHER_DEFAULT_DEVICE], env=environment, capture_output=True,
                          text=True, timeout=scaled(120))  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
