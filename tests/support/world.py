"""Real agents in real processes, directed by a test, and inspected closely when they end.

A :class:`World` is a set of agent processes that stay up and call the functions that a test names, so that many
tests share one start. Closing it shuts every agent down and asserts that each process ends by itself and leaves no
descriptor, thread, shared memory, child process, or name.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import shoal
from shoal.cli.launcher_signals import death_with
from shoal.runtime.agent import current

from .agent_main import PACKET_BYTES, Dying, Outcome, Request, Spawn, left_over
from .limits import scaled
from .namespaces import Namespace

PATIENCE = 30.0
"""Seconds after which an agent that has not answered is taken for hung."""
_LAUNCH_PREFIXES = ("SHOAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "PET_")
_LAUNCH_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "JOB_COMPLETION_INDEX",
)
_PORTS = range(10000, 20000)  # below those that the system gives to outgoing connections


def plain_environment() -> dict[str, str]:
    """This process's environment without anything that a launcher or a user of Shoal sets."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCH_PREFIXES) and name not in _LAUNCH_NAMES
    }


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that is reserved during the block, and that rank 0 may nevertheless listen on.

    Linux lets several sockets with SO_REUSEADDR be bound to one port as long as at most one of them listens.
    """
    while True:
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = random.choice(_PORTS)
        try:
            with socket.socket() as probe:  # without the option it succeeds only if nobody holds the port
                probe.bind(("", port))
            holder.bind(("127.0.0.1", port))
        except OSError:
            holder.close()
            continue
        with holder:
            yield port
        return


class Template:
    """The process that has imported torch and shoal and forks agents."""

    def __init__(self) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = plain_environment() | {
            # The agents import the package that the tests have imported, wherever another one is installed.
            "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[1]), str(Path(shoal.__file__).parents[1]))),
            "PYTHONWARNINGS": "always::ResourceWarning",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from support.agent_main import main; main()", str(other.fileno())],
            env=environment,
            pass_fds=[other.fileno()],
            start_new_session=True,  # Ctrl-C at the terminal is for the test run
        )
        other.close()

    def spawn(self, spawn: Spawn) -> tuple[int, Connection[Any, Any]]:
        ours, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pid: int = self._ask("spawn", spawn, remote.fileno())
        remote.close()
        return pid, Connection(ours.detach())

    def reap(self, pid: int) -> int:
        """The exit code of an agent that has ended; minus the signal that killed it."""
        code: int = self._ask("reap", pid)
        return code

    def orphans(self) -> list[tuple[int, str]]:
        """Processes that dead agents have left running: (pid, command)."""
        result: list[tuple[int, str]] = self._ask("orphans", None)
        return result

    def imports(self, module: str) -> None:
        """Import a module, so that agents forked later have it already: slow imports then happen once."""
        self._ask("import", module)

    def _ask(self, request: str, argument: object, descriptor: int = -1) -> Any:
        socket.send_fds(self._control, [pickle.dumps((request, argument))], [descriptor] if descriptor >= 0 else [])
        data = self._control.recv(PACKET_BYTES)
        assert data, "the template of the agents has ended; its stderr says why"
        return pickle.loads(data)

    def close(self) -> None:
        self._control.close()
        self._process.wait(60.0)


@functools.cache
def served_store() -> int:
    """The port of the rendezvous store of those worlds whose agents may be started again; as a launcher's."""
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    serve = "import sys; from shoal.rendezvous.rendezvous import serve; serve(int(sys.argv[1]))"
    process = subprocess.Popen(
        [sys.executable, "-c", serve, str(listener.fileno())],
        env=plain_environment(),
        pass_fds=[listener.fileno()],
        preexec_fn=death_with(os.getpid()),  # also where the tests are killed
    )
    listener.close()

    @atexit.register
    def end() -> None:
        process.kill()
        process.wait()

    return port


@contextlib.contextmanager
def _store_within(machine: Namespace, port: int) -> Iterator[None]:
    """The same on one of several machines."""
    serve = (
        "import socket; from shoal.rendezvous.rendezvous import serve; "
        f"serve(socket.create_server(({machine.address!r}, {port})).detach())"
    )
    command = ["ip", "netns", "exec", machine.name, sys.executable, "-c", serve]
    process = subprocess.Popen(command, env=plain_environment(), preexec_fn=death_with(os.getpid()))
    try:
        yield
    finally:
        process.kill()
        process.wait()


@functools.cache
def template() -> Template:
    """The one template of this test run."""
    made = Template()
    atexit.register(made.close)
    return made


class Member:
    """One agent of a world, as the test sees it."""

    def __init__(self, rank: int, spawn: Spawn) -> None:
        self.rank = rank
        self.log = Path(spawn.log)
        self.pid, self._connection = template().spawn(spawn)
        self._pidfd = os.pidfd_open(self.pid)
        self.exit_code: int | None = None
        self.died_at = 0.0
        self._silent = False

    def send(self, request: Request | None) -> None:
        # An agent that is dead already is found when its answer is awaited.
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(request)

    def outcome(self, patience: float) -> Outcome:
        """The answer to the request, or that the agent died.

        Raises when neither comes within a limit, which is longer on a busy machine.
        """
        patience = scaled(patience)
        limit = time.monotonic() + patience
        while self.exit_code is None:
            waiting: list[Any] = [self._pidfd] if self._silent else [self._pidfd, self._connection]
            ready = select.select(waiting, [], [], max(0.0, limit - time.monotonic()))[0]
            if not ready:
                raise AssertionError(f"rank {self.rank} does not answer after {patience:g} s\n{self.stacks()}")
            if self._connection in ready:  # first of all: what it said last, before its end
                answer = self._receive()
                if isinstance(answer, Outcome):
                    return answer
            elif self._pidfd in ready:
                self.died_at = self.died_at or time.monotonic()
                self.exit_code = template().reap(self.pid)
        return Outcome(self.rank, None, "Died", f"exit code {self.exit_code}", ended=self.died_at)

    def is_ready(self) -> bool:
        """Whether it has sent a message."""
        waiting: list[Any] = [self._pidfd] if self._silent else [self._pidfd, self._connection]
        return bool(select.select(waiting, [], [], 0.0)[0])

    def _receive(self) -> Outcome | None:
        try:
            received = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._silent = True
            return None
        if isinstance(received, Dying):
            self.died_at = received.at
            return None
        assert isinstance(received, Outcome)
        return received

    def stacks(self) -> str:
        """What each of its threads is doing, and the rest of its log."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self.log.read_text()

    def kill(self, how: int) -> None:
        if self.exit_code is None:
            os.kill(self.pid, how)

    def close(self) -> None:
        self._connection.close()
        os.close(self._pidfd)


class Pending:
    """A call that one agent is busy with."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def ready(self) -> bool:
        """It has ended, or its agent has."""
        return self._member.is_ready()

    def outcome(self, patience: float = PATIENCE) -> Outcome:
        return self._member.outcome(patience)


class World:
    """``size`` agents, each a process; after :func:`shoal.init` unless ``init`` is False.

    Args:
        size: How many.
        environment: Variables besides the ranks and addresses.
        namespaces: Machines to deal the agents out to, in blocks of consecutive ranks.
        timeout: ``SHOAL_TIMEOUT``: above the seconds in which a fault must be noticed, below those of the test.
        init: Make them agents.
        restarts: Agents may be started again: :meth:`start_again`.
        begin_with: How many there are at first; the others may join: :meth:`join`. With ``restarts``.
    """

    def __init__(
        self,
        size: int,
        *,
        environment: Mapping[str, str] | None = None,
        namespaces: Sequence[Namespace] = (),
        timeout: float = 20.0,
        init: bool = True,
        restarts: bool = False,
        begin_with: int | None = None,
    ) -> None:
        self.size = size
        self._incarnations: Counter[int] = Counter()
        self._initialised = init
        self._resources = contextlib.ExitStack()
        self._shared_before = _shared_memory_files()
        self._names: set[str] = set()
        self.members: list[Member] = []
        self.excused: set[int] = set()  # the ranks that may end with any complaint
        self._dropped: list[Member] = []  # that live on, while another has their place
        folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="shoal-world-"))
        served: dict[str, str] = {}
        if restarts:
            host, port = "127.0.0.1", 0 if namespaces else served_store()
            if namespaces:
                host, port = namespaces[0].address, 29400
                self._resources.enter_context(_store_within(namespaces[0], port))
            job = uuid.uuid4().hex
            served = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": job, "SHOAL_SECRET": job[::-1]}
        elif namespaces:
            host, port = namespaces[0].address, 29400
        else:
            host, port = "127.0.0.1", self._resources.enter_context(reserved_port())
        common = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "SHOAL_TIMEOUT": str(timeout)}
        common |= {"WORLD_SIZE": str(size), **served, **(environment or {})}
        if begin_with is not None:
            common = {"SHOAL_BEGIN_WITH": str(begin_with)} | common

        def start(rank: int) -> Member:
            own = plain_environment() | common | {"RANK": str(rank)}
            if self._incarnations[rank]:
                own["SHOAL_INCARNATION"] = str(self._incarnations[rank])
            where = namespaces[rank * len(namespaces) // size].path if namespaces else ""
            return Member(rank, Spawn(own, sys.path, f"{folder}/{rank}.{self._incarnations[rank]}.log", where))

        self._start = start
        try:
            for rank in range(size if begin_with is None else begin_with):
                self.members.append(start(rank))
            self.results(os.getpid)  # nobody's deadline begins before all are there
            if init:
                self._names = {name for name in self.results(_begin) if name}
        except BaseException:
            self.destroy()
            raise

    # Telling agents what to do

    def run_on(self, rank: int, function: Callable[..., object], *args: object, caught: bool = True) -> Pending:
        """Have one agent call a function of a module. With ``caught=False`` an exception ends its process."""
        self.members[rank].send(Request(pickle.dumps((function, args)), caught))
        return Pending(self.members[rank])

    def run(
        self,
        function: Callable[..., object],
        *args: object,
        on: Iterable[int] | None = None,
        patience: float = PATIENCE,
    ) -> list[Outcome]:
        """Have all agents (or those of ``on``) call a function at the same time; what came of it, by rank."""
        ranks = list(range(len(self.members)) if on is None else on)
        pending = [self.run_on(rank, function, *args) for rank in ranks]
        return [one.outcome(patience) for one in pending]

    def results(
        self,
        function: Callable[..., object],
        *args: object,
        on: Iterable[int] | None = None,
        patience: float = PATIENCE,
    ) -> list[Any]:
        """The values that the agents returned; raises if one did not."""
        outcomes = self.run(function, *args, on=on, patience=patience)
        failed = [outcome for outcome in outcomes if outcome.error]
        assert not failed, "\n".join(f"rank {one.rank}: {one.error}: {one.message}\n{one.trace}" for one in failed)
        return [outcome.value for outcome in outcomes]

    def start_again(self, rank: int, *, init: bool = True) -> None:
        """Start a new process after the last one has ended, or was dropped; returns when it is an agent."""
        old = self.members[rank]
        if old.exit_code is None:
            self._dropped.append(old)
        else:
            old.close()
        self._incarnations[rank] += 1
        self.members[rank] = self._start(rank)
        if init:
            self._names |= {name for name in self.results(_begin, on=[rank]) if name}

    def kill_and_start_again(self, rank: int) -> None:
        """Kill an agent, and start another process in its place."""
        self.kill(rank)
        self.members[rank].outcome(5.0)
        self.start_again(rank)

    def join(self, *, init: bool = True) -> int:
        """A process of the next rank that was not there before; its rank, when it is an agent that waits to enter."""
        rank = len(self.members)
        self._incarnations[rank] += 1
        self.members.append(self._start(rank))
        if init:
            self._names |= {name for name in self.results(_begin, on=[rank]) if name}
        return rank

    def kill(self, rank: int, how: int = signal.SIGKILL) -> float:
        """Send a signal; returns ``time.monotonic()`` of that moment."""
        self.members[rank].kill(how)
        return time.monotonic()

    @property
    def alive(self) -> list[int]:
        """The ranks whose end the test has not seen."""
        return [member.rank for member in self.members if member.exit_code is None]

    def is_sound(self) -> bool:
        """Whether all agents are there and in step."""
        try:
            outcomes = self.run(_in_step, patience=10.0)
        except AssertionError:
            return False
        return all(not outcome.error for outcome in outcomes)

    # The end

    def close(self, *, within: float = 5.0) -> None:
        """Shut every agent down and let its process end; assert that this works and that nothing is left.

        Args:
            within: Seconds that one shutdown may take.
        """
        complaints = []
        for member in self._dropped:  # they were shut out, and need not end well
            member.kill(signal.SIGKILL)
            member.outcome(10.0)
        try:
            for one in self.run(_end, on=self.alive):
                if one.error:
                    complaints.append(f"rank {one.rank} did not shut down: {one.error} {one.message}\n{one.trace}")
                elif one.value:
                    complaints.append(f"rank {one.rank} kept {', '.join(one.value)}")
                if one.seconds > within:
                    complaints.append(f"rank {one.rank} needed {one.seconds:.1f} s to shut down")
            leaving = [self.members[rank] for rank in self.alive]
            for member in leaving:
                member.send(None)
            for member in leaving:
                ended = member.outcome(10.0)
                if member.exit_code:
                    complaints.append(f"rank {member.rank} ended with {ended.message}")
            listened = [member for member in self.members if member.rank not in self.excused]
            complaints += [line for member in listened for line in _noise(member)]
            complaints += [f"process left: {pid} {command}" for pid, command in template().orphans()]
            complaints += [f"socket left: @{name}" for name in self._names & _abstract_names()]
            complaints += [f"file left: {name}" for name in sorted(_shared_memory_files() - self._shared_before)]
        finally:
            self.destroy()
        assert not complaints, "\n".join(complaints)

    def destroy(self) -> None:
        """End everything at once, without any check."""
        for member in (*self.members, *self._dropped):
            if member.exit_code is None:
                member.kill(signal.SIGKILL)
                member.outcome(10.0)
            member.close()
        self.members, self._dropped = [], []
        for pid, _ in template().orphans():
            os.kill(pid, signal.SIGKILL)
        self._resources.close()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.destroy()


def _noise(member: Member) -> list[str]:
    """Lines of its output that tell of something that was not closed, or of an exception that had nowhere to go."""
    signs = ("ResourceWarning", "Exception ignored", "internal error", "failed; its later failures")
    lines = member.log.read_text().splitlines()
    return [f"rank {member.rank} wrote: {line}" for line in lines if any(sign in line for sign in signs)]


def _abstract_names() -> set[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.rpartition("@")[2] for line in lines if "@shoal-" in line}


def _shared_memory_files() -> set[str]:
    """Files of Shoal, and files of torch (``torch_PID_...``) whose process has ended.

    A file of a process that runs belongs to a data loader of another test: agents have ended when this is called.
    """
    names = [entry.name for entry in Path("/dev/shm").iterdir()]
    torchs = {name: name.split("_")[1] for name in names if name.startswith("torch_")}
    return {name for name in names if "shoal" in name} | {
        name for name, pid in torchs.items() if not Path("/proc", pid).exists()
    }


def _begin() -> str:
    """Become an agent; the name of the Unix socket that it listens on, if it does."""
    shoal.init()
    agent = current()
    return agent.engine.router.endpoints[agent.rank].unix


def _in_step() -> None:
    shoal.barrier(timeout=5.0)
    shoal.set_topology()


def _end() -> list[str]:
    shoal.shutdown()
    return left_over()
