"""Training under faults that are drawn from a seed, where whoever fails is started again: all must end where they would
have without a fault."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import topology_util
from shoal.topology import Static
from support.chaos import ALGORITHMS, DROP_AFTER, TOPOLOGIES
from support.coming_back import CORRUPTED, KILLED, LOCKED, RAISED, RESET, STOPPED, WITH_CHILD, Fault, Seen, train
from support.fault_points import OVER, Point, wait_for_no_orphans
from support.surviving_training import optimum, resting_place
from support.survivors import CONTINUE
from support.world import World, template

FAULTS = (KILLED, KILLED, WITH_CHILD, STOPPED, LOCKED, RESET, CORRUPTED, RAISED)
SECONDS = 60.0
MOST_STARTS = 12


@dataclass(frozen=True)
class Draw:
    """One run: who trains how, and what befalls whom, where; after a fault some are hit again, while they enter or
    later."""

    size: int
    transport: str
    way: str
    topology: str
    faults: dict[int, list[Fault]]

    @staticmethod
    def of(seed: int) -> Draw:
        chance = random.Random(seed)
        way = chance.choice(list(ALGORITHMS))
        topology = chance.choice(list(TOPOLOGIES)) if way in ("ATC", "AWC") else "ring"
        size = 4 if topology == "hypercube" else chance.randint(3, 5)
        first = chance.choice(FAULTS)
        transport = "network" if first in (RESET, CORRUPTED) else chance.choice(list(OVER))
        victims = chance.sample(range(size), chance.choice([1, 1, 2, size - 1]))
        faults = {
            rank: [(first if rank == victims[0] else KILLED, _point(chance))]
            + ([(KILLED, _point(chance))] if chance.random() < 0.3 else [])
            for rank in victims
        }
        return Draw(size, transport, way, topology, faults)

    @property
    def kind(self) -> str:
        """What befalls, for a table."""
        first = next(iter(self.faults.values()))[0][0]
        return first if sum(map(len, self.faults.values())) == 1 else f"{first}, and others killed"


@dataclass(frozen=True)
class Found:
    """What came of a run: how often an agent was started again, how long it took to enter (seconds), and how far all
    ended from where they must."""

    starts: int
    seconds: list[float]
    distance: float


def _point(chance: random.Random) -> Point:
    return Point(chance.choice(["received", "sent", "finished"]), chance.randint(5, 150))


def run(seed: int) -> Found:
    """Draw, train, and compare. AssertionError where an agent ends otherwise than it must."""
    draw = Draw.of(seed)
    told = f"seed {seed}, {draw}:"
    options = ALGORITHMS[draw.way] | {"topology": TOPOLOGIES[draw.topology](draw.size)}
    environment = OVER[draw.transport] | CONTINUE | {"SHOAL_DROP_AFTER": str(DROP_AFTER)}
    left = {rank: list(faults) for rank, faults in draw.faults.items()}
    with World(draw.size, environment=environment, restarts=True) as world:

        def start(rank: int) -> Any:
            fault = left[rank].pop(0) if left.get(rank) else None
            return world.run_on(rank, train, options, fault, 0)

        pending = {rank: start(rank) for rank in range(draw.size)}
        ended: dict[int, Seen] = {}
        starts, limit, woken = 0, time.monotonic() + SECONDS, time.monotonic() + 2 * DROP_AFTER
        while len(ended) < draw.size:
            assert time.monotonic() < limit, f"{told} ranks {sorted(set(pending) - set(ended))} have not ended"
            if time.monotonic() > woken:  # whoever was stopped is let go on, some time after it was dropped
                woken = time.monotonic() + 1.0
                for rank in pending:
                    world.kill(rank, signal.SIGCONT)
            for rank in [rank for rank in pending if rank not in ended]:
                if not pending[rank].ready():
                    continue
                one = pending[rank].outcome()
                if not one.error:
                    ended[rank] = one.value
                    continue
                expected = ("Died", "ShoalError", "PeerLost", "RuntimeError")
                assert one.error in expected, f"{told} rank {rank}: {one.error}: {one.message}\n{one.trace}"
                starts += 1
                assert starts < MOST_STARTS, f"{told} rank {rank}: {one.error}: {one.message}\n{one.trace}"
                if one.error != "Died":  # as its script would end
                    world.kill(rank)
                    world.members[rank].outcome(5.0)
                world.start_again(rank)
                pending[rank] = start(rank)
            time.sleep(0.005)
        for pid, _ in template().orphans():  # the children of who was killed
            os.kill(pid, signal.SIGKILL)
    expected_x = _expected(draw, ended[0].steps)
    distance = max(float(np.abs(np.array(ended[rank].x) - expected_x[rank]).max()) for rank in ended)
    assert distance < 1e-8, f"{told} {distance}"
    wait_for_no_orphans()
    return Found(starts, [seen.waited for seen in ended.values() if seen.began[0]], distance)


def _expected(draw: Draw, steps: int) -> np.ndarray:
    """The parameters of all agents after so many steps, [size, 3]."""
    if draw.way in ("ATC", "AWC"):
        ring = Static(topology_util.RingGraph(draw.size))
        topology = TOPOLOGIES[draw.topology](draw.size) or ring
        return resting_place(topology, draw.size, [], overlapping=draw.way == "AWC", steps=steps)
    return np.tile(optimum(list(range(draw.size))), (draw.size, 1))
