"""``shoal doctor``: data for a bug report, and a check whether this machine can run agents. It prints versions and
limits, the choices of ``init`` on this machine with their reasons, and then moves real tensors over each transport.
Every check has a deadline. The output is plain lines without secrets, to be pasted into an issue.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import queue
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar, cast

import torch

from .. import config
from .._version import __version__
from ..bench.measurement import cpu_name
from ..coordination.attach import PROCESS_GROUP, check_backend, check_transport
from ..device import Unshareable, open_device
from ..kernels import why_not_triton
from ..kernels.native import why_not_native
from ..rendezvous.launch import LOOPBACK, Launch, detect, join_address, parse_address
from ..rendezvous.rendezvous import is_own
from ..transport.addresses import address_towards, interface_address, is_loopback
from ..transport.process_group import MADE_HERE, available
from ..transport.tls import certificates_of
from . import path_check
from .live_checks import CHECK_SECONDS, PAIR_CHECK, WHEN_BUSY, LiveChecks, check_seconds, launcher_variables

T = TypeVar("T")

TOO_BUSY = 3
"""The exit status where the machine was too busy to find out."""
LOOKUP_SECONDS = 5.0
SLOW_LOOKUP = 0.5
"""Seconds; a longer lookup means that the name server does not answer."""
FEWEST_FILES = 1024
# Slurm sets some forty.
_SHOWN_SLURM = ("SLURM_JOB", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP", "SLURM_NODELIST")
_ADVICE = {
    "threads": "nothing of the system plays a part in it, so this is a bug in Shoal: report it with all of the above",
    "shared_memory": "it needs memfd_create, Unix sockets that pass descriptors, and /proc; a container's seccomp "
    "profile may forbid them. SHOAL_TRANSPORT=network does without",
    "network": "it is TCP from this machine to itself; look at SHOAL_INTERFACE, the loopback interface, and firewalls",
    PROCESS_GROUP: "tensors travel by Gloo, over TCP on 127.0.0.1, and all else as in the other checks; if those "
    "are fine, report it with all of the above",
    PAIR_CHECK: "they meet over TCP on 127.0.0.1, as the agents of `shoal run` do; if the other checks are fine, look "
    "at the SHOAL_ variables above",
}


@dataclass
class Report:
    """Prints lines, and collects the problems to be printed at the end."""

    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        print(f"\n{title}", flush=True)

    def line(self, name: str, text: object) -> None:
        print(f"  {name:<15} {text}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="test the path between two machines instead: run this on both, with the address of machine 0 and a free "
        "port there. SHOAL_PORTS and SHOAL_INTERFACE count as for agents",
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        choices=[0, 1],
        help="which of the two machines this is, if its addresses do not tell",
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help=f"how long to wait for the checks ({CHECK_SECONDS:g}, on a busy machine {WHEN_BUSY:g}), or for the other "
        f"machine ({path_check.WAIT_SECONDS:g})",
    )
    parser.epilog = (
        f"The exit status is 0 if everything works here, 1 if something does not, and {TOO_BUSY} if that is not known "
        "because the machine is too busy."
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if ``init`` would start and every transport works, 1 if not, 3 if that is not known."""
    report = Report()
    if args.wait is not None and not args.wait > 0:
        print(f"shoal doctor: error: --wait {args.wait:g}: give seconds, more than 0", file=sys.stderr)
        return 2
    if args.rendezvous is not None:
        return run_path(report, args.rendezvous, args.node_rank, args.wait or path_check.WAIT_SECONDS)
    with LiveChecks(args.wait or check_seconds()) as checks:
        print(f"shoal doctor, Shoal {__version__}")
        report_versions(report)
        report_machine(report)
        report_init(report, os.environ)
        report_checks(report, checks)
    print()
    for note in report.notes:
        print(f"note: {note}")
    for problem in report.problems:
        print(f"FAILED: {problem}")
    for unknown in report.unknown:
        print(f"NOT KNOWN: {unknown}")
    if report.problems:
        return 1
    if report.unknown:
        return TOO_BUSY
    print("OK: agents can run on this machine")
    return 0


def run_path(report: Report, rendezvous: str, node: int | None, wait: float) -> int:
    """Print whether agents of two machines can connect; 0 if they can, also by one direction, else 1."""
    try:
        host, port = parse_address(rendezvous, "--rendezvous")
        here = node if node is not None else int(not is_own(host))
        print(f"shoal doctor, Shoal {__version__}")
        report.section(f"the path between two machines; this is machine {here}")
        directions = path_check.check(host, port, here, wait)
    except (path_check.PathError, OSError, ValueError) as error:
        print(f"FAILED: {error}")
        return 1
    report.line("rendezvous", f"open: {join_address(host, port)}")
    for direction in directions:
        report.line(f"{direction.source} to {1 - direction.source}", direction)
    closed = [direction for direction in directions if direction.problem]
    print()
    if len(closed) == 2:
        print(
            "FAILED: neither machine can connect to the other. Open ports in one direction at least: SHOAL_PORTS sets "
            "the ports of agents"
        )
        return 1
    if closed:
        print(f"note: agents of machine {1 - closed[0].source} open the connections for both directions")
    print("OK: agents of these machines can run together")
    return 0


def report_versions(report: Report) -> None:
    """Print the versions of the installed packages."""
    report.section("versions")
    report.line("python", f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})")
    for package in ("torch", "numpy", "networkx", "rich"):
        try:
            report.line(package, version(package))
        except PackageNotFoundError:
            report.line(package, "not installed")
    report.line("kernel", f"{platform.system()} {platform.release()} {platform.machine()}")
    report.line("libc", " ".join(platform.libc_ver()) or "unknown")


def report_machine(report: Report) -> None:
    """Print what the agents of this machine share: cores, memory, limits."""
    report.section("machine")
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    report.line("cpu", cpu_name())
    report.line("cores", f"{usable} to use, of {present}; load average {os.getloadavg()[0]:.2f}")
    why_not = why_not_native()
    report.line(
        "sums",
        "compiled kernels, one pass" if why_not is None else f"torch: the compiled kernels are not used, {why_not}",
    )
    report.line("memory", _memory())
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    report.line("open files", f"{_limit(files)} (hard limit {_limit(most_files)})")
    if files != resource.RLIM_INFINITY and files < FEWEST_FILES:
        report.notes.append(
            f"a process may open only {files} files, and an agent has several for each neighbour; ulimit -n "
            f"{FEWEST_FILES} raises it"
        )
    report.line("locked memory", _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], 1024, "KiB"))
    report.line("/dev/shm", f"{_shm()}; Shoal does not use it, data loaders do")
    try:
        devices = _in_time(local_devices, "ask CUDA for its devices")
    except OSError as error:
        devices = [str(error)]
    for line in devices:
        report.line("devices", line)
    report.line("huge pages", f"private memory: {_chosen('enabled')}; shared memory: {_chosen('shmem_enabled')}")


def local_devices() -> list[str]:
    """The CUDA devices of this machine, and how their tensors are sent."""
    if not torch.cuda.is_available():
        return [f"none of CUDA{'' if torch.version.cuda else ', for which this torch was not built'}"]
    why_not = why_not_triton()
    sums = "Triton" if why_not is None else f"torch ({why_not})"
    found = []
    for index in range(torch.cuda.device_count()):
        try:
            open_device(torch.device("cuda", index))
            shared = f"SHOAL_DEVICE_MEMORY=1 leaves tensors there, summed by {sums}; else they go through the CPU"
        except Unshareable as error:
            shared = f"tensors go through the CPU: {error}"
        found.append(f"cuda:{index} {torch.cuda.get_device_name(index)}: {shared}")
    return found


def report_init(report: Report, environ: Mapping[str, str]) -> None:
    """Print what ``init`` would choose here, and why."""
    report.section("shoal.init() here and now")
    ours = {name: text for name, text in environ.items() if name.startswith("SHOAL_")}
    for name, text in sorted(ours.items()):
        report.line("variable", f"{name}={'(set, not shown)' if name == 'SHOAL_SECRET' else text}")
        if name not in (*config.NAMES, config.BUILD_NATIVE):
            resembled = config.misspelled(environ).get(name)
            hint = f"did you mean {resembled}?" if resembled else f"it reads {', '.join(config.NAMES)}"
            report.notes.append(f"{name} is no variable of Shoal's; {hint}")
    for name, text in sorted(launcher_variables(environ).items()):
        if not name.startswith("SLURM_") or name.startswith(_SHOWN_SLURM):
            report.line("launcher's", f"{name}={text}")
    try:
        launch = detect(environ)
        report.line("agents", _agents(launch))
        report.line("transport", _transport(environ, launch))
        report.line("engines", _engines())
        report.line("encryption", _encryption(launch))
        report.line("every wait", f"ends after {config.read(environ).timeout:g} s (SHOAL_TIMEOUT)")
        report.line("listens on", _listens_on(launch, environ))
        report_names(report, launch.host or LOOPBACK)
    except (ValueError, OSError) as error:
        report.line("fails", error)
        report.problems.append(f"shoal.init() would fail: {error}")


def report_names(report: Report, host: str) -> None:
    """Print the time of looking up the rendezvous's name: torch's store does so in each of them, in ``init``."""
    begun = time.monotonic()
    with contextlib.suppress(OSError):  # a missing name is no fault, and a timeout counts as slow
        _in_time(lambda: _name_of(host), f"look up the name of {host}")
    seconds = time.monotonic() - begun
    report.line("name lookup", f"{1e3 * seconds:.0f} ms to look for the name of {host}, as init does")
    if seconds > SLOW_LOOKUP:
        report.notes.append(
            f"after {seconds:.1f} s there was no name for {host}, and init looks for it as long: see whether the name "
            "servers in /etc/resolv.conf answer. Agents of one machine need none where /etc/hosts has the line "
            f"'::ffff:{LOOPBACK} localhost'"
        )


def _name_of(host: str) -> str:
    """As torch's store asks for it: an IPv4 address is mapped into IPv6, which '127.0.0.1' in /etc/hosts is not."""
    mapped = socket.AI_V4MAPPED | socket.AI_ALL
    address = socket.getaddrinfo(host, None, socket.AF_INET6, socket.SOCK_STREAM, flags=mapped)[0][4]
    return socket.getnameinfo(address, socket.NI_NUMERICSERV)[0]


def report_checks(report: Report, checks: LiveChecks) -> None:
    """Print the results of the live checks. A problem that several checks share is printed once."""
    report.section("live checks: two agents average a tensor")
    failed: dict[str, list[str]] = {}
    starved = []
    for check in checks.results():
        if check.problem and check.starved:
            report.line(check.name, f"not known: too busy ({check.problem})")
            starved.append(check.name)
            continue
        report.line(check.name, f"FAILED: {check.problem}" if check.problem else f"OK, {1e3 * check.seconds:.0f} ms")
        if check.problem:
            failed.setdefault(check.problem, []).append(check.name)
    if starved:
        report.unknown.append(
            f"{', '.join(starved)}: too busy. Other programs had the cores, at a load average of "
            f"{os.getloadavg()[0]:.1f}. Try again later, or wait longer: shoal doctor --wait {3 * checks.patience:.0f}"
        )
    for problem, names in failed.items():
        advice = _ADVICE[names[0]] if len(names) == 1 else "look at the variables and limits above"
        report.problems.append(f"{', '.join(names)}: {problem}\n  what to do: {advice}")


def _agents(launch: Launch) -> str:
    if launch.launcher == "none":
        return "a world of one: no launcher has set its variables (shoal run, torchrun, mpirun, srun do)"
    who = f"rank {launch.rank} of {launch.size}, as the variables of {launch.launcher} say"
    if launch.size == 1:
        return who
    server = "its launcher serves" if launch.store_is_served else "rank 0 hosts"
    return f"{who}; they meet at {join_address(launch.host, launch.port)}, where {server} the store"


def _transport(environ: Mapping[str, str], launch: Launch) -> str:
    forced = config.read(environ).transport
    check_transport(forced, "SHOAL_TRANSPORT")
    if forced == PROCESS_GROUP:
        backend = check_backend(config.read(environ).process_group, None, launch.size, launch.rank)
        return f"tensors by {backend} (SHOAL_TRANSPORT), all else by shared memory and TCP"
    if forced:
        return f"{forced} between all agents (SHOAL_TRANSPORT)"
    return "shared memory between agents of one machine, TCP between machines"


def _engines() -> str:
    """The backends of torch.distributed that could move tensors, as text."""
    here = [backend if backend in MADE_HERE else f"{backend} (a group of the script's own)" for backend in available()]
    return f"this build of torch has {', '.join(here) or 'none'}; SHOAL_TRANSPORT={PROCESS_GROUP} takes one"


def _encryption(launch: Launch) -> str:
    certificates = certificates_of(launch.rank, config.read())
    if certificates is None:
        return "none; SHOAL_TLS=on encrypts what travels between machines"
    return f"TLS between machines, as rank {launch.rank}; its authority is good until {certificates.good_until}"


def _listens_on(launch: Launch, environ: Mapping[str, str]) -> str:
    interface = config.read(environ).interface
    if interface:
        return f"{_with_name(interface_address(interface))}, between machines (SHOAL_INTERFACE)"
    if launch.host is None or launch.size == 1:
        return f"no interface but {LOOPBACK}"
    host = launch.host
    address = _in_time(lambda: address_towards(host), f"look up {host}")
    if is_loopback(address):
        return f"{LOOPBACK}: all agents are on this machine"
    return f"{_with_name(address)}, the way to {host}; {LOOPBACK} if all agents are on this machine"


def _in_time(function: Callable[[], T], action: str) -> T:
    """Call what may take as long as a name server does. Raises ``TimeoutError`` (an ``OSError``)."""
    answer: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answer.put((function(), None))
        except (OSError, UnicodeError) as error:  # the second: no name can be written so
            answer.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    try:
        found, error = answer.get(timeout=LOOKUP_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"could not {action} in {LOOKUP_SECONDS:g} s") from None
    if error is not None:
        raise OSError(f"could not {action}: {error}") from error
    return cast(T, found)


def _with_name(address: str) -> str:
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ValueError):
            if address in (interface_address(name), interface_address(name, prefer_ipv6=True)):
                return f"{address} ({name})"
    return address


def _memory() -> str:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name.rstrip(":"): int(size) << 10 for name, size, *_ in lines}
    text = f"{sizes['MemTotal'] / 2**30:.1f} GiB, of which {sizes['MemAvailable'] / 2**30:.1f} available"
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError):
            limit = Path(name).read_text().strip()
            if limit.isdigit() and int(limit) < sizes["MemTotal"]:
                text += f"; this control group may use {int(limit) / 2**30:.1f} GiB"
    return text


def _shm() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return f"absent ({error.strerror})"
    return f"{usage.total / 2**30:.1f} GiB, of which {usage.free / 2**30:.1f} free"


def _chosen(setting: str) -> str:
    """The active value of a setting of transparent huge pages, which the file has in brackets."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage", setting).read_text()
    except OSError:
        return "not supported"
    return text.partition("[")[2].partition("]")[0] or text.strip()


def _limit(value: int, unit: int = 1, name: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value // unit} {name}".strip()
