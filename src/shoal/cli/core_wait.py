"""How long the threads of a process were ready to run while other programs had the cores."""

from __future__ import annotations

import contextlib
from pathlib import Path

STARVED = 0.25
"""Of the time; a process that waited for a core for longer may have failed for that reason alone."""


def core_wait(pid: int | str = "self") -> float:
    """Seconds for which the threads of a process have waited for a core, in all; 0 where the kernel does not count."""
    waited = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended
                waited += int((task / "schedstat").read_text().split()[1])
    return waited / 1e9


def is_starved(waited: float, seconds: float) -> bool:
    """Whether that is much for a process that has existed for so long."""
    return waited > STARVED * seconds
