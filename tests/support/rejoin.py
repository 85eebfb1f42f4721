"""Training in which agents die, are started again, and enter; on a problem whose answer is known."""

from __future__ import annotations

import contextlib
import ctypes
import math
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import shoal
from shoal import topology_util
from shoal.engine.engine import Engine
from shoal.runtime.agent import current
from shoal.transport.network_link import NetworkLink
from support import chaos_acts
from support.agent_main import die
from support.fault_points import Point, arm, fork_a_sleeper
from support.surviving_training import RATE, Point3, step_of

KILLED, WITH_CHILD, STOPPED, LOCKED = "killed", "killed, with a child", "stopped", "interpreter's lock held"
RESET, CORRUPTED, RAISED = "a connection reset", "a packet corrupted", "an exception"
NAN, NO_MEMORY, FULL = "NaN gradients", "out of memory", "a full disk"
Fault = tuple[str, Point]
BETWEEN = 10
"""Steps between two points at which agents enter."""
AFTER = 200
"""Steps that are trained once all are there again; from zero, two agents are within 1e-8 in 142, and more earlier."""
MOST_SECONDS = 40.0


@dataclass
class AgentResult:
    """What one agent saw.

    Attributes:
        x: The final parameters.
        began: The step that it began with, and its parameters there.
        changes: The failed and the joined ranks, in order.
        steps: The step with which training ended.
        waited: Seconds in which it entered.
        reloaded: The remaining checkpoints after a failed write: the step, and the mean of all agents.
    """

    x: list[float] = field(default_factory=list)
    began: tuple[int, list[float]] = (0, [])
    changes: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    at: dict[int, list[float]] = field(default_factory=dict)
    steps: int = 0
    waited: float = 0.0
    reloaded: list[tuple[int, list[float]]] = field(default_factory=list)


def train(options: dict[str, Any], fault: Fault | None, entries: int, folder: Path | None = None) -> AgentResult:
    """Train until the given number of agents have entered and all are members, and then a few more steps.

    Args:
        options: Of the optimizer.
        fault: The fault of this agent, and its place; during its rejoin, if it rejoins.
        entries: How many agents enter at least.
        folder: The folder of the checkpoints; a checkpoint that fails to be written is left out.
    """
    rank, size, seen, model = shoal.rank(), shoal.size(), AgentResult(), Point3()
    shoal.set_topology(topology_util.RingGraph(size), is_weighted=True)
    shoal.broadcast_parameters(model.state_dict(), 0)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, **options)
    progress = Progress()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "progress": progress}
    if folder is not None:
        parts["ballast"] = torch.nn.Linear(100, 50)  # so that a disk may be full in the midst of a file
    checkpoint = shoal.Checkpoint(**parts)
    shoal.on_membership_change(lambda change: seen.changes.append((change.lost, change.entered)))
    fired = [True]
    if fault is not None and shoal.observability.is_entering():
        inject_fault(fault, fired, folder)
    began = time.monotonic()
    step = checkpoint.load(folder, missing_ok=True)
    saved = step
    seen.began, seen.waited = (step, model.x.tolist()), time.monotonic() - began
    if fault is not None and not step:
        inject_fault(fault, fired, folder)
    take_a_step = step_of(optimizer, model)
    limit = time.monotonic() + MOST_SECONDS
    while progress.since < AFTER:
        take_a_step()
        step += 1
        if step % BETWEEN == 0:
            seen.at[step] = model.x.tolist()
            progress.record(entries, fired[0])
            if fault is not None and fault[0] == RAISED and fired[0]:
                raise RuntimeError("drawn")
            if folder is not None and fault is not None and fault[0] == FULL and fired[0] and not seen.reloaded:
                chaos_acts.fill_the_disk(folder)  # again: what a killed agent had begun to write leaves room
            try:
                checkpoint.save(folder, step)
                saved = step
            except shoal.ShoalError as error:
                full = "No space left" in str(error)
                if folder is None or not (full or "memory" in str(error).lower()):
                    raise
                if full:
                    seen.reloaded.append(_loaded(folder))
                    assert seen.reloaded[-1][0] == saved, f"{seen.reloaded[-1]} instead of step {saved}"
                    make_room(folder, fault, len(seen.reloaded))
            assert time.monotonic() < limit, f"rank {rank}: {progress}, {shoal.alive()}, {seen.changes}"
            if not progress.since:
                time.sleep(0.01)  # a joining agent needs a moment
    seen.x, seen.steps = model.x.tolist(), step
    if folder is not None:
        last = Point3()
        assert shoal.Checkpoint(model=last).load(folder) == step and torch.equal(last.x, model.x)
    return seen


def init_slowly() -> None:
    """Become an agent, whose progress thread runs half a second before the next line of ``shoal.init``."""
    start = Engine.start

    def started(engine: Engine) -> None:
        start(engine)
        time.sleep(0.5)

    with mock.patch.object(Engine, "start", started):
        shoal.init()


def members_after(seconds: float) -> tuple[int, ...]:
    """The members after a pause."""
    time.sleep(seconds)
    return tuple(shoal.alive())


def _loaded(folder: Path) -> tuple[int, list[float]]:
    """The last complete checkpoint, as the mean over its agents."""
    while True:
        with contextlib.suppress(shoal.PeerLost):  # the reading agent is lost: for all, and they repeat it
            model = Point3()
            step = shoal.Checkpoint(model=model).load(folder, start="consensus", missing_ok=True)
            return step, model.x.tolist()


def make_room(folder: Path, fault: Fault | None, failures: int) -> None:
    """The agent that has filled the disk frees it after some failed saves."""
    if fault is not None and fault[0] == FULL and failures > fault[1].count % 3:
        (folder / "filler").unlink(missing_ok=True)


@dataclass
class Progress:
    """The progress of the job; equal on all agents, and transferred to joining agents."""

    since: int = 0
    """Steps since the last of those came that are to come."""

    def record(self, entries: int, fired: bool) -> None:
        """All that are there call it, and say whether what is to befall them has."""
        flags = shoal.allgather(torch.tensor([fired]))
        entered = current().engine.agreement.plan.n_admitted
        full = len(flags) == shoal.size() and entered >= entries and bool(flags.all())
        self.since = self.since + BETWEEN if full else 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _reset_a_connection() -> None:
    """Reset a connection, as a router does that has forgotten it."""
    links = [link for link in current().engine.router.links.values() if isinstance(link, NetworkLink) and link.open]
    nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
    ctypes.CDLL(None).connect(links[0].sock.fileno(), nowhere, len(nowhere))


def _corrupt_a_packet() -> None:
    """Turn a bit of the next packet that leaves, behind its length."""
    original: Callable[..., memoryview] = NetworkLink._sealed

    def corrupted(link: NetworkLink, packet: bytes) -> memoryview:
        NetworkLink._sealed = original  # type: ignore[method-assign]
        sealed = bytearray(original(link, packet))
        sealed[len(sealed) // 2] ^= 4
        return memoryview(bytes(sealed))

    NetworkLink._sealed = corrupted  # type: ignore[method-assign]


ACTS: dict[str, Callable[[], None]] = {
    KILLED: die,
    WITH_CHILD: die,
    STOPPED: chaos_acts.stop,
    LOCKED: chaos_acts.hold_the_lock,
    RESET: _reset_a_connection,
    CORRUPTED: _corrupt_a_packet,
}


def inject_fault(fault: Fault, fired: list[bool], folder: Path | None = None) -> None:
    """Have a fault befall this agent; ``fired`` says when it has."""
    what, point = fault
    drawn: dict[str, Callable[[], None]] = {
        RAISED: lambda: None,
        NAN: partial(chaos_acts.spoil_gradients, 1 if point.count % 2 else math.inf),
        NO_MEMORY: partial(chaos_acts.run_out_of_memory, chaos_acts.SMALLEST[point.count % 4]),
        FULL: partial(chaos_acts.fill_the_disk, folder or Path()),
    }
    act = (ACTS | drawn)[what]

    def trigger() -> None:
        fired[0] = True
        act()

    fired[0] = False
    if what == WITH_CHILD:
        fork_a_sleeper()
    arm(point, trigger)
