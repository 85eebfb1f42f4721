"""What the digits example shows, on rank 0: its progress, a table with a verdict, and the picture's path."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
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
    """[epochs][agents], on the test images."""
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
    def __init__(self, args: argparse.Namespace, digits: Digits, graph: nx.DiGraph, quiet: bool) -> None:
        self._args, self._digits, self._graph, self._quiet = args, digits, graph, quiet
        self._console = Console(quiet=quiet, highlight=False)
        self._live: Live | None = None
        self._plural = "s" if len(digits.shards) > 1 else ""

    def __enter__(self) -> Report:
        sizes = ", ".join(str(len(shard)) for shard in self._digits.shards)
        self._console.print(
            f"{len(self._digits.shards)} agent{self._plural}, topology {self._args.topology}; {self._digits.total} "
            f"images to train on, dealt out as {sizes}; {len(self._digits.test)} to test with",
            soft_wrap=True,
        )
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, run: Run) -> None:
        """The progress of a run, after an epoch."""
        epoch, last = len(run.accuracy), self._args.epochs
        if self._live is not None:
            self._live.update(self._panel(run), refresh=True)
        elif epoch == last or epoch % max(1, last // PLAIN_LINES) == 0:
            low, high = min(run.accuracy[-1]), max(run.accuracy[-1])
            self._console.print(
                f"{TITLES[run.algorithm]:20} epoch {epoch:3}/{last}   accuracy {low:.1%} to {high:.1%}   "
                f"consensus distance {run.consensus_distance[-1]:.1g}",
                soft_wrap=True,
            )

    def _panel(self, run: Run) -> Group:
        table = Table(box=box.SIMPLE)
        for title in ("agent", "images", "of 0 1 2 ... 9", "accuracy", ""):
            table.add_column(title, justify="right" if title == "images" else "left")
        for rank, (counts, accuracy) in enumerate(zip(self._digits.counts(), run.accuracy[-1], strict=True)):
            bar = ProgressBar(total=1.0, completed=accuracy, width=30)
            table.add_row(str(rank), str(sum(counts)), _sparkline(counts), bar, f"{accuracy:.1%}")
        epoch, last = len(run.accuracy), self._args.epochs
        state = Table.grid(padding=(0, 2))
        state.add_row(
            f"{TITLES[run.algorithm]:20}",
            ProgressBar(total=last, completed=epoch, width=30),
            f"epoch {epoch}/{last}, consensus distance {run.consensus_distance[-1]:.2g}",
        )
        return Group(table, state)

    def finish(self, runs: list[Run]) -> None:
        """The table, the verdict, and the picture."""
        if self._quiet:
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

        def row(title: str, value: Callable[[Run], str]) -> None:
            table.add_row(title, *(value(run) for run in runs))

        table.add_row("test accuracy")
        for rank, shard in enumerate(self._digits.shards):
            row(f"  agent {rank} ({len(shard)} images)", lambda run, rank=rank: f"{run.accuracy[-1][rank]:.1%}")
        row("  their average model", lambda run: f"{run.read / len(self._digits.test):.1%}")
        row("consensus distance", lambda run: f"{run.consensus_distance[-1]:.1g}")
        row("sent by an agent", lambda run: _span([f"{sent / 1e6:.1f} MB" for sent in sorted(run.bytes_sent)]))
        row("time of a step", lambda run: f"{run.milliseconds:.1f} ms")
        return table

    def _verdict(self, runs: dict[str, Run]) -> list[str]:
        run = runs[self._args.algorithm]
        worst, best = min(run.accuracy[-1]), max(run.accuracy[-1])
        sentences = []
        reference = runs.get("allreduce")
        if reference is not None and run is not reference:
            sentences.append(f"Verdict: {_comparison(run, reference)}")
            fewer = _change(sum(run.bytes_sent), sum(reference.bytes_sent))
            faster = _change(run.milliseconds, reference.milliseconds)
            sentences.append(f"Against all-reduce an agent sent {fewer}, and a step took {faster} time.")
        sentences.append(
            f"The agents end within {100 * run.consensus_distance[-1] / run.norm:.1g}% of their average model, and read "
            f"{worst:.1%} to {best:.1%}."
        )
        if "alone" in runs:
            alone = runs["alone"].accuracy[-1]
            sentences.append(f"Alone, on their own images, they read {min(alone):.1%} to {max(alone):.1%}.")
        return sentences


def _comparison(run: Run, reference: Run) -> str:
    """Which of two models reads more, and whether chance explains it: McNemar's test, at two standard deviations."""
    assert run.correct is not None and reference.correct is not None
    total, more = len(run.correct), run.read - reference.read
    disagree = int((run.correct != reference.correct).sum())
    counts = f"the agents' average model reads {run.read} of {total} test images, all-reduce {reference.read}"
    if abs(more) <= 2 * sqrt(disagree):
        return f"as accurate as all-reduce, as far as this test can tell; {counts}."
    return f"{'better' if more > 0 else 'worse'} than all-reduce, by more than chance explains; {counts}."


def _change(value: float, reference: float) -> str:
    if not reference:
        return "as much" if not value else "more"
    part = value / reference - 1
    return f"{abs(part):.0%} {'less' if part < 0 else 'more'}"


def _span(texts: list[str]) -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def _sparkline(counts: list[int]) -> str:
    marks = " ▁▂▃▄▅▆▇█"
    most = max(counts) or 1
    return "".join(marks[-(-8 * count // most)] for count in counts)
