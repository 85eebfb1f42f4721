"""The table of an agent's states: what the page shows, what is refused, and what each history leaves."""

from __future__ import annotations

import random
from itertools import pairwise, product
from pathlib import Path

import networkx as nx
import pytest

from shoal.execution.membership import NOT_YET, Departure
from shoal.fault_tolerance.membership_states import (
    PRESENT,
    TRANSITIONS,
    AgentEvent,
    AgentState,
    IllegalTransition,
    MembershipTable,
    departure_event,
)

PAGE = Path(__file__).parents[2] / "docs" / "design-failures.md"
FROM_MESSAGES = (AgentEvent.SUSPECT, AgentEvent.LEAVE, AgentEvent.LOSE, AgentEvent.LOSE_TOUCH)
OWN = (AgentState.JOINING, AgentState.CUT_OFF)


def in_state(state: AgentState) -> MembershipTable:
    """A table whose rank 1 is in a state, by the shortest history."""
    table = MembershipTable(3)
    graph = nx.DiGraph([(one, after) for (one, _), after in TRANSITIONS.items()])
    path = nx.shortest_path(graph, AgentState.MEMBER, state)
    for before, after in pairwise(path):
        event = next(event for (one, event), result in TRANSITIONS.items() if (one, result) == (before, after))
        table.apply(event, 1, "the cause")
    assert table.state(1) is state
    return table


def table_as_markdown() -> str:
    """The table of transitions for the documentation: a row for each state; a dash where an event is refused."""
    events = list(AgentEvent)
    rows = [["state", "the agent", *(f"`{event.name}`" for event in events)], ["---"] * (2 + len(events))]
    for state in AgentState:
        after = [TRANSITIONS.get((state, event)) for event in events]
        rows.append([f"`{state.name}`", state.value, *("-" if one is None else one.name for one in after)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_page_has_the_table() -> None:
    assert table_as_markdown() in PAGE.read_text()


@pytest.mark.parametrize(("state", "event"), list(product(AgentState, AgentEvent)), ids=lambda one: one.name)
def test_an_event_is_applied_or_refused_as_in_the_table(state: AgentState, event: AgentEvent) -> None:
    table = in_state(state)
    after, view = TRANSITIONS.get((state, event)), table.view
    if after is None:
        with pytest.raises(IllegalTransition, match=f"event {event.name} of rank 1, whose state is {state.name}"):
            table.apply(event, 1, "another cause")
        assert table.state(1) is state and table.view is view
    else:
        assert table.apply(event, 1, "another cause") is after and table.state(1) is after


def test_events_caused_by_messages_are_refused_for_no_other_agent() -> None:
    """They may come late, and several times."""
    assert all((state, event) in TRANSITIONS for state in AgentState if state not in OWN for event in FROM_MESSAGES)
    assert all((state, AgentEvent.ADMIT) in TRANSITIONS for state in AgentState if state is not AgentState.CUT_OFF)
    assert all((state, AgentEvent.CUT_OFF) in TRANSITIONS for state in PRESENT)


def test_only_an_admission_makes_a_departed_agent_a_member_again() -> None:
    back = {event for (state, event), after in TRANSITIONS.items() if state not in PRESENT and after in PRESENT}
    assert back == {AgentEvent.ADMIT}


def test_one_of_several_illegal_events_changes_nothing() -> None:
    table = MembershipTable(4)
    table.apply(AgentEvent.LOSE, 2, "it ended")
    before = table.view
    with pytest.raises(IllegalTransition):
        table.apply_to_all(AgentEvent.BEGIN_WITHOUT, {1: "", 2: ""})
    assert table.view is before and table.state(1) is AgentState.MEMBER


@pytest.mark.parametrize("seed", range(20))
def test_the_view_follows_the_states(seed: int) -> None:
    draw = random.Random(seed)
    table, seen = MembershipTable(5), []
    table.watch(seen.append)
    for step in range(200):
        rank, event = (
            draw.randrange(1, 5),
            draw.choice([event for event in AgentEvent if event.name not in ("JOIN", "CUT_OFF")]),
        )
        before, view, count = table.state(rank), table.view, len(seen)
        if (before, event) not in TRANSITIONS:
            continue
        after = table.apply(event, rank, f"cause {step}")
        visible = before is not after and not {before, after} <= {AgentState.MEMBER, AgentState.SUSPECT}
        assert (table.view is not view) == visible == (len(seen) > count), "a suspect is a member"
        view = table.view
        assert (rank in view.alive) == (after in PRESENT)
        assert (rank in view.left) == (after in (AgentState.LEFT, AgentState.NEEDED))
        assert (rank in view.needed) == (after is AgentState.NEEDED)
        assert (rank in view.out_of_reach) == (after in (AgentState.UNREACHABLE, AgentState.UNKNOWN))
        assert (rank in view.died) == (after in (AgentState.LOST, AgentState.UNREACHABLE, AgentState.NOT_STARTED))
        if rank in view.died and before is not after:
            assert view.died[rank] == f"cause {step}"
        kinds = [set(view.alive), set(view.left), set(view.died), set(view.out_of_reach) - set(view.died)]
        assert set().union(*kinds) == set(range(5)) and sum(map(len, kinds)) == 5
    assert seen and [one.epoch for one in seen] == list(range(1, len(seen) + 1))


def test_a_joining_agent_is_alone_until_it_is_admitted() -> None:
    table = MembershipTable(4)
    table.begin_without([3])
    assert table.view.died == {3: NOT_YET} and table.describe(3) == "rank 3 has not come yet"
    table.stand_alone(1)
    view = table.view
    assert view.is_joining and view.alive == (1,) and view.out_of_reach == (0, 2, 3) and not view.died
    table.apply_to_all(AgentEvent.ADMIT, {0: "", 1: ""})
    table.apply(AgentEvent.LOSE, 2, "it ended")
    assert not table.view.is_joining and table.view.alive == (0, 1) and table.view.out_of_reach == (3,)


@pytest.mark.parametrize(
    ("departure", "event"),
    [
        (Departure(1, "", False, 0), AgentEvent.LEAVE),
        (Departure(1, "", True, 0, certain=True), AgentEvent.LOSE),
        (Departure(1, "", True, 0), AgentEvent.LOSE_TOUCH),
        (Departure(1, "", True, 0, certain=True, silent=True), AgentEvent.LOSE_TOUCH),
    ],
)
def test_a_failure_is_certain_unless_the_network_may_be_the_cause(departure: Departure, event: AgentEvent) -> None:
    assert departure_event(departure) is event
