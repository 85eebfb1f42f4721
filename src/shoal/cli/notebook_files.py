"""The files of a notebook's job in its IPython profile while it runs: its process, and its connection."""

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
        """The files of a profile of this user, which is made if it does not exist."""
        from IPython.core.profiledir import ProfileDir
        from IPython.paths import get_ipython_dir

        made = ProfileDir.create_profile_dir_by_name(get_ipython_dir(), name)  # type: ignore[no-untyped-call]
        return Files(Path(made.location))

    @staticmethod
    def find(name: str) -> Files | None:
        """The files of a profile of this user; None if it does not exist."""
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
        """The file with which a notebook connects to the job."""
        return self.profile / "security" / "ipcontroller-client.json"

    @property
    def engine(self) -> Path:
        """The file with which an engine connects to the job."""
        return self.profile / "security" / "ipcontroller-engine.json"

    @property
    def lock(self) -> Path:
        return self.profile / "pid" / "shoal-notebook"

    def own(self) -> int | None:
        """Lock the profile as its job, until the returned descriptor is closed; None if another job has locked it."""
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
        """The process of this profile's job. A lock without a holder was left by a killed process."""
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
        """Remove the connection files of a killed job, so that no client waits for it."""
        self.client.unlink(missing_ok=True)
        self.engine.unlink(missing_ok=True)
