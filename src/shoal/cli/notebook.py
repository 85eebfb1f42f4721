"""``shoal notebook``: agents as processes behind a notebook, through ipyparallel.

``start`` leaves a job running whose agents are ipyparallel's engines: each runs the cells that begin with ``%%px``, and
each has the variables of a launcher, so that ``shoal.init()`` in such a cell makes them agents of one fleet. ``stop``
ends the job and removes its files. The job has files in its IPython profile while it runs: its process, and its
connection.

``python -m shoal.cli.notebook`` runs one of the processes behind ``start``: the job, ipyparallel's controller, or an
engine. The job is a launcher like ``shoal run``, with the same parts: it starts the controller and the agents' store,
gives the engines their variables and ends them on request, and the kernel kills all of them with it if it is killed
itself. An engine runs the cells of a notebook, and notifies the other agents when one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import importlib.util
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import config
from ..rendezvous.launch import LOOPBACK, free_ports
from ..rendezvous.rendezvous import listen
from .agent_processes import AgentProcesses, FailureHandling
from .launcher_signals import Signals, death_with
from .run import LaunchedJob, serve_store

_STOP_SECONDS = 30.0
_TAIL = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    start = commands.add_parser("start", help="start engines, and leave them running")
    start.add_argument("-n", "--agents", type=int, required=True, metavar="N", help="how many")
    start.add_argument(
        "--wait", type=float, default=120.0, metavar="SECONDS", help="how long they may take to be there (120)"
    )
    stop = commands.add_parser("stop", help="end them, whatever they are doing")
    status = commands.add_parser("status", help="say whether they are there")
    for command in (start, stop, status):
        command.add_argument("--profile", default="shoal", help="IPython's profile; one job for each (shoal)")


def run(args: argparse.Namespace) -> int:
    """Start, stop or look; the exit status is 0 if it is so."""
    if importlib.util.find_spec("ipyparallel") is None:
        print("shoal notebook: error: it needs ipyparallel: pip install 'shoal[notebook]'", file=sys.stderr)
        return 2
    if args.profile in ("", "..") or args.profile != Path(args.profile).name:
        print(f"shoal notebook: error: --profile {args.profile!r}: a profile is a name, not a path", file=sys.stderr)
        return 2
    if args.command == "start":
        return _start(Files.make(args.profile), args.profile, args.agents, args.wait)
    files = Files.find(args.profile)
    if files is None:
        print(f"no agents are running: there is no profile {args.profile!r}")
        return 0 if args.command == "stop" else 1
    return _stop(files) if args.command == "stop" else _status(files)


def _start(files: Files, profile: str, agents: int, wait: float) -> int:
    if agents < 1:
        print(f"shoal notebook: error: -n {agents}: at least one agent must run", file=sys.stderr)
        return 2
    if files.owner() is not None:
        print(
            f"shoal notebook: error: agents of the profile {profile!r} are running; `shoal notebook stop` ends them",
            file=sys.stderr,
        )
        return 1
    files.forget_connection()
    command = [sys.executable, "-m", "shoal.cli.notebook", "job", str(files.profile), str(agents)]
    with files.log.open("wb") as log:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        problem = _wait_for(files, job, agents, time.monotonic() + wait)
    except BaseException:
        _end(job)
        raise
    if problem:
        _end(job)
        print(f"shoal notebook: error: {problem}; {files.log} ends with:", file=sys.stderr)
        print("\n".join(files.log.read_text(errors="replace").splitlines()[-_TAIL:]), file=sys.stderr)
        return 1
    print(
        f"{agents} agents are there. In the notebook:\n\n"
        f"    import ipyparallel\n"
        f"    ipyparallel.Client(profile={profile!r}).activate()\n\n"
        f"and in a cell of its own:\n\n"
        f"    %%px\n"
        f"    import shoal\n"
        f"    shoal.init()\n\n"
        f"`shoal notebook stop` ends them."
    )
    return 0


def _wait_for(files: Files, job: subprocess.Popen[bytes], agents: int, deadline: float) -> str:
    """Wait until every engine takes cells. Returns what went wrong; empty if nothing did."""
    while not files.client.exists():
        if job.poll() is not None:
            return f"the job ended with code {job.returncode}"
        if time.monotonic() > deadline:
            return "the controller did not start in time"
        time.sleep(0.05)
    while True:
        here = _engines(files)
        if here == list(range(agents)):
            return ""
        if job.poll() is not None:
            return f"the job ended with code {job.returncode}"
        if time.monotonic() > deadline:
            return f"of {agents} engines only {here} came in time"
        time.sleep(0.3)


def _engines(files: Files) -> list[int]:
    """The registered engines. Uses a new client, because an existing one may miss the registration of an engine."""
    import ipyparallel

    try:
        with contextlib.closing(ipyparallel.Client(str(files.client), timeout=10)) as client:
            return sorted(client.ids)
    except (OSError, ValueError):  # a controller that is busy, or has not written all of its file
        return []


def _end(job: subprocess.Popen[bytes]) -> None:
    job.terminate()
    try:
        job.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def _stop(files: Files) -> int:
    owner = files.owner()
    if owner is None:
        print("no agents are running")
        return 0
    for signum in (signal.SIGTERM, signal.SIGKILL):
        # The kernel kills the other processes with their parent.
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner, signum)
        if any(files.owner() is None for _ in _until(time.monotonic() + _STOP_SECONDS)):
            files.forget_connection()
            print("stopped")
            return 0
    print(f"shoal notebook: error: process {owner} does not end", file=sys.stderr)
    return 1


def _status(files: Files) -> int:
    owner = files.owner()
    print("no agents are running" if owner is None else f"agents are running, started by process {owner}")
    return 0 if owner is not None else 1


def _until(deadline: float) -> Iterator[None]:
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)


@dataclass(frozen=True)
class Files:
    """The files of one profile.

    Attributes:
        profile: its directory.
    """

    profile: Path

    @staticmethod
    def make(name: str) -> Files:
        """The files of a profile of this user, which is made if it does not exist."""
        from IPython.core.profiledir import ProfileDir
        from IPython.paths import get_ipython_dir

        profile = ProfileDir.create_profile_dir_by_name(get_ipython_dir(), name)  # type: ignore[no-untyped-call]
        return Files(Path(profile.location))

    @staticmethod
    def find(name: str) -> Files | None:
        """The files of a profile of this user; None if it does not exist."""
        from IPython.core.profiledir import ProfileDir, ProfileDirError
        from IPython.paths import get_ipython_dir

        try:
            found = ProfileDir.find_profile_dir_by_name(get_ipython_dir(), name)  # type: ignore[no-untyped-call]
        except ProfileDirError:
            return None
        return Files(Path(found.location))

    @property
    def log(self) -> Path:
        return self.profile / "log" / "shoal-notebook.log"

    @property
    def client(self) -> Path:
        """The file with which a notebook connects to the job."""
        return self.profile / "security" / "ipcontroller-client.json"

    @property
    def engine(self) -> Path:
        """The file with which an engine connects to the job."""
        return self.profile / "security" / "ipcontroller-engine.json"

    @property
    def lock(self) -> Path:
        return self.profile / "pid" / "shoal-notebook"

    def own(self) -> int | None:
        """Lock the profile as its job, until the returned descriptor is closed; None if another job has locked it."""
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        return descriptor

    def owner(self) -> int | None:
        """The process of this profile's job. A lock without a holder was left by a killed process."""
        try:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            # A job that has just begun has not written yet.
            return int(os.read(descriptor, 32) or 0) or os.getpid()
        finally:
            os.close(descriptor)

    def forget_connection(self) -> None:
        """Remove the connection files of a killed job, so that no client waits for it."""
        self.client.unlink(missing_ok=True)
        self.engine.unlink(missing_ok=True)


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
    controller = [sys.executable, "-m", "shoal.cli.notebook", "controller", where]
    try:
        failures = FailureHandling(survive=True, grace=_GRACE_SECONDS)
        with Signals() as signals, AgentProcesses(None, signals, failures) as processes:
            # It keeps the lock as well, so that no other one is started beside it.
            loss = "no cell can reach the engines"
            processes.start_helper("the controller", controller, owned, loss=loss, is_needed=True)
            serve_store(processes, listener)
            for rank in range(agents):
                engine = [
                    *(sys.executable, "-m", "shoal.cli.notebook", "engine", where, f"--IPEngine.id={rank}"),
                    f"--IPEngine.wait_for_url_file={_START_SECONDS}",
                    f"--IPEngine.timeout={_START_SECONDS}",
                ]
                environ = {"SHOAL_TIMEOUT": _TIMEOUT, **job.environment(rank, os.environ)}
                processes.start(rank, engine, environ, keeps_stdin=False)
            ending = processes.supervise()
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
    while children := [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _parent(int(entry.name)) == os.getpid()
    ]:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


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

    startup = "__import__('shoal.cli.notebook').cli.notebook.watch_cells(get_ipython())"
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
