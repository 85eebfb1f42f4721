"""Write the page that shows every topology of the catalog, and its pictures: ``python docs/topologies/generate.py``.

With ``--check`` nothing is written: it fails if the page is not what the code makes, or if a picture is missing or left
over. Pictures are not compared, as their bytes depend on the version of matplotlib.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import isqrt
from pathlib import Path

from shoal.cli import topology_format as words
from shoal.topology.analysis.overview import Analysis, analyse
from shoal.topology.families.catalog import CATALOG, Topology

HERE = Path(__file__).parent
PAGE = HERE / "README.md"

SIZES = (16, 25, 64)


@dataclass(frozen=True)
class Picture:
    """What a picture shows.

    Attributes:
        size: number of agents.
        options: of the topology.
        together: agents drawn as a group, if the topology has no machines of its own.
    """

    size: int = 8
    options: dict[str, words.Option] = field(default_factory=dict)
    together: int | None = None


# Where 8 agents do not show what it is.
PICTURES = {
    "binary-tree": Picture(15),
    "grid": Picture(12),
    "torus": Picture(16),
    "hypercube": Picture(16),
    "symmetric-exponential": Picture(16),
    "u-equi-static": Picture(16),
    "d-equi-static": Picture(16),
    "small-world": Picture(16),
    "d-cliques": Picture(16, {"clique_size": 4}, together=4),
    "ceca": Picture(6),
    "ceca-pairs": Picture(6),
    "hyper-hypercube": Picture(6),
    "simple-base-2": Picture(5),
    "base-2": Picture(6),
    "base-3": Picture(7),
    "base-4": Picture(7),
    "base-5": Picture(7),
    "gossip-pga": Picture(8, {"every": 4}),
}
ON_MACHINES = Picture(16)
_IN_THE_TABLE = "at its NIC"
_DOTS_PER_INCH = 120
_COLOURS = 64

INTRODUCTION = """\
# Every topology

Written by `docs/topologies/generate.py` from the catalog in `shoal.topology`; CI checks that it is what the code makes.
The same on the command line, for any number of agents:

```sh
shoal topology list                                    # all of them, each in a line
shoal topology show base-2 -n 25                       # what one needs, costs and gives, its rounds and matrices
shoal topology draw ring-star -n 16 --per-machine 4 -o ring-star.pdf
shoal topology compare -n 64 --per-machine 8 --latency 50us --bandwidth 25gbit
shoal topology recommend --agents 64 --per-machine 8 --latency 5ms --bandwidth 1gbit --model-mb 100
```

[topology.md](../topology.md) explains graphs, weights, schedules and clocks, and how to ask for the figures below.
[papers.md](papers.md) has the tables of costs that papers print, and predictions beside what papers report.

**How to read it.** A message is one model, sent by one agent to another; a round is over when all messages of it are.
*Exact after* counts the rounds until all agents hold the exact average, and *rounds to 1e-6* those until the
disagreement is a millionth of what it was. The *spectral gap* is the part of the disagreement that a round (or the
rounds named) surely removes. The *average age* is how many rounds a contribution travels to another agent, on average
over pairs. Agents that *share a NIC at once* send to other machines in the same round, with four, five and
eight agents on a machine; above one, they wait for each other.

In pictures an arrow is a message and a line an exchange. Agents of a machine are side by side. Messages between
machines are orange; one thick line stands for all where every agent of a machine sends to every agent of another.
Agents that rest in a round are pale, and so are the edges of other rounds.
"""

HOW_TO_ADD = '''\
## Add one in 20 lines

A topology is a function from a number of agents to a graph or a schedule, and an entry in the catalog. This one lets
every agent meet every other in turn, as the teams of a tournament do:

```python
from shoal.topology import Mixing, Schedule, Topology, register


class RoundRobin(Schedule):
    """Every agent meets every other once in a period; with an odd number, one sits out each round."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.period = max(1, size - 1 + size % 2)

    def mixing(self, round: int, rank: int) -> Mixing:
        round, rank = self._check(round, rank)
        peer = (round - rank) % self.period if rank < self.period else round * (self.period + 1) // 2 % self.period
        peer = self.period if peer == rank else peer  # nobody meets itself, but the last one
        return Mixing(rank, 0.5, {peer: 0.5}, [peer]) if peer < self.size else Mixing(rank, 1.0)

    def describe(self) -> str:
        return f"round-robin of {self.size} agents"


register(Topology("round-robin", RoundRobin, "everybody meets everybody in turn", "tournaments", symmetric=True))
```

In the package, the class goes into a module of `src/shoal/topology/families`, and the entry into its `catalog.py`.
That is all. The property suite takes every entry, and checks for it that sends and receives match in every round, that
the weights are what the entry promises, that the period holds, and that clocks can be saved and restored. This page,
its picture, and the commands above come from the same entry.
'''


def main(arguments: list[str]) -> int:
    """Write page and pictures, or check them. The exit status is 1 if a check failed."""
    if arguments not in ([], ["--check"]):
        print("usage: generate.py [--check]", file=sys.stderr)
        return 2
    text = page()
    if arguments:
        found = list(problems(text))
        print("\n".join(found) or f"{PAGE} is what the code makes")
        return 1 if found else 0
    for left_over in set(HERE.glob("*.png")) - {picture_of(name) for name in CATALOG}:
        left_over.unlink()
    for topology in CATALOG.values():
        picture_of(topology.name).write_bytes(picture(topology))
    PAGE.write_text(text)
    return 0


def problems(text: str) -> Iterator[str]:
    """What is wrong with the files that are there, given what the page should say."""
    written = PAGE.read_text() if PAGE.exists() else ""
    for number, (old, new) in enumerate(zip_longest(written.splitlines(), text.splitlines()), 1):
        if old != new:
            yield f"{PAGE}:{number} says\n  {old}\nand the code makes\n  {new}\nRun python {Path(__file__).name}."
            break
    wanted, present = {picture_of(name) for name in CATALOG}, set(HERE.glob("*.png"))
    yield from (f"{path} is missing" for path in sorted(wanted - present))
    yield from (f"{path} is of no topology of the catalog" for path in sorted(present - wanted))


def page() -> str:
    """The whole page, Markdown."""
    sections = {topology.name: analyses(topology) for topology in CATALOG.values()}
    parts = [INTRODUCTION, overview(sections)]
    parts += [section(topology, sections[topology.name]) for topology in CATALOG.values()]
    return "\n".join([*parts, HOW_TO_ADD])


def analyses(topology: Topology) -> dict[int, Analysis | str]:
    """For each number of agents what was found, or why there is none."""
    found: dict[int, Analysis | str] = {}
    for size in SIZES:
        try:
            schedule, _ = words.build(topology, size, isqrt(size) if topology.agents_per_machine else None, {})
        except ValueError as refused:
            found[size] = str(refused).partition(" agents: ")[2] or str(refused)
        else:
            found[size] = analyse(schedule, agents_per_machine=isqrt(size))
    return found


def overview(sections: dict[str, dict[int, Analysis | str]]) -> str:
    """All of them in one table, for the largest number of agents."""
    size = SIZES[-1]
    lines = [
        f"## At a glance: {size} agents",
        "",
        "| topology | weights | period | messages a round | exact after | rounds to 1e-6 | average age |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for topology in CATALOG.values():
        name = f"[{topology.name}](#{topology.name})"
        found = sections[topology.name][size]
        if isinstance(found, str):
            lines.append(f"| {name} | {words.preserves(topology)} | not for {size} agents | | | | |")
            continue
        cells = [
            name,
            words.preserves(topology),
            words.repeats(found.period),
            words.format_figure(found.traffic.busiest_messages),
            words.exact(found),
            str(found.rounds),
            str(found.age),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "Messages are those of the busiest agent.", ""])


def section(topology: Topology, found: dict[int, Analysis | str]) -> str:
    """One topology: picture, what it needs, and what it costs and gives for some numbers of agents."""
    shown = pictured(topology)
    schedule, agents_per_machine = words.build(topology, shown.size, None, shown.options)
    machines = f" on machines of {agents_per_machine}" if agents_per_machine > 1 else ""
    chosen = "".join(f", {name} = {value}" for name, value in shown.options.items())
    options = ", ".join(f"`{name}` ({default})" for name, default in words.options_of(topology).items())
    lines = [
        f"## {topology.name}",
        "",
        f"![{topology.name}, {schedule.size} agents{machines}{chosen}]({picture_of(topology.name).name})",
        "",
        f"{topology.summary[0].upper()}{topology.summary[1:]}. {topology.source}.",
        "",
        f"- **Needs** {words.needs(topology)}.",
        f"- **Weights** {words.preserves(topology)} in every round; {_period(schedule.period)}.",
        *([f"- **Options** {options}."] if options else []),
        "",
        *_table(found),
    ]
    for remark in remarks(found):
        lines += [f"- {remark}"]
    return "\n".join([*lines, ""])


def remarks(found: dict[int, Analysis | str]) -> list[str]:
    """Why there is none, and what a user should know, with the numbers of agents if it is not said of all."""
    sizes: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    for size, one in found.items():
        for text in [one] if isinstance(one, str) else one.notes:
            if _IN_THE_TABLE in text:
                continue
            # Of notes that differ only in a number the last one stands for all.
            kind = re.sub(r"[0-9]+", "#", text)
            same = texts.get(kind, text) == text
            sizes[kind] = [*sizes.get(kind, []), size] if same else [size]
            texts[kind] = text
    made = [size for size, one in found.items() if not isinstance(one, str)]
    said_of = {kind: " and ".join(map(str, those)) for kind, those in sizes.items() if those != made}
    return [f"{said_of[kind]} agents: {text}" if kind in said_of else text for kind, text in texts.items()]


def _period(period: int | None) -> str:
    if period is None:
        return "it never repeats"
    return "it never changes" if period == 1 else "it repeats"


def _table(found: dict[int, Analysis | str]) -> list[str]:
    lines = [f"| | {' | '.join(f'{size} agents' for size in found)} |", f"| --- |{' ---: |' * len(found)}"]
    for title, describe in (("It costs", words.costs), ("It gives", words.gives)):
        columns = [{} if isinstance(one, str) else dict(describe(one)) for one in found.values()]
        lines.append(f"| **{title}** |{' |' * len(found)}")
        for label in dict.fromkeys(label for column in columns for label in column):
            cells = [column.get(label, "\N{EN DASH}") for column in columns]
            if any(cell not in ("", "\N{EN DASH}") for cell in cells):
                lines.append(f"| {label} | {' | '.join(cells)} |")
    return [*lines, ""]


def pictured(topology: Topology) -> Picture:
    """What its picture shows; with more agents than usual if it refuses so few."""
    usual = PICTURES.get(topology.name, ON_MACHINES if topology.agents_per_machine else Picture())
    return replace(usual, size=next(size for size in range(usual.size, 1000) if not topology.refuses(size)))


def picture(topology: Topology) -> bytes:
    """PNG with few colours, which keeps it small."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    from shoal.topology.drawing import draw_schedule

    shown = pictured(topology)
    schedule, agents_per_machine = words.build(topology, shown.size, None, shown.options)
    figure = draw_schedule(schedule, agents_per_machine=shown.together or agents_per_machine)
    drawn, reduced = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=_DOTS_PER_INCH, format="png")
    pyplot.close(figure)
    Image.open(drawn).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(reduced, "PNG", optimize=True)
    return reduced.getvalue()


def picture_of(name: str) -> Path:
    return HERE / f"{name}.png"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
