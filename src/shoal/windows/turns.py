"""Shorter turns at the interpreter lock while a neighbour is served.

A thread that wants the lock of an interpreter that runs pure Python gets it after the switch interval, 5 ms, and gives
it up in each system call and each operation of torch: a request of a few bytes would take ten such turns.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 0.0005
_lock = threading.Lock()
_inside = 0
_before = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Switch threads more often meanwhile; several threads of a process may be inside."""
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(SECONDS, _before))
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                sys.setswitchinterval(_before)
