"""What train_cifar10.py and train_gpt.py share around their loops: figures, options, resuming, a table and a picture.

The loops themselves, `train` of each, are what to copy; nothing of them is here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import networkx as nx
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import shoal

ALGORITHMS = {
    "atc": shoal.algorithms.GradientDescent(1.0),
    "awc": shoal.algorithms.GradientDescent(1.0, atc=False),
    "allreduce": shoal.algorithms.ParallelGradientDescent(1.0),
}
TITLES = {"atc": "adapt, then combine", "awc": "adapt with combine", "allreduce": "all-reduce"}
TOPOLOGIES: dict[str, Callable[[int], nx.DiGraph | shoal.topology.Schedule]] = {
    "one-peer": shoal.topology.OnePeerExponential,
    "exponential": shoal.topology.ExponentialTwoGraph,
    "ring": shoal.topology.RingGraph,
    "star": shoal.topology.StarGraph,
    "full": shoal.topology.FullyConnectedGraph,
}


@dataclass
class Run:
    """What one way of training has come to, the same on all agents. Lists are over evaluations.

    With `state_dict` and `load_state_dict` it is a part of a `shoal.Checkpoint`.
    """

    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What must be the same when the job goes on, such as the learning rate: ``{option: value}``."""
    done: int = 0
    """Epochs, or steps, so far."""
    evaluated: list[int] = field(default_factory=list)
    """How many there had been."""
    of_agents: list[list[float]] = field(default_factory=list)
    """[evaluations][agents], of each agent's own model."""
    of_consensus: list[float] = field(default_factory=list)
    """Of the average of all models."""
    distance: list[float] = field(default_factory=list)
    """`shoal.consensus_distance`."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: The settings are others.
        """
        saved = state["settings"]
        for name in sorted(saved.keys() | self.settings.keys()):
            then, now = saved.get(name), self.settings.get(name)
            if then != now:
                raise ValueError(
                    f"the checkpoint is of a job with {name} {then}, and this one has {now}: a job goes on as it began"
                )
        vars(self).update(state)


def check(folder: Path, run: Run, resume: bool) -> None:
    """See that a job may save in a folder, and go on from what is there. All agents call it.

    Args:
        folder: Of a `shoal.Checkpoint`.
        run: With the settings of this job; the checkpoint's part of that name.
        resume: If not, the folder must be empty: what is there would be taken for this job's.

    Raises:
        SystemExit: On all agents: there is something and it is not wanted, or it is of other settings or of another
            number of agents, or an agent cannot read it.
    """
    if shoal.observability.is_entering():  # the others have been through this, and go on
        return
    if not resume and shoal.broadcast_object(folder.is_dir() and any(folder.iterdir())):
        raise SystemExit(f"{folder} has checkpoints already: go on with --resume, or name another folder")
    try:
        # This part before all others: with other settings, the model may be one that does not fit.
        shoal.Checkpoint(run=run).load(folder, missing_ok=True)
    except (ValueError, shoal.ShoalError) as error:
        raise SystemExit(str(error)) from None


def options(parser: argparse.ArgumentParser, unit: str) -> None:
    """Add the options of both. `unit`: what is counted, ``"epoch"`` or ``"step"``."""
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="atc", help="what is averaged, and when")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="one-peer", help="who averages with whom")
    parser.add_argument("--compare", action="store_true", help="train with all-reduce, too, on the same batches")
    parser.add_argument("--checkpoint", default="", help="a folder to save in")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    parser.add_argument("--stop-after", type=int, default=0, help=f"end after so many {unit}s, to go on another time")
    parser.add_argument("--threads", type=int, default=1, help="of one agent")
    parser.add_argument("--picture", default="", help="where to write a picture of the evaluations")


def parsed(
    parser: argparse.ArgumentParser, arguments: list[str] | None, positive: Sequence[str], not_negative: Sequence[str]
) -> argparse.Namespace:
    """The arguments, those of the command if None; numbers that make no sense end the program with a message."""
    args = parser.parse_args(arguments)
    for least, names in ((1, ("threads", *positive)), (0, ("stop_after", *not_negative))):
        for name in names:
            if getattr(args, name) < least:
                parser.error(f"--{name.replace('_', '-')} must be {least} or more")
    if (args.resume or args.stop_after) and not args.checkpoint:
        parser.error("--resume and --stop-after need --checkpoint")
    return args


def progress(console: Console) -> Progress:
    """Bars, where there is a terminal to draw them on."""
    return Progress(console=console, transient=True, disable=console.quiet or not console.is_terminal)


def span(numbers: Sequence[float], form: str) -> str:
    """From the least to the most, as `form` says, such as ``".2%"``."""
    low, high = f"{min(numbers):{form}}", f"{max(numbers):{form}}"
    return low if low == high else f"{low} to {high}"


def table(runs: Sequence[Run], rows: Mapping[str, Sequence[str]]) -> Table:
    """A column for each run, and in each row an entry for each."""
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("")
    for run in runs:
        shown.add_column(TITLES[run.algorithm], justify="right")
    for name, entries in rows.items():
        shown.add_row(name, *entries)
    return shown


def draw(path: Path, runs: Sequence[Run], adorn: Callable[[Any], object]) -> None:
    """The evaluations of each run's consensus, and in thin lines of its agents. `adorn` labels the axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run, colour in zip(runs, ("#1f77b4", "#1b1f23"), strict=False):
        label = f"{TITLES[run.algorithm]}, consensus"
        axes.plot(run.evaluated, run.of_consensus, ".-", color=colour, label=label)
        for curve in zip(*run.of_agents, strict=True):
            axes.plot(run.evaluated, curve, color=colour, linewidth=0.6, alpha=0.6)
    adorn(axes)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
