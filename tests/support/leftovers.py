"""Resources that a test leaves behind: threads and descriptors of this process, compared before and after."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether the condition came true in time."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.001)
    return True


def descriptors() -> dict[str, str]:
    """The open descriptors of this process, and what each is."""
    result = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            result[entry.name] = os.readlink(entry)  # noqa: PTH115 - what a socket or a memfd "links" to is no path
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return result


@contextmanager
def nothing_is_left() -> Iterator[None]:
    """No more threads and no other descriptors after the block than before it."""
    threads, opened = set(threading.enumerate()), set(descriptors().items())
    yield
    # A thread that has done its work may still be on its way out of the interpreter.
    assert wait_until(lambda: set(threading.enumerate()) <= threads), f"threads left: {threading.enumerate()}"

    def nothing_new_is_open() -> bool:
        if not set(descriptors().items()) - opened:
            return True
        gc.collect()  # an exception that the test caught holds its frames, and they tensors over memory files
        return not set(descriptors().items()) - opened

    # The other end of a connection may still be closing: a process that is ending, or a thread that accepted it.
    assert wait_until(nothing_new_is_open), f"descriptors left: {sorted(set(descriptors().items()) - opened)}"


def resident_bytes() -> int:
    """Memory of this process that is backed by pages now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
