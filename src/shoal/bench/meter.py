"""Times several cases of the same task, on all agents at once and in turn, so that conditions are equal.

A repetition runs every case once and measures from an instant that all agents agree on to the end of the slowest agent.
If each agent measured from its exit of a barrier, cases that need no other agent would look too fast: on fewer cores
than agents some leave the barrier only when others have finished. The cases take turns in running first. The barriers
and the comparison of times use ``torch.distributed``, outside the timed code. :class:`Figures` are the measurements, in
the form sent to the process that started the job.

A figure means little without the machine (:class:`MachineInfo`), and nothing if other processes used it. So the CPU
time of all processes is compared with that of the benchmark's own (:class:`LoadWatch`). The load average is shown as
well; it includes the benchmark's own load of the last minute.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Figures:
    """The measurements on tensors of one size.

    Attributes:
        kind: The kind of measurement, which defines the values.
        nbytes: Bytes of one agent's tensor.
        agents: The number of agents.
        values: By case; seconds of the slowest agent in each repetition, or bytes of the agent that holds most.
    """

    kind: str
    nbytes: int
    agents: int
    values: dict[str, list[float]]


Case = Callable[[], object]
Seconds = dict[str, list[float]]
"""Seconds of the slowest agent, for each case and repetition."""

WARMUPS = 2
HEAD_START_SECONDS = 0.003
"""From the barrier to the instant at which all begin; they sleep until then."""
REDRAW_SECONDS = 0.02
"""Time for the other end to draw the progress before the timing begins."""


class Reporter:
    """The channel from rank 0 to the process that started the job: a JSON object a line, on the original stdout."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w", buffering=1)
        # Gloo writes to stdout, too; that is redirected to stderr.
        os.dup2(2, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        if dist.get_rank() == 0:
            self._lines.write(json.dumps(message) + "\n")

    def progress(self, doing: str, done: int, total: int) -> None:
        self.send({"doing": doing, "done": done, "total": total})
        time.sleep(REDRAW_SECONDS)


def compare(reporter: Reporter, title: str, cases: Mapping[str, Case], repetitions: int, calls: int = 1) -> Seconds:
    """Time the cases in turn; all agents call it with the same names in the same order.

    Args:
        title: The name of the measurement, shown as progress.
        cases: The functions to call, by name.
        repetitions: How often each is timed, after ``WARMUPS`` untimed runs.
        calls: How many calls are timed together, if calls are short.

    Returns:
        Seconds of one call on the slowest agent: ``repetitions`` values for each case.
    """
    names = list(cases)
    seconds = torch.zeros(WARMUPS + repetitions, len(names), dtype=torch.float64)
    for repetition, row in enumerate(seconds):
        reporter.progress(title, repetition, len(seconds))
        for turn in range(len(names)):
            case = (repetition + turn) % len(names)
            row[case] = _seconds(cases[names[case]], calls)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    timed = seconds[WARMUPS:]
    return {name: timed[:, case].tolist() for case, name in enumerate(names)}


def _seconds(case: Case, calls: int) -> float:
    # One clock for all processes of a machine, in network namespaces as well.
    start = torch.tensor(time.monotonic() + HEAD_START_SECONDS, dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    begin = start.item()
    time.sleep(max(0.0, begin - time.monotonic()))
    for _ in range(calls):
        case()
    return (time.monotonic() - begin) / calls


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
