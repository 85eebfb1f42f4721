"""Turns measurements into rows of a table: Shoal's figure, its peer's, their ratio, the limit, and the verdict. The
limits are goals for an idle machine of two cores. They hold for the full sizes; other sizes are shown without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median

from .figures import Figures
from .wire_bytes import wire_seconds

MIB = 1 << 20
GROWTH_LIMIT = MIB
"""Bytes that a process may grow by over the rounds; a leak of 100 bytes a round is 1 MB in 10,000."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: The measured task.
        shoal: Shoal's figure: the median over the repetitions.
        unit: ``s`` or ``B``.
        peer: The library it is compared with.
        peer_value: The peer's figure in the same unit.
        ratio: The two figures compared.
        limit: The limit of the ratio, or of the figure.
        met: Whether the limit is met; None without a limit.
    """

    what: str
    shoal: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: str = ""
    limit: str = ""
    met: bool | None = None


def rows_of(found: Iterable[Figures], judged: bool = True) -> list[Row]:
    """The table's rows, in the table's order. Unless ``judged`` they have no limits."""
    ordered = sorted(found, key=lambda figures: list(_ROWS).index(figures.kind))
    rows = [row for figures in ordered for row in _ROWS[figures.kind](figures)]
    return rows if judged else [replace(row, limit="", met=None) for row in rows]


def faster(what: str, shoal: float, peer: str, peer_value: float, least: float | None = None) -> Row:
    """How many times as fast as the peer, and at least how many it must be."""
    ratio = peer_value / shoal
    row = Row(what, shoal, "s", peer, peer_value, f"{ratio:.2f}x as fast")
    return row if least is None else replace(row, limit=f"≥ {least:g}x", met=ratio >= least)


def costs(what: str, shoal: float, peer: str, peer_value: float, most: float, unit: str = "s") -> Row:
    """How many times the peer's figure, and at most how many it may be."""
    ratio = shoal / peer_value
    return Row(what, shoal, unit, peer, peer_value, f"{ratio:.2f}x as much", f"≤ {most:g}x", ratio <= most)


def _large(figures: Figures) -> list[Row]:
    size, t = _size(figures.nbytes), _medians(figures)
    all_reduce = "Gloo all_reduce"
    rows = [
        faster(f"ring, {size}", t["ring"], all_reduce, t["all_reduce"], 1.6),
        costs(f"ring, {size}, a fresh result", t["fresh"], "the same with out=", t["ring"], 1.2),
    ]
    if "copies" in t:
        rows.append(costs(f"ring, {size}", t["ring"], "3 copies, all agents", t["copies"], 1.5))
    if "one-peer" in t:
        rows.append(faster(f"dynamic one-peer, {size}", t["one-peer"], all_reduce, t["all_reduce"], 2.3))
    return rows


def _small(figures: Figures) -> list[Row]:
    t, agents = _medians(figures), f"{figures.agents} agents"
    ring, one_peer = f"ring, {figures.nbytes} B, {agents}", f"dynamic one-peer, {figures.nbytes} B, {agents}"
    if figures.agents == 2:
        first = faster(ring, t["ring"], "Gloo all_reduce", t["all_reduce"])
        first = replace(first, limit="faster", met=t["ring"] < t["all_reduce"])
    else:
        first = costs(ring, t["ring"], "Gloo all_reduce", t["all_reduce"], 1.2)
    return [first, faster(one_peer, t["one-peer"], "Gloo all_reduce", t["all_reduce"])]


def _many(figures: Figures) -> list[Row]:
    t, what = _medians(figures), "100 operations in flight, 4 KB"
    # Compared with Gloo at its best, which is one operation for all; as many operations hinder each other there.
    best = min((case for case in t if case != "ring"), key=t.__getitem__)
    apart = min(("all_reduce, async", "all_reduce, in turn"), key=t.__getitem__)
    row = faster(what, t["ring"], f"Gloo {best}", t[best])
    return [
        replace(row, limit="< 8 ms", met=t["ring"] < 0.008),
        faster(what, t["ring"], f"Gloo {apart}, 100 of them", t[apart]),
    ]


def _windows(figures: Figures) -> list[Row]:
    t = _medians(figures)
    what, all_reduce = f"win_put + win_update, {_size(figures.nbytes)}", "Gloo all_reduce"
    if figures.nbytes == 4:
        return [costs(what, t["window"], all_reduce, t["all_reduce"], 0.5)]
    rows = [faster(what, t["window"], all_reduce, t["all_reduce"])]
    rows = [replace(row, limit="faster", met=t["window"] < t["all_reduce"]) for row in rows]
    if "copies" in t:
        rows.append(costs(what, t["window"], "4 copies, all agents", t["copies"], 1.5))
    return rows


def _published(figures: Figures) -> list[Row]:
    [published], [flying], [neighbours] = (figures.values[key] for key in ("published", "in flight", "neighbours"))
    operations = "1 operation" if flying == 1 else f"{flying:g} operations"
    readers = "1 neighbour" if neighbours == 1 else f"{neighbours:g} neighbours"
    what, peer = f"published by {operations} for {readers}", "1 copy an operation"
    return [costs(what, published, peer, flying * figures.nbytes, 1.0, "B")]


def _rounds(figures: Figures) -> list[Row]:
    [rounds], [grown], [resident] = (figures.values[key] for key in ("rounds", "grown", "resident"))
    return [
        Row(
            f"memory that {rounds:,.0f} rounds add",
            grown,
            "B",
            "the whole process",
            resident,
            f"{grown / rounds:.1f} B a round",
            f"≤ {_size(GROWTH_LIMIT)}",
            grown <= GROWTH_LIMIT,
        )
    ]


def _wire(figures: Figures) -> list[Row]:
    t, what = _medians(figures), f"average {_size(figures.nbytes)} over 1 Gbit/s"
    return [
        costs(what, t["average"], "the wire's own time", wire_seconds(figures.nbytes), 1.06),
        faster(what, t["average"], "Gloo send/recv", t["gloo"]),
        faster(what, t["average"], "Gloo send/recv, mean", t["gloo and average"]),
    ]


def _latency(figures: Figures) -> list[Row]:
    rows = []
    for computes, limit in {"torch": 0.010, "Python": 0.050}.items():
        values = sorted(figures.values[computes])
        percentile = values[min(len(values) - 1, int(0.99 * len(values)))]
        what = f"win_put, {_size(figures.nbytes)}, to a machine busy in {computes}: 99%"
        typical = f"median of {len(values):,}"
        limited = f"< {1e3 * limit:g} ms"
        rows.append(Row(what, percentile, "s", typical, median(values), "", limited, percentile < limit))
    return rows


_ROWS: dict[str, Callable[[Figures], list[Row]]] = {
    "large": _large,
    "small": _small,
    "many": _many,
    "windows": _windows,
    "published": _published,
    "rounds": _rounds,
    "wire": _wire,
    "latency": _latency,
}


def _medians(figures: Figures) -> dict[str, float]:
    return {case: median(values) for case, values in figures.values.items()}


def _size(nbytes: int) -> str:
    if nbytes < 1000:
        return f"{nbytes} B"
    return f"{nbytes // MIB} MiB" if nbytes % MIB == 0 else f"{nbytes / 1e6:g} MB"
