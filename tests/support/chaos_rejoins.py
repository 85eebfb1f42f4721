"""Training under faults drawn from a seed, where failed agents are restarted: all must end at the result of a run
without faults."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal import topology_util
from shoal.topology import Static
from support.agent_main import Outcome
from support.chaos import ALGORITHMS, DROP_AFTER, LATE, TOPOLOGIES
from support.fault_points import OVER, Point, wait_for_no_orphans
from support.namespaces import require_namespaces
from support.rejoin import (
    CORRUPTED,
    FULL,
    KILLED,
    LOCKED,
    NAN,
    NO_MEMORY,
    RAISED,
    RESET,
    STOPPED,
    WITH_CHILD,
    AgentResult,
    Fault,
    train,
)
from support.surviving_training import optimum, resting_place
from support.survivors import CONTINUE
from support.world import World, template

FAULTS = (KILLED, NAN, NO_MEMORY, FULL, WITH_CHILD, STOPPED, LOCKED, RESET, CORRUPTED, RAISED)
NOBODY_LOST = (RESET, CORRUPTED, FULL)
"""After these nobody need be lost, and there may be nothing to agree on."""
SECONDS = 60.0
DISK = "1m"
MOST_STARTS = 12


@dataclass(frozen=True)
class Draw:
    """One run: how each agent trains, and the fault of each, with its place; some restarted agents get a second fault,
    while they rejoin or later.

    Attributes:
        writes: Checkpoints are written into files.
    """

    size: int
    transport: str
    way: str
    topology: str
    faults: dict[int, list[Fault]]
    writes: bool

    @staticmethod
    def of(seed: int, over: str = "") -> Draw:
        """Draw a run. ``over``: the transport, if not the drawn one; its links have no connections to cut."""
        chance = random.Random(seed)
        way = chance.choice(list(ALGORITHMS))
        topology = chance.choice(list(TOPOLOGIES)) if way in ("ATC", "AWC") else "ring"
        size = 4 if topology == "hypercube" else chance.randint(3, 5)
        first = FAULTS[seed % len(FAULTS)]  # in turn, so that few seeds meet all
        if over and first in (RESET, CORRUPTED):
            first = KILLED
        transport = "network" if first in (RESET, CORRUPTED) else chance.choice(list(OVER))
        victims = chance.sample(range(size), chance.choice([1, 1, 2, size - 1]))
        writes = first == FULL or chance.random() < 0.3
        faults = {}
        for rank in victims:
            point = _point(chance)
            if rank != victims[0] and first not in NOBODY_LOST and chance.random() < 0.3:
                point = Point(chance.choice(LATE))
            elif writes and (rank != victims[0] or first == KILLED) and chance.random() < 0.5:
                point = Point("Writing", chance.randint(1, 12))
            faults[rank] = [(first if rank == victims[0] else KILLED, point)]
            if first != FULL and chance.random() < 0.3:
                faults[rank].append((KILLED, Point("Entering") if chance.random() < 0.5 else _point(chance)))
        return Draw(size, transport, way, topology, faults, writes)

    @property
    def kind(self) -> str:
        """The kind of fault, as tables name it."""
        first = next(iter(self.faults.values()))[0][0]
        return first if sum(map(len, self.faults.values())) == 1 else f"{first}, and others killed"

    @property
    def conditions(self) -> list[str]:
        """The other conditions, as tables name them."""
        points = {point.kind for faults in self.faults.values() for _, point in faults}
        problems = {
            "killed while a loss is agreed on": points & set(LATE),
            "killed while it enters": "Entering" in points,
            "killed while a checkpoint is written": "Writing" in points,
        }
        return [text for text, so in problems.items() if so]


@dataclass(frozen=True)
class RunFigures:
    """What came of a run: how often an agent was started again, how long it took to enter (seconds), how far all ended
    from where they must, and how many checkpoints could not be written."""

    starts: int
    seconds: list[float]
    distance: float
    unsaved: int


def _point(chance: random.Random) -> Point:
    return Point(chance.choice(["received", "sent", "finished"]), chance.randint(5, 150))


def run(seed: int, over: str = "") -> RunFigures:
    """Draw, train, and compare, ``over`` the transport that is drawn or another one. AssertionError where an agent ends
    otherwise than it must."""
    draw = Draw.of(seed, over)
    environment = {"SHOAL_TRANSPORT": over} if over else OVER[draw.transport]
    with _folder(draw) as folder:
        return _run(seed, draw, folder, environment)


def _run(seed: int, draw: Draw, folder: Path | None, transport: dict[str, str]) -> RunFigures:
    problems = f"seed {seed}, {draw}:"
    options = ALGORITHMS[draw.way] | {"topology": TOPOLOGIES[draw.topology](draw.size)}
    environment = transport | CONTINUE | {"SHOAL_DROP_AFTER": str(DROP_AFTER)}
    drawn = {fault for faults in draw.faults.values() for fault, _ in faults}
    environment["SHOAL_CHECK_FINITE"] = str(int(NAN in drawn))
    left = {rank: list(faults) for rank, faults in draw.faults.items()}
    has: dict[int, str] = {}
    with World(draw.size, environment=environment, restarts=True) as world:

        def start(rank: int) -> Any:
            fault = left[rank].pop(0) if left.get(rank) else None
            has[rank] = fault[0] if fault else ""
            return world.run_on(rank, train, options, fault, 0, folder)

        pending = {rank: start(rank) for rank in range(draw.size)}
        ended: dict[int, AgentResult] = {}
        world.excused = {rank for rank, faults in draw.faults.items() if faults[0][0] == NO_MEMORY}
        starts, limit, woken = 0, time.monotonic() + SECONDS, time.monotonic() + 2 * DROP_AFTER
        while len(ended) < draw.size:
            if time.monotonic() > limit:
                late = sorted(set(pending) - set(ended))
                stacks = "\n".join(world.members[rank].stacks() for rank in late)
                raise AssertionError(f"{problems} ranks {late} have not ended\n{stacks}")
            if time.monotonic() > woken:  # a stopped agent is continued, some time after it was dropped
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
                assert _may_end(has[rank], one), f"{problems} rank {rank}: {one.error}: {one.message}\n{one.trace}"
                starts += 1
                assert starts < MOST_STARTS, f"{problems} rank {rank}: {one.error}: {one.message}\n{one.trace}"
                if one.error != "Died":  # as its script would end
                    world.kill(rank)
                    world.members[rank].outcome(5.0)
                world.start_again(rank)
                pending[rank] = start(rank)
            time.sleep(0.005)
        for pid, _ in template().orphans():  # the children of the killed agent
            os.kill(pid, signal.SIGKILL)
        wait_for_no_orphans()
    expected_x = _expected(draw, ended[0].steps)
    distance = max(float(np.abs(np.array(ended[rank].x) - expected_x[rank]).max()) for rank in ended)
    assert distance < 1e-8, f"{problems} {distance}"
    for seen in ended.values():
        for step, mean in seen.reloaded:
            if step and all(step in other.at for other in ended.values()):  # else it is of fewer agents
                saved = np.mean([other.at[step] for other in ended.values()], axis=0)
                assert float(np.abs(saved - mean).max()) < 1e-12, f"{problems} step {step}: {mean} instead of {saved}"
    unsaved = max(len(seen.reloaded) for seen in ended.values())
    assert unsaved or FULL not in drawn, f"{problems} the disk was never full"
    if sum(map(len, draw.faults.values())) == 1 and drawn & {RESET, CORRUPTED}:
        assert not starts, f"{problems} what was cut, or spoiled, cost an agent"
    return RunFigures(starts, [seen.waited for seen in ended.values() if seen.began[0]], distance, unsaved)


@contextlib.contextmanager
def _folder(draw: Draw) -> Iterator[Path | None]:
    """Where checkpoints are written: a disk of their own."""
    if not draw.writes:
        yield None
        return
    require_namespaces()  # to mount a disk needs the same rights
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", name], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", name], check=True)


def _may_end(fault: str, one: Outcome) -> bool:
    """Whether the process of an agent that has such a fault, or none, may end so."""
    if one.error == "Died":
        return fault in (KILLED, WITH_CHILD, NO_MEMORY)
    own = {RAISED: "RuntimeError", NAN: "NotFinite"}.get(fault, "")
    return fault == NO_MEMORY or one.error in ("ShoalError", "PeerLost", own)


def _expected(draw: Draw, steps: int) -> np.ndarray:
    """The parameters of all agents after so many steps, [size, 3]."""
    if draw.way in ("ATC", "AWC"):
        ring = Static(topology_util.RingGraph(draw.size))
        topology = TOPOLOGIES[draw.topology](draw.size) or ring
        return resting_place(topology, draw.size, [], overlapping=draw.way == "AWC", steps=steps)
    return np.tile(optimum(list(range(draw.size))), (draw.size, 1))
