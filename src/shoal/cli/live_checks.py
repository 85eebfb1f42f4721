"""The live checks of ``shoal doctor``: two agents over each transport, in processes of their own.

``python -m shoal.cli.live_checks``, which runs in these processes, moves tensors over every transport and reports the
results. A check that hangs can only be ended from outside. Each check is a line of JSON on stdout, written as soon as
it is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import torch

import shoal
from shoal.coordination.attach import PROCESS_GROUP
from shoal.runtime.agent import current
from shoal.transport.process_group import available

from ..rendezvous.launch import LOOPBACK, free_ports

CHECK_SECONDS, WHEN_BUSY = 20.0, 120.0
"""For which the checks are waited for, and where more processes want to run than there are cores."""
_COMMAND = (sys.executable, "-m", "shoal.cli.live_checks")
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL", "SLURM_", "PET_")
_LAUNCHER_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "JOB_COMPLETION_INDEX",
)
# A check meets its own agents, at an address of its own, and writes no trace; these agents are not authenticated.
_NOT_FOR_CHECKS = (
    "SHOAL_BEGIN_WITH",
    "SHOAL_INCARNATION",
    "SHOAL_LAUNCHER",
    "SHOAL_RECORD",
    "SHOAL_RENDEZVOUS",
    "SHOAL_TIMELINE",
    "SHOAL_TLS",
    "SHOAL_WATCH",
)


def check_seconds() -> float:
    """How long to wait for the checks on this machine, as it is now."""
    return WHEN_BUSY if os.getloadavg()[0] > len(os.sched_getaffinity(0)) else CHECK_SECONDS


def launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that launchers have set."""
    return {
        name: text for name, text in environ.items() if name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES)
    }


@dataclass(frozen=True)
class CheckResult:
    """How one check ended.

    Attributes:
        problem: What was wrong; empty if it went well.
        starved: Its process waited for a core for much of the time, so a problem may be due to that alone.
    """

    name: str
    problem: str
    seconds: float
    starved: bool = False


@dataclass(frozen=True)
class _CheckProcess:
    checks: tuple[str, ...]
    """The names of the checks that this process makes."""
    process: subprocess.Popen[bytes]
    output: IO[str]
    errors: IO[str]


class LiveChecks:
    """Two agents over each transport in one process, and two processes, all started at once.

    Args:
        patience: Seconds; what has not ended then is killed, and has failed.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._begun = time.monotonic()
        self._processes: list[_CheckProcess] = []
        self._files = contextlib.ExitStack()

    def __enter__(self) -> LiveChecks:
        taken = launcher_variables(os.environ)
        environ = {k: v for k, v in os.environ.items() if k not in taken and k not in _NOT_FOR_CHECKS}
        self._start("fleet", FLEET_CHECKS, environ)
        pair = {"WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_ports(1)[0])}
        for rank, checks in enumerate([(PAIR_CHECK,), ()]):
            # Its waits end before ours does, so that it can say what it waited for.
            limits = {"RANK": str(rank), "SHOAL_TIMEOUT": f"{0.6 * self.patience:g}"}
            self._start("pair", checks, environ | pair | limits)
        return self

    def __exit__(self, *_: object) -> None:
        for started in self._processes:
            started.process.kill()
            started.process.wait()
        self._files.close()

    def _start(self, part: str, checks: tuple[str, ...], environ: Mapping[str, str]) -> None:
        output, errors = self._scratch_file(), self._scratch_file()
        process = subprocess.Popen(
            [*_COMMAND, part, f"{0.2 * self.patience:g}"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        self._processes.append(_CheckProcess(checks, process, output, errors))

    def _scratch_file(self) -> IO[str]:
        return self._files.enter_context(tempfile.TemporaryFile("w+", errors="replace"))

    def results(self) -> Iterator[CheckResult]:
        """How each check ended."""
        for started in self._processes:
            if not started.checks:
                continue
            starved = False
            try:
                code = started.process.wait(timeout=max(0.1, self._begun + self.patience - time.monotonic()))
                silence = f"its process ended with status {code}: {_text(started.errors)[-500:]}"
            except subprocess.TimeoutExpired:
                silence = f"it did not end in {self.patience:g} s, at a load average of {os.getloadavg()[0]:.1f}"
                starved = is_starved(core_wait(started.process.pid), time.monotonic() - self._begun)
            results = {line["check"]: line for line in map(json.loads, _text(started.output).splitlines())}
            for check in started.checks:
                if check in results:
                    yield CheckResult(
                        check, results[check]["error"], results[check]["seconds"], results[check].get("starved", False)
                    )
                else:
                    yield CheckResult(check, silence, 0.0, starved)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()


FLEET_CHECKS = ("threads", "shared_memory", "network", *([PROCESS_GROUP] if "gloo" in available() else []))
PAIR_CHECK = "two processes"
_SIZES = (1, 1 << 18)
"""Elements: of a tensor that is sent inside a message, and of one that is published or streamed."""


def check_fleet(seconds: float) -> None:
    """Two agents in this process, over one transport after another; each wait in a check may take so long."""
    for transport in FLEET_CHECKS:
        fleet = shoal.Fleet(2, transport=transport, timeout=seconds)
        _report(transport, partial(fleet.run, average))


def check_pair() -> None:
    """This process's part of two that ``init`` brings together, as their variables say."""
    is_first = os.environ["RANK"] == "0"
    _report(PAIR_CHECK, _average_as_process, reports=is_first)


def _average_as_process() -> None:
    shoal.init()
    average()
    shoal.shutdown()


def average() -> None:
    """Average with the other agent and check the result, at two sizes."""
    for elements in _SIZES:
        found = shoal.neighbor_allreduce(torch.full((elements,), float(shoal.rank())))
        if not torch.equal(found, torch.full((elements,), 0.5)):
            kind = current().engine.transport_to(1 - shoal.rank())
            raise RuntimeError(f"the average of 0 and 1 is 0.5, and over {kind} it came to {found[:4].tolist()}")


def _report(check: str, run: Callable[[], object], reports: bool = True) -> None:
    start, waited = time.perf_counter(), core_wait()
    error, late = "", False
    try:
        run()
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
        late = isinstance(problem, TimeoutError | ConnectionError)  # what else went wrong does not depend on time
    if reports:
        seconds = time.perf_counter() - start
        starved = late and is_starved(core_wait() - waited, seconds)
        print(json.dumps({"check": check, "error": error, "seconds": seconds, "starved": starved}), flush=True)


STARVED = 0.25
"""Of the time; a process that waited for a core for longer may have failed for that reason alone."""


def core_wait(pid: int | str = "self") -> float:
    """Seconds for which the threads of a process have waited for a core, in all; 0 where the kernel does not count."""
    waited = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended
                waited += int((task / "schedstat").read_text().split()[1])
    return waited / 1e9


def is_starved(waited: float, seconds: float) -> bool:
    """Whether that is much for a process that has existed for so long."""
    return waited > STARVED * seconds


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_pair() if sys.argv[1] == "pair" else check_fleet(float(sys.argv[2]))
    # An agent that hangs, as a thread, must not keep the process.
    sys.stdout.flush()
    os._exit(0)
