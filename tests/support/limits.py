"""Limits of time that hold on a busy or slow machine, too."""

from __future__ import annotations

import os
import time

CORES = os.cpu_count() or 1
LOOPS, LOOP_SECONDS = 50_000, 0.003
"""Additions, and the processor time that they take on the machines for which the limits were chosen."""


def slowness() -> float:
    """How many times as much processor time a computation takes here and now; 1 or more.

    A core does less in the same time while the other thread of the same core, or another virtual machine, is busy.
    """
    found = []
    for _ in range(3):
        began, total = time.process_time(), 0
        for number in range(LOOPS):
            total += number
        found.append(time.process_time() - began)
    return max(1.0, min(found) / LOOP_SECONDS)


def scaled(seconds: float) -> float:
    """A limit of ``seconds`` on an idle machine.

    It is longer where more threads want to run than there are cores, as each then waits for its turn, and where the
    cores are slow. For tests in which something other than a deadline is to end a wait: on a quiet machine the limit
    tells the two apart.
    """
    return seconds * max(1.0, os.getloadavg()[0] / CORES) * slowness()
