"""The clocks and the randomness of the core: the exchange, the transports, windows, coordination and the rendezvous.

These modules call the functions here by their names in this module, ``clock.monotonic()``, and never the modules
``time``, ``os`` and ``secrets``. So a test can replace them for all at once: the simulation of a fleet
(``tests/support/simulation``) runs in virtual time and from one seed. A call costs what one of ``time`` costs.
"""

from __future__ import annotations

import os
import random
import time as _time

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
