"""Reductions by kernels have the bits of a fold in rank order, whichever implementation computes them."""

from __future__ import annotations

import math
from functools import reduce as fold
from typing import Any

import pytest
import torch

from shoal.kernels.sums import reduce
from support.kernels import DEVICE, IMPLEMENTATIONS, QUIET, same_numbers

pytestmark = QUIET
STEPS = {"sum": torch.add, "average": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
PARTS: list[list[list[int]]] = [[], [[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]], [[5], [4, 3, 2, 1, 0]]]


def numbers(n: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    results = [torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
    for at, one in enumerate(results):
        if n > 100:
            one[at : at + 4] = torch.tensor([math.nan, math.inf, -math.inf, 1e-40], dtype=torch.float64).to(dtype)
    return results


def expected(how: str, tensors: list[torch.Tensor], parts: list[list[int]]) -> torch.Tensor:
    half = tensors[0].dtype in (torch.float16, torch.bfloat16)
    wide = [tensor.float() if half else tensor for tensor in tensors]
    groups = parts or [list(range(len(wide)))]
    total = fold(STEPS[how], [fold(STEPS[how], [wide[place] for place in group]) for group in groups])
    return (total / len(tensors) if how == "average" else total).to(tensors[0].dtype)


@IMPLEMENTATIONS
@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("n", [3, 2500])
def test_inputs_are_folded_in_order_part_by_part(
    implementation: Any, how: str, dtype: torch.dtype, parts: list[list[int]], n: int
) -> None:
    tensors = numbers(n, 6, dtype)
    out = torch.empty(n, dtype=dtype, device=DEVICE)
    reduce(out, how, [tensor.to(DEVICE) for tensor in tensors], parts=parts, implementation=implementation)
    assert same_numbers(out, expected(how, tensors, parts))


@IMPLEMENTATIONS
@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("count", [1, 2, 16, 17])
def test_reductions_of_any_number_of_agents(implementation: Any, how: str, count: int) -> None:
    tensors = numbers(1500, count, torch.float32)
    out = torch.empty(1500, device=DEVICE)
    reduce(out, how, [tensor.to(DEVICE) for tensor in tensors], implementation=implementation)
    assert same_numbers(out, expected(how, tensors, []))


@IMPLEMENTATIONS
@pytest.mark.parametrize("how", ["sum", "max"])
@pytest.mark.parametrize("place", [0, 2, 3])
def test_the_result_may_be_one_of_the_inputs(implementation: Any, how: str, place: int) -> None:
    tensors = numbers(1500, 4, torch.float32)
    on_device = [tensor.clone().to(DEVICE) for tensor in tensors]
    reduce(on_device[place], how, on_device, implementation=implementation)
    assert same_numbers(on_device[place], expected(how, tensors, []))


@IMPLEMENTATIONS
def test_complex_numbers_and_integers(implementation: Any) -> None:
    for dtype, how in ((torch.complex64, "sum"), (torch.complex64, "average"), (torch.complex128, "product")):
        tensors = [torch.complex(*numbers(50, 2, torch.float32)).to(dtype) * (at + 1) for at in range(2)]
        out = torch.empty(50, dtype=dtype, device=DEVICE)
        reduce(out, how, [tensor.to(DEVICE) for tensor in tensors], implementation=implementation)
        a, b = tensors
        if how == "product":
            wanted = torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)
        else:
            wanted = torch.view_as_complex(
                expected(how, [torch.view_as_real(tensor).view(-1) for tensor in tensors], []).view(-1, 2)
            )
        assert same_numbers(out, wanted)
    full = [torch.arange(10, device=DEVICE), torch.arange(10, device=DEVICE) * 3]
    out = torch.empty(10, dtype=torch.int64, device=DEVICE)
    reduce(out, "sum", full, implementation=implementation)
    assert out.tolist() == [4 * number for number in range(10)]


@IMPLEMENTATIONS
def test_an_unknown_reduction_is_an_error(implementation: Any) -> None:
    own = torch.ones(3, device=DEVICE)
    with pytest.raises(ValueError, match="reduction 'mean'"):
        reduce(own, "mean", [own], implementation=implementation)
    with pytest.raises(ValueError, match="tensor 1 has"):
        reduce(own, "sum", [own[:2]], implementation=implementation)
    reduce(own[:0], "sum", [own[:0]], implementation=implementation)
