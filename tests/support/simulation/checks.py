"""Compares what a run showed with the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shoal.errors import Mismatch, NotInitialized, PeerLost

from .programs import OPERATIONS, Call
from .scenarios import Scenario
from .training import History

SLACK = 30.0
"""Seconds in which a run ends that waits for no deadline, beyond those of its partitions."""


@dataclass
class Report:
    """The outcome of a run: for each call of each agent its result, or its error."""

    scenario: Scenario
    results: dict[tuple[int, int], Any] = field(default_factory=dict)
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    never: set[int] = field(default_factory=set)
    history: History = field(default_factory=History)
    seconds: float = 0.0
    steps: int = 0

    @property
    def digest(self) -> tuple[Any, ...]:
        """The same for every run of the same seed."""
        history = {(one.rank, one.start, one.step, one.call.number): one.result for one in self.history.entries}
        output = {at: one.tobytes() if isinstance(one, np.ndarray) else str(one) for at, one in self.results.items()}
        of_steps = {at: one.tobytes() if isinstance(one, np.ndarray) else str(one) for at, one in history.items()}
        return self.steps, self.seconds, tuple(sorted(output.items())), tuple(sorted(of_steps.items()))


def left_behind(rank: int, engines: dict[int, Any], failed: set[str]) -> list[str]:
    """The state that an idle agent still holds. A result is kept until all agents have confirmed that they have it.

    Args:
        rank: The agent.
        engines: Of all agents.
        failed: The names of its calls that have raised; their tombstones stay.
    """
    engine = engines[rank]
    matcher, sender, cache = engine.matcher, engine.sender, engine.result_cache
    unconfirmed = {other: set(one.result_cache._unconfirmed) for other, one in engines.items()}
    result = {
        "operations": matcher.in_flight(),
        "early messages": matcher.early,
        "questions": matcher.asks,
        "unanswered messages": sender._unacknowledged,
        "tombstones": [key for key in matcher._tombstones if key[0] not in failed],
        "results": [
            key for key, one in cache.results.items() if any(key not in unconfirmed[other] for other in one.without)
        ],
    }
    return [f"rank {rank} has {what} left: {one}" for what, one in result.items() if one]


def check(report: Report, crashed: set[int]) -> None:
    scenario, problems = report.scenario, report.problems
    if problems:
        return
    waits = sum(fault.seconds for fault in scenario.faults if fault.kind != "slow")
    slow = any(
        (fault.kind == "slow" and fault.seconds > 0.001) or fault.kind == "missing call" for fault in scenario.faults
    )
    if report.seconds - 1000.0 > SLACK + waits and not slow:
        problems.append(f"it took {report.seconds - 1000.0:.1f} s, though nothing had to wait")
    problems += report.left
    kinds = {fault.kind for fault in scenario.faults}
    for call in scenario.program.calls:
        _check_call(report, call, kinds, crashed)
    if scenario.on_loss == "continue" and crashed:
        left = tuple(rank for rank in range(scenario.program.size) if rank not in crashed)
        for rank, members in report.members.items():
            if rank not in crashed and members != left:
                problems.append(f"rank {rank} counts {members} as alive, and {left} are")


def _check_call(report: Report, call: Call, kinds: set[str], crashed: set[int]) -> None:
    scenario, program = report.scenario, report.scenario.program
    at = {fault.rank for fault in scenario.faults if fault.at == call.number and fault.kind in ("shape", "other call")}
    missing = [fault for fault in scenario.faults if fault.kind == "missing call"]
    departed = {fault.rank for fault in scenario.faults if fault.kind == "leaves"} | crashed
    pending = {fault.rank for fault in scenario.faults if fault.kind == "leaves pending"}
    wrong, right = [], []
    for rank in range(program.size):
        result = report.results.get((rank, call.number))
        if rank in crashed or (call.kind == "group" and rank not in call.members):
            continue
        if result is None:
            if rank not in departed | pending | report.never and not (
                missing and (missing[0].rank, missing[0].at) == (rank, call.number)
            ):
                report.problems.append(f"{call}: nothing came of it on rank {rank}")
        elif isinstance(result, Exception):
            wrong.append(rank)
            _check_error(report, call, rank, result, at or {one.rank for one in missing}, departed)
        else:
            right.append(rank)
            if scenario.on_loss == "continue":
                continue
            if rank not in at and not alike(result, program.expected(call, rank)):
                report.problems.append(f"{call}: rank {rank} has {result[:5]}, not {program.expected(call, rank)[:5]}")
    if at and not wrong:
        report.problems.append(f"{call}: rank {min(at)} called it wrongly, and nobody heard of it")
    if scenario.on_loss == "continue":
        _check_survived(report, call, right, crashed)
    output = {
        str(result)[str(result).find(f"rank {one} has left") :]
        for one in departed - crashed
        for rank in wrong
        if isinstance(result := report.results[rank, call.number], PeerLost) and one in result.ranks
    }
    if len(output) > 1 and call.kind != "window":  # of which some calls are one-sided
        report.problems.append(f"{call}: one event has several outcomes: {sorted(output)}")


def _check_error(
    report: Report, call: Call, rank: int, error: Exception, at: set[int], departed_ranks: set[int]
) -> None:
    output = f"{call}: rank {rank} raised {type(error).__name__}: {error}"
    if at:
        missed = "missing call" in {fault.kind for fault in report.scenario.faults}  # until its agent has left

        def fits(error: Any) -> bool:
            return isinstance(error, Mismatch) or (
                missed and isinstance(error, PeerLost) and bool(set(error.ranks) & at)
            )

        right = fits(error) or _follows(report, call, error, fits)
    elif departed_ranks:
        right = isinstance(error, PeerLost) and bool(set(error.ranks) & departed_ranks)
        right = right or (rank in departed_ranks and isinstance(error, NotInitialized))
    else:  # a refusal that comes after a call has ended is raised by the next one
        late = partial(_is_late, report, call)
        right = late(error) or _follows(report, call, error, late) or _is_out_of_step(report, call, error)
    if not right:
        report.problems.append(output)


def _follows(report: Report, call: Call, error: Exception, fits: Callable[[Any], bool]) -> bool:
    """Whether an error names only agents that an error that fits has stopped in one of the call's several operations.

    These agents have left since, and are needed in the next one of these operations.
    """
    if call.kind not in OPERATIONS or not isinstance(error, PeerLost):
        return False
    return bool(error.ranks) and all(fits(report.results.get((one, call.number))) for one in error.ranks)


def _is_late(report: Report, call: Call, error: Any) -> bool:
    faults = [
        fault for fault in report.scenario.faults if fault.kind in ("shape", "other call") and fault.at < call.number
    ]
    return isinstance(error, Mismatch) and any(f"'call {fault.at}'" in str(error) for fault in faults)


def _is_out_of_step(report: Report, call: Call, error: Any) -> bool:
    """Whether an error names an agent that a late refusal has stopped in a call of several operations, or one that such
    an agent has stopped.

    That agent leaves the rest of them out, for which the others wait, while it makes its next call.
    """
    stopped: set[int] = set()
    for one in report.scenario.program.calls:
        if one.number > call.number:
            break
        errors = {
            rank: result
            for (rank, number), result in report.results.items()
            if number == one.number and isinstance(result, Mismatch | PeerLost)
        }
        if one.kind in OPERATIONS:
            stopped |= {rank for rank, result in errors.items() if _is_late(report, one, result)}
        for _ in errors:
            stopped |= {rank for rank, result in errors.items() if stopped & set(result.ranks)}
    return isinstance(error, Mismatch | PeerLost) and bool(stopped & set(error.ranks))


def _check_survived(report: Report, call: Call, right: list[int], crashed: set[int]) -> None:
    """All survivors have the same average: of all agents, or of the survivors."""
    program = report.scenario.program
    all_ranks = tuple(range(program.size))
    left = tuple(rank for rank in all_ranks if rank not in crashed)
    result = {rank: report.results[rank, call.number] for rank in right if rank not in crashed}
    fits = [
        participants
        for participants in {all_ranks, left}
        if all(alike(one, program.expected(call, rank, participants)) for rank, one in result.items())
    ]
    if result and not fits:
        report.problems.append(f"{call}: the agents have different averages: { {r: v[:3] for r, v in result.items()} }")


def alike(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    return np.array_equal(one, other) or bool(np.allclose(one, other, rtol=1e-9, atol=1e-9))
