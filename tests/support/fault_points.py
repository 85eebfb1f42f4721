"""Where in its work an agent is made to end, so that a run that fails can be repeated exactly."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal import arithmetic
from shoal.coordination import round as round_
from shoal.execution import devices
from shoal.execution.events import Event
from shoal.fault_tolerance.agreement import Agreement
from shoal.fault_tolerance.rejoin import Rejoin
from shoal.kernels import native
from shoal.ops import device_ops
from shoal.optim.checkpoints import checkpoint_files
from shoal.transport import process_group
from shoal.transport.network_link import NetworkIncoming, NetworkLink
from shoal.transport.process_group import ProcessGroups
from support.agent_main import die
from support.world import template

OVER: dict[str, dict[str, str]] = {"shared_memory": {}, "network": {"SHOAL_TRANSPORT": "network"}}
"""The transports between processes, and the environment that has agents use each."""
over_both = pytest.mark.parametrize(
    "environment", [pytest.param(one, id=name, marks=pytest.mark.transport(name)) for name, one in OVER.items()]
)


def over_one(usual: str) -> pytest.MarkDecorator:
    """As ``over_both``; but the soak alone has the transport that is not ``usual``."""
    cases = []
    for name, environment in OVER.items():
        marks = [pytest.mark.transport(name), *([pytest.mark.soak] if name != usual else [])]
        cases.append(pytest.param(environment, id=name, marks=marks))
    return pytest.mark.parametrize("environment", cases)


def each_over_one(ways: Iterable[str], slow: Collection[str] = ()) -> pytest.MarkDecorator:
    """ "way" and "environment": each over one of the transports, in turn; the soak has the others. The ways in ``slow``
    are slow tests."""
    cases = []
    for number, way in enumerate(ways):
        for other, (name, environment) in enumerate(OVER.items()):
            marks = [pytest.mark.transport(name), *([pytest.mark.soak] if (number + other) % 2 else [])]
            marks += [pytest.mark.slow] if way in slow else []
            cases.append(pytest.param(way, environment, id=f"{way}-{name}", marks=marks))
    return pytest.mark.parametrize(("way", "environment"), cases)


def seeds(usual: int, by_ci: int, soak: int) -> pytest.MarkDecorator:
    """ "seed": those below ``usual`` always, below ``by_ci`` with the slow tests, and below ``soak`` by the soak."""
    marks = [[] if k < usual else [pytest.mark.slow] if k < by_ci else [pytest.mark.soak] for k in range(soak)]
    return pytest.mark.parametrize("seed", [pytest.param(k, marks=marks[k]) for k in range(soak)])


def in_turn(names: Sequence[str], usual: Collection[str] | None = None) -> list[object]:
    """As ``each_over_one`` for "transport", of all three. Names that are not in ``usual``, if it is given, are slow."""
    cases = []
    for name, first in zip(names, cycle(("threads", "shared_memory", "network")), strict=False):
        for one in ("threads", "shared_memory", "network"):
            marks = [pytest.mark.transport(one), *([pytest.mark.soak] if one != first else [])]
            marks += [pytest.mark.slow] if usual is not None and name not in usual else []
            cases.append(pytest.param(name, one, id=f"{name}-{one}", marks=marks))
    return cases


@dataclass(frozen=True)
class Point:
    """The ``count``-th event of a kind, or, if the kind begins with a capital, the place of that name."""

    kind: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.kind.replace(' ', '_')}-{self.count}"


def one_of_each_kind(points: Sequence[Point]) -> set[Point]:
    """The middle one of the points of each kind; a sweep has the others among the slow tests."""
    kinds = {kind: [point for point in points if point.kind == kind] for kind in {point.kind for point in points}}
    return {of_kind[len(of_kind) // 2] for of_kind in kinds.values()}


def swept(points: Sequence[Point], numels: tuple[int, int]) -> pytest.MarkDecorator:
    """Every point over both transports, with small tensors over the one and large ones over the other, in turn.

    So any two of point, size and transport meet; the soak has all three. One point of each kind is tested always, and
    the others with the slow tests.
    """
    cases, usual = [], one_of_each_kind(points)
    for number, point in enumerate(points):
        for size, numel in enumerate(numels):
            for way, (name, environment) in enumerate(OVER.items()):
                marks = [pytest.mark.transport(name), *([pytest.mark.soak] if (number + size + way) % 2 else [])]
                marks += [] if point in usual else [pytest.mark.slow]
                cases.append(pytest.param(point, numel, environment, id=f"{point}-{numel}-{name}", marks=marks))
    return pytest.mark.parametrize(("point", "numel", "environment"), cases)


def arm(point: Point, act: Callable[[], object] = die) -> None:
    """Have ``act`` called when this agent reaches the point for the first time."""
    reached = _counting(point.count, act)
    if point.kind == "Block":
        native.library = lambda: None  # torch sums block by block, so that the middle of a sum is reachable
        _before(arithmetic, "_weigh", reached)
    elif point.kind == "Chunk in":
        _before(NetworkIncoming, "_advance", reached)
    elif point.kind == "Chunk out":
        _before(NetworkLink, "_fill", reached)
    elif point.kind == "Agreeing":  # on a loss that this agent has just learnt of
        _before(Agreement, "report_losses", reached)
    elif point.kind == "Deciding":
        _before(Agreement, "_decide", reached)
    elif point.kind == "Entering":
        _before(Rejoin, "_enter", reached)
    elif point.kind == "Telling":  # the others what this agent asks for, in a round of coordination
        _before(round_, "_exchange_messages", reached)
    elif point.kind == "Deciding order":  # of what all ask for, as the coordinator
        _before(round_, "decide", reached)
    elif point.kind == "Moving":  # tensors, by a process group
        _before(ProcessGroups, "_move", reached)
    elif point.kind == "Meeting":  # the other members of a process group
        _before(process_group, "_make", reached)
    elif point.kind == "Queued":  # work on a device, that others wait for
        _before(devices.DeviceLane, "queued", reached)
    elif point.kind == "Bringing":  # numbers from a neighbour's memory, for a sum on a device
        _before(device_ops, "_brought", reached)
    elif point.kind == "Writing":  # a file of a checkpoint
        _before(checkpoint_files, "_sync", reached)
    else:
        listener: Callable[[Event], None] = lambda event: reached() if event.kind == point.kind else None  # noqa: E731
        shoal.observability.events().subscribe(listener)


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

    def wrapped(*args: Any) -> Any:
        call()
        return original(*args)

    setattr(owner, name, wrapped)


def average_until_it_fails(numel: int, victim: int = -1, point: Point | None = None) -> None:
    """Round after round over a ring, each checked; ends with the exception of the round that fails."""
    if point is not None and shoal.rank() == victim:
        arm(point)
    rank, size = shoal.rank(), shoal.size()
    shoal.set_topology(shoal.topology.RingGraph(size))
    group = {(rank + step) % size for step in (-1, 0, 1)}
    mean = sum(group) / len(group)
    own = torch.full((numel,), float(rank))
    out = torch.empty(numel)
    while True:
        shoal.neighbor_allreduce(own, out=out)
        assert torch.allclose(out, torch.tensor(mean)), f"the average is {out} instead of {mean}"


def kill_when(point: Point, pid: int) -> None:
    """Kill another process when this agent reaches the point."""
    arm(point, lambda: os.kill(pid, signal.SIGKILL))


def until_killed_barriers(victim: int, point: Point) -> None:
    _until_killed(victim, point, shoal.barrier)


def until_killed_allreduces(victim: int, point: Point) -> None:
    numbers = torch.ones(50_000)
    _until_killed(victim, point, lambda: shoal.allreduce(numbers))


def until_killed_pushes(victim: int, point: Point) -> None:
    numbers, ahead = torch.ones(50_000), (shoal.rank() + 2) % shoal.size()
    _until_killed(victim, point, lambda: shoal.neighbor_allreduce(numbers, self_weight=0.5, dst_weights={ahead: 0.5}))


def _until_killed(victim: int, point: Point, operation: Callable[[], object]) -> None:
    if shoal.rank() == victim:
        arm(point)
    while True:
        operation()


def fork_a_sleeper() -> int:
    """A child that would keep this agent's sockets open if it could; its pid."""
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            signal.pause()
    return pid


_loaders: list[Iterator[torch.Tensor]] = []


class _Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def start_a_data_loader() -> None:
    """Two worker processes, forked, that stay as long as this agent does."""
    loader = DataLoader(_Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    _loaders.append(batches)


def known_as_dead(count: int) -> list[int]:
    """The agents that this one knows to be dead, once there are so many."""
    limit = time.monotonic() + 2.0
    while len(shoal.observability.membership().died) < count and time.monotonic() < limit:
        time.sleep(0.01)
    return sorted(shoal.observability.membership().died)


def wait_for_no_orphans() -> None:
    """A killed process takes a moment to end; workers of a data loader look for their parent every few seconds."""
    limit = time.monotonic() + 15.0
    while template().orphans():
        assert time.monotonic() < limit, "what a dead agent has started stays"
        time.sleep(0.05)
