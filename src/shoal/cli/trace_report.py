"""The output of ``shoal report`` for a folder of traces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..observability.breakdown import KINDS
from ..observability.findings import Typical, size_of, sizes, small_messages
from ..observability.run_report import RunReport
from ..observability.traces import names_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MERGED = "merged.json"
_VIEWER = "https://ui.perfetto.dev"


def tell(folder: Path, picture: str, output: str | None, *, every_step: bool = False) -> None:
    """Read a folder of traces, and print, write and draw the report.

    Raises:
        FileNotFoundError, ValueError: There is no trace.
        OSError: A file cannot be written.
        ImportError: A picture is requested, but matplotlib is not installed.
    """
    from rich.console import Console

    report = RunReport.of(folder)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for line in _what_there_is(report):
        console.print(line, markup=False)
    console.print(_table(report))
    if every_step:
        console.print(_steps(report))
    console.print("\nWhat stands out, and what would help", style="bold")
    for number, one in enumerate(report.findings, 1):
        console.print(f"{number}. {one.what}.", markup=False)
        console.print(f"   -> {one.advice}.", markup=False)
    _tell_messages(report, console)
    _tell_ends(report, console)
    if output != "":
        path = folder / MERGED if output is None else Path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrows = report.merge(path)
        console.print(f"written: {path}, one trace with {arrows} arrows; open it in {_VIEWER}", markup=False)
    if picture:
        from ..observability.breakdown_picture import draw

        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        draw(report, Path(picture))
        console.print(f"drawn: {picture}", markup=False)


def _what_there_is(report: RunReport) -> list[str]:
    """The agents with traces, the agents without, and the clocks."""
    found = report.found
    hosts = sorted({one.host for one in found.traces})
    agents = len({one.rank for one in found.traces})
    size = max(one.size for one in found.traces) or agents
    on = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} machines"
    lines = [f"traces of {agents} of {size} agents, {on}"]
    if found.missing:
        missing = ", ".join(map(str, found.missing))
        lines.append(f"  none of rank{'s' if len(found.missing) > 1 else ''} {missing}, so what they did is not known")
    torn = ", ".join(name for one, name in zip(found.traces, names_of(found.traces), strict=True) if one.torn)
    if torn:
        lines.append(f"  those of ranks {torn} end in the middle: the agents were killed, or run still")
    if found.others:
        names = ", ".join(sorted(one.path.name for one in found.others))
        lines.append(f"  of other runs, and left out: {names}")
    lines += [f"  left out: {one}" for one in found.skipped]
    told = set()
    for clock in report.clocks:
        if clock.host in told or (not clock.messages and clock.uncertain is not None):
            continue
        told.add(clock.host)
        if clock.uncertain is None:
            lines.append(f"  the clock of {clock.host} is believed: no messages went both ways between it and others")
        else:
            drift = f", growing by {clock.drift / 1e3:+.3g} us a second" if clock.drift else ""
            lines.append(
                f"  the clock of {clock.host} is {clock.ahead / 1e6:+.3f} ms ahead{drift}, give or take "
                f"{clock.uncertain / 1e6:.3f} ms, by {clock.messages} messages; corrected"
            )
    if report.has_steps:
        steps = max(one.steps for one in report.typical)
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
    for one in report.typical:
        table.add_row(one.name, Text(one.host), f"{scale * one.length:.2f}", *_parts(one))
    return table


def _parts(one: Typical) -> list[str]:
    return [f"{one.into[kind] / one.length:.1%}" if one.length else "" for kind in KINDS]


def _steps(report: RunReport) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("rank", "step", "ms", *(f"{kind}, ms" for kind in KINDS)):
        table.add_column(name, justify="right")
    names = names_of(report.traces)
    for one in report.shares:
        times = (one.length, *(one.into[kind] for kind in KINDS))
        table.add_row(names[one.trace], str(one.number), *(f"{nanoseconds / 1e6:.3f}" for nanoseconds in times))
    return table


def _tell_messages(report: RunReport, console: Console) -> None:
    by_size = sizes(report.flows)
    count, nbytes = (sum(one[k] for one in by_size.values()) for k in (0, 1))
    control = [flow.sent.nbytes for flow in report.flows if flow.sent.coordinates]
    if control:
        console.print(f"{len(control)} messages that only coordinate, {_bytes(sum(control))}", markup=False)
    if not count:
        return
    told = ", ".join(
        f"{many / count:.0%} below {size_of(limit)} ({total / max(1, nbytes):.0%} of the bytes)"
        for limit, (many, total) in by_size.items()
    )
    console.print(f"{count} messages, {_bytes(nbytes)}: {told}", markup=False)
    word = small_messages(report.flows, max((one.steps for one in report.typical), default=1))
    if word and report.has_steps:
        console.print(f"   -> {word}.", markup=False)
    for one in sorted(report.links, key=lambda link: link.rate)[:3]:
        between = f"{one.hosts[0]} to {one.hosts[1]}"
        console.print(f"link {one.source} -> {one.destination} ({between}): {one.rate / 1e6:.3g} MB/s", markup=False)
    if len(report.links) > 3:
        fastest = max(one.rate for one in report.links) / 1e6
        console.print(f"and {len(report.links) - 3} links more, up to {fastest:.3g} MB/s", markup=False)


def _tell_ends(report: RunReport, console: Console) -> None:
    begins = min(one.start for one in report.traces)
    losses = {(one.rank, one.how, one.cause): one.at for trace in report.traces for one in trace.losses[::-1]}
    for (rank, how, cause), at in sorted(losses.items(), key=lambda one: one[1]):
        if how == "died":
            console.print(f"rank {rank} was lost at second {(at - begins) / 1e9:.1f}: {cause}", markup=False)
    for trace, call in report.unended:
        since = (trace.end - call.start) / 1e9
        what = f"{call.operation} {call.name.removeprefix('~')!r} round {call.round}"
        console.print(f"the trace of rank {trace.rank} ends in {what}, {since:.3g} s after it began", markup=False)


def _bytes(count: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"
