"""Fleets that are simulated from a seed (docs/testing.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shoal.execution.membership import Plan
from shoal.ops import neighbor
from shoal.runtime.agent import current
from shoal.transport import status_socket
from support.simulation.network import Weather
from support.simulation.optimizers import STYLES, Style
from support.simulation.programs import Call, Program
from support.simulation.runs import run, shrunk
from support.simulation.scenarios import Fault, Scenario
from support.simulation.training import Training

NOBODY: tuple[dict[int, float], ...] = ({}, {}, {})
"""Of three agents: to whom each sends, where the call does not ask."""
FOUND = {
    "a root that only waits for confirmations passed no probe on": Scenario(
        1,
        Program(
            2, "full", [Call(0, "push-pull", 2, True, ({1: 1.0}, {0: 1.0})), Call(1, "object", 1, True, ({}, {}))], 1
        ),
        Weather(),
        (Fault("missing call", 0, 0),),
    ),
    "init() raised PeerLost where another agent had left right after its own": Scenario(
        23,
        Program(4, "full", [Call(0, "average", 1, True, ({}, {}, {}, {}))], 1),
        Weather(0.02, 0.9, 1 << 12),
        (Fault("leaves", 0, 3),),
    ),
    "agents that wait only for confirmations, in a circle, waited until their deadline": Scenario(
        1137,
        Program(
            3,
            "ring",
            [
                Call(0, "push-pull", 2, True, ({}, {0: 1.0}, {0: 1.0})),
                Call(1, "push-pull", 2, True, ({}, {}, {1: 1.0})),
            ],
            1,
        ),
        Weather(),
        (Fault("missing call", 0, 2),),
    ),
    "a tensor that was refused while it arrived was changed by its sender, which then counted as lost": Scenario(
        13783,
        Program(
            2,
            "exponential",
            [
                Call(0, "pull", 7, True, ({1: 0.75}, {0: -0.5})),
                Call(1, "group", 2, False, ({}, {}), members=(0, 1)),
                Call(2, "static", 1, False, ({}, {})),
                Call(3, "push-pull", 5000, False, ({1: -0.5}, {0: 0.5})),
                Call(4, "broadcast", 2, False, ({}, {}), root=1),
                Call(5, "static", 7, True, ({}, {})),
                Call(6, "optimizer", 5000, True, ({}, {}), style=Style(adapts_first=True, one_peer=True)),
            ],
            45861477,
        ),
        Weather(0.0001, 0.0, 1 << 12),
        (Fault("shape", 3, 1),),
    ),
    "an average that had begun before an agent was lost was sent to the agent admitted in its place": Scenario(
        3920,
        Training(
            4,
            "full",
            [
                Call(0, "static", 2, False, ({}, {}, {}, {}), spans=True),
                Call(1, "optimizer", 1100, True, ({}, {}, {}, {}), style=Style(adapts_first=False, one_peer=True)),
            ],
            1038267955,
        ),
        Weather(0.02, 0.9, 1 << 14),
        (
            Fault("returns", 480, 1),
            Fault("returns", 1012, 3, seconds=0.0009561496115973819),
            Fault("cut", 225, 2, 0),
            Fault("cut", 212, 3, 0),
            Fault("cut", 183, 2, 1),
            Fault("cut", 229, 3, 0),
        ),
        "continue",
    ),
    "an agent that was started again while the members admitted its predecessor was never admitted": Scenario(
        3937,
        Training(4, "ring", [Call(0, "allgather", 2, False, ({}, {}, {}, {}))], 537095109),
        Weather(0.02, 0.3, 1 << 18),
        (
            Fault("joins", 0, 3, seconds=0.12268935793183489),
            Fault("returns", 939, 0, seconds=0.033145174230233214),
            Fault("returns", 763, 0, seconds=0.009397414365752555),
            Fault("cut", 121, 2, 1),
            Fault("cut", 126, 2, 1),
        ),
        "continue",
    ),
    "a broadcast whose root was lost failed on an agent that agreed first, and returned on another": Scenario(
        29458,
        Training(4, "exponential", [Call(0, "broadcast", 1, True, ({}, {}, {}, {}), root=2)], 495675688),
        Weather(0.001, 0.9, 1 << 14),
        (Fault("returns", 691, 2, seconds=0.0685311005303068), Fault("departs", 1, 1)),
        "continue",
    ),
}
"""Runs that have found defects, and which."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def failures(first: int, count: int, most: int = 1) -> list[Scenario]:
    results = []
    for seed in range(first, first + count):
        scenario = Scenario.draw(seed)
        if run(scenario).problems:
            results.append(scenario)
            if len(results) == most:
                break
    return results


def check(seed: int) -> None:
    report = run(Scenario.draw(seed))
    assert not report.problems, f"python -m support.simulation --seed {seed}\n{report.scenario}\n{report.problems}"


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(60, 2000, 97))
def test_more_seeds(first: int) -> None:
    """With those above 2,000, in at most two minutes of two cores (docs/simulated-fleet.md)."""
    for seed in range(first, first + 97):
        check(seed)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(2000, 200_000, 1000))
def test_many_seeds(first: int) -> None:
    for seed in range(first, first + 1000):
        check(seed)


def drawn(of: type[Program], with_kind: str, count: int) -> list[int]:
    """The first seeds whose runs are of a kind of program, and have a call of a kind or a fault of it."""
    results = []
    for seed in range(10_000):
        scenario = Scenario.draw(seed)
        kinds = {call.kind for call in scenario.program.calls} | {fault.kind for fault in scenario.faults}
        if type(scenario.program) is of and with_kind in kinds:
            results.append(seed)
            if len(results) == count:
                break
    return results


@pytest.mark.parametrize("kind", ["returns", "joins", "optimizer"])
def test_agents_rejoin_while_others_train(kind: str) -> None:
    for seed in drawn(Training, kind, 3):
        check(seed)


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_optimizers(style: Style) -> None:
    calls = [Call(number, "optimizer", 3, True, NOBODY, style=style) for number in range(2)]
    assert not run(Scenario(1, Program(3, "ring", calls, 1), Weather(), ())).problems


def test_a_rejoined_agent_has_the_results_of_the_others() -> None:
    """Its crash and its rejoin are visible in the results of the calls."""
    training = Training(3, "ring", [Call(0, "average", 2, True, NOBODY), Call(1, "static", 2, True, NOBODY)], 1)
    report = run(Scenario(1, training, Weather(), (Fault("returns", 300, 1, seconds=0.1),), "continue"))
    assert not report.problems
    members = list(report.history.participants.values())
    assert [set(one.values()) for one in (members[0], members[-1])] == [{(0, 1, 2)}] * 2
    assert {(0, 2)} in [set(member.values()) for member in members]
    assert report.history.plans == dict.fromkeys(range(3), Plan((), 1))


def test_a_wrong_average_after_a_rejoin_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = neighbor.mix_steps

    def corrupted(*args, **kwargs):  # type: ignore[no-untyped-def]
        result = yield from mix(*args, **kwargs)
        if current().engine.agreement.plan.n_admitted:
            result[0] += 0.25
        return result

    monkeypatch.setattr(neighbor, "mix_steps", corrupted)
    training = Training(3, "full", [Call(0, "static", 2, True, NOBODY)], 1)
    report = run(Scenario(1, training, Weather(), (Fault("returns", 300, 1, seconds=0.1),), "continue"))
    assert any("has the weights" in one or "not [" in one for one in report.problems), report.problems


def test_agents_that_crash_leave_nothing_in_the_process() -> None:
    scenario = next(
        one for one in map(Scenario.draw, range(1000)) if any(fault.kind == "crash" for fault in one.faults)
    )
    before = list(status_socket.here._agents)
    run(scenario)
    assert status_socket.here._agents == before


@pytest.mark.parametrize("what", FOUND)
def test_fixed_failures_do_not_return(what: str) -> None:
    assert not run(FOUND[what]).problems


@pytest.mark.parametrize("seed", [2, 20, 35])
def test_a_seed_reproduces_the_run(seed: int) -> None:
    first, second = (run(Scenario.draw(seed)) for _ in range(2))
    assert first.digest == second.digest
    assert first.steps > 100


def test_a_defect_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a call uses the square of a weight, an average is wrong."""
    mix = neighbor.mix_steps

    def corrupted(*args, **kwargs):  # type: ignore[no-untyped-def]
        result = yield from mix(*args, **kwargs)
        if result.numel() == 7:
            result.add_(1.0)
        return result

    monkeypatch.setattr(neighbor, "mix_steps", corrupted)
    (results,) = failures(0, 100)
    short = shrunk(results)
    assert len(short.program.calls) == 1 and not short.faults
    assert "of 7 numbers" in str(short)


def test_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail(f"{self.name} was started"))
    check(2)
