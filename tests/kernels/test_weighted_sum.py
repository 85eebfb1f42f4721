"""Weighted sums by kernels have the bits of the reference, whichever implementation computes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels.sums import weighted_sum
from support.kernels import DEVICE, IMPLEMENTATIONS, PROGRAMS, QUIET, same_numbers
from support.reference import weighted

pytestmark = QUIET
REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*REAL, torch.complex64, torch.complex128]
AWKWARD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, -1e-310, 1e-40, -1e-45, 6e-8, 3e38, -65504.0, 1e308]


def numbers(n: int, count: int, dtype: torch.dtype, seed: int = 1) -> list[torch.Tensor]:
    """Tensors of random numbers, with awkward ones among them where they are long."""
    generator = torch.Generator().manual_seed(seed)
    results = [torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
    for at, one in enumerate(results):
        if dtype.is_complex:
            one += 1j * torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
        if n > 3 * len(AWKWARD):
            one[at : at + len(AWKWARD)] = torch.tensor(AWKWARD, dtype=torch.float64).to(dtype)
    return results


def expected(tensors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    return weighted(tensors[0], weights[0], dict(enumerate(zip(weights[1:], tensors[1:], strict=True))))


def computed(tensors: list[torch.Tensor], weights: list[float], implementation: Any) -> torch.Tensor:
    own, *terms = [tensor.to(DEVICE) for tensor in tensors]
    out = torch.empty_like(own)
    weighted_sum(out, own, weights[0], terms, weights[1:], implementation=implementation)
    return out


def unequal(count: int) -> list[float]:
    return [1 / (place + 3) * (-1) ** place for place in range(count)]


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("n", [1, 7, 1024, 3001])
def test_each_term_is_one_fused_multiply_add(implementation: Any, dtype: torch.dtype, count: int, n: int) -> None:
    tensors, weights = numbers(n, count, dtype), unequal(count)
    assert same_numbers(computed(tensors, weights, implementation), expected(tensors, weights))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 17, 40])
@pytest.mark.parametrize("weight", [None, 0.3, 0.25, -1 / 7, 0.0])
def test_equal_weights_scale_the_sum_once(
    implementation: Any, dtype: torch.dtype, count: int, weight: float | None
) -> None:
    tensors, weights = numbers(1500, count, dtype), [1 / count if weight is None else weight] * count
    assert same_numbers(computed(tensors, weights, implementation), expected(tensors, weights))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [18, 33, 34, 50])
def test_more_terms_than_in_a_pass_give_the_same_bits(implementation: Any, dtype: torch.dtype, count: int) -> None:
    tensors, weights = numbers(1100, count, dtype), unequal(count)
    assert same_numbers(computed(tensors, weights, implementation), expected(tensors, weights))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("start", [1, 3, 5])
def test_slices_may_start_anywhere(implementation: Any, dtype: torch.dtype, start: int) -> None:
    tensors = [one[start * (at + 1) :][:1500] for at, one in enumerate(numbers(1600, 3, dtype))]
    own, *terms = [number.clone().to(DEVICE) for number in numbers(1600, 3, dtype)]
    out = torch.zeros(1600, dtype=dtype, device=DEVICE)
    weighted_sum(out[7:1507], own[start:][:1500], 0.5, [terms[0][2 * start :][:1500], terms[1][3 * start :][:1500]],
                 [0.2, 0.3], implementation=implementation)  # fmt: skip
    assert same_numbers(out[7:1507], expected(tensors, [0.5, 0.2, 0.3]))
    assert not out[:7].any() and not out[1507:].any()


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex128])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("count", "place"), [(3, 0), (3, 1), (3, 2), (20, 0), (20, 5), (20, 16), (20, 17), (20, 19)])
def test_the_result_may_be_one_of_the_tensors(
    implementation: Any, dtype: torch.dtype, equal: bool, count: int, place: int
) -> None:
    tensors, weights = numbers(2500, count, dtype), [1 / count] * count if equal else unequal(count)
    on_device = [tensor.clone().to(DEVICE) for tensor in tensors]
    weighted_sum(on_device[place], on_device[0], weights[0], on_device[1:], weights[1:], implementation=implementation)
    assert same_numbers(on_device[place], expected(tensors, weights))
    on_device[place] = tensors[place]
    assert all(same_numbers(one, other) for one, other in zip(on_device, tensors, strict=True))


@IMPLEMENTATIONS
@pytest.mark.parametrize("shift", [-3, 1, 1024])
def test_a_result_that_partly_overlaps_a_term_is_right(implementation: Any, shift: int) -> None:
    own, memory = numbers(7000, 2, torch.float32)
    term = memory[2000:5000].clone()
    own, memory = own[:3000].clone(), memory.to(DEVICE)
    out = memory[2000 + shift : 5000 + shift]
    weighted_sum(out, own.to(DEVICE), 0.3, [memory[2000:5000]], [0.6], implementation=implementation)
    assert same_numbers(out, expected([own, term], [0.3, 0.6]))


@IMPLEMENTATIONS
def test_an_empty_sum_is_empty(implementation: Any) -> None:
    out = torch.empty(0, device=DEVICE)
    weighted_sum(
        out, torch.empty(0, device=DEVICE), 0.5, [torch.empty(0, device=DEVICE)], [0.5], implementation=implementation
    )


@IMPLEMENTATIONS
def test_a_term_of_zeros_is_not_added_and_its_weight_counts(implementation: Any) -> None:
    own, term = (number.to(DEVICE) for number in numbers(100, 2, torch.float32))
    out = torch.empty_like(own)
    weighted_sum(out, own, 1 / 3, [None, term], [1 / 3, 1 / 3], implementation=implementation)
    assert same_numbers(out, (own + term).cpu() / 3)


@IMPLEMENTATIONS
@pytest.mark.parametrize("weight", [1e39, -3.4028235677973366e38])
def test_a_weight_outside_float32_is_an_error(implementation: Any, weight: float) -> None:
    own, out = torch.ones(10, device=DEVICE), torch.empty(10, device=DEVICE)
    with pytest.raises(RuntimeError, match="without overflow"):
        weighted_sum(out, own, 0.5, [own.clone()], [weight], implementation=implementation)
    with pytest.raises(RuntimeError, match="without overflow"):
        weighted_sum(out.half(), own.half(), 0.5, [own.half()], [weight], implementation=implementation)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, 1e-46, 0.1 + 2**-30])
def test_unusual_weights_round_as_in_torch(implementation: Any, dtype: torch.dtype, weight: float) -> None:
    tensors = numbers(200, 3, dtype)
    assert same_numbers(computed(tensors, [0.5, weight, 0.25], implementation), expected(tensors, [0.5, weight, 0.25]))
    assert same_numbers(computed(tensors, [weight, 0.5, 0.25], implementation), expected(tensors, [weight, 0.5, 0.25]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@settings(max_examples=40)
@given(data=st.data())
def test_sums_of_any_numbers(implementation: Any, dtype: torch.dtype, data: st.DataObject) -> None:
    n, count = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    width = 32 if dtype == torch.bfloat16 else torch.finfo(dtype).bits
    one = st.floats(width=width)  # type: ignore[call-overload]
    drawn = [data.draw(st.lists(one, min_size=n, max_size=n)) for _ in range(count)]
    weights = data.draw(st.lists(st.floats(-1e30, 1e30), min_size=count, max_size=count))
    tensors = [torch.tensor(one, dtype=torch.float64).to(dtype) for one in drawn]
    assert same_numbers(computed(tensors, weights, implementation), expected(tensors, weights))


@pytest.mark.parametrize("implementation", [PROGRAMS])
def test_a_program_does_not_use_pointers_of_unequal_tensors(implementation: Any) -> None:
    own = torch.ones(10, device=DEVICE)
    for term in (own[:9], own.double(), torch.ones(20, device=DEVICE)[::2], own.view(2, 5)):
        with pytest.raises(ValueError, match="tensor 2 has"):
            weighted_sum(torch.empty(10, device=DEVICE), own, 0.5, [term], [0.25], implementation=implementation)
    with pytest.raises(ValueError, match="pass floating point"):
        weighted_sum(own.int(), own.int(), 0.5, [own.int()], [0.25], implementation=implementation)
