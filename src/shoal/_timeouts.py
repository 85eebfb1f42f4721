"""Parses, applies and formats timeouts in seconds."""

from __future__ import annotations

import threading
from typing import Any

from ._signals import slices


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


def acquire_with_deadline(lock: threading.Lock | threading.RLock, deadline: float) -> bool:
    """Acquire a lock of this process by ``deadline`` (``clock.monotonic()``), which may be infinite."""
    return any(lock.acquire(timeout=seconds) for seconds in slices(deadline))


def format_seconds(count: float) -> str:
    """Format seconds: three digits for a short time, whole seconds for a long one."""
    return f"{count:.3g} s" if count < 100 else f"{count:.0f} s"
