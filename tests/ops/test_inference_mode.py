"""Inference mode changes nothing, whichever thread sums; and an ``out`` that fails is its own call's failure only."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import shoal

Fleets = Callable[..., shoal.Fleet]
SIZES = [3, 100_000, 2_000_000]


@pytest.mark.parametrize("drives", ["the caller", "another thread"])
@pytest.mark.parametrize("numel", SIZES)
def test_results_in_place_and_new_ones_are_available(fleet: Fleets, numel: int, drives: str) -> None:
    def run() -> None:
        with torch.inference_mode():
            x, y, z = (torch.full((numel,), float(shoal.rank())) for _ in range(3))
            strided = torch.full((2, numel), float(shoal.rank())).t()
            handles = [
                shoal.bluefog.allreduce_nonblocking_(x),
                shoal.nonblocking.neighbor_allreduce(y, out=y),
                shoal.bluefog.broadcast_nonblocking_(z, 1),
                shoal.nonblocking.neighbor_allreduce(strided, out=strided),
                shoal.nonblocking.allreduce(torch.full((numel,), float(shoal.rank()))),
                shoal.nonblocking.neighbor_allreduce(torch.full((numel,), float(shoal.rank()))),
            ]
            while drives == "another thread" and not all(handle.poll() for handle in handles):
                time.sleep(0.001)
            results = [shoal.bluefog.wait(handle) for handle in handles]
        for result, expected in zip(results, [0.5, 0.5, 1.0, 0.5, 0.5, 0.5], strict=True):
            assert (result == expected).all()
        assert not results[4].is_inference()
        assert not results[5].is_inference()
        results[5].add_(1)

    fleet(2).run(run)


def test_an_inference_mode_tensor_is_written_to_outside_of_it(fleet: Fleets) -> None:
    def run() -> None:
        with torch.inference_mode():
            x = torch.full((1000,), float(shoal.rank()))
        assert shoal.allreduce(torch.full((1000,), float(shoal.rank())), out=x) is x
        assert (x == 0.5).all()
        shoal.bluefog.allreduce_parameters({"x": x})
        assert (x == 0.5).all()

    fleet(2).run(run)


def test_an_out_that_cannot_be_written_fails_only_its_own_call(fleet: Fleets) -> None:
    def run() -> None:
        outs = [torch.empty(4) for _ in range(5)]
        handles = [shoal.nonblocking.neighbor_allreduce(torch.full((4,), float(shoal.rank())), out=o) for o in outs]
        if shoal.rank() == 0:
            outs[2].resize_(7)  # against the rules, while the call has it
        for number, handle in enumerate(handles):
            if number == 2 and shoal.rank() == 0:
                with pytest.raises(RuntimeError):
                    shoal.bluefog.wait(handle)
            else:
                assert shoal.bluefog.wait(handle).tolist() == [0.5] * 4

    fleet(2).run(run)


def test_a_conjugate_out_gets_the_right_values(fleet: Fleets) -> None:
    def run() -> None:
        x = torch.full((5,), complex(shoal.rank(), 1)).conj()
        shoal.bluefog.allreduce_(x)
        assert (x == complex(0.5, -1)).all()

    fleet(2).run(run)
