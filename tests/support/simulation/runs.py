"""One run: drawn from a seed, simulated, checked; and a shorter one that fails as well."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

import shoal
from shoal.errors import Mismatch, NotInitialized, PeerLost

from .fleet import Agents, simulated
from .network import Weather
from .programs import FUSIBLE, KINDS, TOPOLOGIES, Call, Program, as_array
from .scheduler import Stuck

TIMEOUT = 60.0
"""Seconds for each call. Virtual, as all time here."""
SHORT = 3.0
"""The longest that a partition lasts which all survive."""
SLACK = 30.0
"""Seconds in which a run ends that waits for no deadline, beyond those of its partitions."""
FAULTS = ("none", "none", "cut", "cut", "partition", "slow", "crash", "shape", "other call", "missing call", "leaves")
CONTINUED = "crash, continue"


@dataclass(frozen=True)
class Fault:
    """What goes wrong: at a step of the scheduler, or at a call of an agent.

    Attributes:
        kind: One of :data:`FAULTS`.
        at: The step, or the number of the call.
        rank, other: Whom it befalls; whom the connection leads to.
        seconds: How long it lasts.
    """

    kind: str
    at: int
    rank: int
    other: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return {
            "cut": f"step {self.at}: the connections of ranks {self.rank} and {self.other} are cut",
            "partition": f"step {self.at}: rank {self.rank} is apart from the others for {self.seconds:.3g} s",
            "slow": f"rank {self.rank} pauses for up to {self.seconds:.3g} s before each of its steps",
            "crash": f"step {self.at}: rank {self.rank} crashes",
            "shape": f"call {self.at}: rank {self.rank} gives a tensor with one number more",
            "other call": f"call {self.at}: rank {self.rank} makes another call under that name",
            "missing call": f"call {self.at}: rank {self.rank} does not make it, and waits with the next for 2 s",
            "leaves": f"call {self.at}: rank {self.rank} leaves in its place",
        }[self.kind]


@dataclass(frozen=True)
class Scenario:
    """All that a seed decides."""

    seed: int
    program: Program
    weather: Weather
    faults: tuple[Fault, ...]
    on_loss: str = "raise"

    @staticmethod
    def draw(seed: int) -> Scenario:
        chance = random.Random(seed)
        size = chance.choice((2, 3, 3, 4, 4, 5))
        kind = chance.choice((*FAULTS, CONTINUED))
        length = chance.choice((3, 8, 15, 30))
        kinds = ("average",) if kind == CONTINUED else FUSIBLE if chance.random() < 0.3 else KINDS
        program = Program.draw(chance, size, length, kinds)
        weather = Weather(
            chance.choice((0.0001, 0.001, 0.02)),
            chance.choice((0.0, 0.3, 0.9)),
            chance.choice((1 << 12, 1 << 14, 1 << 18)),
        )
        faults = tuple(_draw_fault(chance, kind.partition(",")[0], program) for _ in range(_how_many(chance, kind)))
        return Scenario(seed, program, weather, faults, "continue" if kind == CONTINUED else "raise")

    def __str__(self) -> str:
        p, w = self.program, self.weather
        lines = [f"{p.size} agents on the {p.topology} graph, on_loss={self.on_loss!r}; {w}"]
        return "\n".join([*lines, *map(str, p.calls), *map(str, self.faults)])


def _how_many(chance: random.Random, kind: str) -> int:
    return 0 if kind == "none" else chance.randint(1, 6) if kind == "cut" else 1


def _draw_fault(chance: random.Random, kind: str, program: Program) -> Fault:
    rank, other = chance.sample(range(program.size), 2)
    steps = 40 * program.size + 8 * program.size * len(program.calls)
    if kind in ("shape", "other call", "missing call", "leaves"):
        able = [call.number for call in program.calls if _can_be_wrong(call, kind, rank)]
        return Fault(kind, chance.choice(able), rank) if able else Fault("slow", 0, rank, seconds=0.001)
    at = chance.randrange(30 * program.size, steps)
    seconds = chance.choice((0.0005, 0.005, 0.05)) if kind == "slow" else chance.uniform(0.01, SHORT)
    return Fault(kind, at, rank, other, seconds)


def _can_be_wrong(call: Call, kind: str, rank: int) -> bool:
    if kind == "leaves":
        return True
    fits = call.kind in ("static", "average", "sum", "max", "pull", "push-pull")
    return fits and (kind != "missing call" or call.blocking)


@dataclass
class Report:
    """What a run showed: for each call of each agent its result, or its error."""

    scenario: Scenario
    results: dict[tuple[int, int], Any] = field(default_factory=dict)
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    never: set[int] = field(default_factory=set)
    seconds: float = 0.0
    steps: int = 0

    @property
    def digest(self) -> tuple[Any, ...]:
        """The same for every run of the same seed."""
        said = {at: str(one) if isinstance(one, Exception) else one.tobytes() for at, one in self.results.items()}
        return self.steps, self.seconds, tuple(sorted(said.items()))


def run(scenario: Scenario) -> Report:
    """Simulate it, and check what came of it."""
    report = Report(scenario)
    program = scenario.program
    by_call = {(one.rank, one.at): one.kind for one in scenario.faults}
    crashed = {one.rank for one in scenario.faults if one.kind == "crash"}
    level = logging.getLogger("shoal").level
    logging.getLogger("shoal").setLevel(logging.CRITICAL)
    with simulated(scenario.seed, scenario.weather) as world:
        agents = Agents(world, program.size, TIMEOUT, scenario.on_loss)

        def live(rank: int) -> None:
            shoal.set_topology(TOPOLOGIES[program.topology](program.size))
            handles: dict[int, Any] = {}
            for what, call in program.order(rank):
                fault = by_call.get((rank, call.number), "")
                if call.kind == "group" and rank not in call.members:
                    continue
                if fault == "leaves" and what != "wait":
                    return
                try:
                    if what == "wait":
                        if call.number in handles:
                            report.results[rank, call.number] = as_array(handles.pop(call.number).wait())
                        continue
                    if fault == "missing call":
                        world.scheduler.sleep(2.0)
                        continue
                    numbers = program.numbers(call, rank)
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
            ended.add(rank)
            while not scenario.faults and len(ended) < program.size:
                world.scheduler.sleep(0.1)
            world.scheduler.sleep(0.5)
            report.members[rank] = tuple(sorted(agents.engines[rank].membership.view.alive))
            report.left += _left(rank, agents.engines[rank]) if not scenario.faults else []
            world.scheduler.sleep(0.5)

        def happen(step: int) -> None:
            for one in due.pop(step, ()):
                if one.kind == "cut":
                    world.network.cut(one.rank, one.other)
                elif one.kind == "partition":
                    others = [other for other in range(program.size) if other != one.rank]
                    world.network.part([[one.rank], others], one.seconds)
                elif one.kind == "crash":
                    agents.crash(one.rank)

        ended: set[int] = set()
        due: dict[int, list[Fault]] = {}
        for one in scenario.faults:
            if one.kind == "slow":
                world.scheduler.slow[one.rank] = one.seconds
            elif one.kind in ("cut", "partition", "crash"):
                due.setdefault(one.at, []).append(one)
        world.scheduler.on_step.append(happen)
        agents.start(live)
        try:
            agents.run(10 * TIMEOUT)
        except Stuck as error:
            report.problems.append(f"{error}; rank(s) {sorted(set(range(program.size)) - agents.done)} have not ended")
        report.seconds, report.steps = world.scheduler.now, world.scheduler.steps
        crashed &= world.scheduler.dead
        for rank, error in agents.failed.items():
            if rank not in crashed and not (crashed and isinstance(error, PeerLost)):
                report.problems.append(f"rank {rank} ended with {type(error).__name__}: {error}")
            report.never.add(rank)
        agents.end()
    logging.getLogger("shoal").setLevel(level)
    _check(report, crashed)
    return report


def _left(rank: int, engine: Any) -> list[str]:
    """What is there though nothing goes on."""
    matcher, sender = engine.matcher, engine.sender
    found = {
        "operations": matcher.in_flight(),
        "early messages": matcher._early,
        "questions": matcher._asks,
        "unanswered messages": sender._unacknowledged,
        "tombstones": matcher._tombstones,
        "results": engine.result_cache.results,
    }
    return [f"rank {rank} has {what} left: {one}" for what, one in found.items() if one]


def _check(report: Report, crashed: set[int]) -> None:
    scenario, problems = report.scenario, report.problems
    if problems:
        return
    waits = sum(one.seconds for one in scenario.faults if one.kind != "slow")
    slow = any((one.kind == "slow" and one.seconds > 0.001) or one.kind == "missing call" for one in scenario.faults)
    if report.seconds - 1000.0 > SLACK + waits and not slow:
        problems.append(f"it took {report.seconds - 1000.0:.1f} s, though nothing had to wait")
    problems += report.left
    kinds = {one.kind for one in scenario.faults}
    for call in scenario.program.calls:
        _check_call(report, call, kinds, crashed)
    if scenario.on_loss == "continue" and crashed:
        left = tuple(rank for rank in range(scenario.program.size) if rank not in crashed)
        for rank, members in report.members.items():
            if rank not in crashed and members != left:
                problems.append(f"rank {rank} counts {members} as alive, and {left} are")


def _check_call(report: Report, call: Call, kinds: set[str], crashed: set[int]) -> None:
    scenario, program = report.scenario, report.scenario.program
    at = {one.rank for one in scenario.faults if one.at == call.number and one.kind in ("shape", "other call")}
    missing = [one for one in scenario.faults if one.kind == "missing call"]
    gone = {one.rank for one in scenario.faults if one.kind == "leaves"} | crashed
    wrong, right = [], []
    for rank in range(program.size):
        found = report.results.get((rank, call.number))
        if rank in crashed or (call.kind == "group" and rank not in call.members):
            continue
        if found is None:
            if rank not in gone | report.never and not (
                missing and (missing[0].rank, missing[0].at) == (rank, call.number)
            ):
                report.problems.append(f"{call}: nothing came of it on rank {rank}")
        elif isinstance(found, Exception):
            wrong.append(rank)
            _check_error(report, call, rank, found, at or {one.rank for one in missing}, gone)
        else:
            right.append(rank)
            if scenario.on_loss == "continue":
                continue
            if rank not in at and not _alike(found, program.expected(call, rank)):
                report.problems.append(f"{call}: rank {rank} has {found[:5]}, not {program.expected(call, rank)[:5]}")
    if at and not wrong:
        report.problems.append(f"{call}: rank {min(at)} called it wrongly, and nobody heard of it")
    if scenario.on_loss == "continue":
        _check_survived(report, call, right, crashed)
    said = {
        str(found)[str(found).find(f"rank {one} has left") :]
        for one in gone - crashed
        for rank in wrong
        if isinstance(found := report.results[rank, call.number], PeerLost) and one in found.ranks
    }
    if len(said) > 1 and call.kind != "window":  # of which some calls are one-sided
        report.problems.append(f"{call}: one event has several outcomes: {sorted(said)}")


def _check_error(report: Report, call: Call, rank: int, error: Exception, at: set[int], gone: set[int]) -> None:
    said = f"{call}: rank {rank} raised {type(error).__name__}: {error}"
    if at:
        fits = isinstance(error, Mismatch)
        if "missing call" in {one.kind for one in report.scenario.faults}:  # it is missed until its agent has left
            fits = fits or (isinstance(error, PeerLost) and bool(set(error.ranks) & at))
    elif gone:
        fits = isinstance(error, PeerLost) and bool(set(error.ranks) & gone)
        fits = fits or (rank in gone and isinstance(error, NotInitialized))
    else:  # a refusal that comes after a call has ended is raised by the next one
        late = [
            one.at for one in report.scenario.faults if one.kind in ("shape", "other call") and one.at < call.number
        ]
        fits = isinstance(error, Mismatch) and any(f"'call {number}'" in str(error) for number in late)
    if not fits:
        report.problems.append(said)


def _check_survived(report: Report, call: Call, right: list[int], crashed: set[int]) -> None:
    """All that go on have the same average: of all agents, or of those that are left."""
    program = report.scenario.program
    everybody = tuple(range(program.size))
    left = tuple(rank for rank in everybody if rank not in crashed)
    found = {rank: report.results[rank, call.number] for rank in right if rank not in crashed}
    fits = [
        there
        for there in {everybody, left}
        if all(_alike(one, program.expected(call, rank, there)) for rank, one in found.items())
    ]
    if found and not fits:
        report.problems.append(f"{call}: the agents have different averages: { {r: v[:3] for r, v in found.items()} }")


def _alike(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-9, atol=1e-9))


def shrunk(scenario: Scenario, tries: int = 150) -> Scenario:
    """A shorter one that fails as well: with fewer faults and calls."""
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
