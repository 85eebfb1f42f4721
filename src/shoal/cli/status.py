"""``shoal status``: the status of this user's agents on this machine, from the running agents."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..operations.timeouts import format_seconds
from .local_agents import STOPPED, Process, ask, find

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
        print(json.dumps([asdict(one) for one in found], indent=1))
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
    of_job = [replace(one, agents=tuple(agent for agent in one.agents if _is_of(agent, job))) for one in answers]
    return [one for one in of_job if one.agents]


def _is_of(agent: dict[str, Any], job: str) -> bool:
    return job in (agent["job"], agent["job"].rpartition(":")[2], agent["script"].partition(" ")[0], agent["script"])


def status_of(found: Iterable[Process]) -> int:
    """The exit status for the found processes."""
    silent = [bool(one.silent) for one in found]
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
        parts += _job(sorted(agents, key=lambda one: one["rank"]))
    parts += [_silent(one) for one in found if one.silent]
    parts += [
        Text(f"pid {one.pid} has {one.there - len(one.agents)} agents more, for which there was no room")
        for one in found
        if one.there > len(one.agents)
    ]
    return Group(*parts)


def _job(agents: list[dict[str, Any]]) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    first = agents[0]
    known = f"{len(agents)} of {first['size']} agents" if first["size"] > 1 else "one agent"
    script = f" of {_plain(first['script'])}" if first["script"] else ""
    began = min(one["since"] for one in agents)
    ago = _duration(time.time() - began)
    head = f"{known}{script}, job {_plain(first['job'])}, started {_time(began)} ({ago} ago)"
    lines: list[RenderableType] = [Text(head, "bold")]
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "pid", "host", "up", "what it does", "steps", "calls", "sent", "ended last"):
        right = name in ("rank", "pid", "up", "steps", "calls", "sent")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for one in agents:
        table.add_row(*map(Text, _row(one)))
    lines.append(table)
    lost = sorted({rank for one in agents for rank in one.get("lost", ())})
    if lost:
        lines.append(Text(f"lost: rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"))
    lines += [Text(f"rank {one['rank']}: {_plain(one['over'])}") for one in agents if one.get("over")]
    return lines


def _row(one: dict[str, Any]) -> list[str]:
    who = [str(one["rank"]), str(one["pid"]), _plain(one["host"]), _duration(time.time() - one["since"])]
    if "waiting" not in one:
        return [*who, "handles messages, and has no time to say more", "", "", "", ""]
    ended = f"{_plain(one['ended'])}, {format_seconds(one['seconds_ago'])} ago" if one["ended"] else ""
    return [*who, _doing(one), _steps(one), str(one["calls"]), _bytes(one["bytes_sent"]), ended]


def _doing(one: dict[str, Any]) -> str:
    """A short description of an agent's work."""
    if one["agrees_with"]:
        return f"an agent was lost; waits for ranks {_ranks(one['agrees_with'])} to say that they know"
    if not one["waiting"]:
        return "waits, and not for others" if one["stands_still"] else "runs its script"
    first = one["waiting"][0]
    more = f", and in {one['waits_in'] - 1} more" if one["waits_in"] > 1 else ""
    whom = f" for rank{'s' if len(first['ranks']) > 1 else ''} {_ranks(first['ranks'])}" if first["ranks"] else ""
    what = f"{_plain(first['call'])}{whom}"
    since = format_seconds(first["seconds"])
    if one["stands_still"]:
        return f"waits since {since} in {what}{more}"
    return f"runs its script; since {since} under way: {what}{more}"


def _steps(one: dict[str, Any]) -> str:
    steps = one["steps"]
    if not steps:
        return ""
    return str(max(steps.values()))


def _silent(one: Process) -> RenderableType:
    from rich.text import Text

    who = f"pid {one.pid}" if one.rank is None else f"rank {one.rank} (pid {one.pid})"
    why = one.silent if one.state not in STOPPED else f"{one.silent}: continue it with kill -CONT {one.pid}"
    return Text(f"{who}: {why}; its process is {one.state}", "bold red")


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


def _bytes(count: int) -> str:
    return next((f"{count / unit:.3g} {name}" for unit, name in _UNITS if count >= unit), f"{count} B")


def _interval(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 s and a day")
    return value
