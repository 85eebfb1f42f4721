"""Limits of time that hold on a busy machine, too."""

from __future__ import annotations

import os

CORES = os.cpu_count() or 1


def scaled(seconds: float) -> float:
    """A limit of ``seconds`` on an idle machine.

    It is longer where more threads want to run than there are cores, as each then waits for its turn. For tests in
    which something other than a deadline is to end a wait: on a quiet machine the limit tells the two apart.
    """
    return seconds * max(1.0, os.getloadavg()[0] / CORES)
