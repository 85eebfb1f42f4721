"""Every algorithm on every topology with every seed, and what they reach: means with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import atan, cos, isnan, nan, pi, sin, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeVar

import networkx as nx
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..algorithms.algorithm import Algorithm, Gradient
from ..algorithms.needs import check
from ..algorithms.runs.run import WHOLE, Measure, axes_for, frame_of, scale
from ..progress_bar import shown
from ..topology.schedule import Schedule, as_schedule
from .stacked import StackedFleet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
Problem = tuple[torch.Tensor, Gradient | Callable[[torch.Tensor], torch.Tensor]]
"""The initial values and the gradient, as :meth:`StackedFleet.run` takes them."""
_KEYS = ("algorithm", "topology", "seed")


@dataclass
class Sweep:
    """The records of many runs.

    Attributes:
        records: Every record of every run (:class:`shoal.algorithms.Run`), with its ``algorithm``, ``topology`` and
            ``seed``. ``pandas.DataFrame`` takes them as they are.
        refused: The pairs of an algorithm and a topology that does not meet its needs, with the reason. They have no
            records.
        confidence: The confidence of the intervals, such as 0.95.
    """

    records: list[dict[str, Any]]
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    confidence: float = 0.95

    def summary(self) -> list[dict[str, Any]]:
        """The last records of each pair of algorithm and topology, over its seeds.

        Returns:
            A dict for each pair: ``algorithm``, ``topology``, ``runs``, and for each figure its mean by its name, and
            the ends of its confidence interval as ``<name>_low`` and ``<name>_high``. The interval is Student's, and
            NaN with one seed.
        """
        found = []
        for (algorithm, topology), runs in self._pairs().items():
            last = [records[-1] for records in runs]
            row: dict[str, Any] = {"algorithm": algorithm, "topology": topology, "runs": len(runs)}
            for name in _figures(last):
                mean, half = interval([record[name] for record in last], self.confidence)
                row |= {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}
            found.append(row)
        return found

    def table(self) -> Table:
        """The summary for a terminal or a notebook: means, ± half of the confidence interval; and the refused pairs."""
        pairs = self._pairs()
        names = _figures([records[-1] for runs in pairs.values() for records in runs])
        table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=f"± {self.confidence:.0%} confidence")
        for name in ("algorithm", "topology", "runs", *names):
            table.add_column(name, justify="left" if name in _KEYS else "right")
        for row in self.summary():
            cells = [_cell(name, row[name], row[f"{name}_high"] - row[name]) for name in names]
            table.add_row(row["algorithm"], row["topology"], str(row["runs"]), *cells)
        for (algorithm, topology), reason in self.refused.items():
            table.add_row(algorithm, topology, "0")
            table.caption = f"{table.caption}\n{algorithm} on {topology} was refused: {reason}"
        return table

    def to_pandas(self) -> Any:
        """The summary as a ``pandas.DataFrame``.

        Raises:
            ImportError: pandas is not installed.
        """
        return frame_of(self.summary())

    def plot(
        self, figure: str = "consensus", *, against: str = "step", ax: Axes | None = None, log: bool | None = None
    ) -> Axes:
        """Draw the mean of a figure over another, a line for each pair, with its confidence interval as a band.

        Args:
            figure: A recorded figure, vertical.
            against: Another, such as ``"step"``, ``"rounds"`` or ``"bytes"``, horizontal: its mean over the seeds.
            ax: Axes to draw into; a new figure if not given.
            log: A logarithmic vertical axis. If not given, it is logarithmic unless a value is negative.

        Returns:
            The axes; ``.figure.savefig(path)`` writes the picture.

        Raises:
            ImportError: matplotlib is not installed.
            KeyError: A record has no figure of that name.
        """
        pairs = self._pairs()
        names = _figures([record for runs in pairs.values() for records in runs for record in records])
        for name in (figure, against):
            if name not in names:
                raise KeyError(f"no column {name!r}; there are: {', '.join(names)}")
        axes, means = axes_for(ax), []
        for (algorithm, topology), runs in pairs.items():
            at_step = list(zip(*runs, strict=True))
            across = [fmean(record[against] for record in records) for records in at_step]
            up = [interval([record[figure] for record in records], self.confidence) for records in at_step]
            axes.plot(across, [mean for mean, _ in up], label=f"{algorithm}, {topology}")
            if len(runs) > 1:
                low, high = [mean - half for mean, half in up], [mean + half for mean, half in up]
                axes.fill_between(across, low, high, alpha=0.2)
            means += [mean for mean, _ in up]
        scale(axes, against, figure, torch.tensor(means, device="cpu"), log)
        axes.legend()
        return axes

    def _pairs(self) -> dict[tuple[str, str], list[list[dict[str, Any]]]]:
        """The records of each run, by algorithm and topology, and then by seed."""
        found: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = {}
        for record in self.records:
            runs = found.setdefault((record["algorithm"], record["topology"]), {})
            runs.setdefault(record["seed"], []).append(record)
        return {pair: list(runs.values()) for pair, runs in found.items()}


def sweep(
    problem: Problem | Callable[[int], Problem],
    algorithms: Mapping[str, Algorithm] | Iterable[Algorithm],
    topologies: Mapping[str, nx.Graph | Schedule] | Iterable[nx.Graph | Schedule],
    steps: int,
    *,
    seeds: Iterable[int] = range(5),
    measure: Measure | None = None,
    every: int | None = None,
    agents_per_machine: int = 1,
    confidence: float = 0.95,
    progress: bool = False,
) -> Sweep:
    """Run every algorithm on every topology with every seed, in simulation.

    A topology that does not meet an algorithm's needs is refused for that algorithm only; the result has the reason.

    Args:
        problem: ``(x, gradient)``, as for :meth:`StackedFleet.run`; or a function of the seed that returns them, so
            that each seed has data of its own.
        algorithms: By name; or without names, which are then their equations' names and numbers.
        topologies: By name; or without names, which are then their descriptions.
        steps: Of each run.
        seeds: Seeds of the fleets: of batches, compressors, and whatever else an algorithm draws.
        measure: As for :meth:`StackedFleet.run`, and so ``every``.
        every: Steps between two records.
        agents_per_machine: For algorithms that average within a machine.
        confidence: Of the intervals, between 0 and 1.
        progress: Show a bar on stderr, if that is a terminal or a notebook.

    Raises:
        ValueError: There is nothing to run, two have one name, every pair is refused, or ``every`` is 0.
    """
    named, graphs = _named(algorithms, repr), _named(topologies, lambda topology: as_schedule(topology).describe())
    numbers = list(dict.fromkeys(seeds))
    if not (named and graphs and numbers):
        raise ValueError("nothing to run: pass at least one algorithm, one topology and one seed")
    if every == 0 or not 0 < confidence < 1:
        raise ValueError(f"every={every}, confidence={confidence}: pass 1 or more, and a number between 0 and 1")
    problem_of = problem if callable(problem) else lambda seed: problem
    problems = {seed: problem_of(seed) for seed in numbers}
    dimension = problems[numbers[0]][0].shape[-1]
    found = Sweep([], {}, confidence)
    cells = [(name, place) for name in named for place in graphs]
    for name, place in list(cells):
        try:
            check(name, named[name].needs, graphs[place], dimension=dimension)
        except ValueError as error:
            found.refused[name, place] = str(error).partition(" (unchecked=")[0]  # which a sweep does not take
            cells.remove((name, place))
    if not cells:
        raise ValueError(f"every pair is refused; the first because {next(iter(found.refused.values()))}")
    runs = [(name, place, seed) for name, place in cells for seed in numbers]
    for name, place, seed in shown(runs, "runs") if progress else runs:
        fleet = StackedFleet(graphs[place], seed=seed, agents_per_machine=agents_per_machine)
        run = fleet.run(named[name], *problems[seed], steps, measure=measure, every=every)
        key = {"algorithm": name, "topology": place, "seed": seed}
        found.records += [{**key, **record} for record in run.records]
    return found


def _named(given: Mapping[str, T] | Iterable[T], name_of: Callable[[T], str]) -> dict[str, T]:
    if isinstance(given, Mapping):
        return dict(given)
    found: dict[str, T] = {}
    for item in given:
        if (name := name_of(item)) in found:
            raise ValueError(f"two are called {name!r}; pass a dict with a name for each")
        found[name] = item
    return found


def _figures(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The figures that every record has."""
    first = records[0] if records else {}
    return [name for name in first if name not in _KEYS and all(name in record for record in records)]


def _cell(name: str, mean: float, half: float) -> str:
    written = f"{mean:,.0f}" if name in WHOLE else f"{mean:.4g}"
    # Counts are usually equal in all runs.
    return written if isnan(half) or (half == 0 and name in WHOLE) else f"{written} ± {half:.2g}"


def interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """The mean, and half of the width of its confidence interval by Student's t: NaN for a single value."""
    mean, count = fmean(values), len(values)
    if count < 2 or isnan(mean) or abs(mean) == float("inf"):
        return mean, nan
    return mean, student_t((1 + confidence) / 2, count - 1) * stdev(values) / sqrt(count)


def student_t(probability: float, freedom: int) -> float:
    """The quantile of Student's t, by bisection.

    Args:
        probability: From 1/2, below 1.
        freedom: Degrees of freedom, at least 1.
    """
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, freedom: int) -> float:
    """The probability of less than t: finite sums (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = atan(t / sqrt(freedom))
    odd = freedom % 2
    term = cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for index in range(3 if odd else 2, freedom - 1, 2):
        term *= cos(angle) ** 2 * (index - 1) / index
        total += term
    within = 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
    return (1 + within) / 2
