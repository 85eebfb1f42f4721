"""Training that continues after a loss, on a problem with a known answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import shoal
from shoal import topology_util
from shoal.topology import AnyTopology, Without
from support.fault_points import Point, arm

RATE, STEPS = 0.2, 300
disturbances: list[Callable[[torch.Tensor], torch.Tensor]] = []
"""Changes to the losses of this agent: faults add to it."""


def curvature(rank: int) -> float:
    return 0.5 + 0.25 * rank


def target(rank: int) -> NDArray[np.float64]:
    return np.array([rank, rank**2 / 3 - 1, 2.5 - rank])


class Point3(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))


def train_through(victims: dict[int, Point], options: dict[str, Any]) -> list[float]:
    """The final parameters of training, while the victims end at their given places."""
    rank = shoal.rank()
    *_, last = steps_of_training(lambda: arm(victims[rank]) if rank in victims else None, options)
    assert sorted(victims) == [index for index in range(shoal.size()) if index not in shoal.alive()]
    return last


def steps_of_training(before: Callable[[], object], options: dict[str, Any]) -> Iterator[list[float]]:
    """Minimise the mean of ``h/2 |x - c|^2`` over the agents that are there; the parameters after each step.

    Args:
        before: Called before the first step, once all are there.
        options: Of the optimizer.
    """
    model = Point3()
    shoal.set_topology(topology_util.RingGraph(shoal.size()), is_weighted=True)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, **options)
    step = step_of(optimizer, model)
    shoal.barrier()
    before()
    for _ in range(STEPS):
        step()
        yield model.x.detach().tolist()


def step_of(optimizer: shoal.DecentralizedOptimizer, model: Point3) -> Callable[[], object]:
    """A step of this agent's, whose loss is ``h/2 |x - c|^2``."""
    h, c = curvature(shoal.rank()), torch.tensor(target(shoal.rank()))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = 0.5 * h * (model.x - c).square().sum()
        for disturb in disturbances:
            loss = disturb(loss)
        loss.backward()
        return loss

    def step() -> None:
        chooses = not optimizer.algorithm.one_gradient  # where its gradients are
        if not chooses:
            closure()
        optimizer.step(closure if chooses else None)

    return step


def optimum(left: list[int]) -> NDArray[np.float64]:
    weights = np.array([curvature(rank) for rank in left])
    return (weights[:, None] * np.array([target(rank) for rank in left])).sum(0) / weights.sum()


def resting_place(
    topology: AnyTopology,
    size: int,
    gone: Collection[int],
    overlapping: bool,
    steps: int = STEPS,
    unheard: Collection[int] = (),
    idle: Collection[int] = (),
) -> NDArray[np.float64]:
    """The fixed point of decentralized SGD with this constant rate on the surviving topology, after its last round. It
    solves ``x = W (x - rate h (x - c))``, or ``x = W x - rate h (x - c)`` with the step beside the exchange.

    Args:
        unheard: The ranks whose tensors are left out; the receiver's own tensor gets their weight.
        idle: The ranks without gradients.
    """
    schedule = Without(topology, gone)
    x = np.zeros((size, 3))
    h = np.array([0.0 if rank in idle else curvature(rank) for rank in range(size)])[:, None]
    c = np.array([target(rank) for rank in range(size)])
    for number in range(steps + 500 * (schedule.period or 1)):
        matrix, step = schedule.matrix(number).copy(), RATE * h * (x - c)
        for sender in unheard:
            matrix[range(size), range(size)] += matrix[:, sender]
            matrix[:, sender] -= matrix[:, sender]
            matrix[sender] = np.eye(size)[sender]
        x = matrix @ x - step if overlapping else matrix @ (x - step)
    return x
