"""Training on machines whose cables are slow or cut, as drawn from a seed; the expected outcome is computed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

import shoal
from shoal import topology_util
from shoal.topology import Static
from support.agent_main import Outcome
from support.chaos import ALGORITHMS, AVERAGING, DROP_AFTER, TOPOLOGIES
from support.namespaces import Namespace, network_namespaces
from support.surviving_training import RATE, Point3, optimum, resting_place, step_of
from support.survivors import CONTINUE
from support.world import World

SLOW, SLOW_FOR_GOOD = "a slow link, for a time", "a slow link"
CUT, MUTE, DEAF, APART = (
    "cut",
    "cut one way: it is not heard",
    "cut one way: it hears nothing",
    "two cut off from each other",
)
FOR_GOOD = ", for good"
LOPSIDED = (MUTE + FOR_GOOD, DEAF + FOR_GOOD, APART + FOR_GOOD)
"""After these each agent ends, or goes on in a part that is of one mind. Which parts there are depends on who drops
whom first; with ``stop`` there is one at most."""
FAULTS = (SLOW, CUT, CUT + FOR_GOOD, MUTE, DEAF, SLOW_FOR_GOOD, APART, *LOPSIDED)
BETWEEN, AFTER = 10, 300
"""Steps between two looks at the clock, and those that are trained once the time is over."""
SHORT = 0.45 * DROP_AFTER
"""Seconds of the longest cut that is not to lose anybody: after it, TCP may wait as long again."""


@dataclass(frozen=True)
class Draw:
    """One run: how each agent trains, and which cable fails when, with the duration.

    Attributes:
        other: The second of two that are cut off from each other.
        stops: ``SHOAL_ON_PARTITION=stop``.
    """

    size: int
    way: str
    topology: str
    kind: str
    victim: int
    other: int
    after: float
    lasts: float
    kbit: int
    stops: bool

    @staticmethod
    def of(seed: int) -> Draw:
        chance = random.Random(seed)
        way = chance.choice(list(ALGORITHMS))
        topology = chance.choice(list(TOPOLOGIES)) if way in AVERAGING else "ring"
        size = 4 if topology == "hypercube" else chance.randint(3, 5)
        victim, other = chance.sample(range(size), 2)
        kind = FAULTS[seed % len(FAULTS)]  # in turn, so that few seeds meet all
        after, lasts, kbit = chance.uniform(0.1, 0.6), chance.uniform(0.2, SHORT), chance.choice([256, 1000, 4000])
        stops = chance.random() < 0.5
        return Draw(size, way, topology, kind, victim, other, after, lasts, kbit, stops)

    @property
    def for_good(self) -> bool:
        return self.kind.endswith(FOR_GOOD)


@dataclass
class AgentResult:
    """The outcome of one agent: its final parameters, its steps, the longest of them, and the members."""

    x: list[float]
    steps: int
    longest: float
    changes: list[tuple[int, ...]] = field(default_factory=list)
    alive: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunFigures:
    """What came of a run: the longest step, and how far all ended from where they must."""

    seconds: float
    distance: float


def train(draw: Draw, seconds: float) -> AgentResult:
    """Train for the given time, and then a few more steps, as many on all agents that reach each other."""
    model, changes = Point3(), []
    shoal.set_topology(topology_util.RingGraph(draw.size), is_weighted=True)
    options = ALGORITHMS[draw.way] | {"topology": TOPOLOGIES[draw.topology](draw.size)}
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, **options)
    shoal.on_membership_change(lambda change: changes.append(change.lost))
    take_a_step = step_of(optimizer, model)
    shoal.barrier()
    began = last = time.monotonic()
    steps, end, longest = 0, None, 0.0
    while steps != end:
        take_a_step()
        steps += 1
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if end is None and steps % BETWEEN == 0:
            time.sleep(0.01)
            over = shoal.allreduce(torch.tensor([float(now - began > seconds)]))
            end = steps + AFTER if over.item() else None
    return AgentResult(model.x.tolist(), steps, longest, changes, shoal.alive())


def _fault(draw: Draw, machines: list[Namespace]) -> Callable[[bool], None]:
    """The functions that begin and end the fault."""
    victim, other = machines[draw.victim], machines[draw.other]
    rest = [machine for machine in machines if machine is not victim]

    def apply_fault(begins: bool) -> None:
        kind = draw.kind.removesuffix(FOR_GOOD)
        if kind in (SLOW, SLOW_FOR_GOOD):
            victim.slow(draw.kbit if begins else 0)
        elif kind == CUT:
            victim.plug(not begins)
        pairs = {
            MUTE: [(victim, one) for one in rest],
            DEAF: [(one, victim) for one in rest],
            APART: [(victim, other), (other, victim)],
        }
        for source, target in pairs.get(kind, []):
            source.cut(target, begins)

    return apply_fault


def run(seed: int, over: str = "") -> RunFigures:
    """Draw, train, and compare, over TCP or another transport. AssertionError where an agent ends otherwise than it
    must."""
    draw = Draw.of(seed)
    prefix = f"seed {seed}, {draw}:"
    environment = CONTINUE | {"SHOAL_DROP_AFTER": str(DROP_AFTER), "SHOAL_TRANSPORT": over}
    if draw.stops:
        environment["SHOAL_ON_PARTITION"] = "stop"
    with network_namespaces(draw.size) as machines:
        apply_fault = _fault(draw, machines)
        with World(draw.size, environment=environment, namespaces=machines) as world:
            seconds = draw.after + (2 * DROP_AFTER if draw.for_good else draw.lasts + 0.5)
            pending = [world.run_on(rank, train, draw, seconds) for rank in range(draw.size)]
            time.sleep(draw.after)
            apply_fault(True)
            if not draw.for_good and draw.kind != SLOW_FOR_GOOD:
                time.sleep(draw.lasts)
                apply_fault(False)
            outcomes = [one.outcome(60.0) for one in pending]
            if draw.for_good or draw.kind == SLOW_FOR_GOOD:
                apply_fault(False)  # so that all can say goodbye
            parts, shut_out = _parts(draw, outcomes)
            assert sorted([*shut_out, *(rank for part in parts for rank in part)]) == list(range(draw.size)), prefix
            assert parts or (draw.kind in LOPSIDED and draw.stops), f"{prefix} nobody goes on"
            assert not draw.stops or len(parts) < 2, f"{prefix} {parts} go on apart"
            for rank, one in enumerate(outcomes):
                output = f"{prefix} rank {rank}: {one.error}: {one.message}\n{one.trace}"
                if rank in shut_out:
                    assert one.error in ("PeerLost", "ShoalError"), output
                    why = ("as the smaller part", "counts it as lost", "gives way")
                    assert any(text in one.message for text in why), output
                else:
                    assert not one.error, output
            distance, longest = 0.0, 0.0
            for part in parts:
                for rank in part:
                    seen: AgentResult = outcomes[rank].value
                    assert seen.alive == tuple(part), f"{prefix} rank {rank} is with {seen.alive}, not {part}"
                    failed = sorted(one for change in seen.changes for one in change)
                    assert failed == sorted(set(range(draw.size)) - set(part)), f"{prefix} rank {rank}: {seen.changes}"
                    expected = _expected(draw, part, seen.steps)[rank]
                    distance = max(distance, float(np.abs(np.array(seen.x) - expected).max()))
                    longest = max(longest, seen.longest)
            assert distance < 1e-8, f"{prefix} {distance:g} from where they must be"
    return RunFigures(longest, distance)


def _parts(draw: Draw, outcomes: list[Outcome]) -> tuple[list[list[int]], list[int]]:
    """The expected parts, and the agents that end, as docs/survival.md states."""
    all_ranks, victim = list(range(draw.size)), draw.victim
    rest = [rank for rank in all_ranks if rank != victim]
    if not draw.for_good:
        return [all_ranks], []
    if draw.kind == CUT + FOR_GOOD:
        return ([rest], [victim]) if draw.stops else ([rest, [victim]], [])
    views = sorted({outcome.value.alive for outcome in outcomes if not outcome.error})
    return [list(view) for view in views], [rank for rank in all_ranks if outcomes[rank].error]


def _expected(draw: Draw, part: list[int], steps: int) -> np.ndarray:
    """Where those of a part come to rest, [size, 3]."""
    if draw.way not in AVERAGING:
        return np.tile(optimum(part), (draw.size, 1))
    topology = TOPOLOGIES[draw.topology](draw.size) or Static(topology_util.RingGraph(draw.size))
    departed = [rank for rank in range(draw.size) if rank not in part]
    return resting_place(topology, draw.size, departed, draw.way == "AWC", steps=steps)
