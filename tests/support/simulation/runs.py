"""One run: drawn from a seed, simulated, checked; and shrunk to a shorter failing run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import shoal
from shoal.errors import PeerLost

from . import training_checks
from .checks import Report, check, left_behind
from .fleet import Agents, Simulated, simulated
from .programs import as_array
from .scenarios import Fault, Scenario
from .scheduler import Stuck
from .training import Training, run_training

TIMEOUT = 60.0
"""Seconds for each call. Virtual, as all time here."""
NOTICED = 1.0
"""Seconds after which all agents count a crashed one as lost."""
LATER = 50
"""Steps after which a crash that would leave no member is tried again."""


def run(scenario: Scenario) -> Report:
    """Simulate it, and check what came of it."""
    report = Report(scenario)
    program = scenario.program
    log = logging.getLogger("shoal")
    level = log.level
    log.setLevel(logging.CRITICAL)
    with simulated(scenario.seed, scenario.weather) as world:
        joins = any(fault.kind == "joins" for fault in scenario.faults)
        begin_with = program.size - 1 if joins else 0
        agents = Agents(world, program.size, TIMEOUT, scenario.on_loss, begin_with)
        faults = Faults(world, agents, scenario)
        if isinstance(program, Training):
            run_calls = run_training(program, world, agents, report.history, faults.over, faults.departs)
        else:
            run_calls = _calls(world, agents, report)
        ended: set[int] = set()
        looked: dict[int, float] = {}
        calm = not scenario.faults or isinstance(program, Training)

        def run_and_check(rank: int) -> None:
            if not run_calls(rank):
                return
            ended.add(rank)
            while calm and len(ended) + len(agents.failed) < program.size:
                world.scheduler.sleep(0.1)
            world.scheduler.sleep(0.5)
            looked[rank] = world.scheduler.now
            report.members[rank] = tuple(sorted(agents.engines[rank].membership.view.alive))
            report.left += left_behind(rank, agents.engines, report.history.failed(rank)) if calm else []
            world.scheduler.sleep(0.5)

        agents.start(run_and_check)
        try:
            slow = any(fault.kind == "slow" and fault.seconds > 0.001 for fault in scenario.faults)
            agents.run((10 if slow else 3) * TIMEOUT)
        except Stuck as error:
            report.problems.append(f"{error}; rank(s) {sorted(set(range(program.size)) - agents.done)} have not ended")
        report.seconds, report.steps = world.scheduler.now, world.scheduler.steps
        crashed = set(world.scheduler.dead)
        if not isinstance(program, Training):  # where a crash that came late, or after that, is not known yet
            last = max(agents.crashed.values(), default=0.0) + NOTICED
            report.members = {rank: ranks for rank, ranks in report.members.items() if looked[rank] > last}
        for rank, ended_by in agents.failed.items():
            if rank not in crashed and not (crashed and isinstance(ended_by, PeerLost)):
                report.problems.append(f"rank {rank} ended with {type(ended_by).__name__}: {ended_by}")
            report.never.add(rank)
        agents.end()
    log.setLevel(level)
    if isinstance(program, Training):
        training_checks.check(report, program)
    else:
        check(report, crashed)
    return report


class Faults:
    """Has the faults of a scenario happen."""

    def __init__(self, world: Simulated, agents: Agents, scenario: Scenario) -> None:
        self._world, self._agents, self._size = world, agents, scenario.program.size
        self._pending: set[Fault] = set()
        scheduler = world.scheduler
        for fault in scenario.faults:
            if fault.kind == "slow":
                scheduler.slow[fault.rank] = fault.seconds
            elif fault.kind == "joins":
                scheduler.at(scheduler.now + fault.seconds, agents.start_one, fault.rank)
            elif fault.kind == "departs":
                self._pending.add(fault)
            elif fault.kind in ("cut", "partition", "crash", "returns"):
                self._pending.add(fault)
                scheduler.at_step(fault.at, lambda one=fault: self._happen(one))  # type: ignore[misc]

    def over(self) -> bool:
        """All faults have been, and all agents that come back have been started again."""
        return not self._pending and not self._world.scheduler.dead and not self._agents.returning

    def departs(self, rank: int, step: int) -> bool:
        """Whether an agent leaves before this step of its training, to be started again."""
        for one in self._pending:
            if one.kind == "departs" and one.rank == rank and one.at <= step and self._agents.loaded - {rank}:
                self._pending.discard(one)
                self._agents.depart(rank, one.seconds)
                return True
        return False

    def _happen(self, fault: Fault) -> None:
        agents, rank = self._agents, fault.rank
        if fault.kind == "returns" and not agents.loaded - {rank}:
            # Nobody could hand over the state of the run, or not all have met.
            self._world.scheduler.at_step(self._world.scheduler.steps + LATER, lambda: self._happen(fault))
            return
        self._pending.discard(fault)
        if fault.kind == "cut":
            self._world.network.cut(rank, fault.other)
        elif fault.kind == "partition":
            others = [other for other in range(self._size) if other != rank]
            self._world.network.part([[rank], others], fault.seconds)
        elif fault.kind == "crash":
            agents.crash(rank)
        elif rank not in self._world.scheduler.dead | agents.absent:  # two processes would have one rank
            agents.crash(rank, fault.seconds)


def _calls(world: Simulated, agents: Agents, report: Report) -> Callable[[int], bool]:
    """Run an agent: the calls of its program, each with its drawn fault."""
    scenario = report.scenario
    program = scenario.program
    by_call = {(fault.rank, fault.at): fault.kind for fault in scenario.faults}
    pending = {fault.rank for fault in scenario.faults if fault.kind == "leaves pending"}

    def run_calls(rank: int) -> bool:
        """False where it leaves early."""
        shoal.set_topology(program.graph)
        handles: dict[int, Any] = {}
        for what, call in program.order(rank):
            fault = by_call.get((rank, call.number), "")
            if call.kind == "group" and rank not in call.members:
                continue
            if fault == "leaves" and what != "wait":
                return False
            try:
                if what == "wait":
                    if call.number in handles and rank not in pending:
                        report.results[rank, call.number] = as_array(handles.pop(call.number).wait())
                    continue
                if fault == "missing call":
                    world.scheduler.sleep(2.0)
                    continue
                numbers = program.numbers(call, rank).copy()
                if fault == "shape":
                    numbers = np.append(numbers, 1.0)
                if fault == "other call":
                    call = replace(call, kind="broadcast")
                given = program.begin(call, rank, torch.from_numpy(numbers))
                if what == "begin":
                    handles[call.number] = given
                else:
                    report.results[rank, call.number] = as_array(given)
            except Exception as error:
                report.results[rank, call.number] = error
        return True

    return run_calls


def shrunk(scenario: Scenario, tries: int = 150) -> Scenario:
    """A shorter run that fails as well, with fewer faults and calls."""
    changed = True
    while changed and tries > 0:
        changed = False
        for fault in scenario.faults:
            tries -= 1
            smaller = replace(scenario, faults=tuple(one for one in scenario.faults if one is not fault))
            if run(smaller).problems:
                scenario, changed = smaller, True
                break
        calls = scenario.program.calls
        width = max(1, len(calls) // 2)
        while width and tries > 0:
            at = 0
            while at < len(scenario.program.calls) and tries > 0:
                tries -= 1
                calls = scenario.program.calls
                smaller = replace(scenario, program=replace(scenario.program, calls=calls[:at] + calls[at + width :]))
                if len(calls) > width and run(smaller).problems:
                    scenario, changed = smaller, True
                else:
                    at += width
            width //= 2
    return scenario
