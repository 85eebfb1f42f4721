"""``on_loss="continue"``: algorithms of machines continue with the surviving machines and agents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shoal
from shoal.algorithms import EXTRA, OfMachines, own, run
from shoal.topology import Circulant, between_machines
from support.fault_points import Point, arm, each_over_one, in_turn
from support.least_squares import DIMENSION, loss, problem
from support.survivors import CONTINUE
from support.world import World

MACHINES, EACH, STEPS = 3, 2, 200
SIZE = MACHINES * EACH
TOPOLOGY = between_machines(Circulant(MACHINES, {0: 1 / 2, 1: 1 / 4, -1: 1 / 4}), EACH)
POINTS = [Point("sent", 40), Point("received", 47), Point("summed", 31), Point("finished", 53)]
WAYS = {f"{victim}, {point}": (victim, point) for point in POINTS for victim in (2, 3)}
Fleets = Callable[..., shoal.Fleet]
LOSSES = {
    "the second of a machine": {1: 40},
    "the first of a machine": {2: 40},
    "a machine": {4: 40, 5: 41},
    "one of each": {0: 30, 3: 50, 5: 50},
    "a machine, and one of another": {0: 30, 2: 50, 3: 70},
    "all but one": {0: 20, 1: 30, 2: 40, 4: 60, 5: 70},
}


def ridge(x: torch.Tensor, A: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whose optimum is soon reached, also by one agent alone."""
    return loss(x, A, b) + x.square().sum() / 2


def go_through(leaves: dict[int, int], victims: dict[int, Point]) -> list[float]:
    rank = shoal.rank()
    A, b = problem(SIZE)
    start = torch.full((DIMENSION,), float(rank), dtype=torch.float64)
    shoal.barrier()
    if rank in victims:
        arm(victims[rank])
    algorithm = OfMachines(EXTRA(0.3))
    result = run(algorithm, start, own(ridge, A[rank], b[rank]), TOPOLOGY, leaves.get(rank, STEPS), every=0)
    if rank not in leaves:
        shoal.barrier()
    return result.x.tolist()


def check(estimates: dict[int, list[float]]) -> None:
    """Each surviving machine counts once, with the mean of its surviving agents."""
    A, b = problem(SIZE)
    count = [sum(other // EACH == rank // EACH for other in estimates) for rank in range(SIZE)]
    weights = torch.tensor([1 / max(1, count[rank]) if rank in estimates else 0.0 for rank in range(SIZE)]).double()
    one = torch.eye(DIMENSION, dtype=torch.float64)
    sides = (
        (weights.view(-1, 1, 1) * (A.mT @ A + one)).sum(0),
        (weights.view(-1, 1, 1) * (A.mT @ b.unsqueeze(-1))).sum(0),
    )
    expected = torch.linalg.solve(*sides).squeeze(-1)
    ended = torch.tensor([*estimates.values()], dtype=torch.float64)
    assert (ended - expected).abs().max() < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize(("name", "transport"), in_turn([*LOSSES]), indirect=["transport"])
def test_machines_reach_the_survivors_optimum(name: str, fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ON_LOSS", "continue")
    leaves = LOSSES[name]
    results = fleet(SIZE, agents_per_machine=EACH).run(go_through, leaves, {})
    check({rank: results[rank] for rank in range(SIZE) if rank not in leaves})


@each_over_one(WAYS, slow=[way for way in WAYS if way not in (f"2, {POINTS[1]}", f"3, {POINTS[2]}")])
def test_machines_reach_the_survivors_optimum_wherever_one_agent_is_killed(
    way: str, environment: dict[str, str]
) -> None:
    victim, point = WAYS[way]
    with World(SIZE, environment=environment | CONTINUE | {"SHOAL_AGENTS_PER_MACHINE": str(EACH)}) as world:
        outcomes = world.run(go_through, {}, {victim: point})
    failed = [
        f"rank {outcome.rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
        for outcome in outcomes
        if outcome.error
    ]
    assert outcomes[victim].error == "Died" and len(failed) == 1, "\n".join(failed)
    check({outcome.rank: outcome.value for outcome in outcomes if outcome.rank != victim})
