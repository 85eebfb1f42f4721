"""The pipes on which agents print, read in the launcher's loop, and not while the reader of the output has paused."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Mapping
from functools import partial
from typing import IO

from .agent_output import AgentOutput

_CHUNK = 1 << 16
_MOST_IN_PIPE = 1 << 20
"""Bytes. A pipe holds 64 KiB unless a process enlarges it, at most to this."""
_READER_SECONDS = 0.05
"""Seconds between two looks whether a reader of the output that has paused reads again."""


class AgentPipes:
    """Reads what agents print and hands it to an :class:`AgentOutput`.

    Args:
        output: Takes what is read.
        selector: The launcher's loop; the ``data`` of each pipe in it is a function that reads the pipe.
    """

    def __init__(self, output: AgentOutput, selector: selectors.BaseSelector) -> None:
        self._output, self._selector = output, selector
        self._pipes: dict[int, tuple[int, int]] = {}  # rank and stream, by descriptor
        self._paused = False  # no pipe is in the selector

    def add(self, rank: int, files: Mapping[int, IO[bytes] | None]) -> None:
        """Read the pipes of an agent, one for each stream. Closes the files."""
        for stream, file in files.items():
            assert file is not None
            # The pipe is read with os.read alone, and closed by descriptor: a file object would buffer.
            descriptor = os.dup(file.fileno())
            file.close()
            os.set_blocking(descriptor, False)
            self._pipes[descriptor] = (rank, stream)
            if not self._paused:
                self._register(descriptor)

    @property
    def next_look(self) -> float | None:
        """When to call :meth:`follow_reader`, in ``time.monotonic()``; None while the reader takes all at once."""
        return time.monotonic() + _READER_SECONDS if self._output.is_waiting or self._paused else None

    def follow_reader(self) -> None:
        """Write what waits for a reader that has paused.

        While too much waits, nothing is read from the agents. They wait in their own writes, and the launcher still
        sees signals and failures.
        """
        if not (self._output.is_waiting or self._paused):
            return
        self._output.flush()
        if self._output.is_full == self._paused:
            return
        self._paused = not self._paused
        for descriptor in self._pipes:
            if self._paused:
                self._selector.unregister(descriptor)
            else:
                self._register(descriptor)

    def drain(self, rank: int) -> None:
        """Read what an agent that has ended has left in its pipes."""
        for descriptor in [one for one, (whose, _) in self._pipes.items() if whose == rank]:
            # Bounded, because a process that outlives the agent may hold the pipe and keep writing.
            for _ in range(_MOST_IN_PIPE // _CHUNK):
                if not self._read(descriptor):
                    break

    def close(self) -> None:
        """Close all pipes, read or not."""
        for descriptor in list(self._pipes):
            self._close(descriptor)

    def _register(self, descriptor: int) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, partial(self._read, descriptor))

    def _read(self, descriptor: int) -> bool:
        """Pass on what is there, up to a chunk; False if there is nothing, or never will be again."""
        if descriptor not in self._pipes:
            return False
        rank, stream = self._pipes[descriptor]
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if data and self._output.feed(rank, stream, data):
            return True
        # The pipe has ended; or the launcher's stdout is closed, and then the agent's stdout must be closed, too.
        self._close(descriptor)
        return False

    def _close(self, descriptor: int) -> None:
        self._output.end(*self._pipes.pop(descriptor))
        if not self._paused:
            self._selector.unregister(descriptor)
        os.close(descriptor)
