"""The machine of a measurement, and its load during the measurement.

A figure means little without the machine, and nothing if other processes used it. So the CPU time of all processes is
compared with that of the benchmark's own. The load average is shown as well; it includes the benchmark's own load of
the last minute.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

OTHERS_LIMIT = 0.1
"""Share of the machine's time used by other processes during a measurement, above which it counts as busy."""


@dataclass(frozen=True)
class MachineInfo:
    """The data of a machine for readers of a figure. ``memory`` is in bytes; ``cores`` are the usable ones."""

    cpu: str
    cores: int
    memory: int
    kernel: str
    python: str
    torch: str
    shoal: str
    sums: str = "torch"

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory / 2**30:.0f} GiB; Linux {self.kernel}; "
            f"Python {self.python}, torch {self.torch}, Shoal {self.shoal}, "
            f"sums by {self.sums}"
        )


def here() -> MachineInfo:
    """The machine of the caller."""
    from importlib.metadata import version

    from shoal._version import __version__
    from shoal.kernels.native import why_not_native

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    why_not = why_not_native()
    return MachineInfo(
        cpu_name(),
        cores,
        memory,
        platform.release(),
        platform.python_version(),
        version("torch"),
        __version__,
        "compiled kernels" if why_not is None else f"torch ({why_not})",
    )


def cpu_name() -> str:
    """The processor's own name, if the kernel provides it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


@dataclass(frozen=True)
class Load:
    """The load of a machine around and during a measurement.

    Attributes:
        before: Load average (one minute) at its start.
        after: At its end; our own agents are in it.
        others: Cores that other processes kept busy during it, on average, and time taken by a hypervisor.
        cores: The number of cores.
    """

    before: float
    after: float
    others: float
    cores: int

    @property
    def quiet(self) -> bool:
        return self.others <= OTHERS_LIMIT * self.cores

    def __str__(self) -> str:
        return (
            f"load average {self.before:.2f} before, {self.after:.2f} after (with our own agents); meanwhile others "
            f"used {self.others:.2f} of {self.cores} cores"
        )


class LoadWatch:
    """Starts to measure when it is made. It counts only child processes that have been waited for."""

    def __init__(self) -> None:
        self._before = os.getloadavg()[0]
        self._all, self._own, self._time = _all_seconds(), _own_seconds(), time.monotonic()

    def load(self) -> Load:
        elapsed = max(time.monotonic() - self._time, 1e-3)
        others = (_all_seconds() - self._all) - (_own_seconds() - self._own)
        return Load(self._before, os.getloadavg()[0], max(0.0, others / elapsed), os.cpu_count() or 1)


def _all_seconds() -> float:
    """Core seconds that were not idle, of all processes since boot: user, nice, system, interrupts, stolen."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
