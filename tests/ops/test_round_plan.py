"""Plans of calls: resolved once for a name and a round, and dropped when the topology or the membership changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shoal
from shoal.execution.membership import Plan
from shoal.execution.operation import FailurePolicy, Operation, Recovery
from shoal.fault_tolerance.membership_states import AgentEvent
from shoal.ops.arguments import ALL, Internal
from shoal.ops.neighbor import submit
from shoal.ops.round_plan import MOST_PLANS, Key, make_plan
from shoal.runtime.agent import Agent, current
from shoal.topology import Mixing
from support.reference import averaged_over, same_bits
from support.samples import sample, samples

Fleets = Callable[..., shoal.Fleet]


def key_of(name: str | None = "x", mixing: Mixing | None = None, form: str = "static", checked: bool = False) -> Key:
    return "neighbor_allreduce", name, type(name), mixing, form, checked, False, ALL


def excluding(departed: tuple[int, ...]) -> Operation:
    operation = Operation("neighbor_allreduce", "x", 0, 1.0)
    if departed:
        operation.recovery = Recovery(lambda _: iter(()), FailurePolicy.SKIP_MISSING, Plan(departed))  # type: ignore[arg-type, return-value]
    return operation


def test_calls_of_one_name_make_one_plan(fleet: Fleets) -> None:
    def run() -> list[int]:
        agent, counts = current(), []
        for name in ("x", "x", "y", None, None):
            shoal.neighbor_allreduce(torch.ones(2), name=name)
            counts.append(len(agent.plans))
        shoal.barrier()  # an agent that leaves changes the membership
        return counts

    assert fleet(2).run(run) == [[1, 1, 2, 3, 3]] * 2


def test_equal_weights_share_a_plan_and_others_do_not(fleet: Fleets) -> None:
    def run() -> tuple[list[int], list[float]]:
        agent, other, counts, results = current(), 1 - shoal.rank(), [], []
        for weight in (0.5, 0.5, 0.25):
            x = torch.full((1,), float(shoal.rank()))
            result = shoal.neighbor_allreduce(x, 1 - weight, {other: weight}, [other], name="x")
            counts.append(len(agent.plans))
            results.append(result.item())
        shoal.barrier()
        return counts, results

    assert fleet(2).run(run) == [([1, 1, 2], [0.5, 0.5, 0.25]), ([1, 1, 2], [0.5, 0.5, 0.75])]


def test_another_topology_drops_the_plans_and_the_next_call_follows_it(fleet: Fleets) -> None:
    graphs = [shoal.topology.RingGraph(4, 1), shoal.topology.RingGraph(4, 2)]

    def run() -> list[torch.Tensor]:
        agent, result = current(), []
        for graph in graphs:
            shoal.set_topology(graph)
            assert not agent.plans
            result += [shoal.neighbor_allreduce(sample(shoal.rank(), (3,)), name="x") for _ in range(2)]
        return result

    results = fleet(4).run(run)
    for place, graph in enumerate((graphs[0], graphs[0], graphs[1], graphs[1])):
        expected = averaged_over(graph, samples(4, (3,)), is_weighted=False)
        assert all(same_bits(one[place], wanted) for one, wanted in zip(results, expected, strict=True))


def test_a_membership_change_drops_the_plans(fleet: Fleets) -> None:
    def run() -> None:
        agent = current()
        make_plan(agent, agent.plans, key_of())
        assert agent.plans
        shoal.barrier()
        if shoal.rank() == 0:
            with agent.engine.lock:
                agent.engine.membership.apply(AgentEvent.BEGIN_WITHOUT, 1, "it has not come")
            assert not agent.plans
        else:
            assert agent.plans

    fleet(2).run(run)


def test_a_plan_started_before_a_change_is_not_used_after_it(fleet: Fleets) -> None:
    def run() -> None:
        agent = current()
        before = agent.plans
        shoal.set_topology(shoal.topology.RingGraph(1))
        make_plan(agent, before, key_of())
        assert key_of() in before
        assert not agent.plans

    fleet(1).run(run)


def test_the_edges_of_an_operation_are_those_of_its_included_ranks(fleet: Fleets) -> None:
    def run() -> None:
        agent = current()
        if shoal.rank():
            return
        shoal.set_topology(shoal.topology.RingGraph(4))
        plan = make_plan(agent, {}, key_of())
        full = plan.edges(agent, excluding(()), None)
        assert list(full.destinations) == [1, 3]
        assert plan.edges(agent, excluding(()), None) is full
        less = plan.edges(agent, excluding((1,)), None)
        assert list(less.destinations) == [2, 3]  # the ring is closed over the gap
        assert plan.edges(agent, excluding((1,)), None) is less

    fleet(4).run(run)


def test_a_round_planned_again_after_a_failure_is_not_cached(fleet: Fleets) -> None:
    """Two rounds of a schedule may have equal edges, and different ones without the failed agents."""

    def run() -> None:
        agent = current()
        if shoal.rank():
            return
        plan = make_plan(agent, {}, key_of("x", Mixing(0, 0.5, {1: 0.5}, [1]), "push-pull"))
        for substitute in (2, 3):
            again = plan.edges(agent, excluding((1,)), lambda _, to=substitute: Mixing(0, 0.5, {to: 0.5}, [to]))
            assert list(again.destinations) == [substitute]

    fleet(4).run(run)


def test_an_internal_name_has_its_own_plan(fleet: Fleets) -> None:
    def run() -> tuple[str, ...]:
        agent = current()
        for name in ("x", Internal("x")):
            submit(agent, torch.ones(1), None, name=name).wait()
        return tuple(sorted(plan.channel for plan in agent.plans.values()))

    assert fleet(1).run(run) == [("x", "~shoal x")]


def test_names_used_once_do_not_accumulate(fleet: Fleets) -> None:
    def run() -> int:
        agent: Agent = current()
        for number in range(MOST_PLANS + 5):
            make_plan(agent, agent.plans, key_of(f"x{number}"))
        return len(agent.plans)

    assert fleet(1).run(run) == [5]


def test_a_name_that_is_no_string_raises_although_it_is_unhashable(fleet: Fleets) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="a name is a non-empty string"):
            shoal.neighbor_allreduce(torch.ones(1), name=["x"])  # type: ignore[arg-type]

    fleet(1).run(run)


def test_a_group_has_its_own_plan(fleet: Fleets) -> None:
    def run() -> list[int]:
        agent, x = current(), torch.full((1,), float(shoal.rank()))
        if shoal.rank() < 2:
            assert shoal.neighbor_allreduce(x, name="x", group=[0, 1]).item() == 0.5
        shoal.neighbor_allreduce(x, name="x")
        result = [0 if key[-1] == ALL else len(key[-1].ranks) for key in agent.plans]
        shoal.barrier()
        return result

    results = fleet(3).run(run)
    assert results == [[2, 0], [2, 0], [0]]
