"""The results that the checks of a simulated run accept, and those they report."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.errors import Mismatch, PeerLost
from shoal.execution.membership import Plan
from support.simulation import checks, training_checks
from support.simulation.checks import Report
from support.simulation.network import Weather
from support.simulation.optimizers import STYLES, Style, row_applied
from support.simulation.programs import Call, Program
from support.simulation.scenarios import Fault, Scenario
from support.simulation.training import Entry, History, Training

SIZE = 4
NOBODY: tuple[dict[int, float], ...] = ({},) * SIZE


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("lost", "kind", "right"), [(1, "window", True), (2, "window", False), (1, "average", False), (3, "average", True)]
)
def test_a_loss_names_the_agent_at_fault_or_one_that_it_has_stopped(lost: int, kind: str, right: bool) -> None:
    """Seed 2358: rank 3 misses a call, which stops rank 1 in the next one, and rank 0 needs rank 1 there."""
    calls = [Call(0, "average", 2, True, NOBODY), Call(1, kind, 2, True, NOBODY)]
    program = Program(SIZE, "ring", calls, 1)
    report = Report(Scenario(1, program, Weather(), (Fault("missing call", 0, 3),)))
    stopped = Mismatch("rank 3 has freed this window, or never made it", (3,))
    report.results = {(rank, number): stopped for rank in range(SIZE) for number in range(2)}
    report.results[2, 1] = program.expected(calls[1], 2)
    report.results[0, 1] = PeerLost(f"rank {lost} has left, and is still needed", (lost,))
    checks.check(report, set())
    assert ("rank 0 raised PeerLost" not in str(report.problems)) == right, report.problems


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "named", "right"), [("optimizer", 2, True), ("optimizer", 3, False), ("static", 2, False)]
)
def test_a_late_refusal_puts_an_agent_out_of_step_in_a_call_of_several_operations(
    kind: str, named: int, right: bool
) -> None:
    """Seed 702259: rank 2 learns in a step of its optimizer that its call before was refused, and skips the other
    steps, for which rank 1 waits.
    """
    calls = [Call(0, "average", 2, True, NOBODY), Call(1, kind, 2, True, NOBODY, style=STYLES[0])]
    program = Program(SIZE, "ring", calls, 1)
    report = Report(Scenario(1, program, Weather(), (Fault("shape", 0, 0),)))
    report.results = {
        (rank, number): program.expected(calls[number], rank) for rank in range(SIZE) for number in (0, 1)
    }
    report.results[0, 0] = Mismatch("'call 0': rank 0 expected another shape", (0, 3))
    report.results[2, 1] = Mismatch("'call 0': rank 0 refused it", (0, 2))
    report.results[1, 1] = Mismatch("agents wait for each other", (named,))
    checks.check(report, set())
    assert ("rank 1 raised Mismatch" not in str(report.problems)) == right, report.problems


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "style"),
    [
        ("optimizer", Style(adapts_first=False, one_peer=False)),
        ("static", STYLES[0]),
        ("neighbor_allgather", STYLES[0]),
    ],
)
@pytest.mark.parametrize("members", [(0, 1, 2), (0, 1, 2, 3)])
def test_only_an_agent_that_the_receiver_knows_to_have_left_may_be_missing(
    kind: str, style: Style, members: tuple[int, ...]
) -> None:
    """Seed 3421: rank 3 has left, the plan includes it still, and its neighbours have their averages without it."""
    call = Call(0, kind, 2, True, NOBODY, style=style)
    training = Training(SIZE, "ring", [call], 1)
    x, plan = training.at_all(2, call), Plan((), 1)
    history = History(reached={(rank, 1): 3 for rank in range(3)})
    for rank in range(3):
        row = style.matrix(training.graph, 2)[rank].copy()
        row[rank] += row[3]
        row[3] = 0.0
        if kind == "neighbor_allgather":
            result = np.concatenate([x[one] for one in np.flatnonzero(row) if one != rank])
        elif kind == "optimizer":
            result = row_applied(style, row, rank, x, training.at_all(2, call, 1))
        else:
            result = row @ x
        history.entries.append(Entry(rank, 1, 2, call, plan, plan, members, result))
    report = Report(Scenario(1, training, Weather(), (Fault("departs", 2, 3),), "continue"), history=history)
    training_checks.check(report, training)
    step_problems = [one for one in report.problems if one.startswith("step 2, call 0")]
    assert bool(step_problems) == (3 in members), step_problems
