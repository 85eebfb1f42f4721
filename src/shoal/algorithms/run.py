"""Runs an algorithm for some steps, stacked or real: the loop, the records, the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import track

from .algorithm import Algorithm, Gradient
from .mix import Mix

Measure = Callable[[torch.Tensor], Mapping[str, float]]
"""Takes the estimates, gives figures of them."""


@dataclass
class Run:
    """What came out.

    Attributes:
        x: What the steps left: ``[n, d]`` stacked, ``[d]`` in a real agent.
        estimate: What the agents would answer: ``x``, or what the algorithm makes of it.
        state: The algorithm's, to go on with.
        steps: How many steps have been taken, since the state was new.
        sent: Bytes sent in them: by all agents of a stacked fleet, by this one in a real agent.
        records: A row for each time that was recorded: ``step``, ``bytes`` sent since the beginning, ``seconds`` of the
            network model if there was one, and the figures of the measure. pandas.DataFrame takes it as it is.
    """

    x: torch.Tensor
    estimate: torch.Tensor
    state: Any
    steps: int
    sent: int = 0
    records: list[dict[str, float]] = field(default_factory=list)

    def column(self, name: str) -> torch.Tensor:
        """One figure over the steps, float64 ``[records]``, for a plot.

        Raises:
            KeyError: Nothing of that name was recorded.
        """
        if self.records and name not in self.records[0]:
            raise KeyError(f"no column {name!r}; there are: {', '.join(self.records[0])}")
        return torch.tensor([row[name] for row in self.records], dtype=torch.float64)


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
        x: Where the agents begin; ignored when a run is resumed.
        gradient: A :class:`Gradient`, or a function of ``x``.
        mix: The exchange.
        steps: How many.
        measure: Figures of the estimates, recorded every ``every`` steps, before the first and after the last.
        every: How often to record.
        progress: Show a bar.
        resume: A run to go on with: its ``x``, state, records, and the number of its steps.

    Raises:
        ValueError: ``steps`` or ``every`` is no count.
    """
    if steps < 0 or every < 1:
        raise ValueError(f"steps={steps}, every={every}: pass a number of steps, and 1 or more for every")
    grad = gradient if isinstance(gradient, Gradient) else Gradient(gradient)
    first, mix.sent = (0, 0) if resume is None else (resume.steps, resume.sent)
    mix.begin(first)
    grad.draw(mix)
    with torch.no_grad():
        x, state = (x.clone(), None) if resume is None else (resume.x, resume.state)
        if resume is None:
            state = algorithm.init(x, grad, mix)
        records = [] if resume is None else list(resume.records)

        def record(done: int) -> None:
            if measure is not None:
                figures = measure(algorithm.estimate(x, state))
                records.append({"step": done, "bytes": mix.sent, **{name: float(one) for name, one in figures.items()}})

        if resume is None:
            record(0)
        rounds = range(first, first + steps)
        for number in track(rounds, "steps", transient=True) if progress else rounds:
            mix.begin(number)
            grad.draw(mix)
            x, state = algorithm.step(x, state, grad, mix)
            if (number + 1 - first) % every == 0 or number + 1 == first + steps:
                record(number + 1)
        return Run(x, algorithm.estimate(x, state), state, first + steps, mix.sent, records)
