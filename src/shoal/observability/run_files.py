"""What the writers and readers of a run's files share: files of this user alone, and the names of files
and in a trace.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NEIGHBOURS = ("neighbor", "hierarchical", "pair")
"""Prefixes of the names of operations between neighbours."""


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


_TEXTS = ("name", "host", "boot", "run", "error", "cause", "what")
_COUNTS = ("rank", "size", "incarnation", "peer", "stage", "calls")
_INTEGERS = ("round", "bytes", "step", "unix_time_ns", "perf_counter_ns")
_TIMES = ("ts", "dur", "at")
_FIGURES = ("own", "mean")
_MOST = 1 << 20
"""Agents of a run, and calls that travel together: readers loop over them."""


def check_fields(fields: Mapping[str, Any]) -> None:
    """Refuse a value from a file with which no reader could compute.

    Raises:
        ValueError: A field has a value of another type or size than its name tells.
    """
    for name, value in fields.items():
        if name in _TEXTS:
            fits = isinstance(value, str)
        elif name in _COUNTS:
            fits = isinstance(value, int) and 0 <= value <= _MOST
        elif name in _INTEGERS:
            fits = isinstance(value, int) and -(1 << 63) <= value < 1 << 63
        elif name in _TIMES:
            fits = isinstance(value, (int, float)) and abs(value) < 1 << 63  # false for NaN
        elif name in _FIGURES:
            fits = value is None or (isinstance(value, (int, float)) and math.isfinite(value))
        else:
            continue
        if not fits:
            raise ValueError(f"{name!r} is {str(value)[:60]!r}")


def check_ranks(ranks: Any) -> tuple[int, ...]:
    """Several ranks from a file, as :func:`check_fields` checks one."""
    for rank in ranks:
        check_fields({"rank": rank})
    return tuple(ranks)


FUSED = "small calls that travel together"
"""The name of the row of fused calls in a trace."""
ASKED, ORDERING, MOVING = "asked", "ordering", "moving"
"""Events in a trace, of a process group for a stage of an operation: requested, ordered, moved."""
