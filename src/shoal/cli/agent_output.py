"""The output of all agents, on one terminal or in one log: whole lines, each with the rank of its agent.

A line is written when it is complete, so that lines of different agents never mix. An incomplete line, such as a prompt
or a progress bar that redraws itself with a carriage return, is a *state*. On a terminal the lowest rank's state stays
on the bottom line, below the lines; in a file one state of a progress bar is kept every ten seconds. All output is
bytes: it is not decoded, and need not be text.

A reader that pauses (``less``, Ctrl-S) must not block the launcher, which supervises agents. So output that the reader
does not take is buffered here. The descriptors stay blocking, because other processes share them: a few bytes are
written at a time, and only if a poll reports that the write will not block.

The launcher reads the pipes on which agents print in its loop, but not while the reader of the output has paused.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import IO, NamedTuple

from .launcher_signals import TO_END, Signals

STDOUT = 1
STDERR = 2

REDRAW_SECONDS = 0.1
_STATE_IN_FILE_SECONDS = 10.0
_KEPT_LINES = 10
_LONGEST_LINE = 1 << 16
_AT_ONCE = 512
"""Bytes that a pipe or a terminal takes without blocking, once it is writable."""
_MOST_WAITING = 1 << 20
"""Bytes that wait for a reader before no more is read from the agents."""
_BREAK = re.compile(rb"\r*\n|\r+(?=[^\r\n])")
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_ERASE = b"\r\x1b[K"


@dataclass
class _AgentStream:
    tail: bytes = b""
    state: bytes = b""
    state_written: float = field(default_factory=time.monotonic)


class _Waiting(NamedTuple):
    """Bytes to be written to a stream, and whether an agent printed them."""

    stream: int
    data: bytes
    is_agents: bool


class AgentOutput:
    """Writes what agents print on their ``STDOUT`` and ``STDERR`` to this process's own, prefixed by rank.

    Attributes:
        is_incomplete: Some output could not be written.
    """

    def __init__(self, out: int = STDOUT, err: int = STDERR) -> None:
        self.is_incomplete = False
        self._signals: Signals | None = None  # to which the last flush listens
        self._ended_by: signal.Signals | None = None
        self._descriptors = {STDOUT: out, STDERR: err}
        self._is_terminal = {stream: os.isatty(fd) for stream, fd in self._descriptors.items()}
        self._streams: dict[tuple[int, int], _AgentStream] = {}
        self._last_lines: dict[int, deque[bytes]] = {}
        self._broken: set[int] = set()
        # One queue if both are the same file, so that writes keep their order.
        first: deque[_Waiting] = deque()
        self._queues = {STDOUT: first, STDERR: first if os.path.sameopenfile(out, err) else deque[_Waiting]()}
        self._shown = b""
        self._redraw_at: float | None = None

    def feed(self, rank: int, stream: int, data: bytes) -> bool:
        """Take what ``rank`` printed; False if our own ``stream`` takes nothing more."""
        source = self._streams.setdefault((rank, stream), _AgentStream())
        text = source.tail + data
        lines = []
        start = 0
        for found in _BREAK.finditer(text):
            piece = text[start : found.start()]
            start = found.end()
            if found.group().endswith(b"\n"):
                lines.append(piece)
                source.state = b""
            elif piece:
                source.state = piece
        source.tail = text[start:]
        while len(source.tail) > _LONGEST_LINE:
            cut = _character_boundary(source.tail, _LONGEST_LINE)
            lines.append(source.tail[:cut])
            source.tail = source.tail[cut:]
        if self._is_terminal[stream]:
            self._plan_redraw()
        elif source.state and time.monotonic() - source.state_written >= _STATE_IN_FILE_SECONDS:
            source.state_written = time.monotonic()
            lines.append(source.state)
            source.state = b""
        self._write_lines(rank, stream, lines)
        return stream not in self._broken

    def end(self, rank: int, stream: int) -> None:
        """``rank`` prints nothing more: write what it left without a newline."""
        source = self._streams.pop((rank, stream), None)
        rest = source.tail.rstrip(b"\r") if source else b""
        if rest:
            self._write_lines(rank, stream, [rest])
        self._plan_redraw()

    def print(self, text: str) -> None:
        """Write a message of the launcher's own to stderr."""
        self._write(STDERR, f"{text}\n".encode(errors="backslashreplace"))

    def last_lines(self, rank: int) -> list[bytes]:
        """The last lines that ``rank`` wrote to stderr, without their newlines."""
        return list(self._last_lines.get(rank, ()))

    @property
    def is_waiting(self) -> bool:
        """A reader has not taken all: call :meth:`flush` from time to time."""
        return any(self._queues.values())

    @property
    def is_full(self) -> bool:
        """So much waits that no more should be read from the agents."""
        return any(sum(len(line.data) for line in queue) > _MOST_WAITING for queue in self._queues.values())

    def flush(self, *, wait: bool = False) -> None:
        """Write what waits, as far as readers take it at once, or with ``wait`` all of it."""
        for queue in self._queues.values():
            while queue:
                stream, data, is_agents = queue.popleft()
                if stream in self._broken:
                    self.is_incomplete |= is_agents
                    continue
                rest = self._write_now(stream, data, wait)
                if rest:
                    queue.appendleft(_Waiting(stream, rest, is_agents))
                self.is_incomplete |= is_agents and stream in self._broken
                if rest and not wait:
                    break

    def _write_now(self, stream: int, data: bytes, wait: bool) -> bytes:
        """Write to a stream what it takes; the rest."""
        descriptor, at = self._descriptors[stream], 0
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        # A reader that has paused must not keep a launcher that is to end.
        signals = self._signals if wait else None
        if signals is not None:
            poll.register(signals, select.POLLIN)
        try:
            while at < len(data) and (ready := dict(poll.poll(None if wait and self._ended_by is None else 0))):
                if descriptor not in ready:
                    assert signals is not None
                    self._ended_by = next((one for one in signals.read() if one in TO_END), self._ended_by)
                    continue
                with contextlib.suppress(BlockingIOError):  # another process that shares it has made it non-blocking
                    at += os.write(descriptor, data[at : at + _AT_ONCE])
                    continue
                if not wait:
                    break
        except OSError as error:
            # Nobody reads any more (``shoal run ... | head``), the disk is full, or the terminal was closed.
            self._broken.add(stream)
            if stream == STDOUT and not isinstance(error, BrokenPipeError):
                self.print(f"shoal run: cannot write the output of the agents: {error.strerror}")
            return b""
        if wait and at < len(data):
            self._broken.add(stream)
            return b""
        return data[at:]

    def next_redraw(self) -> float | None:
        """When to call ``redraw``, in ``time.monotonic()``; None if there is nothing to draw."""
        return self._redraw_at

    def redraw(self) -> None:
        """Bring the bottom line of the terminal up to date, if it is time."""
        if self._redraw_at is None or time.monotonic() < self._redraw_at:
            return
        self._redraw_at = None
        if self.is_waiting:
            self._plan_redraw()
            return
        stream, state = self._current_state()
        if state != self._shown:
            self._write(stream, state)
            self._shown = state

    def close(self, signals: Signals) -> signal.Signals | None:
        """Take the state off the bottom line, and wait until readers have taken all.

        Returns the signal to end that the launcher has received meanwhile, if any: then the rest is lost.
        """
        self._write(STDERR, b"")
        self._signals = signals
        self.flush(wait=True)
        return self._ended_by

    def _plan_redraw(self) -> None:
        if self._redraw_at is None and any(self._is_terminal.values()):
            self._redraw_at = time.monotonic() + REDRAW_SECONDS

    def _current_state(self) -> tuple[int, bytes]:
        for (rank, stream), source in sorted(self._streams.items()):
            state = source.tail.rstrip(b"\r") or source.state
            if state and self._is_terminal[stream]:
                return stream, self._prefix(rank, stream) + self._fitting(stream, state, len(f"[{rank}] "))
        return STDERR, b""

    def _fitting(self, stream: int, state: bytes, used: int) -> bytes:
        try:
            columns = os.get_terminal_size(self._descriptors[stream]).columns
        except OSError:
            columns = 0
        # A state that wraps could not be erased; a terminal of unknown width (0) gets 80 columns.
        return state.decode(errors="replace")[: max(0, (columns or 80) - used - 1)].encode()

    def _prefix(self, rank: int, stream: int) -> bytes:
        if not self._is_terminal[stream] or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            return b"[%d] " % rank
        return b"\x1b[%dm[%d]\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], rank)

    def _write_lines(self, rank: int, stream: int, lines: list[bytes]) -> None:
        if not lines:
            return
        if stream == STDERR:
            self._last_lines.setdefault(rank, deque(maxlen=_KEPT_LINES)).extend(lines)
        prefix = self._prefix(rank, stream)
        self._write(stream, b"".join(prefix + line + b"\n" for line in lines), is_agents=True)

    def _write(self, stream: int, data: bytes, *, is_agents: bool = False) -> None:
        if self._shown and self._is_terminal[stream]:
            self._shown = b""
            self._plan_redraw()
            data = _ERASE + data
        if data:
            self._queues[stream].append(_Waiting(stream, data, is_agents))
            self.flush()


def _character_boundary(data: bytes, limit: int) -> int:
    """The last position up to ``limit`` that does not cut a UTF-8 character, or ``limit`` if this is no UTF-8."""
    for cut in range(limit, limit - 4, -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return limit


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
        for descriptor in [other for other, (whose, _) in self._pipes.items() if whose == rank]:
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
