"""What the writers and readers of a run's files share: files of this user alone, and the names of files
and in a trace.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_own(path: Path) -> int:
    """An empty file at ``path`` that only this user may write, as a descriptor.

    In a directory that others may write to, such as ``/tmp``, its name may exist already, as a link to a file that must
    not be overwritten or as a file that another user reads.

    Raises:
        PermissionError: It is no regular file of this user's alone.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise PermissionError(errno.EPERM, "it is no file of this user's alone", str(path))
        os.ftruncate(file, 0)
    except BaseException:
        os.close(file)
        raise
    return file


TRACES, LOGS = "shoal-rank*.json", "agent*.jsonl"
"""The names of traces, and of membership logs, in a run's folder."""


def kinds_in(folder: Path) -> tuple[bool, bool]:
    """Whether a folder has files that look like traces, and files that look like membership logs.

    Raises:
        FileNotFoundError: It has neither.
    """
    found = any(folder.glob(TRACES)), any(folder.glob(LOGS))
    if not any(found):
        raise FileNotFoundError(
            f"there is neither a trace nor a record of an agent in {folder}; run with SHOAL_TIMELINE={folder}, or "
            f"SHOAL_RECORD={folder}"
        )
    return found


FUSED = "small calls that travel together"
"""The name of the row of fused calls in a trace."""
ASKED, ORDERING, MOVING = "asked", "ordering", "moving"
"""Events in a trace, of a process group for a stage of an operation: requested, ordered, moved."""
