"""Times several cases of the same task, on all agents at once and in turn, so that conditions are equal.

A repetition runs every case once and measures from an instant that all agents agree on to the end of the slowest agent.
If each agent measured from its exit of a barrier, cases that need no other agent would look too fast: on fewer cores
than agents some leave the barrier only when others have finished. The cases take turns in running first. The barriers
and the comparison of times use ``torch.distributed``, outside the timed code. :class:`Figures` are the measurements, in
the form sent to the process that started the job.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Figures:
    """The measurements on tensors of one size.

    Attributes:
        kind: The kind of measurement, which defines the values.
        nbytes: Bytes of one agent's tensor.
        agents: The number of agents.
        values: By case; seconds of the slowest agent in each repetition, or bytes of the agent that holds most.
    """

    kind: str
    nbytes: int
    agents: int
    values: dict[str, list[float]]


Case = Callable[[], object]
Seconds = dict[str, list[float]]
"""Seconds of the slowest agent, for each case and repetition."""

WARMUPS = 2
HEAD_START_SECONDS = 0.003
"""From the barrier to the instant at which all begin; they sleep until then."""
REDRAW_SECONDS = 0.02
"""Time for the other end to draw the progress before the timing begins."""


class Reporter:
    """The channel from rank 0 to the process that started the job: a JSON object a line, on the original stdout."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w", buffering=1)
        # Gloo writes to stdout, too; that is redirected to stderr.
        os.dup2(2, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        if dist.get_rank() == 0:
            self._lines.write(json.dumps(message) + "\n")

    def progress(self, doing: str, done: int, total: int) -> None:
        self.send({"doing": doing, "done": done, "total": total})
        time.sleep(REDRAW_SECONDS)


def compare(reporter: Reporter, title: str, cases: Mapping[str, Case], repetitions: int, calls: int = 1) -> Seconds:
    """Time the cases in turn; all agents call it with the same names in the same order.

    Args:
        title: The name of the measurement, shown as progress.
        cases: The functions to call, by name.
        repetitions: How often each is timed, after ``WARMUPS`` untimed runs.
        calls: How many calls are timed together, if calls are short.

    Returns:
        Seconds of one call on the slowest agent: ``repetitions`` values for each case.
    """
    names = list(cases)
    seconds = torch.zeros(WARMUPS + repetitions, len(names), dtype=torch.float64)
    for repetition, row in enumerate(seconds):
        reporter.progress(title, repetition, len(seconds))
        for turn in range(len(names)):
            case = (repetition + turn) % len(names)
            row[case] = _seconds(cases[names[case]], calls)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    timed = seconds[WARMUPS:]
    return {name: timed[:, case].tolist() for case, name in enumerate(names)}


def _seconds(case: Case, calls: int) -> float:
    # One clock for all processes of a machine, in network namespaces as well.
    start = torch.tensor(time.monotonic() + HEAD_START_SECONDS, dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    begin = start.item()
    time.sleep(max(0.0, begin - time.monotonic()))
    for _ in range(calls):
        case()
    return (time.monotonic() - begin) / calls
