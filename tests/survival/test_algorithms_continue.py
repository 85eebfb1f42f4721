"""``on_loss="continue"``: every algorithm of the catalog continues as a fleet of the survivors would."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

import shoal
from shoal.algorithms import CATALOG
from support.algorithm_cases import case_of
from support.fault_points import OVER, Point, in_turn
from support.surviving_algorithms import AgentOutcome, fleet_of_survivors, optimum_of, run_through
from support.survivors import CONTINUE
from support.world import World

SIZE, GONE = 5, 1
LEFT = [rank for rank in range(SIZE) if rank != GONE]
STEPS = 60  # the one that is lost is lost in step 40, or by its events before
Fleets = Callable[..., shoal.Fleet]
SMOOTH = [value.name for value in CATALOG.values() if not case_of(value).compressed and value.name != "push-sum"]
COMPRESSED = [value.name for value in CATALOG.values() if case_of(value).compressed]
POINTS = [Point("sent", 10), Point("received", 35), Point("summed", 9), Point("finished", 40)]
"""Survivors restart in the first step that none of them has begun. Algorithms that communicate in each fifth of the 60
steps sum 12 times, and some send fewer than 18 messages. After the ninth sum of the victim its neighbours wait in step
50 to 54, and the agents behind them may be one exchange further; after the tenth, these have begun the last step, and
none would restart."""
KILLED = ("gradient tracking (ATC)", "exact diffusion (D2)", "push-sum gradient tracking", "RelaySGD", "SGP")
USUAL = {*KILLED, *SMOOTH[::5]}
"""The others are slow tests: no algorithm has a part of its own in this."""


@pytest.fixture(autouse=True)
def continue_on_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ON_LOSS", "continue")


def killed() -> list[object]:
    """One point of each, over shared memory or the network; the slow tests have one over the other, the soak all."""
    cases = []
    for (place, name), (at, point), (way, environment) in product(enumerate(SMOOTH), enumerate(POINTS), OVER.items()):
        over_network = way == "network"
        of_soak = name not in KILLED or (at - place) % 4 != over_network
        slow = not of_soak and KILLED.index(name) % 2 != over_network
        marks = [pytest.mark.transport(way), *[pytest.mark.soak] * of_soak, *[pytest.mark.slow] * slow]
        cases.append(pytest.param(name, point, environment, id=f"{name}-{point}-{way}", marks=marks))
    return cases


def check_that_survivors_are_a_fleet(name: str, agent_outcomes: dict[int, AgentOutcome]) -> None:
    assert [one.alive for one in agent_outcomes.values()] == [tuple(LEFT)] * len(LEFT)
    assert [len(one.restarts) for one in agent_outcomes.values()] == [1] * len(LEFT)
    expected = fleet_of_survivors(name, SIZE, LEFT, agent_outcomes, STEPS)
    ended = torch.tensor([one.estimate for one in agent_outcomes.values()], dtype=torch.float64)
    assert (ended - expected).abs().max() < 1e-10


@pytest.mark.parametrize(("name", "transport"), in_turn(SMOOTH, usual=USUAL), indirect=["transport"])
def test_survivors_form_a_fleet_of_their_own_from_one_step_on(name: str, fleet: Fleets) -> None:
    results = fleet(SIZE).run(run_through, name, STEPS, {GONE: 40})
    check_that_survivors_are_a_fleet(name, {rank: results[rank] for rank in LEFT})


@pytest.mark.parametrize("name", ["EXTRA", "gradient tracking (ATC)"])
def test_survivors_form_a_fleet_if_one_agent_leaves_between_two_runs(name: str, fleet: Fleets) -> None:
    results = fleet(SIZE).run(run_through, name, STEPS, {GONE: 40}, pause=40)
    check_that_survivors_are_a_fleet(name, {rank: results[rank] for rank in LEFT})


@pytest.mark.parametrize(("name", "point", "environment"), killed())
def test_survivors_form_a_fleet_wherever_one_agent_is_killed(
    name: str, point: Point, environment: dict[str, str]
) -> None:
    with World(SIZE, environment=environment | CONTINUE) as world:
        outcomes = world.run(run_through, name, STEPS, {}, {GONE: point})
        failed = [
            f"rank {outcome.rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
            for outcome in outcomes
            if outcome.error
        ]
        assert outcomes[GONE].error == "Died" and len(failed) == 1, "\n".join(failed)
        check_that_survivors_are_a_fleet(name, {rank: outcomes[rank].value for rank in LEFT})


@pytest.mark.parametrize(("name", "transport"), in_turn(COMPRESSED), indirect=["transport"])
def test_compressed_algorithms_converge_close_to_the_survivors_optimum(name: str, fleet: Fleets) -> None:
    results = fleet(SIZE).run(run_through, name, 150, {GONE: 40})
    agent_outcomes = {rank: results[rank] for rank in LEFT}
    assert [len(one.restarts) for one in agent_outcomes.values()] == [1] * len(LEFT)
    optimum = optimum_of(SIZE, LEFT)
    expected = (fleet_of_survivors(name, SIZE, LEFT, agent_outcomes, 150) - optimum).norm()
    ended = torch.tensor([one.estimate for one in agent_outcomes.values()], dtype=torch.float64)
    assert (ended - optimum).norm() < 2 * expected + 1e-3  # they draw by rank, and survivors keep their ranks


@pytest.mark.slow  # that they are a fleet of their own, and that such a fleet finds the optimum, others test apart
@pytest.mark.parametrize(
    ("name", "transport"),
    in_turn(["gradient tracking (semi-ATC, DSGT)", "EXTRA", "push-pull, semi-ATC"]),
    indirect=["transport"],
)
def test_exact_algorithms_reach_the_survivors_optimum(name: str, fleet: Fleets) -> None:
    results = fleet(SIZE).run(run_through, name, 1500, {GONE: 40})
    ended = torch.tensor([results[rank].estimate for rank in LEFT], dtype=torch.float64)
    assert (ended - optimum_of(SIZE, LEFT)).abs().max() < 1e-8


@pytest.mark.parametrize("leaves", [3, 40])
def test_push_sum_agrees_on_a_mean_of_the_initial_values(fleet: Fleets, leaves: int) -> None:
    results = fleet(SIZE).run(run_through, "push-sum", STEPS, {GONE: leaves})
    ended = torch.tensor([results[rank].estimate for rank in LEFT], dtype=torch.float64)
    assert (ended - ended[0, 0]).abs().max() < 1e-10  # agents begin with their ranks, in every place
    assert min(LEFT) < float(ended[0, 0]) < max(LEFT)
