"""The faults of an agent, each called in the middle of its work."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path

import torch

from support.surviving_training import disturbances

LOCKED_SECONDS = 5.0
"""For which a fault holds the interpreter's lock: longer than those after which an agent is dropped."""
BATCH = 1 << 20
"""Float64 numbers that a step needs room for, once memory is short."""
SMALLEST = (1 << 20, 1 << 16, 1 << 10, 64)
"""Bytes of which an agent that has no memory finds no piece any more: a few, or all that there are."""
_eaten: list[bytearray] = []


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_lock(seconds: float = LOCKED_SECONDS) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def spoil_gradients(steps: float) -> None:
    """Those of so many steps to come are NaN."""
    left = steps

    def spoil(loss: torch.Tensor) -> torch.Tensor:
        nonlocal left
        left -= 1
        return loss * float("nan") if left >= 0 else loss

    disturbances.append(spoil)


def run_out_of_memory(smallest: int) -> None:
    """No piece of so many bytes is left, nor will be; and the next step needs a large one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    used = {
        name: int(text.split()[0]) << 10 for name, _, text in (line.partition(":") for line in lines) if "kB" in text
    }

    def need_more(loss: torch.Tensor) -> torch.Tensor:
        _eat(smallest)  # also what has been given back since, as the memory that an agent shared that was lost
        return loss + 0 * torch.zeros(BATCH, dtype=torch.float64).sum()

    disturbances.append(need_more)
    for limit, now in ((resource.RLIMIT_AS, used["VmSize"]), (resource.RLIMIT_DATA, used["VmData"])):
        resource.setrlimit(limit, (now, resource.RLIM_INFINITY))
    _eat(smallest)


def _eat(smallest: int) -> None:
    """All memory that there is, but for smaller pieces."""
    size = 1 << 24
    while size >= smallest:
        try:
            _eaten.append(bytearray(size))
        except MemoryError:
            size //= 2


def fill_the_disk(folder: Path) -> None:
    """Nothing more can be written there until the file "filler" is removed."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
