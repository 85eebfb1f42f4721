"""Nothing is lost and nothing is doubled: the total over all agents after hundreds of interleaved operations, in the
soak after thousands."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

import shoal
from support.window_agents import Flow, Mass, first_mass, move_mass
from support.world import World

Fleets = Callable[..., shoal.Fleet]
OVER = [
    pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
    pytest.param({"SHOAL_TRANSPORT": "network"}, id="network", marks=pytest.mark.transport("network")),
]


def assert_conserved(masses: list[list[Mass]], flow: Flow) -> None:
    """After each phase the sum over the agents is the first one: equal, or to rounding if shares are rounded."""
    size = len(masses)
    first = [math.fsum(one) for one in zip(*(first_mass(rank, flow.numel) for rank in range(size)), strict=True)]
    for phase in range(flow.phases):
        now = [one[phase] for one in masses]
        values = [math.fsum(one) for one in zip(*(mass.values for mass in now), strict=True)]
        p = math.fsum(mass.p for mass in now)
        if flow.dyadic:
            assert (values, p) == (first, size), f"phase {phase}"
        else:
            operations = flow.phases * flow.operations * flow.threads * size
            rounding = operations * 2.0**-53  # each operation rounds a part of the total a few times
            assert all(math.isclose(a, b, rel_tol=4 * rounding) for a, b in zip(values, first, strict=True)), (
                f"phase {phase}"
            )
            assert math.isclose(p, size, rel_tol=4 * rounding), f"phase {phase}"


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_dyadic_shares_conserve_values_and_associated_weights_exactly(fleet: Fleets, in_place: bool) -> None:
    flow = Flow(phases=3, operations=80, in_place=in_place)
    assert_conserved(fleet(4).run(move_mass, flow), flow)


def test_other_shares_conserve_values_and_associated_weights_to_rounding(fleet: Fleets) -> None:
    flow = Flow(phases=2, operations=80, dyadic=False, seed=1)
    assert_conserved(fleet(4).run(move_mass, flow), flow)


def test_large_tensors_conserve_every_element(fleet: Fleets) -> None:
    flow = Flow(phases=2, operations=15, numel=200_000, seed=2)
    assert_conserved(fleet(3).run(move_mass, flow), flow)


def test_several_threads_of_an_agent_conserve_mass_under_its_mutex(fleet: Fleets) -> None:
    flow = Flow(phases=2, operations=30, threads=3, seed=3)
    assert_conserved(fleet(3).run(move_mass, flow), flow)


@pytest.mark.soak
@pytest.mark.parametrize("dyadic", [True, False])
def test_thousands_of_operations_conserve_mass(fleet: Fleets, dyadic: bool) -> None:
    flow = Flow(phases=4, operations=400, dyadic=dyadic, seed=5)
    assert_conserved(fleet(4).run(move_mass, flow), flow)


@pytest.mark.parametrize("environment", OVER)
@pytest.mark.parametrize("threads", [1, 2])
def test_processes_conserve_mass_exactly(environment: dict[str, str], threads: int) -> None:
    flow = Flow(phases=2, operations=120 // threads, threads=threads, seed=4)
    with World(4, environment=environment) as world:
        assert_conserved(world.results(move_mass, flow), flow)
