"""Muon for matrices and AdamW for the rest, each in a wrapper around one model, as docs/optimizers.md prints it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shoal
from support import two_optimizers as agents
from support.two_optimizers import Arrays
from support.world import World

SIZE = 4


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(SIZE) as made:
        yield made


def by_hand(averages_gradients: bool = False) -> list[Arrays]:
    """Parameters, and then moments: each optimizer steps by itself, and the state that the page names is averaged on a
    ring."""
    W = torch.from_numpy(shoal.topology.mixing_matrix(shoal.topology.RingGraph(SIZE))).float()
    models = [agents.initial() for _ in range(SIZE)]
    pairs = [agents.plain(model) for model in models]

    def average(tensors: tuple[torch.Tensor, ...], weights: torch.Tensor) -> None:
        mixed = torch.einsum("ij,j...->i...", weights, torch.stack(tensors))
        for tensor, value in zip(tensors, mixed, strict=True):
            tensor.copy_(value)

    for step in range(agents.STEPS):
        for rank, model in enumerate(models):
            agents.gradients(model, rank, step)
        with torch.no_grad():
            if averages_gradients:
                for params in zip(*(model.parameters() for model in models), strict=True):
                    average(tuple(param.grad for param in params), torch.full((SIZE, SIZE), 1 / SIZE))
            for pair in pairs:
                for one in pair:
                    one.step()
            if averages_gradients:
                continue
            for params in zip(*(model.parameters() for model in models), strict=True):
                average(params, W)
            for number, name in enumerate(("momentum_buffer", "exp_avg_sq")):
                for states in zip(*(pair[number].state.values() for pair in pairs), strict=True):
                    average(tuple(state[name] for state in states), W)
    return [agents.arrays(model.parameters()) + agents.moments(pair) for model, pair in zip(models, pairs, strict=True)]


def test_two_wrappers_of_one_model_average_each_parameter_once_and_are_resumed(world: World, tmp_path: Path) -> None:
    result = world.results(agents.run, str(tmp_path))
    for one, wanted in zip(result, by_hand(), strict=True):
        for value, by_own in zip(one["own"] + one["moments"], wanted, strict=True):
            np.testing.assert_allclose(value, by_own, rtol=1e-5, atol=1e-6)
        assert one["rounds"] == [agents.STEPS] * 2
        assert all(np.array_equal(*both) for both in zip(one["whole"], one["again"], strict=True))
        for what, mean in (("own", "mean"), ("own", "consensus"), ("moments", "mean moments")):
            for number, value in enumerate(one[mean]):
                wanted_mean = np.mean([each[what][number] for each in result], axis=0)
                np.testing.assert_allclose(value, wanted_mean, rtol=1e-5, atol=1e-6)
    assert not np.allclose(result[0]["own"][0], result[1]["own"][0], atol=1e-4)
    wanted = by_hand(averages_gradients=True)
    for one in result:
        assert all(np.array_equal(*both) for both in zip(one["gradients"], result[0]["gradients"], strict=True))
        for value, by_own in zip(one["gradients"], wanted[0], strict=False):  # parameters come before moments
            np.testing.assert_allclose(value, by_own, rtol=1e-5, atol=1e-5)
