"""How a launcher learns which of its agents failed because of another one's failure.

An exit code does not show it, and neither does the order in which processes end: an agent that failed may take longer
to end than those that fail because of it. So each agent writes a note before it tells the others that it ends. The
notes are lines of a memory file of the launcher, which agents open in ``/proc``, where no other user may look. Where
that is not possible no note comes, and the launcher goes by order. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os

VARIABLE = "SHOAL_EXIT_NOTES"
_NAME = "shoal-exit-notes"
_MOST = 1 << 20
PEER_LOSS = b"peer-loss"
"""The note of an agent whose script failed because another agent was lost."""
OTHER = b"other"
"""The note of any other agent."""


class ExitNotes:
    """The launcher's side."""

    def __init__(self) -> None:
        self._file = os.memfd_create(_NAME)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def read(self) -> dict[int, bytes]:
        """The note of each process that has written one, by its pid."""
        lines = os.pread(self._file, _MOST, 0).split(b"\n")[:-1]
        pairs = [line.split() for line in lines]
        return {int(pair[0]): pair[1] for pair in pairs if len(pair) == 2 and pair[0].isdigit()}

    def close(self) -> None:
        os.close(self._file)


def write_note(is_peer_loss: bool) -> None:
    """Write the note of this process, if its launcher reads notes."""
    path = os.environ.get(VARIABLE, "")
    with contextlib.suppress(OSError):
        # The launcher may be gone, and its pid another process's.
        if path and os.readlink(path) == f"/memfd:{_NAME} (deleted)":  # noqa: PTH115 - no path
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(descriptor, b"%d %s\n" % (os.getpid(), PEER_LOSS if is_peer_loss else OTHER))
            finally:
                os.close(descriptor)
