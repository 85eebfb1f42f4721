"""A schedule of one's own: two methods, and it serves wherever a topology is taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import shoal
from shoal.algorithms import GradientDescent, run
from shoal.sim import StackedFleet
from shoal.topology import AnyTopology, CustomSchedule, RingGraph, rounds_to
from shoal.topology.mixing import mixing_matrix

SIZE = 4


class Turns(CustomSchedule):
    """A ring, and in every second round a random pair."""

    def __init__(self, size: int, seed: int = 0, wrong: int = 0) -> None:
        super().__init__(size)
        self.seed, self.wrong = seed, wrong

    def weights(self, round: int) -> AnyTopology:
        if round % 2 == 0:
            return RingGraph(self.size + self.wrong)
        i, j = np.random.default_rng((self.seed, round)).choice(self.size, 2, replace=False)
        W = np.eye(self.size)
        W[[i, i, j, j], [i, j, i, j]] = 0.5
        return W

    def describe(self) -> str:
        return f"ring and random pairs of {self.size} agents, seed {self.seed}"


def test_the_rounds_are_the_weights_that_the_function_returns() -> None:
    schedule = Turns(SIZE)
    assert np.allclose(schedule.matrix(0), mixing_matrix(RingGraph(SIZE)))
    assert np.array_equal(schedule.matrix(3), schedule.weights(3))
    assert schedule.period is None and repr(schedule) == "<ring and random pairs of 4 agents, seed 0>"
    assert rounds_to(schedule, 1e-3).value is not None


def test_agents_and_the_simulation_use_the_same_rounds() -> None:
    start = torch.arange(SIZE * 2, dtype=torch.float64).reshape(SIZE, 2)
    simulated = StackedFleet(Turns(SIZE)).run(GradientDescent(0.1), start, lambda x: x, 6).x

    def agent() -> torch.Tensor:
        return run(GradientDescent(0.1), start[shoal.rank()], lambda x: x, Turns(SIZE), 6).x

    assert torch.stack(shoal.Fleet(SIZE, timeout=60.0).run(agent)) == pytest.approx(simulated)


def test_weights_for_another_number_of_agents_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Turns.weights\(0\) is for 5 agents, and the schedule has 4"):
        Turns(SIZE, wrong=1).edges(0)
    with pytest.raises(ValueError, match="period"):
        CustomSchedule.__init__(Turns(SIZE), SIZE, 0)
