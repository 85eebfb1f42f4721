"""The compiled kernels have the bits of torch's operations, and are not used where they would not have them."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.arithmetic import weigh_in_blocks
from shoal.compression import QSGD, Cast, Compressor, Identity, MinMaxUInt8, RandomK, Sign, TopK
from shoal.compression.bits import positions_bytes, read_positions, write_positions
from shoal.compression.random_numbers import HashStream, Redrawn
from shoal.kernels import native
from shoal.kernels.native import build, differing, library, why_not_native
from shoal.kernels.sums import (
    REDUCTIONS,
    add_scaled,
    combine,
    common_factor,
    copy,
    reduce,
    scale,
    weigh,
    weighted_sum,
)
from support.kernels import same_numbers
from support.limits import scaled
from support.reference import same_bits

NATIVE = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 1e-40, 6e-8, -65504.0, 3e38]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context in which the compiled kernels are not used."""

    def without_library() -> pytest.MonkeyPatch:
        patch = pytest.MonkeyPatch()
        patch.setattr(native, "library", lambda: None)
        return patch

    return without_library


def drawn(n: int, seed: int, dtype: torch.dtype, special: bool, gap: int = 0) -> torch.Tensor:
    """Random numbers of many magnitudes that begin ``gap`` numbers into their memory."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(gap + n, generator=chance, dtype=torch.float64)
    x *= 2.0 ** torch.randint(-30, 30, (gap + n,), generator=chance).double()
    if special:
        where = torch.randint(0, gap + n, (max(1, n // 7),), generator=chance)
        x[where] = torch.tensor([SPECIAL[int(at) % len(SPECIAL)] for at in where], dtype=torch.float64)
    return x.to(dtype)[gap:]


@NATIVE
def test_compiled_kernels_are_called_on_the_native_path_only(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(native, "weigh", lambda *_, **__: called.append("weigh"))
    monkeypatch.setattr(native, "reduce", lambda *_, **__: called.append("reduce"))
    out, x = torch.zeros(8), torch.ones(8)
    weighted_sum(out, x, 0.5, [x + 1], [0.25], implementation="torch")
    reduce(out, "sum", [out, x], implementation="torch")
    assert called == [] and torch.equal(out, torch.full((8,), 2.0))
    weighted_sum(out, x, 0.5, [x + 1], [0.25], implementation="native")
    reduce(out, "sum", [out, x], implementation="native")
    assert called == ["weigh", "reduce"]


@NATIVE
@settings(max_examples=150)
@given(
    st.integers(4096, 9000),
    st.integers(1, 64),
    st.integers(0, 9),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from(["unequal", "mean", "equal"]),
    st.integers(0, 1 << 30),
)
def test_weighted_sums(n: int, count: int, gap: int, dtype: torch.dtype, special: bool, kind: str, seed: int) -> None:
    inputs = [drawn(n, seed + at, dtype, special, gap if at else 0) for at in range(count)]
    weights = {"unequal": [0.1 + 0.3 * at for at in range(count)], "mean": [1 / count] * count, "equal": [0.3] * count}
    factor, given_weights = common_factor(weights[kind]), weights[kind]
    result, also, expected = (torch.zeros(gap + n, dtype=dtype)[gap:] for _ in range(3))
    assert native.fits(result, inputs, least=0)
    if factor is None:
        native.weigh(result, inputs, given_weights, also=also)
    else:
        native.weigh(result, inputs, given_weights, factor.number, factor.divides, also)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        weigh(given_weights, factor, expected, inputs[0], inputs[1:])
    assert same_numbers(result, expected)
    assert same_bits(result.nan_to_num(), also.nan_to_num())


@NATIVE
@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [[], [[0, 1], [2, 3, 4]], [[4, 0], [1], [3, 2]]], ids=str)
def test_reductions(by_torch: Any, how: str, dtype: torch.dtype, parts: list[list[int]]) -> None:
    inputs = [drawn(20_011, seed, dtype, special=True) for seed in range(5)]
    result, expected = torch.empty(20_011, dtype=dtype), torch.empty(20_011, dtype=dtype)
    combine(how, 2, parts, result, inputs[2], [*inputs[:2], *inputs[3:]])
    patch = by_torch()
    combine(how, 2, parts, expected, inputs[2], [*inputs[:2], *inputs[3:]])
    patch.undo()
    if how in ("min", "max"):  # which zero it is where both are is left open
        result, expected = result + 0.0, expected + 0.0
    assert same_numbers(result, expected)


@NATIVE
@pytest.mark.parametrize("gap", [0, 1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_large_results_use_streaming_stores_at_any_offset(by_torch: Any, gap: int, dtype: torch.dtype) -> None:
    n = 2 * native.STREAMED_BYTES // dtype.itemsize + 5
    own, other = (torch.ones(gap + n, dtype=dtype)[gap:] * at for at in (3, 5))
    own[:7] = torch.arange(7)
    result, also, expected = (torch.full((gap + n + 9,), 7, dtype=dtype) for _ in range(3))
    weigh_in_blocks(result[gap : gap + n], own, 0.3, [other, None], [0.2, 0.5], also[:n])
    patch = by_torch()
    weigh_in_blocks(expected[gap : gap + n], own, 0.3, [other, None], [0.2, 0.5])
    patch.undo()
    assert torch.equal(result, expected)
    assert torch.equal(also[:n], result[gap : gap + n])
    assert (also[n:] == 7).all()
    assert (result[:gap] == 7).all()
    assert (result[gap + n :] == 7).all()
    copy(expected[gap : gap + n], own)
    assert torch.equal(expected[gap : gap + n], own)
    assert (expected[gap + n :] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_copies_are_those_of_torch(dtype: torch.dtype) -> None:
    x, y = (drawn(30_001, seed, dtype, special=True) for seed in (1, 2))
    out = torch.empty_like(x)
    scale(out, x, 1 / 3)
    assert same_numbers(out, torch.mul(x, 1 / 3))
    add_scaled(out, x, y, 0.7)
    wide = x.float() if dtype in (torch.float16, torch.bfloat16) else x.clone()
    assert same_numbers(out, wide.add_(y.to(wide.dtype), alpha=0.7).to(dtype))
    add_scaled(out[::2], x[::2], y[::2], 0.7)
    assert same_numbers(out[1::2], wide[1::2].to(dtype))


COMPRESSORS: list[Compressor] = [
    Identity(),
    Cast(torch.bfloat16),
    MinMaxUInt8(),
    MinMaxUInt8(100, dyadic=True),
    *(QSGD(levels) for levels in (127, 63, 31, 15, 7, 3, 1)),
    QSGD(7, chunk=64),
    QSGD(7, "euclidean", chunk=50),
    QSGD(1000),
    Sign(),
    *(TopK(share) for share in (0.0001, 0.01, 0.3, 1.0)),
    *(RandomK(share) for share in (0.0001, 0.05, 0.6, 1.0)),
]


@NATIVE
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["usual", "ties", "special", "zeros"])
@pytest.mark.parametrize("n", [1, 13, 4_099, 140_003])
def test_messages_and_their_results(
    by_torch: Any, compressor: Compressor, dtype: torch.dtype, kind: str, n: int
) -> None:
    chance = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=chance, dtype=torch.float64).to(dtype)
    if kind == "ties":
        x = x.mul(4).round().div(4)
    elif kind == "special":
        x[torch.randint(0, n, (3,), generator=chance)] = torch.tensor([math.nan, math.inf, -1e-40]).to(dtype)
    elif kind == "zeros":
        x = torch.zeros(n, dtype=dtype)
    result = _outcome(compressor, x)
    patch = by_torch()
    expected = _outcome(compressor, x)
    patch.undo()
    assert torch.equal(result[0], expected[0])
    assert same_numbers(result[1], expected[1])
    assert same_numbers(result[2], expected[2])


def _outcome(compressor: Compressor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    data = compressor.encode(x, Redrawn(1, 2, 3))
    total = torch.linspace(-1, 1, len(x)).to(x.dtype)
    compressor.add_decoded(total, data, 0.3, Redrawn(1, 2, 3))
    return data, compressor.decode(data, len(x), x.dtype, Redrawn(1, 2, 3)), total


SHARES = [1e-5, 0.01, 0.1, 0.4, 0.9, 1.0]


def numbers_of_kind(kind: str, n: int) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    if kind == "ascending":
        return x.sort().values
    if kind == "equal":
        return torch.full((n,), -0.5)
    if kind == "ties":
        return x.mul(2).round()
    if kind == "mostly zeros":
        return torch.where(x > 1.5, x, -0.0)
    if kind == "many NaN":
        return torch.where(x > 1, math.nan, torch.where(x < -1.5, -math.inf, x))
    if kind.startswith("the sample"):
        # One of each stretch, at the places from which the kernel guesses where the k-th largest number is.
        stretch, number = max(1, n >> 15), torch.arange(min(n, 1 << 15))
        x[number * stretch + ((number * 0x9E3779B9 & 0xFFFFFFFF) * stretch >> 32)] = 9.0 if "large" in kind else 0.0
    return x


@NATIVE
@pytest.mark.parametrize("n", [1, 9, 1_000, 131_071, 200_003])
@pytest.mark.parametrize(
    "kind",
    ["random", "ascending", "equal", "ties", "mostly zeros", "many NaN", "the sample is large", "the sample is small"],
)
def test_the_largest_are_found_at_any_position(by_torch: Any, kind: str, n: int) -> None:
    x = numbers_of_kind(kind, n)
    for share in SHARES:
        compressor = TopK(share)
        result = compressor.encode(x, Redrawn(1, 2, 3))
        patch = by_torch()
        expected = compressor.encode(x, Redrawn(1, 2, 3))
        patch.undo()
        assert torch.equal(result, expected)


@NATIVE
@pytest.mark.parametrize("share", [1e-9, 0.0001, 0.01, 0.1, 0.15, 0.3, 0.999])
@pytest.mark.parametrize("d", [2, 8, 63, 65, 1_000, 70_001, 1 << 20])
def test_positions_are_those_of_torch(by_torch: Any, share: float, d: int) -> None:
    k = min(d - 1, max(1, round(share * d)))
    chance = torch.Generator().manual_seed(d + k)
    for places in (torch.randperm(d, generator=chance)[:k].sort().values, torch.arange(k), torch.arange(d - k, d)):
        message = torch.full((positions_bytes(k, d),), 255, dtype=torch.uint8)
        expected = message.clone()
        write_positions(d, places, message)
        assert torch.equal(read_positions(message, k, d), places)
        patch = by_torch()
        write_positions(d, places, expected)
        patch.undo()
        assert torch.equal(message, expected)


@NATIVE
@pytest.mark.parametrize("d", [9, 100, 3_000])
def test_positions_that_torch_refuses_are_refused(by_torch: Any, d: int) -> None:
    """Of messages with one wrong byte each, the same are valid, with the same values or the same error."""
    chance, refused = torch.Generator().manual_seed(d), 0
    for k in (1, 2, d // 10 + 1, d // 3):
        message = torch.empty(positions_bytes(k, d), dtype=torch.uint8)
        write_positions(d, torch.randperm(d, generator=chance)[:k].sort().values, message)
        for _ in range(40):
            corrupted = message.clone()
            corrupted[int(torch.randint(len(corrupted), (), generator=chance))] ^= int(
                torch.randint(1, 256, (), generator=chance)
            )
            outcomes = []
            for undo in (None, by_torch()):
                try:
                    outcomes.append(read_positions(corrupted, k, d).tolist())
                except ValueError as error:
                    outcomes.append(str(error))
                if undo is not None:
                    undo.undo()
            assert outcomes[0] == outcomes[1]
            refused += isinstance(outcomes[0], str)
    assert refused


def largest_of_drawn(key: int, d: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """By torch's own order, which is stable: of equals the first."""
    numbers = HashStream(torch.tensor([key]), torch.empty(d, dtype=dtype)).whole()
    return numbers.sort(descending=True, stable=True).indices[:count].sort().values


KEYS = [0, -1, 2**63 - 5, -(2**63), 0x1234567890ABCDEF]


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 7, 8, 100, 4_099, 150_001])
def test_positions_of_the_largest_random_numbers_are_found_without_storing_them(d: int, dtype: torch.dtype) -> None:
    for share in SHARES:
        count = max(1, round(share * d))
        for key in KEYS:
            result = native.drawn_largest(key, d, count, dtype)
            assert result is not None
            assert torch.equal(result, largest_of_drawn(key, d, count, dtype))


@NATIVE
@pytest.mark.parametrize("key", [135_000_405, 162_000_486, 440_001_320])
def test_of_equal_random_numbers_the_first_is_selected(key: int) -> None:
    d, count = 100_000, 30_000
    numbers = HashStream(torch.tensor([key]), torch.empty(d)).whole().sort(descending=True).values
    assert numbers[count - 1] == numbers[count]  # float32 has 2^24 numbers below one
    result = native.drawn_largest(key, d, count, torch.float32)
    assert result is not None
    assert torch.equal(result, largest_of_drawn(key, d, count, torch.float32))


@NATIVE
@pytest.mark.parametrize("key", [135_000_405, 162_000_486, 440_001_320])
def test_bounds_that_split_equal_random_numbers_are_refused(key: int) -> None:
    """The hashes at and after the end of the largest are one number in float32. A bound between them is too high."""
    kernels, d, count = library(), 100_000, 30_000
    assert kernels is not None
    hashes = (HashStream(torch.tensor([key]), torch.empty(d, dtype=torch.float64)).whole() * 2.0**53).long()
    last, _, below = hashes.sort(descending=True).values[count - 1 : count + 2].tolist()
    places, room = torch.empty(d, dtype=torch.int64), torch.empty(3, d, dtype=torch.int64)
    refused = []
    for low in (last, below):
        given = key, d, count, low, 1 << 53, places.data_ptr(), d, room.data_ptr(), d
        refused.append(bool(kernels.shoal_drawn_largest(0, *given)))
    assert refused == [True, False]
    assert torch.equal(places[:count], largest_of_drawn(key, d, count, torch.float32))


@NATIVE
def test_random_positions_are_right_also_with_wrong_bounds(by_torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a margin of a tenth of a standard deviation the kernel often refuses, and torch's path draws the numbers."""
    monkeypatch.setattr(native, "_DEVIATIONS", 0.1)
    x, refused = torch.arange(100_000.0), 0
    for seed in range(20):
        stream = Redrawn(seed, 2, 3).stream(x)
        result = native.drawn_largest(stream.key(0), len(x), 30_000, x.dtype)
        expected = largest_of_drawn(stream.key(0), len(x), 30_000, x.dtype)
        refused += result is None
        assert result is None or torch.equal(result, expected)
        assert torch.equal(RandomK(0.3).encode(x, Redrawn(seed, 2, 3)).view(torch.float32), x[expected])
    assert 0 < refused < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_numbers_are_the_hashes(by_torch: Any, dtype: torch.dtype) -> None:
    stream = Redrawn(5, 6, 7).stream(torch.empty(100_003, dtype=dtype))
    result = stream.fill(0, 17, torch.empty(70_003, dtype=dtype))
    patch = by_torch()
    assert torch.equal(result, stream.fill(0, 17, torch.empty(70_003, dtype=dtype)))
    patch.undo()
    assert float(result.max()) < 1


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_numbers_are_the_same_with_all_instruction_sets(dtype: torch.dtype) -> None:
    """Some CPUs multiply 64-bit integers by one instruction. Agents on others must draw and send the same."""
    kernels = library()
    assert kernels is not None
    if not kernels.shoal_multiply_words(1):
        pytest.skip("this CPU has no such instruction")
    x, outcomes = drawn(100_003, 1, dtype, special=False), []
    try:
        for wanted in (0, 1):
            assert kernels.shoal_multiply_words(wanted) == wanted
            messages = [one.encode(x, Redrawn(1, 2, 3)) for one in (QSGD(), QSGD(7, chunk=64), RandomK(0.03))]
            numbers = Redrawn(1, 2, 3).stream(x).fill(0, 17, torch.empty(70_003, dtype=dtype))
            outcomes.append([numbers, *messages])
    finally:
        kernels.shoal_multiply_words(1)
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


@NATIVE
def test_the_interpreter_lock_is_released_while_a_kernel_runs() -> None:
    assert type(library()) is ctypes.CDLL  # ctypes.PyDLL, of the same interface, holds it


# Where they are not used


class _Wrong:
    """Kernels of which one function gives a result that is off by one unit in the last place."""

    def __init__(self, kernels: ctypes.CDLL, name: str) -> None:
        self._kernels, self._name = kernels, name

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        if name != self._name:
            return function

        def corrupted(dtype: int, out: int, *args: Any) -> int:
            result = int(function(dtype, out, *args))
            ctypes.cast(out, ctypes.POINTER(ctypes.c_uint16))[0] ^= 1
            return result

        return corrupted


@NATIVE
def test_kernels_that_round_differently_are_detected() -> None:
    kernels = library()
    assert kernels is not None
    assert differing(kernels) is None
    corrupted: Any = _Wrong(kernels, "shoal_weigh")
    assert differing(corrupted) == "weighted sums of torch.float32"
    corrupted = _Wrong(kernels, "shoal_reduce")
    assert differing(corrupted) == "reductions (sum) of torch.float32"


@pytest.mark.parametrize("numel", [8192, 1 << 21])
def test_copies_and_scaled_copies_of_views_are_by_value(numel: int) -> None:
    """The memory of a conjugate or negative view holds other numbers than its values."""
    x = torch.full((numel,), 1 + 2j, dtype=torch.complex64)
    negative, out = torch._neg_view(torch.ones(numel)), torch.zeros(numel)
    copied, into = torch.zeros_like(x), torch.zeros_like(x).conj()
    copy(copied, x.conj())
    copy(into, x)
    assert (copied == 1 - 2j).all() and (into == 1 + 2j).all()
    for write, number in [
        (lambda: copy(out, negative), -1.0),
        (lambda: scale(out, negative, 0.5), -0.5),
        (lambda: add_scaled(out, torch.ones(numel), negative, 3.0), -2.0),
        (lambda: weigh([1.0, 2.0], None, out, negative, [negative]), -3.0),
        (lambda: combine("sum", 0, [], out, negative, [negative]), -2.0),
    ]:
        write()
        assert (out == number).all()


def test_a_reduction_of_no_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="reduction 'sum' of no tensors"):
        reduce(torch.zeros(3), "sum", [])


@pytest.mark.parametrize("implementation", ["torch", "native"])
def test_sums_refuse_views_whose_memory_holds_other_numbers(implementation: Any) -> None:
    out, negative = torch.zeros(8), torch._neg_view(torch.ones(8))
    conjugate = torch.zeros(8, dtype=torch.complex64).conj()
    for sums in (
        lambda: weighted_sum(out, negative, 1.0, [], [], implementation=implementation),
        lambda: weighted_sum(conjugate, conjugate, 1.0, [], [], implementation=implementation),
        lambda: reduce(out, "sum", [out, negative], implementation=implementation),
    ):
        with pytest.raises(ValueError, match=r"tensor \d is a conjugate or negative view.*resolve_conj"):
            sums()


def test_a_variable_disables_them() -> None:
    code = "from shoal.kernels.native import library, why_not_native; print(library(), why_not_native())"
    results = subprocess.run([sys.executable, "-c", code], env={"SHOAL_NATIVE": "0"}, capture_output=True, text=True,
                           timeout=scaled(120), check=True)  # fmt: skip
    assert results.stdout.strip() == "None SHOAL_NATIVE is 0"


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(build.CannotCompile, match="there is no C\\+\\+ compiler no-such-compiler"):
        build.compile_kernels(tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.CannotCompile, match="failed"):
        build.compile_kernels(tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.CannotCompile, match=r"install g\+\+"):
        build.compile_kernels(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_they_compile_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-Werror"])
    assert build.compile_kernels(tmp_path) == tmp_path / build.LIBRARY
    assert [path.name for path in tmp_path.iterdir()] == [build.LIBRARY]
