"""The process of one agent in a :class:`~support.world.World`, and the template that it is forked from.

Importing torch costs a second or two, and forking a process that has imported it ten milliseconds. So one template
imports everything, before it has a second thread, and forks an agent for each request. An agent then calls the
functions that its world requests, by name, and returns their outcomes, until its world shuts it down.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWNET = 0x40000000
PACKET_BYTES = 1 << 17
_libc = ctypes.CDLL(None, use_errno=True)
IMPORTED = (
    "encodings.idna",  # the first address of a network
    "numpy.ma",  # the first tensor that becomes an array
    "pytest",  # the modules of tests
    "torch._dynamo.config",  # DistributedDataParallel; in the middle of a run it keeps process groups alive
    "torch.profiler",
    "torch.utils.data",
    "shoal._public",  # the first name of Shoal
    "shoal.observability.membership_log",  # init
    "shoal.observability.status_publisher",
    "shoal.observability.timeline",
    "shoal.netmodel",
    "shoal.sim",
    "support.world",
)
"""What the template imports: else agents would, each for itself, when they first do what is said beside it."""


@dataclass(frozen=True)
class Spawn:
    """The parameters with which the template forks a new agent."""

    environment: dict[str, str]
    path: list[str]
    """``sys.path``, so that the functions of test modules are found."""
    log: str
    """The file that takes stdout and stderr."""
    namespace: str = ""
    """The network namespace to live in, as a path; empty for the template's own."""


@dataclass(frozen=True)
class Outcome:
    """What came of one call in one agent."""

    rank: int
    value: Any = None
    error: str = ""
    """The class of the exception; ``Died`` if the process ended instead of answering."""
    message: str = ""
    ranks: tuple[int, ...] = ()
    trace: str = ""
    ended: float = 0.0
    """``time.monotonic()`` when the call ended; one clock for all processes of a machine."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Request:
    """A call for an agent: the pickle of ``(function, args)``, which names the function and does not contain it."""

    call: bytes
    caught: bool = True
    """Send an exception back; else let it end the process, as it would in a script."""


@dataclass(frozen=True)
class Dying:
    """Sent by :func:`die`, with the time of death."""

    at: float


@dataclass(frozen=True)
class Holdings:
    """The resources of a process that an agent must give back: descriptors, threads, shared memory, child processes."""

    descriptors: frozenset[tuple[str, str]]
    threads: tuple[str, ...]
    maps: tuple[str, ...]
    children: tuple[str, ...]

    def beyond(self, before: Holdings) -> list[str]:
        """The resources held now but not before."""
        results = []
        # Gloo never wakes who waits for a message of which a part has come when its sender was killed: that thread
        # keeps its group, and the tensors that it was to receive.
        if not any(name.startswith("abandoned to") for name in self.threads):
            results += [f"descriptor {fd} -> {target}" for fd, target in sorted(self.descriptors - before.descriptors)]
            results += [f"thread {name}" for name in _added(self.threads, before.threads)]
            results += [f"memory {line}" for line in self.maps if line not in before.maps]
        results += [f"child process {pid}" for pid in self.children if pid not in before.children]
        return results


def _added(now: tuple[str, ...], before: tuple[str, ...]) -> list[str]:
    rest = list(before)
    return [name for name in now if name not in rest or rest.remove(name)]  # type: ignore[func-returns-value]


def holdings() -> Holdings:
    """The resources of this process now."""
    gc.collect()
    descriptors = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptors.add((entry.name, os.readlink(entry)))  # noqa: PTH115 - a socket's "target" is no path
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    threads = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            threads.append(f"{task.name} ({(task / 'comm').read_text().strip()})")
    threads += [f"{thread.name} (Python)" for thread in threading.enumerate()]
    lines = Path("/proc/self/maps").read_text().splitlines()
    # A memory file of Shoal's, or anonymous memory that is mapped shared, which is what mmap.mmap(-1, n) gives.
    maps = [line for line in lines if "memfd:" in line or line.endswith("/dev/zero (deleted)")]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return Holdings(frozenset(descriptors), tuple(sorted(threads)), tuple(maps), tuple(children))


_connection: Connection[Any, Any] | None = None
_before: Holdings | None = None


def die(how: int = signal.SIGKILL) -> NoReturn:
    """Tell the world when, and end this very moment."""
    assert _connection is not None
    _connection.send(Dying(time.monotonic()))
    os.kill(os.getpid(), how)
    while True:  # the signal is on its way to this thread
        signal.pause()


def left_over() -> list[str]:
    """Resources that this process has acquired since its start. Threads get a moment to end."""
    assert _before is not None
    limit = time.monotonic() + 2.0
    while (result := holdings().beyond(_before)) and time.monotonic() < limit:
        time.sleep(0.01)
    return result


def main() -> None:
    """Be the template on the socket whose descriptor is the first argument; and then, in each fork, be an agent."""
    control = socket.socket(fileno=int(sys.argv[1]))
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    gc.disable()
    import torch

    from shoal.runtime import script_end

    for name in IMPORTED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    _check_that_it_may_fork()
    gc.collect()
    gc.freeze()  # a collection in an agent need not look at all of torch, nor copy the pages that it lies on
    gc.enable()
    work = _serve(control)
    if work is not None:
        try:
            _agent(*work)
        except SystemExit as error:
            script_end.note_exit(error)  # as the runner of a launcher's scripts does
            raise


def _check_that_it_may_fork() -> None:
    assert len(os.listdir("/proc/self/task")) == 1, "a process with several threads must not fork agents"  # noqa: PTH208


def _serve(control: socket.socket) -> tuple[Spawn, int] | None:
    """Answer requests until the other end closes (None), or until this is a forked agent (its work)."""
    agents: set[int] = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, PACKET_BYTES, 1)
        if not data:
            control.close()
            for pid in agents:
                os.kill(pid, signal.SIGKILL)
            return None
        request, argument = pickle.loads(data)
        answer: Any = None
        if request == "spawn":
            pid = os.fork()
            if not pid:
                control.close()
                return argument, descriptors[0]
            os.close(descriptors[0])
            agents.add(pid)
            answer = pid
        elif request == "reap":
            agents.discard(argument)
            answer = os.waitstatus_to_exitcode(os.waitpid(argument, 0)[1])
        elif request == "orphans":
            answer = _orphans(agents)
        elif request == "import":
            importlib.import_module(argument)
            _check_that_it_may_fork()
        control.send(pickle.dumps(answer))


def _orphans(agents: set[int]) -> list[tuple[int, str]]:
    """Processes that agents have left behind; they have become children of the template."""
    results = []
    for text in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        pid = int(text)
        if pid not in agents and os.waitpid(pid, os.WNOHANG) == (0, 0):
            results.append((pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")))
    return results


def _agent(spawn: Spawn, descriptor: int) -> None:
    global _connection, _before
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(spawn.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # A test run in the background of a shell is started with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1)
    os.environ.clear()
    os.environ.update(spawn.environment)
    sys.path[:] = spawn.path
    random.seed()
    if spawn.namespace:
        _enter(spawn.namespace)
    connection: Connection[Any, Any] = Connection(descriptor)
    _connection = connection
    rank = int(spawn.environment["RANK"])
    if rank == 0:
        _open_a_store()
    _before = holdings()
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request is None:
            # It has shut down and holds nothing. To take torch apart would cost a quarter of a second for each agent;
            # the tests of agents that end in the middle of their work do it.
            os._exit(0)
        function, args = _load(request.call)
        if not request.caught:
            function(*args)
            return
        connection.send(_call(rank, function, args))


def _open_a_store() -> None:
    """libuv, which serves the store of torch.distributed, opens one pipe the first time and keeps it for good."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _load(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    function, args = pickle.loads(call)
    return function, args


def _enter(namespace: str) -> None:
    descriptor = os.open(namespace, os.O_RDONLY)
    if _libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.close(descriptor)


def _call(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    started = time.monotonic()
    try:
        value = function(*args)
    except BaseException as error:
        now = time.monotonic()
        trace = "".join(traceback.format_exception(error))
        ranks = getattr(error, "ranks", ())
        return Outcome(rank, None, type(error).__name__, str(error), ranks, trace, now, now - started)
    now = time.monotonic()
    return Outcome(rank, value, ended=now, seconds=now - started)
