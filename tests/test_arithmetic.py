"""Sums that wait for their terms leave the thread that takes them as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shoal
from shoal.arithmetic import BLOCK_BYTES, reduce, weigh_in_blocks, weighted_sum
from shoal.execution.stage import MORE
from shoal.transport.messages import Payload

Fleets = Callable[..., shoal.Fleet]


@pytest.mark.parametrize("kind", ["reduce", "weighted_sum"])
def test_a_waiting_sum_does_not_change_the_gradient_mode(kind: str) -> None:
    numel = 2 * BLOCK_BYTES // 4
    own, out, payload = torch.ones(numel), torch.empty(numel), Payload(torch.ones(numel), numel // 2)
    terms = [payload]
    summing = reduce(out, "sum", own, 0, terms) if kind == "reduce" else weighted_sum(out, own, [1.0, 1.0], terms)
    assert next(summing) == MORE
    assert torch.is_grad_enabled()
    payload.available = numel
    with pytest.raises(StopIteration):
        next(summing)
    assert torch.is_grad_enabled()
    assert (out == 2).all()


@pytest.mark.parametrize("count", [1, 65])
def test_complex_sums_of_several_blocks_are_written_twice(count: int) -> None:
    """The compiled kernels sum at most 64 tensors."""
    x = torch.ones((BLOCK_BYTES >> 3) + 1, dtype=torch.complex64)
    out, also = torch.empty_like(x), torch.empty_like(x)
    weigh_in_blocks(out, x, 0.5, [x] * count, [0.25] * count, also)
    assert (out == 0.5 + 0.25 * count).all()
    assert torch.equal(out, also)


def test_the_callers_thread_keeps_its_gradient_mode_whichever_thread_sums(fleet: Fleets) -> None:
    def run() -> bool:
        x = torch.ones(1_000_000)
        for _ in range(10):
            handle = shoal.nonblocking.allreduce(x)
            _ = x * 2
            handle.wait()
            if not torch.is_grad_enabled():
                return False
        return True

    assert all(fleet(2).run(run))
