"""Training under faults that are drawn from a seed; what must come of it is computed, all else is an error."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from shoal import topology_util
from shoal.algorithms import ExactDiffusion, GradientDescent, GradientTracking, ParallelGradientDescent
from shoal.topology import BaseGraph, OnePeerExponential, OnePeerHypercube
from support.agent_main import die
from support.fault_points import Point, arm, fork_a_sleeper, start_a_data_loader, wait_for_no_orphans
from support.surviving_training import optimum, resting_place, steps_of_training
from support.survivors import CONTINUE
from support.world import World

DROP_AFTER = 2.0
LOCKED = 5.0
"""Seconds for which a fault holds the interpreter's lock: longer than those after which an agent is dropped."""
FAULTS = ("killed", "killed, with a child", "killed, with a data loader", "stopped", "interpreter's lock held")
KINDS = ("submitted", "sent", "received", "summed", "finished")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ATC": {"algorithm": GradientDescent(1.0)},
    "AWC": {"algorithm": GradientDescent(1.0, atc=False)},
    "gradients": {"algorithm": ParallelGradientDescent(1.0)},
    "gradients during backward": {"algorithm": ParallelGradientDescent(1.0), "overlap": "backward"},
    "tracking": {"algorithm": GradientTracking(1.0)},
    "exact diffusion": {"algorithm": ExactDiffusion(1.0, lazy=True)},
}
TOPOLOGIES: dict[str, Callable[[int], Any]] = {
    "ring": lambda size: None,  # the static topology
    "one-peer exponential": OnePeerExponential,
    "hypercube": OnePeerHypercube,
    "base": BaseGraph,
}


@dataclass(frozen=True)
class Draw:
    """One run: who trains how, and what befalls whom, where.

    Attributes:
        faults: By rank.
    """

    size: int
    transport: str
    way: str
    topology: str
    faults: dict[int, tuple[str, Point]]

    @staticmethod
    def of(seed: int) -> Draw:
        chance = random.Random(seed)
        way = chance.choice(list(ALGORITHMS))
        topology = chance.choice(list(TOPOLOGIES)) if way in ("ATC", "AWC") else "ring"
        size = 4 if topology == "hypercube" else chance.randint(3, 6)
        victims = chance.sample(range(size), chance.choice([1, 1, 1, 2, 2, size - 1]))
        first = chance.choice(FAULTS)
        faults = {rank: (first if rank == victims[0] else "killed", _point(chance)) for rank in victims}
        return Draw(size, chance.choice(["shared_memory", "network"]), way, topology, faults)

    @property
    def left(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.faults]

    @property
    def kind(self) -> str:
        """What befalls, for a table."""
        first = next(iter(self.faults.values()))[0]
        return first if len(self.faults) == 1 else f"{first}, and others killed"


@dataclass(frozen=True)
class Found:
    """What came of a run: how long the survivors' longest step was, and how far they ended from where they must."""

    seconds: float
    distance: float


def _point(chance: random.Random) -> Point:
    return Point(chance.choice(KINDS), chance.randint(3, 60))


def _hold_the_lock() -> None:
    ctypes.PyDLL(None).usleep(int(LOCKED * 1e6))


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def suffer(draw: Draw, rank: int) -> None:
    """Have befall this agent what is drawn for it."""
    if rank not in draw.faults:
        return
    fault, point = draw.faults[rank]
    arm(point, {"stopped": _stop, "interpreter's lock held": _hold_the_lock}.get(fault, die))


def train(draw: Draw, rank: int) -> tuple[list[float], float]:
    """The parameters after training, and the seconds of the longest step."""
    options = ALGORITHMS[draw.way] | {"topology": TOPOLOGIES[draw.topology](draw.size)}
    steps = [(time.monotonic(), x) for x in steps_of_training(lambda: suffer(draw, rank), options)]
    ends, (_, last) = [at for at, _ in steps], steps[-1]
    return last, max(later - earlier for earlier, later in pairwise(ends))


def run(seed: int) -> Found:
    """Draw, train, and compare. AssertionError where an agent ends otherwise than it must."""
    draw = Draw.of(seed)
    environment = CONTINUE | {"SHOAL_DROP_AFTER": str(DROP_AFTER), "SHOAL_TRANSPORT": draw.transport}
    with World(draw.size, environment=environment) as world:
        children = []
        for rank, (fault, _) in draw.faults.items():
            if fault == "killed, with a child":
                children += world.results(fork_a_sleeper, on=[rank])
            elif fault == "killed, with a data loader":
                world.results(start_a_data_loader, on=[rank])
        pending = {rank: world.run_on(rank, train, draw, rank) for rank in range(draw.size)}
        outcomes = {rank: pending[rank].outcome() for rank in draw.left}
        told = f"seed {seed}, {draw}:"
        for rank, one in outcomes.items():
            assert not one.error, f"{told} rank {rank}: {one.error}: {one.message}\n{one.trace}"
        for rank, (fault, _) in draw.faults.items():
            if fault == "stopped":
                world.kill(rank, signal.SIGCONT)
            one = pending[rank].outcome()
            if fault.startswith("killed"):
                assert one.error == "Died", f"{told} rank {rank}: {one.error}: {one.message}"
            else:  # it wakes, and learns that it is not there any more
                assert one.error == "ShoalError", f"{told} rank {rank}: {one.error}: {one.message}\n{one.trace}"
                assert "counts it as lost" in one.message, f"{told} rank {rank}: {one.message}"
        expected = _expected(draw)
        distance = max(float(np.abs(np.array(one.value[0]) - expected[rank]).max()) for rank, one in outcomes.items())
        assert distance < 1e-8, f"{told} {distance:g} from where they must be"
        for child in children:  # it has lived to the end
            os.kill(child, signal.SIGKILL)
        wait_for_no_orphans()
        return Found(max(one.value[1] for one in outcomes.values()), distance)


def _expected(draw: Draw) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Where the survivors come to rest, [size, 3]."""
    if draw.way not in ("ATC", "AWC"):
        return np.broadcast_to(optimum(draw.left), (draw.size, 3))
    topology = TOPOLOGIES[draw.topology](draw.size) or topology_util.RingGraph(draw.size)
    return resting_place(topology, draw.size, sorted(draw.faults), overlapping=draw.way == "AWC")
