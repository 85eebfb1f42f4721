"""The marker by which a launcher sees that an agent waits to rejoin: a memory file of this name among its descriptors.

A launcher needs it after restarts, to know whether any live agent is a member that could admit others. The agent needs
no connection to the launcher for it. This module does not import torch, because launchers do not.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NAME = "shoal-outside"


class RejoinMarker:
    """The marker is visible from :meth:`show` to :meth:`hide`, and never for an ended process."""

    def __init__(self) -> None:
        self._shown: list[int] = []

    def show(self) -> None:
        """Make the marker visible until :meth:`hide`."""
        self._shown.append(os.memfd_create(_NAME))

    def hide(self) -> None:
        """Remove the marker, from any thread; a second call does nothing."""
        with contextlib.suppress(IndexError):
            os.close(self._shown.pop())

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must close."""
        return list(self._shown)


def is_marked(pid: int) -> bool:
    """Whether a process of this user has the marker. False if its descriptors cannot be read, or it has ended."""
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(entry) == f"/memfd:{_NAME} (deleted)":  # noqa: PTH115 - no path
                    return True
            except FileNotFoundError:  # closed since
                continue
    except OSError:
        pass
    return False
