"""Notes of agents for their launcher, as memory files, without a connection: the rejoin marker, and exit notes.

The rejoin marker shows that an agent waits to rejoin: a memory file with a fixed name is among the agent's descriptors.
A launcher needs it after restarts, to know whether any live agent is a member that could admit others.

Exit notes show which agents failed because of another agent's failure. An exit code does not show it, and neither does
the order in which processes end: an agent that failed may take longer to end than the agents that fail because of it.
So each agent writes a note before it sends its shutdown message. The notes are lines of a memory file of the launcher.
Agents open it in ``/proc``, where no other user has access. If that is not possible there is no note, and the launcher
uses the order.

This module does not import torch, because launchers do not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from ..config import EXIT_NOTES

_MARKER = "shoal-outside"
_NOTES = "shoal-exit-notes"
_MOST_BYTES = 1 << 20
PEER_LOSS = b"peer-loss"
"""The note of an agent whose script failed because another agent was lost."""
OTHER = b"other"
"""The note of any other agent."""
TIMEOUT = b"timeout:"
"""The prefix of a note with the ranks, separated by commas, that an agent awaited until a deadline ended it."""


class RejoinMarker:
    """The marker is visible from :meth:`show` to :meth:`hide`, and never for an ended process."""

    def __init__(self) -> None:
        self._shown: list[int] = []

    def show(self) -> None:
        """Make the marker visible until :meth:`hide`."""
        self._shown.append(os.memfd_create(_MARKER))

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
                if os.readlink(entry) == f"/memfd:{_MARKER} (deleted)":  # noqa: PTH115 - no path
                    return True
            except FileNotFoundError:  # closed since
                continue
    except OSError:
        pass
    return False


class ExitNotes:
    """The launcher's file of exit notes."""

    def __init__(self) -> None:
        self._file = os.memfd_create(_NOTES)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def read(self) -> dict[int, bytes]:
        """The notes of processes, by pid."""
        lines = os.pread(self._file, _MOST_BYTES, 0).split(b"\n")[:-1]
        pairs = [line.split() for line in lines]
        return {int(pair[0]): pair[1] for pair in pairs if len(pair) == 2 and pair[0].isdigit()}

    def close(self) -> None:
        os.close(self._file)


def awaited_ranks(note: bytes) -> tuple[int, ...]:
    """The ranks of a note about a deadline; empty for any other note."""
    ranks = note.removeprefix(TIMEOUT).split(b",") if note.startswith(TIMEOUT) else []
    return tuple(int(rank) for rank in ranks if rank.isdigit())


def write_note(is_peer_loss: bool, awaited: Sequence[int] = ()) -> None:
    """Write the note of this process, if its launcher reads notes.

    Args:
        is_peer_loss: Whether the loss of another agent ended the script.
        awaited: The ranks for which the script waited until the deadline that ended it.
    """
    other = TIMEOUT + b",".join(b"%d" % rank for rank in awaited) if awaited else OTHER
    path = os.environ.get(EXIT_NOTES, "")
    with contextlib.suppress(OSError):
        # The launcher may have ended, and its pid may belong to another process.
        if path and os.readlink(path) == f"/memfd:{_NOTES} (deleted)":  # noqa: PTH115 - no path
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(descriptor, b"%d %s\n" % (os.getpid(), PEER_LOSS if is_peer_loss else other))
            finally:
                os.close(descriptor)
