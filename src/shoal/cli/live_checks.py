"""The live checks of ``shoal doctor``: two agents over each transport, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from ..rendezvous.launch import LOOPBACK
from .core_wait import core_wait, is_starved
from .self_test import FLEET_CHECKS, PAIR_CHECK

CHECK_SECONDS, WHEN_BUSY = 20.0, 120.0
"""For which the checks are waited for, and where more processes want to run than there are cores."""
_COMMAND = (sys.executable, "-m", "shoal.cli.self_test")
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
# A check meets its own agents, at an address of its own, and writes no trace; who they are is no question.
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


def patience_here() -> float:
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
        pair = {"WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(_free_port())}
        for rank, checks in enumerate([(PAIR_CHECK,), ()]):
            # Its waits end before ours does, so that it can say what it waited for.
            limits = {"RANK": str(rank), "SHOAL_TIMEOUT": f"{0.6 * self.patience:g}"}
            self._start("pair", checks, environ | pair | limits)
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._processes:
            one.process.kill()
            one.process.wait()
        self._files.close()

    def _start(self, what: str, checks: tuple[str, ...], environ: Mapping[str, str]) -> None:
        output, errors = self._scratch_file(), self._scratch_file()
        process = subprocess.Popen(
            [*_COMMAND, what, f"{0.2 * self.patience:g}"],
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
        for one in self._processes:
            if not one.checks:
                continue
            starved = False
            try:
                code = one.process.wait(timeout=max(0.1, self._begun + self.patience - time.monotonic()))
                silence = f"its process ended with status {code}: {_text(one.errors)[-500:]}"
            except subprocess.TimeoutExpired:
                silence = f"it did not end in {self.patience:g} s, at a load average of {os.getloadavg()[0]:.1f}"
                starved = is_starved(core_wait(one.process.pid), time.monotonic() - self._begun)
            results = {line["check"]: line for line in map(json.loads, _text(one.output).splitlines())}
            for check in one.checks:
                if check in results:
                    yield CheckResult(
                        check, results[check]["error"], results[check]["seconds"], results[check].get("starved", False)
                    )
                else:
                    yield CheckResult(check, silence, 0.0, starved)


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as sock:
        return int(sock.getsockname()[1])


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()
