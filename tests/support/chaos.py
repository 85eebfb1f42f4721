"""Training under faults drawn from a seed; the expected outcome is computed, and any other is an error."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

import shoal
from shoal import topology_util
from shoal.algorithms import ExactDiffusion, GradientDescent, GradientTracking, ParallelGradientDescent
from shoal.topology import BaseGraph, OnePeerExponential, OnePeerHypercube, Static, Without
from support import chaos_acts
from support.agent_main import Outcome, die
from support.fault_points import Point, arm, fork_a_sleeper, start_a_data_loader, wait_for_no_orphans
from support.surviving_training import RATE, STEPS, Point3, optimum, resting_place, step_of
from support.survivors import CONTINUE
from support.world import World

DROP_AFTER = 2.0
KILLED, STOPPED, LOCKED = "killed", "stopped", "interpreter's lock held"
REFUSED, LEFT_OUT, NO_MEMORY = "NaN gradients, refused", "NaN gradients, left out", "out of memory"
WITH_CHILD, WITH_LOADER = "killed, with a child", "killed, with a data loader"
FAULTS = (KILLED, REFUSED, LEFT_OUT, NO_MEMORY, WITH_CHILD, STOPPED, WITH_LOADER, LOCKED)
KINDS = ("submitted", "sent", "received", "summed", "finished")
LATE = ("Agreeing", "Deciding")
"""Where an agent dies that others agree with on another loss."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ATC": {"algorithm": GradientDescent(1.0)},
    "AWC": {"algorithm": GradientDescent(1.0, atc=False)},
    "gradients": {"algorithm": ParallelGradientDescent(1.0)},
    "gradients during backward": {"algorithm": ParallelGradientDescent(1.0), "overlap": "backward"},
    "tracking": {"algorithm": GradientTracking(1.0)},
    "exact diffusion": {"algorithm": ExactDiffusion(1.0, lazy=True)},
}
AVERAGING, JOINING = ("ATC", "AWC"), ("ATC", "AWC", "gradients", "gradients during backward")
MANY = 2 * STEPS
"""The largest number of batches of an agent, where the numbers differ."""
TOPOLOGIES: dict[str, Callable[[int], Any]] = {
    "ring": lambda size: None,  # the static topology
    "one-peer exponential": OnePeerExponential,
    "hypercube": OnePeerHypercube,
    "base": BaseGraph,
}


@dataclass(frozen=True)
class Draw:
    """One run: how each agent trains, and the fault of each, with its place.

    Attributes:
        faults: By rank.
        batches: How many each has; with different numbers they use ``join()``.
    """

    size: int
    transport: str
    way: str
    topology: str
    faults: dict[int, tuple[str, Point]]
    batches: tuple[int, ...]

    @staticmethod
    def of(seed: int) -> Draw:
        chance = random.Random(seed)
        first = FAULTS[seed % len(FAULTS)]  # in turn, so that few seeds meet all
        way = chance.choice(AVERAGING if first == LEFT_OUT else list(ALGORITHMS))
        topology = chance.choice(list(TOPOLOGIES)) if way in AVERAGING else "ring"
        size = 4 if topology == "hypercube" else chance.randint(3, 6)
        victims = chance.sample(range(size), chance.choice([1, 1, 1, 2, 2, size - 1]))
        faults = {victims[0]: (first, _point(chance))}
        for rank in victims[1:]:
            late = first != LEFT_OUT and chance.random() < 0.4
            faults[rank] = (KILLED, Point(chance.choice(LATE)) if late else _point(chance))
        # On a Base-(k+1) graph an agent may exchange in one round of five, and be hit near step 300.
        batches = [MANY if topology == "base" else STEPS] * size
        if way in JOINING and first != LEFT_OUT and chance.random() < 0.5:
            left = [rank for rank in range(size) if rank not in faults]
            some = chance.sample(left, (len(left) + 1) // 2)  # enough to come to rest in time
            if first in (REFUSED, NO_MEMORY):  # which shows only where it still has gradients
                some.append(victims[0])
            batches = [
                MANY if rank in some or chance.random() < 0.2 else chance.randint(10, 150) for rank in range(size)
            ]
        return Draw(size, chance.choice(["shared_memory", "network"]), way, topology, faults, tuple(batches))

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.faults]

    @property
    def departed(self) -> list[int]:
        return sorted(rank for rank, (fault, _) in self.faults.items() if fault != LEFT_OUT)

    @property
    def unequal(self) -> bool:
        return len(set(self.batches)) > 1

    @property
    def kind(self) -> str:
        """The kind of fault, as tables name it."""
        first = next(iter(self.faults.values()))[0]
        return first if len(self.faults) == 1 else f"{first}, and others killed"

    @property
    def conditions(self) -> list[str]:
        """The other conditions, as tables name them."""
        late = any(point.kind in LATE for _, point in self.faults.values())
        return ["unequal batches"] * self.unequal + ["killed while a loss is agreed on"] * late


@dataclass(frozen=True)
class RunFigures:
    """What came of a run: how long the survivors' longest step was, and how far they ended from where they must."""

    seconds: float
    distance: float


def _point(chance: random.Random) -> Point:
    return Point(chance.choice(KINDS), chance.randint(3, 60))


def inject_fault(draw: Draw, rank: int, locked: float) -> None:
    """Have befall this agent what is drawn for it."""
    if rank not in draw.faults:
        return
    fault, point = draw.faults[rank]
    acts: dict[str, Callable[[], object]] = {
        STOPPED: chaos_acts.stop,
        LOCKED: partial(chaos_acts.hold_the_lock, locked),
        REFUSED: partial(chaos_acts.spoil_gradients, 1 if point.count % 2 else math.inf),
        LEFT_OUT: partial(chaos_acts.spoil_gradients, 1 if point.count % 2 else math.inf),
        NO_MEMORY: partial(chaos_acts.run_out_of_memory, chaos_acts.SMALLEST[point.count % 4]),
    }
    arm(point, acts.get(fault, die))


def train(draw: Draw, rank: int, locked: float) -> tuple[list[float], float, int, int]:
    """The parameters after training, the seconds of the longest step, and how many steps and rounds there were."""
    options = ALGORITHMS[draw.way] | {"topology": TOPOLOGIES[draw.topology](draw.size)}
    if any(fault == LEFT_OUT for fault, _ in draw.faults.values()):
        options["robust"] = shoal.robust.FiniteOnly()
    model = Point3()
    shoal.set_topology(topology_util.RingGraph(draw.size), is_weighted=True)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, **options)
    step, ends = step_of(optimizer, model), [time.monotonic()]
    shoal.barrier()
    inject_fault(draw, rank, locked)
    with optimizer.join() if draw.unequal else contextlib.nullcontext():
        for _ in range(draw.batches[rank]):
            step()
            ends.append(time.monotonic())
    longest = max(later - earlier for earlier, later in pairwise(ends))
    return model.x.tolist(), longest, len(ends) - 1, optimizer.rounds


def run(seed: int, locked: float = chaos_acts.LOCKED_SECONDS, over: str = "") -> RunFigures:
    """Draw, train, and compare. AssertionError where an agent ends otherwise than it must.

    Args:
        locked: The seconds for which an agent's interpreter lock is held.
        over: The transport, if not the drawn one.
    """
    draw = Draw.of(seed)
    environment = CONTINUE | {"SHOAL_DROP_AFTER": str(DROP_AFTER), "SHOAL_TRANSPORT": over or draw.transport}
    environment["SHOAL_CHECK_FINITE"] = str(int(any(fault == REFUSED for fault, _ in draw.faults.values())))
    prefix = f"seed {seed}, {draw}:"
    with World(draw.size, environment=environment) as world:
        world.excused = {rank for rank, (fault, _) in draw.faults.items() if fault == NO_MEMORY}
        children = []
        for rank, (fault, _) in draw.faults.items():
            if fault == WITH_CHILD:
                children += world.results(fork_a_sleeper, on=[rank])
            elif fault == WITH_LOADER:
                world.results(start_a_data_loader, on=[rank])
        script_ends = {rank for rank, (fault, _) in draw.faults.items() if fault in (REFUSED, NO_MEMORY)}
        pending = {
            rank: world.run_on(rank, train, draw, rank, locked, caught=rank not in script_ends)
            for rank in range(draw.size)
        }
        outcomes = {rank: pending[rank].outcome(locked + 30.0) for rank in draw.survivors}
        for rank, one in outcomes.items():
            assert not one.error, f"{prefix} rank {rank}: {one.error}: {one.message}\n{one.trace}"
        for rank, (fault, _) in draw.faults.items():
            if fault == STOPPED:
                world.kill(rank, signal.SIGCONT)
            problem = _problem(fault, pending[rank].outcome(locked + 30.0), world.members[rank].log.read_text())
            assert not problem, f"{prefix} rank {rank}: {problem}"
        expected, distance = _expected(draw), 0.0
        for rank, one in outcomes.items():
            x, _, steps, rounds = one.value
            distance = max(distance, float(np.abs(np.array(x) - expected[rank]).max()))
            assert not distance >= 1e-8 and not math.isnan(distance), f"{prefix} {distance:g} from where they must be"
            assert steps == draw.batches[rank], f"{prefix} rank {rank} made {steps} steps"
            assert rounds == outcomes[draw.survivors[0]].value[3], f"{prefix} rank {rank} was in {rounds} rounds"
        for sender, receiver in _names(draw):
            output = f"rank {receiver} leaves out the values of rank {sender}"
            assert output in world.members[receiver].log.read_text(), f"{prefix} the log lacks: {output}"
        for child in children:  # it has lived to the end
            os.kill(child, signal.SIGKILL)
        wait_for_no_orphans()
        return RunFigures(max(outcome.value[1] for outcome in outcomes.values()), distance)


def _problem(fault: str, one: Outcome, log: str) -> str:
    """Why an agent must not end like this that had such a fault; empty where it may."""
    output = f"{one.error}: {one.message}\n{one.trace}"
    if fault == LEFT_OUT:  # it got no notice, and continues
        return output if one.error or not np.isnan(one.value[0]).all() else ""
    if fault == REFUSED:
        right = one.message == "exit code 1" and "NotFinite" in log and "nothing of it was sent" in log
        return "" if right else f"{output}\n{log}"
    if fault == NO_MEMORY:
        return "" if one.error == "Died" and one.message != "exit code 0" else f"{output}\n{log}"
    if fault in (STOPPED, LOCKED):  # it wakes, and learns that it is not there any more
        return "" if one.error == "ShoalError" and "counts it as lost" in one.message else output
    return "" if one.error == "Died" else output


def _schedule(draw: Draw) -> Any:
    return TOPOLOGIES[draw.topology](draw.size) or Static(topology_util.RingGraph(draw.size))


def _names(draw: Draw) -> list[tuple[int, int]]:
    """The pairs of a sender of NaN and its receiver, among the survivors."""
    senders = [rank for rank, (fault, _) in draw.faults.items() if fault == LEFT_OUT]
    schedule = Without(_schedule(draw), draw.departed)
    matrices = [schedule.matrix(number) for number in range(schedule.period or 1)]
    return [(j, i) for j in senders for i in draw.survivors if any(matrix[i, j] for matrix in matrices)]


def _expected(draw: Draw) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Where the survivors come to rest, [size, 3]."""
    steps = max(draw.batches)
    idle = [rank for rank in range(draw.size) if draw.batches[rank] < steps]
    if draw.way not in AVERAGING:
        return np.broadcast_to(optimum([rank for rank in draw.survivors if rank not in idle]), (draw.size, 3))
    silent = [rank for rank, (fault, _) in draw.faults.items() if fault == LEFT_OUT]
    return resting_place(
        _schedule(draw), draw.size, draw.departed, draw.way == "AWC", steps=steps, unheard=silent, idle=idle
    )
