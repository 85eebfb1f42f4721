"""Clocks, randomness and timeouts of the core: exchanges, transports, windows, coordination and the rendezvous.

These modules call the clocks and the randomness by their names in this module, ``clock.monotonic()``, and never the
modules ``time``, ``os`` and ``secrets``. So a test can replace them for all at once: the simulation of a fleet
(``tests/support/simulation``) runs in virtual time and from one seed. A call costs what one of ``time`` costs.

:func:`parse_timeout` checks the argument ``timeout=`` of all operations.
"""

from __future__ import annotations

import os
import random
import time as _time
from typing import Any

monotonic = _time.monotonic
"""Seconds. All deadlines are in it."""
monotonic_ns = _time.monotonic_ns
perf_counter_ns = _time.perf_counter_ns
"""Nanoseconds, for traces."""
thread_time = _time.thread_time
"""Seconds that the calling thread has computed."""
time = _time.time
"""Seconds since 1970, for people."""
sleep = _time.sleep

random_bytes = os.urandom
"""Unpredictable bytes, for names, nonces and secrets."""
uniform = random.Random().uniform
"""A number between two, for pauses that are not to be alike on all agents."""


def random_hex(nbytes: int) -> str:
    """``nbytes`` unpredictable bytes, as twice as many hexadecimal digits."""
    return random_bytes(nbytes).hex()


def parse_timeout(timeout: Any, default: float, *, zero: bool = False) -> float:
    """Convert a ``timeout`` argument to seconds, which may be infinite.

    Args:
        timeout: Any number; None for ``default``.
        zero: Whether 0 is allowed, for a check without waiting.

    Raises:
        TypeError: The argument is no number.
        ValueError: The argument is NaN, negative, or a zero that is not allowed.
    """
    if timeout is None:
        return default
    if isinstance(timeout, bool | str | bytes) or not hasattr(timeout, "__float__"):
        raise TypeError(f"timeout={timeout!r}: it must be a positive number of seconds, not {type(timeout).__name__}")
    try:
        seconds = float(timeout)
    except OverflowError:  # an integer beyond the range of floats
        seconds = float("inf") if timeout > 0 else -1.0
    if not (seconds > 0 or (zero and seconds == 0)):
        allowed = "a number of seconds, 0 or more" if zero else "a positive number of seconds"
        raise ValueError(f"timeout={timeout}: it must be {allowed}")
    return seconds


def format_seconds(count: float) -> str:
    """Format seconds: three digits for a short time, whole seconds for a long one."""
    return f"{count:.3g} s" if count < 100 else f"{count:.0f} s"
