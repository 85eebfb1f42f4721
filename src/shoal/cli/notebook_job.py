"""The process behind ``shoal notebook start``: ipyparallel's controller, the agents' store, and the engines.

It is a launcher like ``shoal run``, with the same parts: it gives the engines their variables and ends them on request,
and the kernel kills all of them with it if it is killed itself.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import sys
from pathlib import Path

from .. import config
from ..rendezvous.launch import LOOPBACK
from ..rendezvous.rendezvous import listen
from .agent_processes import AgentProcesses, FailureHandling
from .launcher_signals import Signals
from .notebook import Files
from .run import SERVE, LaunchedJob

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_SECONDS = 2.0
_START_SECONDS = 120
_TIMEOUT = "60"
"""Seconds for every wait by default: short, because notebooks are interactive."""


def main(profile: str, agents: int) -> int:
    """Run until ended by a signal, or until no engine is left."""
    files = Files(Path(profile))
    owned = files.own()
    if owned is None:
        print(f"another job of {profile} is running", file=sys.stderr)
        return 1
    _adopt_orphans()
    listener = listen(LOOPBACK, 0)
    port = listener.getsockname()[1]
    job = LaunchedJob(agents, 1, 0, LOOPBACK, port, secrets.token_hex(8), config.read().secret or secrets.token_hex(32))
    where = f"--profile-dir={profile}"
    controller = [sys.executable, "-m", "shoal.cli.notebook_controller", where]
    serve = [sys.executable, "-c", SERVE, str(listener.fileno())]
    try:
        failures = FailureHandling(survive=True, grace=_GRACE_SECONDS)
        with Signals() as signals, AgentProcesses(None, signals, failures) as processes:
            # It keeps the lock as well, so that no other one is started beside it.
            processes.start_helper("the controller", controller, owned)
            processes.start_helper("the rendezvous store", serve, listener.fileno())
            listener.close()
            for rank in range(agents):
                engine = [
                    *(sys.executable, "-m", "shoal.cli.notebook_engine", where, f"--IPEngine.id={rank}"),
                    f"--IPEngine.wait_for_url_file={_START_SECONDS}",
                    f"--IPEngine.timeout={_START_SECONDS}",
                ]
                environ = {"SHOAL_TIMEOUT": _TIMEOUT, **job.environment(rank, os.environ)}
                processes.start(rank, engine, environ, keeps_stdin=False)
            ending = processes.mind()
            if ending.summary:
                processes.print(ending.summary)
            return ending.status
    finally:
        _kill_children()
        files.forget_connection()


def _adopt_orphans() -> None:
    """Become the parent of orphaned processes of engines: each engine has a watcher process in a session of its own."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, *(ctypes.c_ulong(value) for value in (1, 0, 0, 0)))


def _kill_children() -> None:
    """Kill the remaining children. Called after all started processes have been waited for."""
    while children := [pid for pid in _processes() if _parent(pid) == os.getpid()]:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _processes() -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat.rpartition(")")[2].split()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
