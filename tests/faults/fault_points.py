"""Where in its work an agent is made to end, so that a run that fails can be repeated exactly."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.agent_main import die

import shoal
from shoal.ops import arithmetic
from shoal.runtime.events import Event
from shoal.transport.network import NetworkIncoming, NetworkLink


@dataclass(frozen=True)
class Point:
    """The ``count``-th event of a kind, or, for the kinds that begin with a capital, the place named there."""

    kind: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.kind.replace(' ', '_')}-{self.count}"


def arm(point: Point, act: Callable[[], object] = die) -> None:
    """Have ``act`` called when this agent reaches the point for the first time."""
    reached = _counting(point.count, act)
    if point.kind == "Block":
        _before(arithmetic, "_weigh", reached)
    elif point.kind == "Chunk in":
        _before(NetworkIncoming, "_read_chunk", reached)
    elif point.kind == "Chunk out":
        _before(NetworkLink, "_fill", reached)
    else:
        listener: Callable[[Event], None] = lambda event: reached() if event.kind == point.kind else None  # noqa: E731
        shoal.events().subscribe(listener)


def _counting(count: int, act: Callable[[], object]) -> Callable[[], None]:
    left = count

    def reached() -> None:
        nonlocal left
        left -= 1
        if not left:
            act()

    return reached


def _before(owner: Any, name: str, call: Callable[[], None]) -> None:
    """Have ``call`` called before each call of a function that has no event of its own."""
    original = getattr(owner, name)

    def instead(*args: Any) -> Any:
        call()
        return original(*args)

    setattr(owner, name, instead)


def average_until_it_fails(numel: int, victim: int = -1, point: Point | None = None) -> None:
    """Round after round over a ring, each checked; ends with the exception of the round that fails."""
    if point is not None and shoal.rank() == victim:
        arm(point)
    rank, size = shoal.rank(), shoal.size()
    shoal.set_topology(shoal.RingGraph(size))
    mean = sum((rank + step) % size for step in (-1, 0, 1)) / 3
    own = torch.full((numel,), float(rank))
    out = torch.empty(numel)
    while True:
        shoal.neighbor_allreduce(own, out=out)
        assert torch.allclose(out, torch.tensor(mean)), f"the average is {out} instead of {mean}"


def kill_when(point: Point, pid: int) -> None:
    """Kill another process when this agent reaches the point."""
    arm(point, lambda: os.kill(pid, signal.SIGKILL))
