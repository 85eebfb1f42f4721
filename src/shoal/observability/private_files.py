"""Files that only this user can access, in directories that others may write to, too."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_own(path: Path) -> int:
    """An empty file of this user's at ``path``. In a directory that others may write to, such as ``/tmp``, its name may
    exist already, as a link to a file that must not be overwritten or as a file that another user reads.
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
