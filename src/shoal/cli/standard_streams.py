"""The standard streams of a command, without tracebacks for a closed stream, a full disk, or a reader that has ended.

A closed stream (``>&-``, as for daemons and cron jobs) is opened on ``/dev/null``. Otherwise the next file or socket
that the command opens would get its descriptor, and the printed text.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any


class _GuardedStream:
    """A text stream that ends the command where it cannot be written.

    It raises ``SystemExit`` and no ``OSError``, which a command may take for an error of a file that it reads.
    """

    def __init__(self, stream: Any) -> None:
        self.error: OSError | None = None
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        return self._try(self._stream.write, text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OSError as error:
            self.error = error
            self._failed()

    def _failed(self) -> None:
        raise SystemExit(1)

    def discard_rest(self) -> None:
        """After an error, discard the buffered text: writing it would fail again at the end of the process, and change
        its exit status.
        """
        if self.error is not None:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as null:  # noqa: PTH123
                os.dup2(null.fileno(), self.fileno())


class _MessageStream(_GuardedStream):
    """A stream for messages, without which the command does what it does."""

    def _failed(self) -> None:
        pass


def run_with_streams(command: Callable[[], int], name: str) -> int:
    """Call a command and return its exit status; 1 if its output could not be written.

    If the reader of the output has ended (``| head``) it ends without a message, else it prints the reason on stderr.
    """
    _open_closed_descriptors()
    out, err = _GuardedStream(sys.stdout), _MessageStream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            try:
                return command()
            finally:
                out.flush()
        except SystemExit:
            if out.error is None:
                raise
            if not isinstance(out.error, BrokenPipeError):
                print(f"{name}: error: cannot write the output: {out.error.strerror}", file=sys.stderr)
            return 1
        finally:
            err.flush()
            for stream in (out, err):
                stream.discard_rest()


def _open_closed_descriptors() -> None:
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(descriptor, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
