"""The processes behind ``shoal notebook start``: the job, ipyparallel's controller, and the engines that are agents.

``python -m shoal.cli.notebook_job`` runs one of them. The job is a launcher like ``shoal run``, with the same parts: it
starts the controller and the agents' store, gives the engines their variables and ends them on request, and the kernel
kills all of them with it if it is killed itself. An engine runs the cells of a notebook, and notifies the other agents
when one fails.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .. import config
from ..rendezvous.launch import LOOPBACK, free_ports
from ..rendezvous.rendezvous import listen
from .agent_processes import AgentProcesses, FailureHandling, death_with
from .launcher_signals import Signals
from .notebook import Files
from .run import LaunchedJob, serve_store

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_SECONDS = 2.0
_START_SECONDS = 120
_TIMEOUT = "60"
"""Seconds for every wait by default: short, because notebooks are interactive."""


def run_job(profile: str, agents: int) -> int:
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
    controller = [sys.executable, "-m", "shoal.cli.notebook_job", "controller", where]
    try:
        failures = FailureHandling(survive=True, grace=_GRACE_SECONDS)
        with Signals() as signals, AgentProcesses(None, signals, failures) as processes:
            # It keeps the lock as well, so that no other one is started beside it.
            loss = "no cell can reach the engines"
            processes.start_helper("the controller", controller, owned, loss=loss, is_needed=True)
            serve_store(processes, listener)
            for rank in range(agents):
                engine = [
                    *(sys.executable, "-m", "shoal.cli.notebook_job", "engine", where, f"--IPEngine.id={rank}"),
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
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat.rpartition(")")[2].split()[1])


# An engine counts after two heartbeats, by default every three seconds; it is lost after half a minute.
_CONTROLLER_OPTIONS = (
    "--IPController.use_threads=True",
    "--IPController.enable_curve=True",  # every user of this machine can connect to its ports
    "--HeartMonitor.period=1000",
    "--HeartMonitor.max_heartmonitor_misses=30",
)
_CONTROLLER_PORTS = 40
"""Ports for the controller's sockets, of which it has about twenty."""


def run_controller(arguments: list[str]) -> None:
    """Run ipyparallel's controller until it is ended; its own processes end with it in all cases."""
    from ipyparallel.controller.app import IPController
    from traitlets import default

    class Controller(IPController):  # type: ignore[misc]
        """It binds a port up to seconds after it has chosen it. By default it chooses among those that Linux also gives
        to other processes; it would end if one of them was faster.
        """

        @default("ports")
        def _default_ports(self) -> list[int]:
            return free_ports(_CONTROLLER_PORTS)

    # It starts processes of its own (the monitor of the heartbeats), which would outlive a controller that is
    # killed. A forked child can make the kernel kill it with its parent, too.
    multiprocessing.set_start_method("fork")
    os.register_at_fork(after_in_child=death_with(os.getpid()))
    Controller.launch_instance([*arguments, *_CONTROLLER_OPTIONS])


_LOOK_SECONDS = 0.05
_IDLE_SECONDS = 2.0
"""How long others wait for an idle engine before it leaves. Engines begin the next cell at different times; without
this the first one to begin would lose the last one."""


class CellWatch:
    """Watches over the cells of this process, from the events of its IPython shell.

    After a cell has raised, its engine is alive and idle, and an agent that waits for it would wait until its deadline.
    So while an engine is idle after a failure it checks whether others wait for it. After two seconds of such a wait it
    leaves, and the others get :class:`~shoal.PeerLost` with the cell's exception. If no agent waits, as after the same
    error in all engines, it stays.
    """

    def __init__(self) -> None:
        self._next_cell = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, *_: Any) -> None:
        """Called when a cell begins: what others wait for may come yet."""
        self._next_cell.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def end(self, result: Any) -> None:
        """Called when a cell has ended: if it failed and others wait for this agent, it leaves."""
        error = result.error_before_exec or result.error_in_exec
        if error is None or self._thread is not None:
            return
        self._next_cell.clear()
        cause = f"its cell raised {type(error).__name__}: {error}".splitlines()[0][:500]
        self._thread = threading.Thread(target=self._look, args=(cause,), name="shoal-cells", daemon=True)
        self._thread.start()

    def _look(self, cause: str) -> None:
        from ..runtime.agent import process_context
        from ..runtime.bootstrap import leave

        waited_for_since = None
        while True:
            agent = process_context().agent
            if agent is None:
                return
            with agent.engine.lock:
                is_waited_for = agent.engine.is_waited_for()
            if not is_waited_for:
                waited_for_since = None
            elif waited_for_since is None:
                waited_for_since = time.monotonic()
            elif time.monotonic() - waited_for_since >= _IDLE_SECONDS:
                leave(process_context(), cause, died=True)
                return
            if self._next_cell.wait(_LOOK_SECONDS):
                return


def watch_cells(shell: Any) -> None:
    """Watch every cell of an IPython shell."""
    watch = CellWatch()
    shell.events.register("pre_run_cell", watch.begin)
    shell.events.register("post_run_cell", watch.end)


def run_engine(arguments: list[str]) -> None:
    """Run an engine until it is ended."""
    from ipyparallel.engine.app import IPEngine

    from shoal import init  # noqa: F401 - and all with it: before it takes cells, since the first would wait for torch

    startup = "__import__('shoal.cli.notebook_job').cli.notebook_job.watch_cells(get_ipython())"
    IPEngine.launch_instance([*arguments, f"--IPEngine.startup_command={startup}"])


def main(process: str, arguments: list[str]) -> int:
    """Run one of the processes; the exit status."""
    if process == "job":
        profile, agents = arguments
        return run_job(profile, int(agents))
    (run_controller if process == "controller" else run_engine)(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
