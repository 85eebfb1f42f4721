"""``shoal notebook``: agents as processes behind a notebook, through ipyparallel.

``start`` leaves a job running whose agents are ipyparallel's engines: each runs the cells that begin with ``%%px``, and
each has the variables of a launcher, so that ``shoal.init()`` in such a cell makes them agents of one fleet. ``stop``
ends the job and removes its files. The processes of the running job are in :mod:`~shoal.cli.notebook_job`.

The job has files in its IPython profile while it runs: its process, and its connection.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    command = [sys.executable, "-m", "shoal.cli.notebook_job", "job", str(files.profile), str(agents)]
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
