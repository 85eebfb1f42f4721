"""What ``training.py`` prints: tables of its figures, the goals beside them, and whether they are met.

The goals are for a quiet machine of two cores and for the full sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev

from rich.table import Table

from _table2 import BATCH, TARGET
from _ways import (
    ATC,
    AWC,
    DECENT_DP,
    GET,
    GRADIENTS,
    LIMIT,
    LOCAL,
    OVERLAP,
    PUSH_SUM,
    PUT,
)
from shoal.bench.measurement import Figures
from shoal.bench.results import Row, amount, faster, speed_markdown, speed_table

GOALS = {
    ("mlp", 2): 1.2,
    ("mlp", 4): 1.35,
    ("resnet20", 2): 0.97,
    ("resnet20", 4): 0.97,
    ("hosts", 4): 1.35,
    ("hosts", 8): 1.55,
}
"""Times DDP's steps a second, by part and number of agents."""
OVERHEAD_GOAL = 0.02
ROUNDING = 0.25
"""Memory that others read comes in sizes that are at most a quarter larger than what is asked for."""
MEMORY_TOLERANCE = 0.1
"""Of the model: messages, handles, and what the allocator keeps."""


@dataclass(frozen=True)
class Held:
    """What a way should take, in copies of the parameters P.

    Attributes:
        beside: what it holds besides parameters, gradients and the state of the optimizer.
        shared: what of all that lies in memory that others read, which is rounded up; the parameters, too.
        formula: in words.
    """

    beside: float
    shared: float
    formula: str


HELD = {
    "DDP": Held(0, 0, "0: its buckets are the gradients"),
    GRADIENTS: Held(2.25, 2.25, "(2 + 1/n) P: the gradients joined, their mean, the sum of a share"),
    ATC: Held(1, 2, "P: the average is summed there and becomes the parameters"),
    AWC: Held(1, 2, "P: as ATC"),
    OVERLAP: Held(1, 2, "P: as ATC"),
    PUT: Held(4, 1, "2 d P: two slots for each of d = 2 in-neighbours"),
    GET: Held(4, 1, "2 d P: as win-put"),
    PUSH_SUM: Held(6, 2, "(2 d + 2) P: the slots, the biased parameters, those before the local step"),
}


@dataclass(frozen=True)
class Comparison:
    """Figures beside those of a peer, with goals."""

    title: str
    rows: Sequence[Row]

    def table(self) -> Table:
        made = speed_table(self.rows)
        made.title = self.title
        return made

    def markdown(self) -> str:
        return speed_markdown(self.rows)

    @property
    def missed(self) -> bool:
        return any(row.met is False for row in self.rows)


@dataclass(frozen=True)
class Sheet:
    """Any table. The columns whose names end with `>` hold numbers."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]
    missed: bool = False

    def table(self) -> Table:
        made = Table(title=self.title, title_justify="left")
        for column in self.columns:
            is_number = column.endswith(">")
            # In a narrow terminal the words wrap, and the name of a line stays whole.
            whole = not made.columns or not column
            made.add_column(column.rstrip(" >"), justify="right" if is_number else "left", no_wrap=whole)
        for line in self.lines:
            made.add_row(*line)
        return made

    def markdown(self) -> str:
        rules = ["---:" if column.endswith(">") else "---" for column in self.columns]
        lines = [[column.rstrip(" >") for column in self.columns], rules, *self.lines]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables_of(figures: Sequence[Figures], judged: bool) -> list[Comparison | Sheet]:
    """The tables of whatever has been measured. Unless `judged` they have no goals."""
    makers: list[Callable[[Sequence[Figures]], Iterable[Comparison | Sheet]]]
    makers = [_mlp, _resnet20, _alone, _hosts, _volumes, _gradients, _table2, _memory]
    made = [one for maker in makers for one in maker(figures)]
    return made if judged else [_unjudged(one) for one in made]


def _unjudged(one: Comparison | Sheet) -> Comparison | Sheet:
    if isinstance(one, Sheet):
        verdicts = [number for number, column in enumerate(one.columns) if not column]
        lines = [["" if number in verdicts else cell for number, cell in enumerate(line)] for line in one.lines]
        return replace(one, lines=lines, missed=False)
    return replace(one, rows=[replace(row, limit="", met=None) for row in one.rows])


def goal_of(one: Figures) -> float | None:
    """Times DDP's steps a second that a part should reach with so many agents."""
    return GOALS.get((one.kind, one.agents))


def _of(figures: Sequence[Figures], kind: str) -> list[Figures]:
    return [one for one in figures if one.kind == kind]


def _mlp(figures: Sequence[Figures]) -> Iterable[Comparison | Sheet]:
    found = _of(figures, "mlp")
    if not found:
        return
    rows = [row for one in found for row in _against_ddp(one, _batch(figures, one), goal_of(one))]
    yield Comparison("A 50-million-parameter MLP on one machine: a step, beside DistributedDataParallel's", rows)
    shares = _of(figures, "mlp: shares")
    lines = [
        [str(one.agents), *(_percent(one.values[size][0]) if size in one.values else "" for size in _sizes(shares))]
        for one in shares
    ]
    columns = ["agents >", *(f"batch {size} >" for size in _sizes(shares))]
    yield Sheet("DDP's communication as a part of its step", columns, lines)


def _sizes(shares: Sequence[Figures]) -> list[str]:
    return sorted({size for one in shares for size in one.values}, key=int)


def _resnet20(figures: Sequence[Figures]) -> Iterable[Comparison]:
    found = _of(figures, "resnet20")
    rows = [row for one in found for row in _against_ddp(one, _batch(figures, one), goal_of(one))]
    if rows:
        yield Comparison("ResNet-20 (CIFAR) on one machine", rows)


def _hosts(figures: Sequence[Figures]) -> Iterable[Comparison]:
    rows = []
    for one in _of(figures, "hosts"):
        for row in _against_ddp(one, _batch(figures, one), goal_of(one)):
            # Only what overlaps can be as fast as the wire.
            plain = f": {ATC}, " in row.what
            rows.append(replace(row, limit="", met=None) if plain else row)
    if rows:
        yield Comparison("VGG-16 (CIFAR), hosts with a NIC of 100 Mbit/s", rows)


def _gradients(figures: Sequence[Figures]) -> Iterable[Comparison]:
    titles = {"machine": "one machine", "hosts": "hosts with a NIC of 1 Gbit/s"}
    for place, title in titles.items():
        rows = []
        for one in figures:
            model = one.kind.removeprefix(f"gradients {place}, ")
            if model == one.kind or ": " in model:
                continue
            found = _against_ddp(one, _batch(figures, one), None)
            rows += [replace(row, what=f"{model}, {row.what}") for row in found]
        if rows:
            yield Comparison(f"Averaged gradients, {title}: a step, beside DistributedDataParallel's", rows)


def _against_ddp(one: Figures, batch: int, goal: float | None) -> list[Row]:
    t = {name: median(values) for name, values in one.values.items()}
    ddp = min((name for name in t if name.startswith("DDP")), key=t.__getitem__)
    agents = f"{one.agents} agents, batch {batch}"
    rows = [
        faster(f"{agents}: {name}", t[name], ddp, t[ddp], None if name.startswith(DECENT_DP) else goal)
        for name in t
        if name not in (LOCAL, LIMIT) and not name.startswith("DDP")
    ]
    other = next((name for name in t if name.startswith(DECENT_DP)), None)
    if other is not None:
        ours = [name for name in t if name.startswith((f"{ATC}, ", f"{AWC}, "))]
        rows += [faster(f"{agents}: {name}", t[name], other, t[other], None) for name in ours]
    if LIMIT in t:
        rows.append(faster(f"{agents}: {LIMIT}", t[LIMIT], ddp, t[ddp], None))
    return [*rows, Row(f"{agents}: without communication", t[LOCAL], "s", ddp, t[ddp], _share(t[LOCAL], t[ddp]))]


def _share(local: float, step: float) -> str:
    return f"{_percent(1 - local / step)} communicating"


def _batch(figures: Sequence[Figures], of: Figures) -> int:
    [found] = [one for one in _of(figures, f"{of.kind}: batch") if one.agents == of.agents]
    [[size]] = found.values.values()
    return int(size)


def _alone(figures: Sequence[Figures]) -> Iterable[Comparison]:
    rows = []
    for one in figures:
        if not one.kind.startswith("alone: "):
            continue
        for way in [name for name in one.values if not name.endswith(": unwrapped")]:
            wrapped, plain = one.values[way], one.values[f"{way}: unwrapped"]
            share = overhead(wrapped, plain)
            what = f"{one.kind.removeprefix('alone: ')}, {way}"
            row = Row(what, median(wrapped), "s", "the optimizer inside", median(plain), f"{share:+.2%}")
            rows.append(replace(row, limit=f"< {OVERHEAD_GOAL:.0%}", met=share < OVERHEAD_GOAL))
    if rows:
        yield Comparison("A world of one: a step with the wrapper and without it", rows)


def overhead(wrapped: Sequence[float], plain: Sequence[float]) -> float:
    """The median of the paired differences, as a part of the median of what is plain."""
    return median(w - p for w, p in zip(wrapped, plain, strict=True)) / median(plain)


def _volumes(figures: Sequence[Figures]) -> Iterable[Sheet]:
    titles = {
        "volumes": "One machine, four agents: how much of the exchange shows",
        "volumes over hosts": "Two hosts with a NIC of 500 Mbit/s: how much of the exchange shows",
    }
    columns = ["parameters >", "way", "step >", "alone >", "exposed >", "exchange by itself >", "hidden >"]
    for kind, title in titles.items():
        lines = []
        for one in figures:
            if one.kind.split(": ")[0] != kind:
                continue
            t = {name: median(values) for name, values in one.values.items()}
            for way in [name for name in t if f"{name}: exchange" in t]:
                exposed, exchange = t[way] - t[LOCAL], t[f"{way}: exchange"]
                times = [amount(seconds, "s") for seconds in (t[way], t[LOCAL], exposed, exchange)]
                lines.append([f"{one.nbytes / 1e6:.0f} MB", way, *times, _percent(1 - exposed / exchange)])
        if lines:
            yield Sheet(title, columns, lines)


def _table2(figures: Sequence[Figures]) -> Iterable[Sheet]:
    found = _of(figures, "table2")
    if not found:
        return
    [one], seeds = found, [other for other in figures if other.kind.startswith("table2: seed ")]
    t = {name: median(values) for name, values in one.values.items()}
    [single] = [median(other.values[LOCAL]) for other in _of(figures, "table2: one agent")]
    lines = []
    for way in [name for name in t if name != LOCAL]:
        runs = [_learnt(other, way) for other in seeds]
        reached = [seconds for _, _, seconds in runs if seconds is not None]
        lines.append(
            [
                way,
                f"{one.agents * BATCH / t[way]:,.0f}",
                _percent(t[LOCAL] / t[way]),
                _percent(single / t[way]),
                amount(t[way] - t[LOCAL], "s"),
                _spread([100 * accuracy for accuracy, _, _ in runs], "%"),
                _percent(fmean(worst for _, worst, _ in runs), 1),
                f"{_spread(reached, 's')} ({len(reached)} of {len(runs)})",
            ]
        )
    columns = [
        *("way", "images a second >", "of agents without exchange >", f"of {one.agents} times one agent >"),
        *("exposed in a step >", "accuracy of the average >", "of the worst agent >", f"time to {TARGET:.0%} >"),
    ]
    yield Sheet(
        f"Four hosts of two agents, 200 Mbit/s, learn digits; {one.nbytes / 1e6:.1f} MB of parameters", columns, lines
    )


def _learnt(one: Figures, way: str) -> tuple[float, float, float | None]:
    """Final accuracy of the average, of the worst agent, and the seconds of training until the target."""
    accuracy, seconds = one.values[f"{way}: accuracy"], one.values[f"{way}: seconds"]
    first = next((at for at, value in zip(seconds, accuracy, strict=True) if value >= TARGET), None)
    return accuracy[-1], one.values[f"{way}: worst agent"][-1], first


def _memory(figures: Sequence[Figures]) -> Iterable[Sheet]:
    found = {name: one for one in _of(figures, "memory") for name in one.values if not name.endswith(": arena")}
    if LOCAL not in found:
        return
    base, missed = found[LOCAL].values[LOCAL][0], False
    lines: list[list[str]] = []
    for way, one in found.items():
        if way == LOCAL:
            continue
        held = HELD[way]
        most = held.beside + ROUNDING * held.shared + MEMORY_TOLERANCE
        beside = (one.values[way][0] - base) / one.nbytes
        arena = one.values[f"{way}: arena"][0] / one.nbytes
        missed = missed or beside > most
        verdict = "met" if beside <= most else "not met"
        lines.append([way, held.formula, f"{beside:.2f} P", f"{arena:.2f} P", f"≤ {most:.2f} P", verdict])
    columns = ["way", "formula", "measured >", "in shared memory, parameters too >", "goal >", ""]
    nbytes = next(iter(found.values())).nbytes
    title = f"Memory of an agent beside parameters (P = {nbytes / 1e6:.0f} MB), gradients and the optimizer's state"
    yield Sheet(title, columns, lines, missed)


def _spread(values: Sequence[float], unit: str) -> str:
    if not values:
        return "never"
    reach = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{reach} {unit}"


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}%"
