"""An agent that waits to be let in shows it to its launcher, which need not have told it how: by a memory file of this
name among its descriptors.

A launcher needs that to know whether anybody is left whom others could come back to, where all that live were started
again. Nothing here imports torch, which launchers do without.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NAME = "shoal-outside"


class RejoinMarker:
    """It is shown from :meth:`show` to :meth:`take_down`, and by nobody whose process has ended."""

    def __init__(self) -> None:
        self._shown: list[int] = []

    def show(self) -> None:
        """Until it is taken down."""
        self._shown.append(os.memfd_create(_NAME))

    def hide(self) -> None:
        """For any thread; a second call does nothing."""
        with contextlib.suppress(IndexError):
            os.close(self._shown.pop())

    def descriptors(self) -> list[int]:
        """What a forked child must close."""
        return list(self._shown)


def is_marked(pid: int) -> bool:
    """Whether a process of this user shows the sign. False where that cannot be seen, or it has ended."""
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(entry) == f"/memfd:{_NAME} (deleted)":  # noqa: PTH115 - no path
                    return True
            except FileNotFoundError:  # closed meanwhile
                continue
    except OSError:
        pass
    return False
