"""Runs an algorithm for some steps, stacked or real: the loop, the records, the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..progress_bar import shown
from .algorithm import Algorithm, Gradient
from .mix import Mix

Measure = Callable[[torch.Tensor], Mapping[str, float]]
"""Computes figures, by name, of the estimates."""

_WHOLE = ("step", "rounds", "bytes")


@dataclass
class Run:
    """The result of a run, from which another can continue.

    Attributes:
        x: After the last step: ``[n, d]`` stacked, ``[d]`` in a real agent.
        estimate: The agents' estimates: ``x``, or the algorithm's function of it.
        state: The algorithm's state, to continue with.
        steps: How many steps have been taken, since the state was new.
        sent: Bytes sent in them: by all agents of a stacked fleet, by this one in a real agent.
        rounds: Exchanges in them, of which an algorithm may make several in a step.
        seconds: The simulated time of the steps on the network that the run was given; None without one.
        records: A row for each time that was recorded: ``step``, then ``rounds``, ``bytes`` and (if there was a
            network) ``seconds`` since the beginning, and the figures of the measure. pandas.DataFrame takes it as it
            is.
    """

    x: torch.Tensor
    estimate: torch.Tensor
    state: Any
    steps: int
    sent: int = 0
    rounds: int = 0
    seconds: float | None = None
    records: list[dict[str, float]] = field(default_factory=list)

    def column(self, name: str) -> torch.Tensor:
        """One recorded value over the steps, float64 ``[records]``, to plot.

        Raises:
            KeyError: Some record has no value of that name.
        """
        if self.records and name not in self._columns:
            raise KeyError(f"no column {name!r}; there are: {', '.join(self._columns)}")
        return torch.tensor([row[name] for row in self.records], dtype=torch.float64)

    def table(self, rows: int = 20) -> Table:
        """The records for a terminal or a notebook, as ``rich.print`` shows them.

        Args:
            rows: At most so many, evenly spaced, with the first and the last among them.

        Raises:
            ValueError: ``rows`` is no count.
        """
        if rows < 2:
            raise ValueError(f"rows={rows}: pass at least 2, for the first and the last")
        made = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in self._columns:
            made.add_column(name, justify="right")
        last = len(self.records) - 1
        for number in range(min(rows, last + 1)):
            row = self.records[number if last < rows else round(number * last / (rows - 1))]
            made.add_row(*(f"{row[name]:,.0f}" if name in _WHOLE else f"{row[name]:.4g}" for name in self._columns))
        return made

    @property
    def _columns(self) -> list[str]:
        """The columns that every row has: a run may have been resumed with another measure."""
        return [name for name in self.records[-1] if all(name in row for row in self.records)] if self.records else []


def steps_of(
    algorithm: Algorithm,
    x: torch.Tensor,
    gradient: Gradient | Callable[[torch.Tensor], torch.Tensor],
    mix: Mix,
    steps: int,
    *,
    measure: Measure | None = None,
    every: int = 1,
    progress: bool = False,
    resume: Run | None = None,
) -> Run:
    """Take some steps. The callers' tensors are not changed.

    Args:
        algorithm: Its equation.
        x: The initial values; ignored when a run is resumed.
        gradient: A :class:`Gradient`, or a function of ``x``.
        mix: The exchange.
        steps: How many.
        measure: Figures of the estimates, recorded every ``every`` steps, before the first and after the last. Without
            one there are records only if the mix provides seconds.
        every: How often to record.
        progress: Show a bar on stderr, if that is a terminal or a notebook.
        resume: A run to continue: its ``x``, state, records, and the number of its steps.

    Raises:
        ValueError: ``steps`` or ``every`` is no count.
    """
    if steps < 0 or every < 1:
        raise ValueError(f"steps={steps}, every={every}: pass a number of steps, and 1 or more for every")
    grad = gradient if isinstance(gradient, Gradient) else Gradient(gradient)
    first = 0
    if resume is not None:
        first, mix.sent, mix.exchanges = resume.steps, resume.sent, resume.rounds
        if mix.seconds is not None:
            mix.seconds = resume.seconds or 0.0
    lost = mix.begin(first) and resume is not None  # a new state has no terms of lost agents
    grad.draw(mix)
    with torch.no_grad():
        x, state = (x.clone(), None) if resume is None else (resume.x, resume.state)
        if resume is None:
            state = algorithm.init(x, grad, mix)
        records = [] if resume is None else list(resume.records)

        def record(done: int) -> None:
            if measure is None and mix.seconds is None:
                return
            books = {"step": done, "rounds": mix.exchanges, "bytes": mix.sent}
            clock = {} if mix.seconds is None else {"seconds": mix.seconds}
            figures = {} if measure is None else measure(algorithm.estimate(x, state))
            records.append({**books, **clock, **{name: float(one) for name, one in figures.items()}})

        if resume is None:
            record(0)
        numbers = range(first, first + steps)
        for number in shown(numbers, "steps") if progress else numbers:
            lost = mix.begin(number) or lost
            grad.draw(mix)
            if lost:
                x, state = algorithm.restart(x, state, grad, mix)
                lost = False
            x, state = algorithm.step(x, state, grad, mix)
            mix.end()
            if (number + 1 - first) % every == 0 or number + 1 == first + steps:
                record(number + 1)
        estimate = algorithm.estimate(x, state)
        return Run(x, estimate, state, first + steps, mix.sent, mix.exchanges, mix.seconds, records)
