"""Times several ways to do the same thing, on all agents at once and in turn, so that none has the better moment.

A repetition runs every case once and counts from an instant that all agents agree on to the end of the slowest one:
counted by each agent from where it leaves a barrier, what needs no other agent would look faster than it is, since on
fewer cores than agents some leave it only when others are done. The cases take turns in going first.
Only what an agent of a job calls is here; the barriers and the comparison of times are ``torch.distributed``'s, and
never inside what is timed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

Case = Callable[[], object]
Seconds = dict[str, list[float]]
"""Seconds of the slowest agent, for each case and repetition."""

WARMUPS = 2
HEAD_START_SECONDS = 0.003
"""From the barrier to the instant at which all begin; they sleep until then."""
REDRAW_SECONDS = 0.02
"""What the other end gets to draw its progress before anything is timed."""


class Reporter:
    """The way from rank 0 to whoever started the job: a JSON object a line, on what was this process's stdout."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w", buffering=1)
        # Gloo writes to stdout, too; that goes where the errors go.
        os.dup2(2, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        if dist.get_rank() == 0:
            self._lines.write(json.dumps(message) + "\n")

    def progress(self, doing: str, done: int, total: int) -> None:
        self.send({"doing": doing, "done": done, "total": total})
        time.sleep(REDRAW_SECONDS)


def compare(reporter: Reporter, what: str, cases: Mapping[str, Case], repetitions: int, calls: int = 1) -> Seconds:
    """Time the cases in turn; all agents call it with the same names in the same order.

    Args:
        what: What is measured, for the progress display.
        cases: What to call, by name.
        repetitions: How often each is timed, after ``WARMUPS`` that are not.
        calls: How many calls are timed together, for what is short.

    Returns:
        Seconds of one call on the slowest agent: ``repetitions`` values for each case.
    """
    names = list(cases)
    seconds = torch.zeros(WARMUPS + repetitions, len(names), dtype=torch.float64)
    for repetition, row in enumerate(seconds):
        reporter.progress(what, repetition, len(seconds))
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
