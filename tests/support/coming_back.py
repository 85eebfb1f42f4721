"""Training in which agents die, are started again, and enter; on a problem whose answer is known."""

from __future__ import annotations

import ctypes
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import shoal
from shoal import topology_util
from shoal.transport.network import NetworkLink
from shoal.world.agent import current
from support.agent_main import die
from support.fault_points import Point, arm, fork_a_sleeper
from support.surviving_training import RATE, Point3, step_of

KILLED, WITH_CHILD, STOPPED, LOCKED = "killed", "killed, with a child", "stopped", "interpreter's lock held"
RESET, CORRUPTED, RAISED = "a connection reset", "a packet corrupted", "an exception"
Fault = tuple[str, Point]
BETWEEN = 10
"""Steps between two points at which agents enter."""
AFTER = 400
"""Steps that are trained once all are there again."""
MOST_SECONDS = 40.0
LOCKED_SECONDS = 5.0


@dataclass
class Seen:
    """What one agent saw.

    Attributes:
        x: The parameters in the end.
        began: The step that it began with, and what it began there with.
        changes: Who was lost, and who entered, in this order.
        steps: The step with which training ended.
        waited: Seconds in which it entered.
    """

    x: list[float] = field(default_factory=list)
    began: tuple[int, list[float]] = (0, [])
    changes: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    at: dict[int, list[float]] = field(default_factory=dict)
    steps: int = 0
    waited: float = 0.0


def train(options: dict[str, Any], fault: Fault | None, entries: int) -> Seen:
    """Train until so many agents have entered, all are there, and then some more.

    Args:
        options: Of the optimizer.
        fault: What befalls this agent, and where; while it enters, where it does.
        entries: How many agents enter at least.
    """
    rank, size, seen, model = shoal.rank(), shoal.size(), Seen(), Point3()
    shoal.set_topology(topology_util.RingGraph(size), is_weighted=True)
    shoal.broadcast_parameters(model.state_dict(), 0)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, **options)
    progress = Progress()
    checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer, progress=progress)
    shoal.on_membership_change(lambda change: seen.changes.append((change.lost, change.entered)))
    fired = [True]
    if fault is not None and shoal.is_entering():
        suffer(fault, fired)
    began = time.monotonic()
    step = checkpoint.load(None, missing_ok=True)
    seen.began, seen.waited = (step, model.x.tolist()), time.monotonic() - began
    if fault is not None and not step:
        suffer(fault, fired)
    take_a_step = step_of(optimizer, model)
    limit = time.monotonic() + MOST_SECONDS
    while progress.since < AFTER:
        take_a_step()
        step += 1
        if step % BETWEEN == 0:
            seen.at[step] = model.x.tolist()
            progress.look(entries, fired[0])
            if fault is not None and fault[0] == RAISED and fired[0]:
                raise RuntimeError("drawn")
            checkpoint.save(None, step)
            assert time.monotonic() < limit, f"rank {rank}: {progress}, {shoal.alive()}, {seen.changes}"
            if not progress.since:
                time.sleep(0.01)  # who comes needs a moment
    seen.x, seen.steps = model.x.tolist(), step
    return seen


@dataclass
class Progress:
    """How far all are; the same on all agents, and handed over to those that enter."""

    since: int = 0
    """Steps since the last of those came that are to come."""

    def look(self, entries: int, fired: bool) -> None:
        """All that are there call it, and say whether what is to befall them has."""
        there = shoal.allgather(torch.tensor([fired]))
        entered = current().engine.agreement.now.entered
        whole = len(there) == shoal.size() and entered >= entries and bool(there.all())
        self.since = self.since + BETWEEN if whole else 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _reset_a_connection() -> None:
    """As a router does that has forgotten a connection: the other side is told that there is none."""
    links = [link for link in current().engine.router.links.values() if isinstance(link, NetworkLink) and link.open]
    nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
    ctypes.CDLL(None).connect(links[0].sock.fileno(), nowhere, len(nowhere))


def _corrupt_a_packet() -> None:
    """Turn a bit of the next packet that leaves, behind its length."""
    original: Callable[..., memoryview] = NetworkLink._sealed

    def instead(link: NetworkLink, packet: bytes) -> memoryview:
        NetworkLink._sealed = original  # type: ignore[method-assign]
        sealed = bytearray(original(link, packet))
        sealed[len(sealed) // 2] ^= 4
        return memoryview(bytes(sealed))

    NetworkLink._sealed = instead  # type: ignore[method-assign]


def _hold_the_lock() -> None:
    ctypes.PyDLL(None).usleep(int(LOCKED_SECONDS * 1e6))


def _stop() -> None:
    signal.raise_signal(signal.SIGSTOP)


ACTS: dict[str, Callable[[], None]] = {
    KILLED: die,
    WITH_CHILD: die,
    STOPPED: _stop,
    LOCKED: _hold_the_lock,
    RESET: _reset_a_connection,
    CORRUPTED: _corrupt_a_packet,
}


def suffer(fault: Fault, fired: list[bool]) -> None:
    """Have a fault befall this agent; ``fired`` says when it has."""
    what, point = fault

    def act() -> None:
        fired[0] = True
        if what != RAISED:
            ACTS[what]()

    fired[0] = False
    if what == WITH_CHILD:
        fork_a_sleeper()
    arm(point, act)
