"""What the digits example shows, on the first agent that is there: progress, a table with a verdict, a picture."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from types import TracebackType

import networkx as nx
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from torch import Tensor

import _picture
from _data import Digits

TITLES = {"atc": "adapt, then combine", "awc": "adapt with combine", "allreduce": "all-reduce", "alone": "alone"}
PLAIN_LINES = 10
"""Lines of progress for each run where there is no terminal to draw on."""


@dataclass
class Run:
    """What one way of training came to. Lists over epochs hold what was measured at the end of each."""

    algorithm: str
    accuracy: list[list[float]] = field(default_factory=list)
    """[epochs][agents], on the test images; NaN of an agent that is gone."""
    consensus_distance: list[float] = field(default_factory=list)
    """sqrt(mean over agents of ||x_i - mean||^2)."""
    norm: float = 0.0
    """||mean||, at the end."""
    correct: Tensor | None = None
    """Bool [test images]: which of them the average model reads, at the end."""
    bytes_sent: list[int] = field(default_factory=list)
    """By each agent, for training alone."""
    milliseconds: float = 0.0
    """A step's, the median over epochs."""

    @property
    def read(self) -> int:
        """How many test images the average model reads."""
        assert self.correct is not None
        return int(self.correct.sum())


class Report:
    def __init__(self, args: argparse.Namespace, digits: Digits, graph: nx.DiGraph, rank: int) -> None:
        self._args, self._digits, self._graph, self._rank = args, digits, graph, rank
        self._console = Console(quiet=rank != 0, highlight=False)
        self._live: Live | None = None
        self._plural = "s" if len(digits.shards) > 1 else ""

    def __enter__(self) -> Report:
        sizes = ", ".join(str(len(shard)) for shard in self._digits.shards)
        self._console.print(
            f"{len(self._digits.shards)} agent{self._plural}, topology {self._args.topology}; {self._digits.total} "
            f"images to train on, dealt out as {sizes}; {len(self._digits.test)} to test with",
            soft_wrap=True,
        )
        self._begin()
        return self

    def _begin(self) -> None:
        if self._console.is_terminal and not self._console.quiet:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, run: Run) -> None:
        """The progress of a run, after an epoch."""
        first = next(rank for rank, one in enumerate(run.accuracy[-1]) if not math.isnan(one))
        if self._console.quiet and first == self._rank:  # who has spoken so far is gone
            self._console.quiet = False
            self._begin()
        epoch, last = len(run.accuracy), self._args.epochs
        if self._live is not None:
            self._live.update(self._panel(run), refresh=True)
        if epoch == last or (self._live is None and epoch % max(1, last // PLAIN_LINES) == 0):
            self._console.print(
                f"{TITLES[run.algorithm]:20} epoch {epoch:{len(str(last))}}/{last}   "
                f"accuracy {_span_of(run)}   "
                f"consensus distance {run.consensus_distance[-1]:.1g}",
                soft_wrap=True,
            )

    def _panel(self, run: Run) -> Group:
        table = Table(box=box.SIMPLE)
        for title in ("agent", "images", "of 0 1 2 ... 9", "accuracy", ""):
            table.add_column(title, justify="right" if title == "images" else "left")
        for rank, (counts, accuracy) in enumerate(zip(self._digits.counts(), run.accuracy[-1], strict=True)):
            bar = ProgressBar(total=1.0, completed=0.0 if math.isnan(accuracy) else accuracy, width=30)
            table.add_row(str(rank), str(sum(counts)), _sparkline(counts), bar, _percent(accuracy))
        epoch, last = len(run.accuracy), self._args.epochs
        state = Table.grid(padding=(0, 2))
        distance = f"consensus distance {run.consensus_distance[-1]:.1g}"
        bar = ProgressBar(total=last, completed=epoch, width=20)
        state.add_row(TITLES[run.algorithm], bar, f"epoch {epoch}/{last}", distance)
        return Group(table, state)

    def finish(self, runs: list[Run]) -> None:
        """The table, the verdict, and the picture."""
        if self._console.quiet:
            return
        self._console.print(self._table(runs))
        for sentence in self._verdict({run.algorithm: run for run in runs}):
            self._console.print(sentence, soft_wrap=True)
        path = Path(self._args.picture)
        _picture.draw(path, runs, TITLES, self._digits, self._args.topology, self._graph)
        self._console.print(f"Picture: {path}", soft_wrap=True)

    def _table(self, runs: list[Run]) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("")
        for run in runs:
            table.add_column(TITLES[run.algorithm], justify="right")

        table.add_row("test accuracy")
        for rank, shard in enumerate(self._digits.shards):
            table.add_row(f"  agent {rank} ({len(shard)} images)", *(_percent(run.accuracy[-1][rank]) for run in runs))
        table.add_row("  their average model", *(f"{run.read / len(self._digits.test):.1%}" for run in runs))
        table.add_row("consensus distance", *(f"{run.consensus_distance[-1]:.1g}" for run in runs))
        table.add_row("sent by an agent", *(_span([f"{sent / 1e6:.1f} MB" for sent in run.bytes_sent]) for run in runs))
        table.add_row("time of a step", *(f"{run.milliseconds:.1f} ms" for run in runs))
        return table

    def _verdict(self, runs: dict[str, Run]) -> list[str]:
        run, reference, alone = (runs.get(name) for name in (self._args.algorithm, "allreduce", "alone"))
        assert run is not None
        sentences = []
        if reference is not None and run is not reference:
            sentences.append(f"Verdict: {_comparison(run, reference)}")
            fewer = _change(sum(run.bytes_sent), sum(reference.bytes_sent))
            faster = _change(run.milliseconds, reference.milliseconds)
            sentences.append(f"Against all-reduce an agent sent {fewer}, and a step took {faster} time.")
        apart = f"{100 * run.consensus_distance[-1] / run.norm:.1g}%"
        sentences.append(f"The agents end within {apart} of their average model, and read {_span_of(run)}.")
        if alone is not None:
            sentences.append(f"Alone, without any communication, they read {_span_of(alone)}.")
        return sentences


def _comparison(run: Run, reference: Run) -> str:
    """Which of two models reads more images."""
    assert run.correct is not None and reference.correct is not None
    better = int((run.correct & ~reference.correct).sum())
    worse = int((reference.correct & ~run.correct).sum())
    verdict = f"{'better' if better > worse else 'worse'} than all-reduce, by more than chance explains"
    if _chance(better, worse) > 0.05:
        verdict = "as accurate as all-reduce, as far as this test can tell"
    total = len(run.correct)
    return f"{verdict}; the agents' average model reads {run.read} of {total} test images, all-reduce {reference.read}."


def _chance(better: int, worse: int) -> float:
    """How likely equally good models are to differ at least so much: McNemar's exact test, two-sided."""
    disagree = better + worse
    tail = sum(comb(disagree, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2.0**disagree)


def _change(value: float, reference: float) -> str:
    part = round(value / reference - 1, 2)
    return f"{abs(part):.0%} {'less' if part < 0 else 'more'}" if part else "as much"


def _percent(accuracy: float) -> str:
    return "gone" if math.isnan(accuracy) else f"{accuracy:.1%}"


def _span_of(run: Run) -> str:
    """The accuracy of the agents that are there, at the end."""
    return _span([f"{one:.1%}" for one in run.accuracy[-1] if not math.isnan(one)])


def _span(texts: list[str]) -> str:
    """The lowest and the highest of numbers of one format."""
    low, high = min(texts, key=_number), max(texts, key=_number)
    return low if low == high else f"{low} to {high}"


def _number(text: str) -> float:
    return float(text.rstrip("% MB"))


def _sparkline(counts: list[int]) -> str:
    marks = " ▁▂▃▄▅▆▇█"
    most = max(counts) or 1
    return "".join(marks[-(-8 * count // most)] for count in counts)
