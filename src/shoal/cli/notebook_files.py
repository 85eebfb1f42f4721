"""What a notebook's job leaves in its IPython profile while it runs: who it is, and how it is reached."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Files:
    """The files of one profile.

    Attributes:
        profile: its directory.
    """

    profile: Path

    @staticmethod
    def make(name: str) -> Files:
        """Those of a profile of this user, which is made if there is none."""
        from IPython.core.profiledir import ProfileDir
        from IPython.paths import get_ipython_dir

        made = ProfileDir.create_profile_dir_by_name(get_ipython_dir(), name)  # type: ignore[no-untyped-call]
        return Files(Path(made.location))

    @staticmethod
    def find(name: str) -> Files | None:
        """Those of a profile of this user; None if there is none."""
        from IPython.core.profiledir import ProfileDir, ProfileDirError
        from IPython.paths import get_ipython_dir

        try:
            found = ProfileDir.find_profile_dir_by_name(get_ipython_dir(), name)  # type: ignore[no-untyped-call]
        except ProfileDirError:
            return None
        return Files(Path(found.location))

    @property
    def log(self) -> Path:
        return self.profile / "log" / "shoal-notebook.log"

    @property
    def client(self) -> Path:
        """The file that tells a notebook how to reach the job."""
        return self.profile / "security" / "ipcontroller-client.json"

    @property
    def engine(self) -> Path:
        """The file that tells an engine how to reach the job."""
        return self.profile / "security" / "ipcontroller-engine.json"

    @property
    def lock(self) -> Path:
        return self.profile / "pid" / "shoal-notebook"

    def own(self) -> int | None:
        """Be the job of this profile for as long as the returned descriptor is open; None if there is one."""
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        return descriptor

    def owner(self) -> int | None:
        """The process that is this profile's job. A lock that nobody holds any more was left by one that was killed."""
        try:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            # A job that has just begun has not written yet.
            return int(os.read(descriptor, 32) or 0) or os.getpid()
        finally:
            os.close(descriptor)

    def forget_connection(self) -> None:
        """Remove what a job that was killed has left: nobody shall wait for it."""
        self.client.unlink(missing_ok=True)
        self.engine.unlink(missing_ok=True)
