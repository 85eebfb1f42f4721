"""The output of ``shoal report`` for a run with ``SHOAL_RECORD=folder``: the membership over time, as a table and a
picture.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..observability.membership_log import CAME, LEFT, MembershipEvent, read

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
    coming = sorted((one for one in entries if one.what == CAME), key=lambda one: (one.rank, one.at))
    for one, after in zip(coming, [*coming[1:], None], strict=True):
        until = after.at if after is not None and after.rank == one.rank else float("inf")
        own = [
            other
            for other in entries  # a restarted job has several of one incarnation
            if (other.rank, other.incarnation) == (one.rank, one.incarnation) and one.at <= other.at < until
        ]
        entered = one.at if one.alive != (one.rank,) or not one.incarnation else None
        if entered is None:
            entered = next((other.at for other in own if one.rank in other.entered), None)
        inside = one.at if entered is None else entered
        left = next((other.at for other in own if other.what == LEFT), None)
        lost = next((other.at for other in entries if one.rank in other.lost and inside < other.at <= until), None)
        if lost is not None and (left is None or lost < left):
            left, was_lost = lost, True
        else:
            was_lost = left is None and until < float("inf")
            left = until if was_lost else left
        shift = [None if at is None else at - start for at in (entered, left)]
        found.append(Stay(one.rank, one.at - start, shift[0], shift[1], was_lost))
    return found


def tell(folder: Path, picture: str) -> None:
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

        figure = Figure(figsize=(9, 1.5 + 0.35 * len({one.rank for one in found})), layout="constrained")
        draw(figure.subplots(), found, entries[-1].at - entries[0].at)
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=150)
        print(f"drawn: {picture}")


def _print(entries: list[MembershipEvent], found: list[Stay]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("second", "lost", "entered", "there then", box=None)
    reported: dict[tuple[Any, ...], float] = {}
    for one in entries:
        what = one.lost, one.entered, one.alive
        news = (*one.lost, *(rank for rank in one.entered if len(one.entered) == 1))
        if news and one.at > reported.get(what, 0.0) + AT_ONCE:  # each agent records it
            reported[what] = one.at
            ranks = [", ".join(map(str, ranks)) for ranks in (one.lost, one.entered)]
            table.add_row(f"{one.at - entries[0].at:.1f}", *ranks, f"{len(one.alive)} of {_most(entries)}")
    lost = [one for one in found if one.was_lost]
    back = [
        (one.entered or 0.0) - (before.ended or 0.0)
        for before, one in pairwise(found)
        if before.rank == one.rank and before.was_lost and one.entered is not None
    ]
    console = Console()
    console.print(table)
    text = f"lost: {len(lost)}; came back: {len(back)}"
    console.print(f"{text}, {statistics.median(back):.1f} s later (median; at most {max(back):.1f})" if back else text)


def _most(entries: list[MembershipEvent]) -> int:
    return max(len(one.alive) for one in entries)


def draw(axes: Any, found: list[Stay], seconds: float) -> None:
    """A line for each rank: dark while it was a member, light while it waited to be admitted, a cross when it was
    lost.
    """
    for one in found:
        ended = seconds if one.ended is None else one.ended
        entered = ended if one.entered is None else one.entered
        axes.barh(one.rank, entered - one.came, left=one.came, height=0.5, color=COMING)
        axes.barh(one.rank, ended - entered, left=entered, height=0.5, color=IN)
        if one.was_lost:
            axes.plot(ended, one.rank, "x", color="#d62728", markersize=7, markeredgewidth=2)
    axes.barh(0, 0, color=IN, label="member")
    axes.barh(0, 0, color=COMING, label="waits to be admitted")
    axes.plot([], [], "x", color="#d62728", markersize=7, markeredgewidth=2, label="lost")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9)
    axes.set_title("membership of each agent over time", loc="left", fontsize=11, pad=28)
    axes.set_yticks(sorted({one.rank for one in found}))
    axes.set_ylabel("rank")
    axes.set_xlabel("seconds since the start")
    axes.set_xlim(0, seconds)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
