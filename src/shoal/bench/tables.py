"""The measurements as tables for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .figures import Figures
from .picture import LABELS, band
from .verdicts import MIB, Row

_STYLES = {"met": "green", "not met": "bold red"}
_COLUMNS = ("what", "Shoal >", "compared with", "its figure >", "ratio", "limit", "")


def speed_table(rows: Sequence[Row]) -> Table:
    """Every row beside its peer and its limit."""
    table = _table("Averaging float32 tensors: the median, over repetitions, of the slowest agent's time")
    for column in _COLUMNS:
        # In a narrow terminal the words wrap, and the figures stay whole.
        is_words = column in ("what", "compared with")
        table.add_column(
            column.rstrip(" >"),
            justify="right" if column.endswith(">") else "left",
            no_wrap=not is_words,
            min_width=10 if is_words else None,
        )
    for row in rows:
        *cells, verdict = _cells(row)
        table.add_row(*cells, f"[{_STYLES[verdict]}]{verdict}[/]" if verdict else "")
    return table


def speed_markdown(rows: Sequence[Row]) -> str:
    """The same table in Markdown."""
    rules = ["---:" if column.endswith(">") else "---" for column in _COLUMNS]
    lines = [[column.rstrip(" >") for column in _COLUMNS], rules, *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def scaling_table(found: Sequence[Figures]) -> Table:
    """A line for each size and number of agents."""
    table = _table("Milliseconds of a call: the mean of ten, and its 90% band")
    table.add_column("tensor", justify="right")
    table.add_column("agents", justify="right")
    for label in LABELS.values():
        table.add_column(label, justify="right")
    for figures in sorted(found, key=lambda one: (one.nbytes, one.agents)):
        bands = [band([1e3 * seconds for seconds in figures.values[case]]) for case in LABELS]
        cells = [f"{one.mean:.2f} ± {one.reach:.2f}" for one in bands]
        table.add_row(f"{figures.nbytes / 1e6:g} MB", str(figures.agents), *cells)
    return table


def amount(value: float, unit: str) -> str:
    """A figure for people: milliseconds or mebibytes, with three digits or so."""
    scaled, name = (value * 1e3, "ms") if unit == "s" else (value / MIB, "MiB")
    digits = 1 if scaled >= 10 else 2 if scaled >= 1 else 3
    return f"{scaled:.{digits}f} {name}"


def _cells(row: Row) -> list[str]:
    peer_value = "" if row.peer_value is None else amount(row.peer_value, row.unit)
    verdict = "" if row.met is None else "met" if row.met else "not met"
    return [row.what, amount(row.shoal, row.unit), row.peer, peer_value, row.ratio, row.limit, verdict]


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
