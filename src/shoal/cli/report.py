"""``shoal report``: a report from a run's files. From traces (SHOAL_TIMELINE): slow agents and their causes; from
membership logs (SHOAL_RECORD): the membership over time. The files in the folder decide; with both, it reports both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..observability.breakdown import KINDS
from ..observability.findings import Typical, size_of, sizes, small_messages
from ..observability.membership_log import CAME, LEFT, MembershipEvent, read
from ..observability.run_files import kinds_in
from ..observability.run_report import RunReport, draw_breakdown
from ..observability.traces import names_of
from .status import bytes_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="the folder that SHOAL_TIMELINE or SHOAL_RECORD named in the run")
    parser.add_argument("--picture", default="", metavar="FILE", help="draw it as well, such as run.png (matplotlib)")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"where the one trace of all agents goes (FOLDER/{MERGED}); empty: nowhere",
    )
    parser.add_argument("--steps", action="store_true", help="also list every step of every agent")


def run(args: argparse.Namespace) -> int:
    """Tell what is there, and draw it."""
    folder = Path(args.folder)
    try:
        of_traces, of_records = kinds_in(folder)
        if of_records:
            picture = _beside(args.picture) if args.picture and of_traces else args.picture
            report_membership(folder, picture)
        if of_traces:
            report_traces(folder, args.picture, args.output, every_step=args.steps)
    except (OSError, ValueError) as error:
        print(f"shoal report: error: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print("shoal report: error: a picture needs matplotlib: pip install shoal[demo]", file=sys.stderr)
        return 2
    return 0


def _beside(picture: str) -> str:
    """Another name, for the picture of the membership, if there are two pictures."""
    path = Path(picture)
    return str(path.with_name(f"{path.stem}-members{path.suffix}"))


MERGED = "merged.json"
_VIEWER = "https://ui.perfetto.dev"


def report_traces(folder: Path, picture: str, output: str | None, *, every_step: bool = False) -> None:
    """Read a folder of traces, and print, write and draw the report.

    Raises:
        FileNotFoundError, ValueError: There is no trace.
        OSError: A file cannot be written.
        ImportError: A picture is requested, but matplotlib is not installed.
    """
    from rich.console import Console

    report = RunReport.of(folder)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for line in _inventory(report):
        console.print(line, markup=False)
    console.print(_table(report))
    if every_step:
        console.print(_steps(report))
    console.print("\nWhat stands out, and what would help", style="bold")
    for number, finding in enumerate(report.findings, 1):
        console.print(f"{number}. {finding.what}.", markup=False)
        console.print(f"   -> {finding.advice}.", markup=False)
    _print_messages(report, console)
    _print_ends(report, console)
    if output != "":
        path = folder / MERGED if output is None else Path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrows = report.merge(path)
        console.print(f"written: {path}, one trace with {arrows} arrows; open it in {_VIEWER}", markup=False)
    if picture:
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        draw_breakdown(report, Path(picture))
        console.print(f"drawn: {picture}", markup=False)


def _inventory(report: RunReport) -> list[str]:
    """The agents with traces, the agents without, and the clocks."""
    found = report.found
    hosts = sorted({trace.host for trace in found.traces})
    agents = len({trace.rank for trace in found.traces})
    size = max(trace.size for trace in found.traces) or agents
    on = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} machines"
    lines = [f"traces of {agents} of {size} agents, {on}"]
    if found.missing:
        missing = ", ".join(map(str, found.missing))
        lines.append(f"  none of rank{'s' if len(found.missing) > 1 else ''} {missing}, so their activity is not known")
    torn = ", ".join(name for trace, name in zip(found.traces, names_of(found.traces), strict=True) if trace.torn)
    if torn:
        lines.append(f"  those of ranks {torn} end in the middle: the agents were killed, or run still")
    if found.others:
        names = ", ".join(sorted(trace.path.name for trace in found.others))
        lines.append(f"  of other runs, and left out: {names}")
    lines += [f"  left out: {skipped}" for skipped in found.skipped]
    reported = set()
    for clock in report.clocks:
        if clock.host in reported or (not clock.messages and clock.uncertain is not None):
            continue
        reported.add(clock.host)
        if clock.uncertain is None:
            lines.append(
                f"  the clock of {clock.host} is not corrected: no messages went both ways between it and others"
            )
        else:
            drift = f", growing by {clock.drift / 1e3:+.3g} us a second" if clock.drift else ""
            lines.append(
                f"  the clock of {clock.host} is {clock.ahead / 1e6:+.3f} ms ahead{drift}, give or take "
                f"{clock.uncertain / 1e6:.3f} ms, by {clock.messages} messages; corrected"
            )
    if report.has_steps:
        steps = max(agent.steps for agent in report.typical)
        lines.append(f"a step of {report.optimizer!r}, the mean of {steps}, the first left out:")
    else:
        lines.append("no optimizer of Shoal's has marked steps: of the whole run")
    return lines


def _table(report: RunReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    unit, scale = ("ms", 1e3) if report.has_steps else ("s", 1.0)
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "host", unit, *KINDS):
        table.add_column(name, justify="left" if name == "host" else "right")
    for agent in report.typical:
        table.add_row(agent.name, Text(agent.host), f"{scale * agent.length:.2f}", *_parts(agent))
    return table


def _parts(agent: Typical) -> list[str]:
    return [f"{agent.into[kind] / agent.length:.1%}" if agent.length else "" for kind in KINDS]


def _steps(report: RunReport) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("rank", "step", "ms", *(f"{kind}, ms" for kind in KINDS)):
        table.add_column(name, justify="right")
    names = names_of(report.traces)
    for share in report.shares:
        times = (share.length, *(share.into[kind] for kind in KINDS))
        table.add_row(names[share.trace], str(share.number), *(f"{nanoseconds / 1e6:.3f}" for nanoseconds in times))
    return table


def _print_messages(report: RunReport, console: Console) -> None:
    by_size = sizes(report.flows)
    count, nbytes = (sum(counts[k] for counts in by_size.values()) for k in (0, 1))
    control = [flow.sent.nbytes for flow in report.flows if flow.sent.coordinates]
    if control:
        console.print(f"{len(control)} messages that only coordinate, {bytes_text(sum(control))}", markup=False)
    if not count:
        return
    shares = ", ".join(
        f"{many / count:.0%} below {size_of(limit)} ({total / max(1, nbytes):.0%} of the bytes)"
        for limit, (many, total) in by_size.items()
    )
    console.print(f"{count} messages, {bytes_text(nbytes)}: {shares}", markup=False)
    word = small_messages(report.flows, max((agent.steps for agent in report.typical), default=1))
    if word and report.has_steps:
        console.print(f"   -> {word}.", markup=False)
    for link in sorted(report.links, key=lambda link: link.rate)[:3]:
        between = f"{link.hosts[0]} to {link.hosts[1]}"
        console.print(f"link {link.source} -> {link.destination} ({between}): {link.rate / 1e6:.3g} MB/s", markup=False)
    if len(report.links) > 3:
        fastest = max(link.rate for link in report.links) / 1e6
        console.print(f"and {len(report.links) - 3} links more, up to {fastest:.3g} MB/s", markup=False)


def _print_ends(report: RunReport, console: Console) -> None:
    begins = min(trace.start for trace in report.traces)
    losses = {(loss.rank, loss.how, loss.cause): loss.at for trace in report.traces for loss in trace.losses[::-1]}
    for (rank, how, cause), at in sorted(losses.items(), key=lambda item: item[1]):
        if how == "died":
            console.print(f"rank {rank} was lost at second {(at - begins) / 1e9:.1f}: {cause}", markup=False)
    for trace, call in report.unended:
        since = (trace.end - call.start) / 1e9
        call_text = f"{call.operation} {call.name.removeprefix('~')!r} round {call.round}"
        console.print(f"the trace of rank {trace.rank} ends in {call_text}, {since:.3g} s after it began", markup=False)


AT_ONCE = 2.0
"""Seconds in which all agents write down one change."""
IN, COMING = "#1f77b4", "#c7d9ea"


@dataclass(frozen=True)
class Stay:
    """One agent's time in a run, in seconds since it began.

    Attributes:
        came: When it was started. ``entered``: when it was admitted; equal to ``came`` for initial agents, None if it
            never was.
        ended: When it was lost, or left; None: it was a member at the end of the log.
        was_lost: The agent did not shut down properly.
    """

    rank: int
    came: float
    entered: float | None
    ended: float | None
    was_lost: bool


def stays(entries: list[MembershipEvent]) -> list[Stay]:
    """The stays of all agents, by rank and time."""
    start = entries[0].at
    found = []
    coming = sorted(
        (arrival for arrival in entries if arrival.what == CAME), key=lambda arrival: (arrival.rank, arrival.at)
    )
    for arrival, after in zip(coming, [*coming[1:], None], strict=True):
        until = after.at if after is not None and after.rank == arrival.rank else float("inf")
        own = [
            other
            for other in entries  # a restarted job has several of one incarnation
            if (other.rank, other.incarnation) == (arrival.rank, arrival.incarnation) and arrival.at <= other.at < until
        ]
        entered = arrival.at if arrival.alive != (arrival.rank,) or not arrival.incarnation else None
        if entered is None:
            entered = next((other.at for other in own if arrival.rank in other.entered), None)
        inside = arrival.at if entered is None else entered
        ended = next((other.at for other in own if other.what == LEFT), None)
        lost = next((other.at for other in entries if arrival.rank in other.lost and inside < other.at <= until), None)
        if lost is not None and (ended is None or lost < ended):
            ended, was_lost = lost, True
        else:
            was_lost = ended is None and until < float("inf")
            ended = until if was_lost else ended
        shift = [None if at is None else at - start for at in (entered, ended)]
        found.append(Stay(arrival.rank, arrival.at - start, shift[0], shift[1], was_lost))
    return found


def report_membership(folder: Path, picture: str) -> None:
    """Print the events, and draw them.

    Raises:
        FileNotFoundError, ValueError: The folder has no membership log.
        ImportError: A picture is requested, but matplotlib is not installed.
    """
    entries = read(folder)
    found = stays(entries)
    _print(entries, found)
    if picture:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1.5 + 0.35 * len({stay.rank for stay in found})), layout="constrained")
        draw(figure.subplots(), found, entries[-1].at - entries[0].at)
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=150)
        print(f"drawn: {picture}")


def _print(entries: list[MembershipEvent], found: list[Stay]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("second", "lost", "entered", "there then", box=None)
    most = max(len(event.alive) for event in entries)
    reported: dict[tuple[Any, ...], float] = {}
    for event in entries:
        change = event.lost, event.entered, event.alive
        # An admitted agent lists all members that it has met; the members' entries have the change.
        is_news = bool(event.lost or event.entered) and event.rank not in event.entered
        if is_news and event.at > reported.get(change, 0.0) + AT_ONCE:  # each agent records it
            reported[change] = event.at
            ranks = [", ".join(map(str, ranks)) for ranks in (event.lost, event.entered)]
            table.add_row(f"{event.at - entries[0].at:.1f}", *ranks, f"{len(event.alive)} of {most}")
    lost = [stay for stay in found if stay.was_lost]
    back = [
        (stay.entered or 0.0) - (before.ended or 0.0)
        for before, stay in pairwise(found)
        if before.rank == stay.rank and before.was_lost and stay.entered is not None
    ]
    console = Console()
    console.print(table)
    text = f"lost: {len(lost)}; came back: {len(back)}"
    console.print(f"{text}, {statistics.median(back):.1f} s later (median; at most {max(back):.1f})" if back else text)


def draw(axes: Any, found: list[Stay], seconds: float) -> None:
    """A line for each rank: dark while it was a member, light while it waited to be admitted, a cross when it was
    lost.
    """
    for stay in found:
        ended = seconds if stay.ended is None else stay.ended
        entered = ended if stay.entered is None else stay.entered
        axes.barh(stay.rank, entered - stay.came, left=stay.came, height=0.5, color=COMING)
        axes.barh(stay.rank, ended - entered, left=entered, height=0.5, color=IN)
        if stay.was_lost:
            axes.plot(ended, stay.rank, "x", color="#d62728", markersize=7, markeredgewidth=2)
    axes.barh(0, 0, color=IN, label="member")
    axes.barh(0, 0, color=COMING, label="waits to be admitted")
    axes.plot([], [], "x", color="#d62728", markersize=7, markeredgewidth=2, label="lost")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9)
    axes.set_title("membership of each agent over time", loc="left", fontsize=11, pad=28)
    axes.set_yticks(sorted({stay.rank for stay in found}))
    axes.set_ylabel("rank")
    axes.set_xlabel("seconds since the start")
    axes.set_xlim(0, seconds)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
