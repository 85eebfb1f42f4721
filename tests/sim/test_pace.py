"""The clock of a stacked run: it equals the network model for every step, and for the messages actually sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms import Algorithm, Gradient, GradientDescent, GradientTracking, LocalSteps, Mix
from shoal.netmodel import Link, Network, direct_allreduce, hierarchical_allreduce, rounds_of, simulate, tree_allreduce
from shoal.sim import StackedFleet, pace
from shoal.topology import between_machines, inside_machines
from shoal.topology.families.compose import Alternating as by_turns
from shoal.topology.families.one_peer import OnePeerExponential, RandomMatchings, ShiftOne
from shoal.topology.families.static import exponential, ring
from shoal.topology.mixing import Mixing
from shoal.topology.schedule import Schedule

NIC = Link(latency=1e-3, bandwidth=1e6, overhead=1e-4)
DIMENSION = 500
NBYTES = 8 * DIMENSION


@dataclass(frozen=True)
class StepDependent(Algorithm):
    """Communicates in a way that depends on the step, and does nothing else."""

    ways: tuple[str, ...]
    source = "no paper"
    needs = ()

    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, Any]:
        for verb in self.ways[mix.round % len(self.ways)].split():
            if verb in ("all", "machine"):
                mix.average(x, verb)
            elif verb == "edges":
                mix.edges(mix.spread(x))
            elif verb == "silent":
                mix(x, speaks=torch.zeros(len(x), 1, dtype=torch.bool))
            elif verb == "one":
                mix(x, speaks=torch.arange(len(x)).unsqueeze(1) == 3)
            elif verb != "nothing":
                getattr(mix, verb)(x) if verb != "mix" else mix(x)
        return x, state


def start(size: int) -> torch.Tensor:
    return torch.zeros(size, DIMENSION, dtype=torch.float64)


def clock(topology: Schedule, network: Network, steps: int, algorithm: Algorithm | None = None, **options: Any) -> Any:
    chosen = algorithm or GradientDescent(0.1)
    fleet = StackedFleet(topology, agents_per_machine=options.pop("agents_per_machine", 1))
    return fleet.run(chosen, start(topology.size), lambda x: x, steps, network=network, **options)


def ends(run: Any) -> np.ndarray[Any, Any]:
    """When each step had ended, without the start."""
    result: np.ndarray[Any, Any] = run.column("seconds").numpy()[1:]
    return result


NETWORKS = {
    "alike": Network(16, NIC),
    "machines": Network(16, NIC, agents_per_machine=4, inside=Link(1e-5, 1e8)),
    "a slow NIC": Network(16, NIC, nics={5: Link(1e-3, 2e5)}),
}


every_topology = pytest.mark.parametrize("topology", [ring(16), OnePeerExponential(16)], ids=["ring", "one-peer"])


@pytest.mark.parametrize("compute", [0.0, 0.02, [0.05] + [0.01] * 15], ids=["none", "alike", "a straggler"])
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@every_topology
def test_the_clock_equals_a_simulation_of_every_step(topology: Schedule, network: Network, compute: Any) -> None:
    steps = 100
    played = simulate(network, rounds_of(topology, NBYTES, steps), compute).ended.max(axis=1)
    result = ends(clock(topology, network, steps, compute=compute))
    assert np.abs(result / played - 1)[:3].max() < 1e-9
    assert np.abs(result / played - 1).max() < 0.05


class Alternating(Schedule):
    """Rounds of few messages and of many, in turn."""

    period = 3

    def __init__(self, size: int) -> None:
        self.size = size
        self._rounds = ring(size, connect_style=1), ring(size), exponential(size)

    def mixing(self, round: int, rank: int) -> Mixing:
        return self._rounds[round % 3].mixing(0, rank)

    def describe(self) -> str:
        return f"alternating rounds of {self.size} agents"


@pytest.mark.parametrize("compute", [0.0, 0.02], ids=["none", "some"])
@pytest.mark.parametrize(
    "topology", [ring(16), OnePeerExponential(16), Alternating(16)], ids=lambda one: one.describe()
)
def test_the_clock_is_exact_for_equal_agents(topology: Schedule, compute: float) -> None:
    network = NETWORKS["alike"]
    played = simulate(network, rounds_of(topology, NBYTES, 50), compute).ended.max(axis=1)
    assert np.abs(ends(clock(topology, network, 50, compute=compute)) / played - 1).max() < 1e-9


def test_two_exchanges_in_a_step_take_twice_as_long() -> None:
    one = clock(ring(16), NETWORKS["alike"], 9)
    two = clock(ring(16), NETWORKS["alike"], 9, GradientTracking(0.1))
    assert two.seconds == pytest.approx(2 * one.seconds)
    assert (two.rounds, one.rounds) == (9, 9)
    assert (two.exchanges, two.sent) == (2 * one.exchanges, 2 * one.sent) == (18, 2 * 9 * 32 * NBYTES)


@pytest.mark.parametrize("verb", ["mix", "pull", "push", "edges"])
def test_every_exchange_with_neighbours_takes_the_same_time(verb: str) -> None:
    result = clock(ring(16), NETWORKS["alike"], 4, StepDependent((verb,)))
    assert result.seconds == pytest.approx(4 * NIC.seconds(NBYTES, 2))
    assert result.sent == 4 * 32 * NBYTES


def test_averages_over_all_take_the_time_of_an_allreduce() -> None:
    network = NETWORKS["machines"]
    expected = simulate(network, [direct_allreduce(16, NBYTES)]).seconds
    assert clock(ring(16), network, 5, StepDependent(("all",))).seconds == pytest.approx(5 * expected)
    large = Network(300, NIC)
    expected = simulate(large, [tree_allreduce(300, NBYTES)]).seconds
    assert clock(ring(300), large, 1, StepDependent(("all",))).seconds == pytest.approx(expected)


def test_averages_within_a_machine_leave_the_nics_alone() -> None:
    network = NETWORKS["machines"]
    result = clock(ring(16), network, 3, StepDependent(("machine",)), agents_per_machine=4).seconds
    # Two exchanges, in each of which an agent sends three quarters of its tensor through its port.
    assert result == pytest.approx(3 * 2 * network.inside.seconds(NBYTES / 4 * 3))
    assert result < simulate(network, [hierarchical_allreduce(4, 4, NBYTES)]).seconds


def test_a_step_without_messages_takes_its_computation_alone() -> None:
    result = ends(clock(ring(16), NETWORKS["alike"], 6, StepDependent(("nothing", "mix")), compute=0.5))
    both = [0.5, 0.5 + NIC.seconds(NBYTES, 2)]
    assert np.diff(result, prepend=0.0) == pytest.approx(both * 3)


def test_an_empty_message_takes_its_latency_and_overhead() -> None:
    result = clock(ring(16), NETWORKS["alike"], 2, StepDependent(("silent",)))
    assert result.seconds == pytest.approx(2 * NIC.seconds(0, 2), rel=1e-6)
    assert result.sent == 0


def test_one_message_determines_the_time_of_all() -> None:
    result = clock(ring(16), NETWORKS["alike"], 2, StepDependent(("one",)))
    assert result.seconds == pytest.approx(2 * NIC.seconds(NBYTES, 2))
    assert result.sent == 2 * 2 * NBYTES


def test_a_nonperiodic_schedule_is_extrapolated_from_the_simulated_rounds() -> None:
    topology, network = RandomMatchings(16, seed=3), NETWORKS["machines"]
    steps = 120
    result = ends(clock(topology, network, steps))
    played = simulate(network, rounds_of(topology, NBYTES, steps)).ended.max(axis=1)
    assert result[:72] == pytest.approx(played[:72])
    # Of the last rounds that are played nothing is kept, as they meet no traffic of others that would follow.
    assert np.ptp(np.diff(result[71:])) < 1e-9
    assert result[-1] == pytest.approx(played[-1], rel=0.05)


def test_a_period_too_long_to_be_simulated_is_sampled() -> None:
    topology, network = ShiftOne(400), Network(400, NIC)
    result = clock(topology, network, 450).seconds
    assert result == pytest.approx(450 * NIC.seconds(NBYTES))


def test_the_clock_continues_when_a_run_is_resumed() -> None:
    topology, network = OnePeerExponential(16), NETWORKS["machines"]
    full = clock(topology, network, 20, compute=0.01)
    half = clock(topology, network, 7, compute=0.01)
    rest = clock(topology, network, 13, compute=0.01, resume=half)
    assert rest.seconds == pytest.approx(full.seconds)
    assert [row["seconds"] for row in rest.records] == pytest.approx([row["seconds"] for row in full.records])


def test_a_run_without_a_network_has_no_seconds() -> None:
    fleet = StackedFleet(ring(4))
    run = fleet.run(GradientDescent(0.1), start(4), lambda x: x, 3, measure=lambda x: {"norm": float(x.norm())})
    assert run.seconds is None
    assert list(run.records[0]) == ["step", "rounds", "exchanges", "bytes", "consensus", "norm"]


def test_with_a_network_there_are_records_without_a_measure() -> None:
    run = clock(ring(4), Network(4, NIC), 5, every=2)
    assert [row["step"] for row in run.records] == [0, 2, 4, 5]
    assert [row["rounds"] for row in run.records] == [0, 2, 4, 5]
    assert [row["bytes"] for row in run.records] == [0, *(8 * NBYTES * step for step in (2, 4, 5))]
    assert run.records[0]["seconds"] == 0
    assert run.seconds == run.records[-1]["seconds"]


def test_a_network_of_other_agents_is_refused() -> None:
    with pytest.raises(ValueError, match="the network has 5 agents and the fleet 4"):
        clock(ring(4), Network(5, NIC), 1)


@pytest.mark.parametrize("compute", [-1.0, float("nan"), [1.0, 2.0], [[1.0] * 4]])
def test_invalid_times_are_refused(compute: Any) -> None:
    with pytest.raises(ValueError, match="pass seconds"):
        clock(ring(4), Network(4, NIC), 1, compute=compute)


def test_a_long_run_is_not_simulated_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    played = []

    def counted(network: Network, steps: Any, compute: Any) -> Any:
        played.append(len(steps))
        return simulate(network, steps, compute)

    monkeypatch.setattr(pace, "simulate", counted)
    result = ends(clock(ring(16), NETWORKS["alike"], 500))
    assert played == [4]
    assert result[-1] == pytest.approx(500 * NIC.seconds(NBYTES, 2))


def test_local_steps_take_the_time_of_the_rounds_in_which_they_exchange() -> None:
    """Every second step exchanges: with rounds inside machines and between them by turns, in both."""
    fast, slow = Link(latency=0.0, bandwidth=1e12), Link(latency=0.0, bandwidth=1e6)
    inside, between = inside_machines(ShiftOne(2), 2), between_machines(ShiftOne(2), 2)
    for schedules in ([inside, between], [between, inside]):
        fleet = StackedFleet(by_turns(schedules), agents_per_machine=2)
        x = torch.zeros(250_000)
        network = Network(4, slow, 2, fast)
        every = fleet.run(GradientDescent(0.1), x, lambda x: x * 0, 8, network=network)
        second = fleet.run(LocalSteps(GradientDescent(0.1), 2), x, lambda x: x * 0, 16, network=network)
        assert second.seconds == pytest.approx(every.seconds)
