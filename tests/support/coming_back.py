"""Training in which agents die, are started again, and enter; on a problem whose answer is known."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

import shoal
from shoal import topology_util
from shoal.world.agent import current
from support.fault_points import Point, arm
from support.surviving_training import RATE, Point3, curvature, target

BETWEEN = 10
"""Steps between two points at which agents enter."""
AFTER = 400
"""Steps that are trained once all are there again."""
MOST_SECONDS = 40.0


@dataclass
class Seen:
    """What one agent saw.

    Attributes:
        x: The parameters in the end.
        began: The step that it began with, and what it began there with.
        changes: Who was lost, and who entered, in this order.
        steps: The step with which training ended.
    """

    x: list[float] = field(default_factory=list)
    began: tuple[int, list[float]] = (0, [])
    changes: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    at: dict[int, list[float]] = field(default_factory=dict)
    steps: int = 0


def train(options: dict[str, Any], point: Point | None, entries: int) -> Seen:
    """Train until so many agents have entered, all are there, and then some more.

    Args:
        options: Of the optimizer.
        point: Where this agent dies.
        entries: How many agents enter; what this one has not seen it is told.
    """
    rank, size, seen, model = shoal.rank(), shoal.size(), Seen(), Point3()
    shoal.set_topology(topology_util.RingGraph(size), is_weighted=True)
    shoal.broadcast_parameters(model.state_dict(), 0)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, **options)
    progress = Progress()
    checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer, progress=progress)
    shoal.on_membership_change(lambda change: seen.changes.append((change.lost, change.entered)))
    if point is not None and shoal.is_entering():
        arm(point)
    step = checkpoint.load(None, missing_ok=True)
    seen.began = (step, model.x.tolist())
    if point is not None and not step:
        arm(point)
    h, c = curvature(rank), torch.tensor(target(rank))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = 0.5 * h * (model.x - c).square().sum()
        loss.backward()
        return loss

    chooses = not options["algorithm"].one_gradient  # where its gradients are
    limit = time.monotonic() + MOST_SECONDS
    while progress.since < AFTER:
        if not chooses:
            closure()
        optimizer.step(closure if chooses else None)
        step += 1
        if step % BETWEEN == 0:
            seen.at[step] = model.x.tolist()
            progress.look(entries)
            checkpoint.save(None, step)
            assert time.monotonic() < limit, f"rank {rank}: {progress}, {shoal.alive()}, {seen.changes}"
            if not progress.since:
                time.sleep(0.01)  # who comes needs a moment
    seen.x, seen.steps = model.x.tolist(), step
    return seen


@dataclass
class Progress:
    """How far all are; the same on all agents, and handed over to those that enter."""

    since: int = 0
    """Steps since the last of those came that are to come."""

    def look(self, entries: int) -> None:
        """All that are there call it."""
        there = shoal.allgather(torch.tensor([shoal.rank()])).tolist()
        entered = current().engine.agreement.now.entered
        self.since = self.since + BETWEEN if len(there) == shoal.size() and entered >= entries else 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
