"""Runs an algorithm for some steps, stacked or real: the loop, the records, the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isnan, nan, sqrt
from typing import Any

import torch

from ...progress_bar import shown
from ..algorithm import Algorithm, Gradient
from ..mix import Mix
from .run_result import Run as Run

Measure = Callable[[torch.Tensor], Mapping[str, float]]
"""Computes figures, by name, of the estimates of all agents, ``[n, d]``."""
_RECORDS = 100
"""About so many records of a run, if ``every`` is not given."""
_ROWS = 1024
"""Rows whose distances are computed at once: another tensor of the size of a large fleet's might not fit."""


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
        ValueError: ``steps`` or ``every`` is negative, or ``lr_lambda`` is for an algorithm without a learning rate.
    """
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
    rows = counted.reshape(-1, estimate.shape[-1])
    parts = (rows[at : at + _ROWS].to(wide) for at in range(0, len(rows), _ROWS))
    square = sum((float(torch.linalg.vector_norm(part - mean)) ** 2 for part in parts), 0.0)
    losses = grad.loss(mean.to(estimate.dtype).expand_as(estimate))
    loss = nan if losses is None else float(mix.counted(losses).sum())
    # One small message for all the sums; float64 counts bytes exactly up to 2**53.
    mine = torch.tensor([len(rows), mix.sent, square, loss], dtype=torch.float64)
    agents, sent, square, loss = mix.sum_of_all(mine).tolist()
    row: dict[str, float] = {"step": step, "rounds": rounds, "exchanges": mix.exchanges, "bytes": round(sent)}
    if mix.seconds is not None:
        row["seconds"] = mix.seconds
    row["consensus"] = nan if isnan(square) else sqrt(square / agents)
    if losses is not None:
        row["loss"] = loss / agents
    figures: Mapping[str, Any] = {} if measure is None or everyone is None else measure(everyone)
    return {**row, **{name: float(one) for name, one in figures.items()}}
