"""A measurement: a job whose agents time several cases of the same task in turn, so that conditions are equal.

A repetition runs every case once and measures from an instant that all agents agree on to the end of the slowest agent.
If each agent measured from its exit of a barrier, cases that need no other agent would look too fast: on fewer cores
than agents some leave the barrier only when others have finished. The cases take turns in running first. The barriers
and the comparison of times use ``torch.distributed``, outside the timed code. :class:`Figures` are the measurements, in
the form in which rank 0 sends them to the process that started the job (:class:`Reporter`, :func:`run_job`).

**Machine and load.** A figure means little without the machine (:class:`MachineInfo`), and nothing if other processes
used it. So the CPU time of all processes is compared with that of the benchmark's own (:class:`LoadWatch`). The load
average is shown as well; it includes the benchmark's own load of the last minute.

**Job.** A job is one ``shoal run``, or one in each network namespace. It leads a session of its own and ends with this
process: in all cases no agent is left when :func:`run_job` returns.

**Wire.** Shoal's network transport is TCP. Network namespaces make two machines of this one, joined by a wire of a
known speed: a pair of virtual Ethernet devices that the kernel holds to 1 Gbit/s (``tc tbf``). So how long a tensor
must take is known: its bytes and their headers. Making the wire needs root. The namespaces have no names: they vanish
with the processes that hold them, also when those are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

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


Progress = Callable[[str, int, int], None]
"""Called with the current measurement, the number of completed steps, and the number of all steps."""

SILENCE_SECONDS = 300.0
"""The time without a message after which a job counts as hanging."""
END_SECONDS = 15.0
_PORT = 29400
_ERROR_BYTES = 4000
# With these, agents would meet elsewhere, or write a trace of the timed code.
_NOT_PASSED_ON = ("SHOAL_RENDEZVOUS", "SHOAL_TIMELINE")


class JobFailed(RuntimeError):
    """A job ended without its figures. The message ends with its stderr."""


def run_agents(parts: Sequence[str], agents: int, quick: bool, progress: Progress) -> list[Figures]:
    """Measure parts of ``python -m shoal.bench.parts``, one after another, with this many agents on this machine."""
    return run_job([_launch(parts, quick, "-n", str(agents))], {}, progress)


def run_over_wire(quick: bool, progress: Progress) -> list[Figures]:
    """Measure the parts that need another machine, with an agent in each of two network namespaces. Needs root."""
    with two_machines() as machines:
        meeting = ["--nnodes", "2", "--rendezvous", f"{ADDRESSES[0]}:{_PORT}"]
        commands = [
            [*enter, *_launch(["wire", "latency"], quick, "-n", "1", *meeting, "--node-rank", str(node))]
            for node, enter in enumerate(machines)
        ]
        return run_job(commands, {"GLOO_SOCKET_IFNAME": DEVICE}, progress)


def _launch(parts: Sequence[str], quick: bool, *options: str) -> list[str]:
    run = [sys.executable, "-m", "shoal", "run", "--no-prefix", *options, "-m", "shoal.bench.parts", *parts]
    return [*run, "--quick"] if quick else run


def run_job(commands: Sequence[Sequence[str]], environ: dict[str, str], progress: Progress) -> list[Figures]:
    """Run the launchers of one job, of which the first has rank 0, and return what rank 0 measured.

    Raises:
        JobFailed: A launcher failed, or the job fell silent.
    """
    variables = {name: text for name, text in os.environ.items() if name not in _NOT_PASSED_ON}
    variables |= {"OMP_NUM_THREADS": "1", **environ}
    with tempfile.TemporaryFile() as errors, _Launchers(commands, variables, errors) as launchers:
        figures = None
        for message in launchers.messages():
            if "figures" in message:
                figures = [Figures(**content) for content in message["figures"]]
            else:
                progress(message["doing"], message["done"], message["total"])
        problem = launchers.problem() or ("" if figures else "it reported no figures")
        if problem or figures is None:
            raise JobFailed(f"{' '.join(commands[0])}: {problem}\n{_tail(errors)}")
        return figures


class _Launchers:
    def __init__(self, commands: Sequence[Sequence[str]], environ: dict[str, str], errors: IO[bytes]) -> None:
        self._commands, self._environ, self._errors = commands, environ, errors
        self._processes: list[subprocess.Popen[bytes]] = []
        self._silent = False

    def __enter__(self) -> _Launchers:
        try:
            for command in self._commands:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL if self._processes else subprocess.PIPE,
                        stderr=self._errors,
                        env=self._environ,
                        # Ctrl-C reaches this process alone, which ends the others.
                        start_new_session=True,
                    )
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        end = time.monotonic() + END_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            # A launcher's agents die with it.
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def messages(self) -> Iterator[dict[str, Any]]:
        """The messages of rank 0, until all launchers have ended, one has failed, or no message arrives any more."""
        assert self._processes[0].stdout is not None
        lines = self._processes[0].stdout.fileno()
        rest = b""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
            selector.register(lines, selectors.EVENT_READ)
            for process in self._processes:
                descriptor = os.pidfd_open(process.pid)
                opened.callback(os.close, descriptor)
                selector.register(descriptor, selectors.EVENT_READ, process)
            while selector.get_map():
                ready = selector.select(SILENCE_SECONDS)
                if not ready:
                    self._silent = True
                    return
                for key, _ in ready:
                    if key.fd == lines:
                        data = os.read(lines, 1 << 16)
                        *whole, rest = (rest + data).split(b"\n")
                        # Anything else was printed before the agent's Reporter took stdout over.
                        yield from (json.loads(line) for line in whole if line.startswith(b"{"))
                    elif key.data.wait():
                        return
                    if key.fd != lines or not data:
                        selector.unregister(key.fd)

    def problem(self) -> str:
        """The problem of the job; empty if there is none."""
        if self._silent:
            return f"it reported nothing for {SILENCE_SECONDS:.0f} s"
        failed = next((process.returncode for process in self._processes if process.returncode), None)
        return "" if failed is None else f"it ended with status {failed}"


def _tail(errors: IO[bytes]) -> str:
    end = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, end - _ERROR_BYTES))
    return errors.read().decode(errors="replace").strip()


BITS_PER_SECOND = 1_000_000_000
DEVICE = "veth0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")

_MTU = 1500
_ETHERNET_HEADER = 14
_IP_AND_TCP_HEADERS = 20 + 32
"""IPv4, and TCP with its timestamps."""


def wire_seconds(nbytes: int) -> float:
    """The least time that ``nbytes`` of payload take on the wire, with the headers of their full segments."""
    segments = -(-nbytes // (_MTU - _IP_AND_TCP_HEADERS))
    return (nbytes + segments * (_ETHERNET_HEADER + _IP_AND_TCP_HEADERS)) * 8 / BITS_PER_SECOND


def missing_tool() -> str:
    """A program that :func:`two_machines` needs and this machine lacks; empty if there is none."""
    return next((tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None), "")


@contextlib.contextmanager
def two_machines() -> Iterator[list[list[str]]]:
    """Two network namespaces at ``ADDRESSES``, joined by a wire of 1 Gbit/s each way.

    Yields:
        For each, the prefix of a command to be run there.

    Raises:
        RuntimeError: The system does not allow it; the message has its error.
    """
    with contextlib.ExitStack() as held:
        holders = [held.enter_context(_namespace()) for _ in ADDRESSES]
        inside = [["nsenter", f"--net=/proc/{pid}/ns/net"] for pid in holders]
        pid, peer = holders
        _run("ip", "link", "add", DEVICE, "netns", str(pid), "type", "veth", "peer", "name", DEVICE, "netns", str(peer))
        for enter, address in zip(inside, ADDRESSES, strict=True):
            _run(*enter, "ip", "address", "add", f"{address}/24", "dev", DEVICE)
            _run(*enter, "ip", "link", "set", "lo", "up")
            _run(*enter, "ip", "link", "set", DEVICE, "up")
            limit = ["rate", f"{BITS_PER_SECOND}bit", "burst", "128kb", "latency", "50ms"]
            _run(*enter, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)
        yield inside


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """A process in a network namespace of its own, which ends when its stdin closes, so at the latest with us."""
    command = ["unshare", "--net", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as holder:
        assert holder.stdin and holder.stdout and holder.stderr
        try:
            holder.stdin.write(b".")
            holder.stdin.flush()
            if not holder.stdout.read(1):  # it answers once it is inside
                raise RuntimeError(f"unshare --net: {holder.stderr.read().decode().strip()}")
            yield holder.pid
        finally:
            holder.kill()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
