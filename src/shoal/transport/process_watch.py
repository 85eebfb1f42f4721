"""Watches the processes of other agents on this machine: it detects their ends, even if a child keeps their sockets
open.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from .peer_address import PeerId, pid_namespace, process_start
from .poller import Poller


class ProcessWatch:
    """The watched processes, by rank; ``on_end`` is called when one has ended."""

    def __init__(self, poller: Poller, on_end: Callable[[int], None]) -> None:
        self._poller = poller
        self._on_end = on_end
        self._pidfds: dict[int, int] = {}

    def watch(self, place: PeerId) -> None:
        """Watch the process of an agent, if this process can see it."""
        if place.pid_namespace != pid_namespace():
            return
        try:
            fd = os.pidfd_open(place.pid)
        except OSError:
            return
        if process_start(place.pid) != place.started:  # it has ended, and its number is another one's
            os.close(fd)
            return
        self._pidfds[place.rank] = fd
        self._poller.add(fd, lambda _: self._end(place.rank))

    def _end(self, rank: int) -> None:
        self.forget(rank)
        self._on_end(rank)

    def forget(self, rank: int) -> None:
        fd = self._pidfds.pop(rank, None)
        if fd is not None:
            self._poller.remove(fd)
            os.close(fd)

    def __contains__(self, rank: int) -> bool:
        return rank in self._pidfds

    def descriptors(self) -> list[int]:
        return list(self._pidfds.values())

    def close(self) -> None:
        for rank in list(self._pidfds):
            self.forget(rank)
