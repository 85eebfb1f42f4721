"""Shared by the experiments of this folder: options, intervals over seeds, claims and verdicts, tables, the page.

A script makes a :class:`Report`, prints through it while it measures, adds its tables and its claims, and ends with
``return report.finish()``. A :class:`Claim` compares one statement of a paper with measured values; the functions that
make claims are kept apart from the measurements, so that tests can pass values with which a claim fails.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.bench.measurement import here
from shoal.sim.sweeps import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("README.md")
"""Has a row for each figure and table of a paper; the other pages beside it have the results."""
IMAGES = ROOT / "docs" / "images" / "reproduce"


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95% confidence interval, mean - reach to mean + reach, by Student's t.

    Attributes:
        mean: The mean of the values.
        reach: Half the interval's length; infinite for a single value.
    """

    mean: float
    reach: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        """The interval of independent values, one for each seed.

        Raises:
            ValueError: There is no value.
        """
        found = list(values)
        if not found:
            raise ValueError("no values: run at least one seed")
        if len(found) == 1:
            return cls(found[0], math.inf)
        return cls(*interval(found, 0.95))

    @property
    def low(self) -> float:
        return self.mean - self.reach

    @property
    def high(self) -> float:
        return self.mean + self.reach

    def between(self, least: float = -math.inf, most: float = math.inf) -> bool | None:
        """Whether it lies between two values: True if all of it does, False if no part does, None if a part does."""
        if self.high <= least or self.low >= most:
            return False
        inside = (least == -math.inf or self.low > least) and (most == math.inf or self.high < most)
        return True if inside else None

    def __format__(self, spec: str) -> str:
        if math.isinf(self.reach):
            return f"{self.mean:{spec}} (one seed)"
        return f"{self.mean:{spec}} ± {self.reach:{spec}}"

    def __str__(self) -> str:
        return f"{self:.3g}"


def powers_of_ten(values: Iterable[float]) -> str:
    """Positive values of several magnitudes: their geometric mean, and the 95% interval of it, as ``a (b to c)``."""
    one = Interval.of(math.log10(value) for value in values)
    if math.isinf(one.reach):
        return f"{10**one.mean:.2g} (one seed)"
    return f"{10**one.mean:.2g} ({10**one.low:.2g} to {10**one.high:.2g})"


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, and whether the measurements have it.

    Attributes:
        paper: The statement, with its place in the paper.
        measured: The measured values that decide it, with their intervals.
        holds: Whether they agree; None if an interval contains values that agree and values that do not.
    """

    paper: str
    measured: str
    holds: bool | None

    @property
    def word(self) -> str:
        return {True: AGREES, False: DIFFERS, None: OPEN}[self.holds]


AGREES, DIFFERS, OPEN = "agrees", "differs", "not separated"
"""Verdicts; the last where more seeds are needed."""


def every(parts: Iterable[bool | None]) -> bool | None:
    """Whether all parts of a statement hold: False if one does not, None if that is open for one."""
    found = list(parts)
    return False if False in found else None if None in found else True


def exceeds(
    paper: str, more: Sequence[float], less: Sequence[float], *, by: float = 0.0, spec: str = ".3g", unit: str = ""
) -> Claim:
    """Claim that ``more`` is above ``less + by``: the interval of the differences, seed by seed, lies above ``by``.

    Args:
        paper: The statement, with its place in the paper.
        more: Values that should be higher, one for each seed.
        less: The values of the same seeds that should be lower.
        by: The least difference.
        spec: Format of the numbers.
        unit: Unit of the values, with its leading space.
    """
    difference = Interval.of(one - other for one, other in zip(more, less, strict=True))
    pair = f"{Interval.of(more):{spec}}{unit} against {Interval.of(less):{spec}}{unit}"
    return Claim(paper, f"{pair}; difference {difference:{spec}}", difference.between(by))


def within(
    paper: str, values: Sequence[float], reference: Sequence[float], *, by: float, spec: str = ".3g", unit: str = ""
) -> Claim:
    """Claim that values equal reference values: the interval of the differences lies within ``-by`` to ``by``."""
    difference = Interval.of(one - other for one, other in zip(values, reference, strict=True))
    measured = (
        f"{Interval.of(values):{spec}}{unit} against {Interval.of(reference):{spec}}{unit}; "
        f"difference {difference:{spec}}, allowed {by:g}"
    )
    return Claim(paper, measured, difference.between(-by, by))


def below(paper: str, values: Sequence[float], limit: float) -> Claim:
    """Claim that positive values are below a limit, all of them, such as the errors of exact methods."""
    return Claim(paper, f"{powers_of_ten(values)}, largest {max(values):.2g}, limit {limit:g}", max(values) < limit)


def verdict(claims: Sequence[Claim]) -> str:
    """In words: whether the measurements agree with the paper, and in which claims they do not or this is open.

    Raises:
        ValueError: There are no claims.
    """
    if not claims:
        raise ValueError("no claims: nothing was compared with the paper")
    if all(claim.holds for claim in claims):
        return f"agrees: {'the claim holds' if len(claims) == 1 else f'all {len(claims)} claims hold'}"
    named = []
    for word in (DIFFERS, OPEN):
        papers = [claim.paper for claim in claims if claim.word == word]
        if papers:
            named.append(f"{word} in {len(papers)} of {len(claims)} claims: {'; '.join(papers)}")
    return ". ".join(named)


def _in_short(claims: Sequence[Claim]) -> str:
    """A verdict with numbers: "differs in 1 of 7, not separated in 2"; "agrees" alone where all claims agree."""
    counts = [(word, sum(claim.word == word for claim in claims)) for word in (DIFFERS, OPEN)]
    some = [(word, count) for word, count in counts if count]
    if len(some) == 1 and some[0][1] == len(claims):
        return some[0][0]
    of = f" of {len(claims)}"
    return ", ".join(f"{word} in {count}{'' if at else of}" for at, (word, count) in enumerate(some)) or AGREES


def arguments(doc: str | None, *, seeds: int, quick_seeds: int = 2) -> argparse.ArgumentParser:
    """A parser with the options that all experiments have.

    Args:
        doc: The script's docstring.
        seeds: How many seeds it runs by default.
        quick_seeds: How many under ``--quick``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run of seconds, to see that everything works")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"seeds to run ({seeds}; {quick_seeds} if --quick)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="write the figure there (needs matplotlib)")
    parser.add_argument("--page", action="store_true", help="write results into the pages of reproduce, and the figure")
    parser.set_defaults(default_seeds=(seeds, quick_seeds))
    return parser


class Report:
    """Prints an experiment's progress, its tables, claims and verdict, and writes them into the pages of ``reproduce``.

    Args:
        script: ``__file__`` of the experiment.
        title: Of the experiment and of its figures.
        args: Parsed arguments; ``args.seeds`` is set to the number of seeds to run.
        repeated: What is repeated, if that is not a seed, as "10 repetitions".
    """

    def __init__(self, script: str, title: str, args: argparse.Namespace, repeated: str = "") -> None:
        if args.page and args.quick:
            raise SystemExit("--page: the page has results of whole runs; leave out --quick")
        seeds, quick_seeds = args.default_seeds
        args.seeds = args.seeds or (quick_seeds if args.quick else seeds)
        self.name, self.title, self.args = Path(script).stem, title, args
        self.claims: list[Claim] = []
        self._repeated = repeated or f"{args.seeds} seeds"
        self._markdown: list[str] = []
        self._images: list[Path] = []
        self._began = time.monotonic()
        self._console = Console(width=None if sys.stdout.isatty() else 140)
        self._console.print(f"[bold]{escape(title)}[/]")

    def say(self, text: str) -> None:
        """Print a line, with the seconds since the beginning."""
        self._console.print(f"[dim]{time.monotonic() - self._began:6.1f} s[/]  {escape(text)}", highlight=False)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table. The first column is aligned to the left, the others to the right."""
        shown = Table(title=escape(title), box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
        for number, column in enumerate(columns):
            shown.add_column(escape(column), justify="right" if number else "left")
        lines = [[str(cell) for cell in row] for row in rows]
        for line in lines:
            shown.add_row(*map(escape, line))
        self._console.print(shown)
        rules = ["---:" if number else "---" for number in range(len(columns))]
        cells = [[cell.replace("|", "\\|") for cell in line] for line in [columns, rules, *lines]]
        self._markdown.append(f"{title}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells))

    def note(self, text: str) -> None:
        """Print a sentence that belongs to the results, and keep it for the page."""
        self._console.print(escape(text), highlight=False)
        self._markdown.append(text)

    def claim(self, claims: Claim | Iterable[Claim]) -> None:
        """Add claims to the verdict."""
        self.claims += [claims] if isinstance(claims, Claim) else claims

    def figure(self, draw: Callable[[Figure], None], size: tuple[float, float] = (9.0, 4.2)) -> None:
        """Draw and write the figure, if ``--figure`` or ``--page`` asks for one; ``size`` is in inches."""

        def save(path: Path) -> None:
            from matplotlib.figure import Figure

            figure = Figure(figsize=size, layout="constrained")
            draw(figure)
            figure.savefig(path, dpi=110)

        self.image(save)

    def image(self, save: Callable[[Path], None], suffix: str = ".png") -> None:
        """Let ``save`` write another image, such as an animation, if ``--figure`` or ``--page`` asks for one."""
        path = self.args.figure or (IMAGES / self.name if self.args.page else None)
        if path is not None:
            path = path.with_suffix(suffix)
            path.parent.mkdir(parents=True, exist_ok=True)
            save(path)
            self._images.append(path)
            self.say(f"figure: {path}")

    def finish(self) -> int:
        """Print the claims and the verdict, and update the pages if asked; the exit status, 0.

        A result that differs from the paper is a result: it does not make the command fail.
        """
        seconds = time.monotonic() - self._began
        rows = [[claim.paper, claim.measured, claim.word] for claim in self.claims]
        shown = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in ("the paper", "measured", "verdict"):
            shown.add_column(column)
        for row, claim in zip(rows, self.claims, strict=True):
            cells = [escape(cell) for cell in row]
            color = {True: "green", False: "bold red", None: "yellow"}[claim.holds]
            shown.add_row(*cells[:2], f"[{color}]{cells[2]}[/]")
        self._console.print(shown)
        words = verdict(self.claims)
        self._console.print(f"[bold]{escape(words)}[/] ({duration(seconds)}, {machine()})", highlight=False)
        if self.args.page:
            LIST.write_text(self.listed(LIST.read_text(), duration(seconds)))
            page = page_of(self.name)
            page.write_text(self.detailed(page.read_text()))
        return 0

    def listed(self, page: str, taken: str) -> str:
        """The list with the time and the verdicts of this experiment.

        A row has five cells: the part of the paper, the command, the time, the details, the verdict. If a command has
        several rows, a row's claims are those that name its part, which ends at a colon: "Figure 8: throughput".

        Args:
            page: The list.
            taken: The time of the run, in words.

        Raises:
            RuntimeError: The list has no row of this command, a row has no claim, or a claim has no row.
        """
        command = f"| `python reproduce/{self.name}.py` |"
        lines = page.split("\n")
        at = [number for number, line in enumerate(lines) if command in line]
        missing = set(self.claims)
        for number in at:
            cells = [cell.strip() for cell in lines[number].strip("|").split("|")]
            part = re.compile(rf"\b{re.escape(cells[0].partition(':')[0])}\b", re.IGNORECASE)
            claims = [one for one in self.claims if len(at) == 1 or part.search(one.paper)]
            if not claims:
                raise RuntimeError(f"no claim of this run is about the row {cells[0]!r} of reproduce/README.md")
            missing -= set(claims)
            cells[2], cells[4] = taken, _in_short(claims)
            lines[number] = f"| {' | '.join(cells)} |"
        if missing:
            names = "; ".join(sorted(one.paper for one in missing))
            raise RuntimeError(f"reproduce/README.md has no row with {command} for: {names}")
        return "\n".join(lines)

    def detailed(self, page: str) -> str:
        """A paper's page with the results of this experiment, between ``<!-- NAME -->`` and ``<!-- end -->``."""
        claims = "\n".join(f"| {one.paper} | {one.measured} | {one.word} |" for one in self.claims)
        measured = [
            f"{self._repeated}; {machine()}.",
            *self._markdown,
            *(f"![{self.title}](../docs/images/reproduce/{path.name})" for path in self._images),
            f"| the paper | measured | verdict |\n| --- | --- | --- |\n{claims}",
        ]
        section = "\n\n".join([f"<!-- {self.name} -->", *measured, "<!-- end -->"])
        return re.sub(rf"<!-- {self.name} -->.*?<!-- end -->", lambda _: section, page, count=1, flags=re.DOTALL)


def page_of(name: str) -> Path:
    """The page with the results of an experiment.

    Raises:
        RuntimeError: No page has a place for them, or several have.
    """
    pages = [page for page in sorted(LIST.parent.glob("*.md")) if f"<!-- {name} -->" in page.read_text()]
    if len(pages) != 1:
        raise RuntimeError(f"{len(pages)} pages in reproduce have <!-- {name} --> and <!-- end -->; one must")
    return pages[0]


def duration(seconds: float) -> str:
    """Seconds for people: ``45 s``, ``3 min 10 s``."""
    whole = max(1, round(seconds))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"


def machine() -> str:
    """The machine and the versions of a measurement, in words."""
    one = here()
    return f"{one.cpu}, {one.cores} cores, torch {one.torch}, Shoal {one.shoal}"
