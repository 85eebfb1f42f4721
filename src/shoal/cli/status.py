"""``shoal status``: the status of this user's agents on this machine, from the running agents.

The command finds the agents of this user on this machine, and queries all of them in parallel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..clock import format_seconds
from ..errors import NONSENSE
from ..rendezvous.launch import detect
from ..transport.addresses import connect
from ..transport.authentication import HELLO_SIZE, MAGIC
from ..transport.status_socket import MOST_BYTES, PACKET_BYTES, QUESTION

if TYPE_CHECKING:
    from rich.console import RenderableType

ALL_ANSWERED, SOME_DID_NOT, NONE_FOUND = 0, 1, 2
"""The exit status."""
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The exit status is 0 if all agents answered, 1 if some did not (their processes are stopped, hung, or busy in "
        "something that lets no thread of Python run), and 2 if there are none."
    )
    parser.add_argument("pids", nargs="*", type=int, metavar="PID", help="only these processes")
    parser.add_argument(
        "--job",
        metavar="JOB",
        help="only the agents of this job: its name as this command prints it, the pid in that, or the script's name",
    )
    parser.add_argument("--json", action="store_true", help="print what was found as one JSON array, a process each")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=1.0,
        metavar="SECONDS",
        help="repeat every SECONDS (1), until Ctrl-C",
    )


def run(args: argparse.Namespace) -> int:
    """Find them, ask them, and print what they say."""
    if args.watch is not None and args.json:
        print("shoal status: error: --watch is for people, --json for programs: give one of them", file=sys.stderr)
        return NONE_FOUND
    if args.watch is not None:
        return _watch(args.pids, args.job, args.watch)
    found = look(args.pids, args.job)
    if args.json:
        print(json.dumps([asdict(process) for process in found], indent=1))
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 160).print(rendered(found, args.pids, args.job))
    return status_of(found)


def look(pids: Sequence[int], job: str | None = None) -> list[Process]:
    """The processes that have agents, or those of these that do; of one job, those that answer."""
    found = find()
    answers = ask({pid: listeners for pid, listeners in found.items() if not pids or pid in pids})
    if job is None:
        return answers
    of_job = [
        replace(process, agents=tuple(agent for agent in process.agents if _is_of(agent, job))) for process in answers
    ]
    return [process for process in of_job if process.agents]


def _is_of(agent: dict[str, Any], job: str) -> bool:
    return job in (agent["job"], agent["job"].rpartition(":")[2], agent["script"].partition(" ")[0], agent["script"])


def status_of(found: Iterable[Process]) -> int:
    """The exit status for the found processes."""
    silent = [bool(process.silent) for process in found]
    return NONE_FOUND if not silent else SOME_DID_NOT if any(silent) else ALL_ANSWERED


def _watch(pids: Sequence[int], job: str | None, interval: float) -> int:
    from rich.live import Live

    found = look(pids, job)
    try:
        with Live(rendered(found, pids, job), auto_refresh=False, screen=False) as live:
            while True:
                time.sleep(interval)
                found = look(pids, job)
                live.update(rendered(found, pids, job), refresh=True)
    except KeyboardInterrupt:
        return status_of(found)


def rendered(found: Sequence[Process], pids: Sequence[int] = (), job: str | None = None) -> RenderableType:
    """The found processes, formatted for people."""
    from rich.console import Group
    from rich.text import Text

    if not found:
        which = f" in the processes {', '.join(map(str, pids))}" if pids else " on this machine"
        which = which if job is None else f" of the job {job}{which}"
        return Text(
            f"there are no agents of this user{which}. (They are found from the end of shoal.init() on; those of other "
            "users, and of other containers, are not.)"
        )
    jobs: dict[str, list[dict[str, Any]]] = {}
    for process in found:
        for agent in process.agents:
            jobs.setdefault(agent["job"], []).append(agent | {"pid": process.pid})
    parts: list[RenderableType] = []
    for agents in jobs.values():
        parts += _job(sorted(agents, key=lambda agent: agent["rank"]))
    parts += [_silent(process) for process in found if process.silent]
    parts += [
        Text(f"pid {process.pid} has {process.there - len(process.agents)} agents more, for which there was no room")
        for process in found
        if process.there > len(process.agents)
    ]
    return Group(*parts)


def _job(agents: list[dict[str, Any]]) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    first = agents[0]
    known = f"{len(agents)} of {first['size']} agents" if first["size"] > 1 else "one agent"
    script = f" of {_plain(first['script'])}" if first["script"] else ""
    began = min(agent["since"] for agent in agents)
    ago = _duration(time.time() - began)
    head = f"{known}{script}, job {_plain(first['job'])}, started {_time(began)} ({ago} ago)"
    lines: list[RenderableType] = [Text(head, "bold")]
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "pid", "host", "up", "what it does", "steps", "calls", "sent", "ended last"):
        right = name in ("rank", "pid", "up", "steps", "calls", "sent")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for agent in agents:
        table.add_row(*map(Text, _row(agent)))
    lines.append(table)
    lost = sorted({rank for agent in agents for rank in agent.get("lost", ())})
    if lost:
        lines.append(Text(f"lost: rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"))
    lines += [Text(f"rank {agent['rank']}: {_plain(agent['over'])}") for agent in agents if agent.get("over")]
    return lines


def _row(agent: dict[str, Any]) -> list[str]:
    who = [str(agent["rank"]), str(agent["pid"]), _plain(agent["host"]), _duration(time.time() - agent["since"])]
    if "waiting" not in agent:
        return [*who, "handles messages, and has no time to say more", "", "", "", ""]
    ended = f"{_plain(agent['ended'])}, {format_seconds(agent['seconds_ago'])} ago" if agent["ended"] else ""
    steps = str(max(agent["steps"].values(), default=""))
    return [*who, _doing(agent), steps, str(agent["calls"]), bytes_text(agent["bytes_sent"]), ended]


def _doing(agent: dict[str, Any]) -> str:
    """A short description of an agent's work."""
    if agent["agrees_with"]:
        return f"an agent was lost; waits for ranks {_ranks(agent['agrees_with'])} to acknowledge it"
    if not agent["waiting"]:
        return "waits, and not for others" if agent["stands_still"] else "runs its script"
    first = agent["waiting"][0]
    more = f", and in {agent['waits_in'] - 1} more" if agent["waits_in"] > 1 else ""
    for_ranks = f" for rank{'s' if len(first['ranks']) > 1 else ''} {_ranks(first['ranks'])}" if first["ranks"] else ""
    call = f"{_plain(first['call'])}{for_ranks}"
    since = format_seconds(first["seconds"])
    if agent["stands_still"]:
        return f"has waited {since} in {call}{more}"
    return f"runs its script; {call} has been in progress for {since}{more}"


def _silent(process: Process) -> RenderableType:
    from rich.text import Text

    who = f"pid {process.pid}" if process.rank is None else f"rank {process.rank} (pid {process.pid})"
    why = (
        process.silent
        if process.state not in STOPPED
        else f"{process.silent}: continue it with kill -CONT {process.pid}"
    )
    return Text(f"{who}: {why}; its process is {process.state}", "bold red")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _plain(text: str) -> str:
    """Text of an agent in a printable form: scripts choose names, and terminals obey some characters."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _time(seconds: float) -> str:
    """The time of day, with the date where it is not today's."""
    at = time.localtime(seconds)
    return time.strftime("%H:%M:%S" if at[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M:%S", at)


def _duration(count: float) -> str:
    minutes, rest = divmod(max(0, round(count)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bytes_text(count: int) -> str:
    """A number of bytes in three digits and a unit, with prefixes of 1000."""
    return next((f"{count / unit:.3g} {name}" for unit, name in _UNITS if count >= unit), f"{count} B")


def _interval(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 s and a day")
    return value


PROC = Path("/proc")
WITHIN_SECONDS = 1.5
"""The limit for an answer."""
_SOCKET = re.compile(r"/shoal-[^/]+/socket( \(deleted\))?$")
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a device",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
    "I": "idle",
}
STOPPED = (_STATES["T"], _STATES["t"])


@dataclass(frozen=True)
class Process:
    """A process with agents.

    Attributes:
        pid: Its process ID.
        state: Its state in the kernel.
        rank: The rank of its agent, from its answer or from its launcher's variables; None if unknown.
        agents: Their status, in the form of :meth:`~shoal.engine.agent_status.StatusReporter.as_json`.
        there: The number of agents.
        silent: The reason for missing status; empty if they have answered.
    """

    pid: int
    state: str
    rank: int | None
    agents: tuple[dict[str, Any], ...] = ()
    there: int = 0
    silent: str = ""


def find() -> dict[int, list[str]]:
    """The processes of this user that have agents, and the paths at which they can be asked."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (listeners := _listeners(entry)):
            found[int(entry.name)] = listeners
    return found


def _listeners(process: Path) -> list[str]:
    found = []
    with contextlib.suppress(OSError):  # it has ended since, or is another user's
        if process.stat().st_uid != os.getuid():
            return []
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if _SOCKET.search(os.readlink(entry)):  # noqa: PTH115 - what a descriptor leads to may be no path
                    found.append(str(entry))
    return sorted(found)


def ask(processes: Mapping[int, Iterable[str]], within: float = WITHIN_SECONDS) -> list[Process]:
    """Ask them, all at the same time, and wait for so many seconds at most."""
    questions = {pid: _StatusQuery(paths) for pid, paths in processes.items()}
    limit = time.monotonic() + within
    with selectors.DefaultSelector() as selector:
        for query in questions.values():
            query.begin(selector)
        while selector.get_map() and (rest := limit - time.monotonic()) > 0:
            for key, _ in selector.select(rest):
                key.data.receive(selector)
    ranks = {pid: rank for query in questions.values() for agent in query.agents for rank, pid in agent.get("here", ())}
    found = []
    for pid, query in sorted(questions.items()):
        query.end()
        state = _state(pid)
        if state is None and not query.agents:
            continue  # it ended before the query
        rank = ranks.get(pid, _rank(pid))
        found.append(Process(pid, state or _STATES["X"], rank, tuple(query.agents), query.there, query.silent))
    return found


class _StatusQuery:
    """One process that is asked."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.agents: list[dict[str, Any]] = []
        self.there = 0
        self.silent = "it does not answer"
        self._paths = iter(paths)
        self._sock: socket.socket | None = None
        self._packets: list[bytes] = []
        self._greeted = False

    def begin(self, selector: selectors.BaseSelector) -> None:
        """Connect, where that works."""
        for path in self._paths:
            try:
                self._sock = connect(path)
            except OSError as error:
                self.silent = f"it cannot be asked ({error.strerror or error})"
                continue
            self.silent = "it does not answer"
            selector.register(self._sock, selectors.EVENT_READ, self)
            return

    def receive(self, selector: selectors.BaseSelector) -> None:
        """Read the received data."""
        sock = self._sock
        assert sock is not None
        try:
            packet = sock.recv(max(PACKET_BYTES, HELLO_SIZE))
            if packet and not self._greeted:
                if not packet.startswith(MAGIC):
                    raise ValueError
                self._greeted = True
                sock.send(QUESTION)
                return
            if packet:
                self._packets.append(packet)
                if sum(map(len, self._packets)) > 2 * MOST_BYTES:
                    raise ValueError
                return
            if self._packets:
                self.there, self.agents = _read(b"".join(self._packets))
                self.silent = ""
        except BlockingIOError:
            return
        except OSError as error:
            self.silent = f"it cannot be asked ({error.strerror or error})"
        except NONSENSE:
            self.silent = "its answer is invalid: is it of another version of Shoal?"
        selector.unregister(sock)
        if self.silent and not self._packets:  # it has no place just now, or another of its agents knows more
            self.end()
            self._greeted = False
            self.begin(selector)

    def end(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


_TYPES: dict[str, tuple[type, ...]] = {
    "rank": (int,),
    "size": (int,),
    "host": (str,),
    "job": (str,),
    "script": (str,),
    "since": (int, float),
}
_MORE_TYPES: dict[str, tuple[type, ...]] = {
    "waiting": (list,),
    "stands_still": (bool,),
    "agrees_with": (list,),
    "ended": (str,),
    "seconds_ago": (int, float),
    "waits_in": (int,),
    "lost": (list,),
    "over": (str,),
    "here": (list,),
    "steps": (dict,),
    "stepped_ago": (int, float, type(None)),
    "calls": (int,),
    "bytes_sent": (int,),
}


def _read(text: bytes) -> tuple[int, list[dict[str, Any]]]:
    """The number of agents, and their status. ValueError, TypeError or KeyError if the data is malformed."""
    content = json.loads(text)
    agents = content["agents"]
    for agent in agents:
        busy = "waiting" not in agent
        for name, types in (_TYPES if busy else _TYPES | _MORE_TYPES).items():
            if not isinstance(agent[name], types):
                raise ValueError(name)
        for wait in () if busy else agent["waiting"]:
            if not isinstance(wait["call"], str) or not all(isinstance(rank, int) for rank in wait["ranks"]):
                raise ValueError("waiting")
            float(wait["seconds"])
        for rank, pid in agent.get("here", ()):
            if not isinstance(rank, int) or not isinstance(pid, int):
                raise ValueError("here")
    return int(content["there"]), list(agents)


def _state(pid: int) -> str | None:
    """The kernel's state of a process; None if it does not exist."""
    try:
        letter = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return _STATES.get(letter, letter)


def _rank(pid: int) -> int | None:
    """The rank in a process's environment, set by its launcher."""
    try:
        environ = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
        launch = detect(dict(variable.split("=", 1) for variable in environ if "=" in variable))
    except (OSError, ValueError):
        return None
    return None if launch.launcher == "none" else launch.rank
