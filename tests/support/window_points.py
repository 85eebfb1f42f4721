"""The agents' functions with windows in the tests of their faults, and the places in a write at which one ends or
stops.

Every write here sends a multiple of ones, and the same multiple as its associated weight. So a slot with one whole
write in it has a single value, which is also its associated weight; and after accumulates of 1 it is their number too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import shoal
from shoal.execution.events import Event
from shoal.kernels import sums
from shoal.windows import window_memory
from shoal.windows.locks import ByteLocks
from shoal.windows.window_memory import WindowMemory
from support import fault_points
from support.agent_main import Holdings, die, holdings
from support.leftovers import resident_bytes

T = TypeVar("T")
NAME = "window"
PUT, ACCUMULATE = "win_put", "win_accumulate"
NUMEL = 100_000
BEFORE_THE_FLIP = ("locked", "half copied", "copied", "described")
AFTER_THE_FLIP = ("flipped", "unlocked")
PLACES = (*BEFORE_THE_FLIP, *AFTER_THE_FLIP)


@dataclass(frozen=True)
class Slot:
    """The content of a slot: its smallest and its largest element, and its associated weight."""

    smallest: float
    largest: float
    p: float


def whole_write(multiple: float) -> Slot:
    """A slot that holds this multiple of ones, and nothing else."""
    return Slot(multiple, multiple, multiple)


# Where a write is interrupted


def _in_halves(write: Callable[..., None], act: Callable[[], object]) -> Callable[..., None]:
    """``write(out, *tensors, *weights)``, which fills a slot, with ``act`` called when it has filled half of it."""

    def halves(out: torch.Tensor, *given: Any) -> None:
        half = out.numel() // 2
        for part in (slice(0, half), slice(half, None)):
            write(out.view(-1)[part], *(one.view(-1)[part] if isinstance(one, torch.Tensor) else one for one in given))
            if part.start == 0:
                act()

    return halves


def arm_write(place: str, act: Callable[[], object] = die) -> None:
    """Have ``act`` called once, when a write that this process itself does comes to the place."""
    once = fault_points._counting(1, act)
    if place == "locked":
        _wrap(WindowMemory, "_write", before=once)
    elif place == "half copied":
        for name in ("scale", "add_scaled"):
            setattr(window_memory, name, _in_halves(getattr(sums, name), once))
    elif place == "copied":
        _wrap(WindowMemory, "_describe", before=once)
    elif place == "described":
        _wrap(WindowMemory, "_describe", after=once)
    elif place == "flipped":
        _wrap(WindowMemory, "_write", after=once)
    else:
        assert place == "unlocked"
        _wrap(WindowMemory, "write", after=once)


def _nothing() -> None:
    pass


def _wrap(
    owner: Any, name: str, before: Callable[[], object] = _nothing, after: Callable[[], object] = _nothing
) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any) -> Any:
        before()
        result = original(*args)
        after()
        return result

    setattr(owner, name, wrapped)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(pid: int, how: int = signal.SIGKILL) -> None:
    os.kill(pid, how)


# What agents do


_ones = torch.empty(0)


def open_window(numel: int = NUMEL) -> None:
    global _ones
    _ones = torch.ones(numel)
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    shoal.bluefog.turn_on_win_ops_with_associated_p()
    assert shoal.bluefog.win_create(torch.zeros(numel), NAME, zero_init=True)
    shoal.barrier()


def write(how: str, multiple: float, to: int, timeout: float | None = None) -> None:
    function = shoal.bluefog.win_put if how == PUT else shoal.bluefog.win_accumulate
    assert function(_ones, NAME, dst_weights={to: multiple}, timeout=timeout)


def write_twice(how: str, to: int, point: str | fault_points.Point, act: Callable[[], object] = die) -> None:
    """3 to begin with, and then, interrupted, 5."""
    write(how, 3.0, to)
    if isinstance(point, str):
        arm_write(point, act)
    else:
        fault_points.arm(point, act)
    write(how, 5.0, to)


def write_for_ever(how: str, to: int) -> None:
    """1, 2, 3 and so on, or 1 again and again; ends with the exception of the write that fails."""
    count = 0
    while True:
        count += 1
        write(how, float(count) if how == PUT else 1.0, to)


def write_for_ever_without_waiting(how: str, to: int) -> None:
    """The same through this agent's worker, several on their way at a time."""
    function = shoal.bluefog.win_put_nonblocking if how == PUT else shoal.bluefog.win_accumulate_nonblocking
    count = 0
    while True:
        count += 1
        weights = {to: float(count) if how == PUT else 1.0}
        for handle in [function(_ones, NAME, dst_weights=weights) for _ in range(4)]:
            shoal.bluefog.win_wait(handle)


def read(source: int, timeout: float = 1.0) -> Slot:
    """The content of this agent's slot for a neighbour. Afterwards its own associated weight is that of the slot."""
    value = shoal.bluefog.win_update(NAME, 0.0, {source: 1.0}, clone=True, timeout=timeout)
    return Slot(value.min().item(), value.max().item(), shoal.bluefog.win_associated_p(NAME))


def read_until(source: int, count: int, seconds: float = 10.0) -> list[Slot]:
    """Read until the given number of different values have been seen; return the torn ones."""
    seen: set[float] = set()
    broken = []
    limit = time.monotonic() + seconds
    while len(seen) < count:
        assert time.monotonic() < limit, f"only {sorted(seen)} came in {seconds:g} s"
        slot = read(source)
        seen.add(slot.largest)
        if slot != whole_write(slot.largest):
            broken.append(slot)
    return broken


def accumulates(source: int) -> int:
    return shoal.bluefog.win_slots(NAME)[source].accumulates


def update_and_stop(source: int) -> Slot:
    """Stops with the locks of its slots in its hands."""
    _wrap(window_memory, "weigh_in_blocks", before=fault_points._counting(1, stop))
    return read(source)


def get_and_stop(source: int) -> None:
    """Stops with the lock of its neighbour's tensor in its hands."""
    arm_write("locked", stop)
    shoal.bluefog.win_get(NAME, {source: 1.0})


def hold_mutex(of: int, then: Callable[[], T]) -> T:
    with shoal.bluefog.win_mutex(NAME, for_self=of == shoal.rank(), ranks=[of]):
        return then()


def sleep_for_ever() -> None:
    while True:
        signal.pause()


def end_when_waiting(pid: int, how: int = signal.SIGKILL) -> None:
    """Send a signal as soon as this agent waits for a mutex."""
    once = fault_points._counting(1, lambda: kill(pid, how))
    _wrap(ByteLocks, "_take_in_turn", before=fault_points._counting(30, once))

    def listener(event: Event) -> None:
        if (event.operation, event.kind) == ("win_lock", "sent"):
            once()

    shoal.observability.events().subscribe(listener)


def take_mutex(of: int, timeout: float | None = None) -> float:
    """The time at which this agent has it."""
    with shoal.bluefog.win_mutex(NAME, for_self=of == shoal.rank(), ranks=[of], timeout=timeout):
        return time.monotonic()


def write_after_a_loss(neighbours: list[int]) -> list[Slot]:
    """Three writes to each surviving neighbour, and the values received after theirs; no barrier knows them."""
    others = [rank for rank in neighbours if rank != shoal.rank()]
    for rank in others:
        for _ in range(2):
            write(PUT, 7.0, rank)
        write(PUT, 11.0, rank)
    limit = time.monotonic() + 10.0
    results = [_read_when(rank, 11.0, limit) for rank in others]
    assert all(take_mutex(rank) for rank in neighbours)
    return results


def _read_when(source: int, value: float, limit: float) -> Slot:
    while (slot := read(source)).largest != value and time.monotonic() < limit:
        time.sleep(0.001)
    return slot


def free_after(count: int, source: int) -> None:
    """Free the window when so many values have come."""
    read_until(source, count)
    shoal.bluefog.win_free(NAME)


def cycle(count: int, warm: int) -> tuple[list[str], int]:
    """Make and free a window again and again; what is left of the later times, and the memory that they took, in bytes.

    Args:
        warm: The times that come before the first look.
    """
    before: Holdings | None = None
    resident = 0
    for i in range(count):
        if i == warm:
            shoal.barrier()
            before, resident = holdings(), resident_bytes()
        name = f"{NAME} {i % 3}"
        tensor = shoal.windows.empty(5000) if i % 2 else torch.empty(5000)
        assert shoal.bluefog.win_create(tensor.fill_(1.0), name)
        with contextlib.suppress(shoal.Mismatch):  # its neighbour may have freed it already
            shoal.bluefog.win_accumulate(tensor, name)
            shoal.bluefog.win_wait(shoal.bluefog.win_put_nonblocking(tensor, name, require_mutex=i % 7 == 0))
        shoal.bluefog.win_free(name)
    shoal.barrier()
    assert before is not None
    limit = time.monotonic() + 2.0
    while (left := holdings().beyond(before)) and time.monotonic() < limit:
        time.sleep(0.01)
    grown = resident_bytes() - resident
    shoal.barrier()  # one that left before the other has looked would have it open a socket for `shoal status`
    return left, grown
