"""A run of an algorithm, stacked or real: the loop over its steps, and the result with its records.

The records are columns, and become a table, a plot, a pandas frame or a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from math import isnan, nan, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ...ops import safe_serialization
from ...progress_bar import shown
from ...topology._validate import as_int
from ..algorithm import Algorithm, Gradient
from ..mix import Mix

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def axes_for(ax: Axes | None) -> Axes:
    """The caller's axes, or those of a new figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plot() needs matplotlib, which is not installed. Run: pip install 'shoal[plot]'") from error
    axes: Axes = pyplot.subplots(layout="constrained")[1]
    return axes


def scale(axes: Axes, across: str, up: str, values: torch.Tensor, log: bool | None) -> None:
    """Name both axes. The vertical one is logarithmic if ``log`` is True, or None and no value is negative."""
    # A value of 0, such as the consensus distance of a common start, is left out and not drawn at the bottom.
    if log or (log is None and bool((values > 0).any()) and not bool((values < 0).any())):
        axes.set_yscale("log", nonpositive="mask")
    axes.set_xlabel(across)
    axes.set_ylabel(up)


def frame_of(rows: Sequence[dict[str, Any]]) -> Any:
    """The rows as a ``pandas.DataFrame``.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        pandas: Any = import_module("pandas")
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas, which is not installed. Run: pip install pandas") from error
    return pandas.DataFrame(list(rows))


_FORMAT = "shoal run, version "
_VERSION = "2"
"""Of the fields in a file. A field that is added, removed or changed in its meaning needs the next number."""
WHOLE = ("step", "rounds", "exchanges", "bytes")
"""The recorded counts; the other figures are numbers with fractions."""


@dataclass
class Run:
    """The result of a run, from which another can continue.

    A *step* is one step of the algorithm. A *round* is a step in which agents exchange something; ``LocalSteps`` has
    fewer rounds than steps. An *exchange* is one use of a verb of :class:`Mix` that sends something: gradient tracking
    makes two in a round.

    Attributes:
        x: After the last step: ``[n, d]`` stacked, ``[d]`` in a real agent.
        estimate: The agents' estimates: ``x``, or the algorithm's function of it.
        state: The algorithm's state, to continue with.
        steps: How many steps have been taken, since the state was new.
        sent: Bytes sent in them: by all agents of a stacked fleet, by this one in a real agent.
        rounds: Steps among them in which agents exchanged something.
        seconds: The simulated time of the steps on the network that the run was given; None without one.
        records: A dict for each recorded step, equal in a simulation and on every real agent, up to rounding:

            - ``step``, ``rounds``, ``exchanges``: the counts since the beginning;
            - ``bytes``: sent by all agents, without the messages that the records themselves need;
            - ``seconds``: simulated time, if there was a network;
            - ``consensus``: the consensus distance, ``sqrt(mean over agents of |x_i - mean x|^2)`` of the estimates;
            - ``loss``: the mean over agents of their losses at the mean of the estimates, if the gradient knows the
              loss (:func:`own`, :func:`shoal.sim.per_agent`), on the data of the step: all of it, or its batch;
            - the figures of ``measure``, which replace those above if they have their names.
        exchanges: Exchanges in the steps.
        gradients: Gradients that each agent took in them, so that a continued run knows its next batch.
    """

    x: torch.Tensor
    estimate: torch.Tensor
    state: Any
    steps: int
    sent: int = 0
    rounds: int = 0
    seconds: float | None = None
    records: list[dict[str, float]] = field(default_factory=list)
    exchanges: int = 0
    gradients: int = 0

    def column(self, name: str) -> torch.Tensor:
        """One recorded value over the steps, float64 ``[records]``, to plot.

        Raises:
            KeyError: Some record has no value of that name.
        """
        if self.records and name not in self._columns:
            raise KeyError(f"no column {name!r}; there are: {', '.join(self._columns)}")
        return torch.tensor([row[name] for row in self.records], dtype=torch.float64, device="cpu")

    def table(self, rows: int = 20) -> Table:
        """The records for a terminal or a notebook, as ``rich.print`` shows them.

        Args:
            rows: At most so many, evenly spaced, with the first and the last among them.

        Raises:
            ValueError: ``rows`` is no count.
        """
        if rows < 2:
            raise ValueError(f"rows={rows}: pass at least 2, for the first and the last")
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in self._columns:
            table.add_column(name, justify="right")
        last = len(self.records) - 1
        for number in range(min(rows, last + 1)):
            row = self.records[number if last < rows else round(number * last / (rows - 1))]
            table.add_row(*(f"{row[name]:,.0f}" if name in WHOLE else f"{row[name]:.4g}" for name in self._columns))
        return table

    def plot(
        self,
        figure: str = "consensus",
        *,
        against: str = "step",
        ax: Axes | None = None,
        log: bool | None = None,
        **style: Any,
    ) -> Axes:
        """Draw a recorded figure over another with matplotlib.

        Args:
            figure: A column of the records, vertical.
            against: Another column, such as ``"step"``, ``"rounds"`` or ``"bytes"``, horizontal.
            ax: Axes to draw into; a new figure if not given.
            log: A logarithmic vertical axis. If not given, it is logarithmic unless a value is negative.
            style: Options of ``matplotlib.axes.Axes.plot``, such as ``label`` or ``color``.

        Returns:
            The axes; ``.figure.savefig(path)`` writes the picture.

        Raises:
            ImportError: matplotlib is not installed.
            KeyError: Some record has no value of that name.
        """
        across, up = self.column(against), self.column(figure)
        axes = axes_for(ax)
        axes.plot(across.numpy(), up.numpy(), **style)
        scale(axes, against, figure, up, log)
        return axes

    def to_pandas(self) -> Any:
        """The records as a ``pandas.DataFrame``: a row for each recorded step.

        Raises:
            ImportError: pandas is not installed.
        """
        return frame_of(self.records)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run to a file, to continue it or to draw it later. The file contains no pickle.

        Args:
            path: The file; an existing one is replaced. Each real agent needs a file of its own.

        Raises:
            TypeError: The algorithm's state has a part that is no tensor, number, string or container of these.
        """
        content = {
            "kind": _FORMAT + _VERSION,
            **{attribute.name: getattr(self, attribute.name) for attribute in fields(self)},
        }
        try:
            data = safe_serialization.write(content, "run")
        except TypeError as error:
            raise TypeError(f"{error}, which cannot be saved without pickle: use tensors and plain data") from None
        Path(path).write_bytes(data.numpy().tobytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Run:
        """A run from a file of :meth:`save`. Loading runs no code of the file.

        Args:
            path: The file.
            device: Where to put its tensors.

        Raises:
            ValueError: The file is not one of :meth:`save`, or one of another version of Shoal with other fields.
        """
        data = bytearray(Path(path).read_bytes())
        try:
            content = safe_serialization.read(
                torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, device="cpu")
            )
            kind, version, found = content.pop("kind").partition(_FORMAT)
            if kind or not version:
                raise ValueError("its content is of another kind")
            if found == _VERSION and content.keys() != {attribute.name for attribute in fields(cls)}:
                raise ValueError(f"its fields are {', '.join(content)}")
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)} is not a saved run, or is damaged: {error}") from error
        # An older file lacks counts that a continued run needs. With zeros in their place it would continue with other
        # batches, without an error.
        if found != _VERSION:
            raise ValueError(
                f"{os.fspath(path)} is a run of file version {found}, and this version of Shoal reads version "
                f"{_VERSION}. Load it with the version of Shoal that saved it, or run it again"
            )
        return cls(**_on(torch.device(device), content))

    @property
    def _columns(self) -> list[str]:
        """The columns that every row has: a run may have been resumed with another measure."""
        return [name for name in self.records[-1] if all(name in row for row in self.records)] if self.records else []


def _on(device: torch.device, content: Any) -> Any:
    """The content with its tensors on a device."""
    if isinstance(content, torch.Tensor):
        return content.to(device)
    if isinstance(content, dict):
        return {name: _on(device, item) for name, item in content.items()}
    return type(content)(_on(device, item) for item in content) if isinstance(content, (tuple, list)) else content


Measure = Callable[[torch.Tensor], Mapping[str, float]]
"""Computes figures, by name, of the estimates of all agents, ``[n, d]``."""
_RECORDS = 100
"""About so many records of a run, if ``every`` is not given."""
_ROWS = 1024
"""Rows whose distances are computed at once: another tensor of the size of a large fleet's might not fit."""


def check_start(x: object) -> None:
    """Check the initial values of a run.

    Raises:
        TypeError: They are no tensor of numbers with fractions: averages of whole numbers would fail in mid-step.
        ValueError: They have no dimension.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}: pass a tensor, [n, d] in a stacked fleet and [d] in a real agent")
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"x has {x.dtype}: pass numbers with fractions, as x.to(torch.float32)")
    if not x.dim():
        raise ValueError("x has no dimension: pass [n, d] in a stacked fleet and [d] in a real agent, as x.view(1)")


def steps_of(
    algorithm: Algorithm,
    x: torch.Tensor,
    gradient: Gradient | Callable[[torch.Tensor], torch.Tensor],
    mix: Mix,
    steps: int,
    *,
    measure: Measure | None = None,
    every: int | None = None,
    progress: bool = False,
    resume: Run | None = None,
    lr_lambda: Callable[[int], float] | None = None,
) -> Run:
    """Take some steps. The callers' tensors are not changed.

    Args:
        algorithm: Its equation.
        x: The initial values; ignored when a run is resumed.
        gradient: A :class:`Gradient`, or a function of ``x``.
        mix: The exchange.
        steps: How many.
        measure: Figures of the estimates of all agents, ``[n, d]``, in rank order; also on a real agent, to which the
            others then send theirs at every record.
        every: Steps between two records; the first is before the first step, and the last after the last. If not
            given, a hundredth of the steps, at least 1. With 0 nothing is recorded, and nothing sent for records.
            All agents must pass the same number, and the same ``steps`` unless it is 0.
        progress: Show a bar on stderr, if that is a terminal or a notebook.
        resume: A run to continue: its ``x``, state, records, and the number of its steps.
        lr_lambda: The factor of the algorithm's learning rate in each step, by its number from 0.

    Raises:
        TypeError: ``steps`` is no whole number.
        ValueError: ``steps`` or ``every`` is negative, or ``lr_lambda`` is for an algorithm without a learning rate.
    """
    steps = as_int(steps, "steps")
    every = max(1, steps // _RECORDS) if every is None else every
    if steps < 0 or every < 0:
        raise ValueError(
            f"steps={steps}, every={every}: pass a number of steps, and 1 or more for every, or 0 to record nothing"
        )
    grad = gradient if isinstance(gradient, Gradient) else Gradient(gradient)
    first = rounds = 0
    if resume is not None:
        first, rounds, mix.sent, mix.exchanges = resume.steps, resume.rounds, resume.sent, resume.exchanges
        mix.gradients = resume.gradients
        if mix.seconds is not None:
            mix.seconds = resume.seconds or 0.0
    unscaled, factor = algorithm, 1.0
    if lr_lambda is not None and algorithm.scaled(1.0) is None:
        raise ValueError(f"lr_lambda: {algorithm!r} has no learning rate (lr) to multiply")
    lost = mix.begin(first) and resume is not None  # a new state has no terms of lost agents
    grad.draw(mix)
    before = mix.exchanges  # those of init belong to the first round
    with torch.no_grad():
        x, state = (x.clone(), None) if resume is None else (resume.x, resume.state)
        if resume is None:
            state = algorithm.init(x, grad, mix)
        records = [] if resume is None else list(resume.records)
        if resume is None and every:
            records.append(_record(0, rounds, algorithm.estimate(x, state), grad, mix, measure))
        numbers = range(first, first + steps)
        for number in shown(numbers, "steps") if progress else numbers:
            lost = mix.begin(number) or lost
            grad.draw(mix)
            if lr_lambda is not None and (wanted := lr_lambda(number)) != factor:
                algorithm, factor = unscaled.scaled(wanted) or unscaled, wanted
            if lost:
                x, state = algorithm.restart(x, state, grad, mix)
                lost = False
            mix.follow(x, state)
            x, state = mix.kept((x, state), algorithm.step(x, state, grad, mix))
            mix.end()
            rounds, before = rounds + (mix.exchanges > before), mix.exchanges
            if every and ((number + 1 - first) % every == 0 or number + 1 == first + steps):
                records.append(_record(number + 1, rounds, algorithm.estimate(x, state), grad, mix, measure))
        estimate = algorithm.estimate(x, state)
        return Run(
            x, estimate, state, first + steps, mix.sent, rounds, mix.seconds, records, mix.exchanges, mix.gradients
        )


def _record(
    step: int, rounds: int, estimate: torch.Tensor, grad: Gradient, mix: Mix, measure: Measure | None
) -> dict[str, float]:
    """A row of the records, the same on all agents; docs in :class:`Run`."""
    wide = torch.promote_types(estimate.dtype, torch.float32)
    counted = mix.counted(estimate)
    everyone = None if measure is None else mix.rows_of_all(counted)
    mean = mix.mean_of_all(counted.to(wide)) if everyone is None else everyone.mean(0, dtype=wide)
    rows = counted.flatten(0, -2) if counted.dim() > 1 else counted.unsqueeze(0)
    parts = (rows[at : at + _ROWS].to(wide) for at in range(0, len(rows), _ROWS))
    square = sum((float(torch.linalg.vector_norm(part - mean)) ** 2 for part in parts), 0.0)
    losses = grad.loss(mean.to(estimate.dtype).expand_as(estimate))
    loss = nan if losses is None else float(mix.counted(losses).sum())
    # One small message for all the sums; float64 counts bytes exactly up to 2**53.
    mine = torch.tensor([len(rows), mix.sent, square, loss], dtype=torch.float64, device="cpu")
    agents, sent, square, loss = mix.sum_of_all(mine).tolist()
    row: dict[str, float] = {"step": step, "rounds": rounds, "exchanges": mix.exchanges, "bytes": round(sent)}
    if mix.seconds is not None:
        row["seconds"] = mix.seconds
    row["consensus"] = nan if isnan(square) else sqrt(square / agents)
    if losses is not None:
        row["loss"] = loss / agents
    figures: Mapping[str, Any] = {} if measure is None or everyone is None else measure(everyone)
    if not isinstance(figures, Mapping):
        raise TypeError(f"measure= must return a dict of numbers by name, not {type(figures).__name__}")
    return {**row, **{name: float(figure) for name, figure in figures.items()}}
