"""Quantities as people write them on a command line, ``5ms`` or ``1gbit``, and the defaults of the options of training.

Ambiguous units are refused. A rate is in bits or in bytes a second, and its unit states which; prefixes are powers of
1000, and prefixes with an i, as in ``MiB``, of 1024. The command line reads this module, which does without the torch
that :class:`.Training` needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*([a-zA-Zµμ/]*)\s*")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_RATES: Mapping[str, float] = {
    **{f"{prefix}{bit}": many / 8 for prefix, many in _PREFIXES.items() for bit in ("bit", "bit/s", "bps")},
    **{f"{prefix}b/s": float(many) for prefix, many in {**_PREFIXES, **_BINARY}.items()},
}


def parse_seconds(text: str) -> float:
    """Seconds in a duration such as ``5ms``, ``50us``, ``0.2s``; zero needs no unit."""
    return _parse(text, _SECONDS, "a duration", "ns, us, ms, s or min, as in 5ms", allow_zero=True)


def parse_rate(text: str) -> float:
    """Bytes a second in a rate such as ``1gbit``, ``25Gbit/s``, ``400Mbps`` (bits) or ``23GB/s`` (bytes)."""
    accepted = "bit, kbit, mbit, gbit or tbit (bits a second), or B/s, kB/s, MB/s, GB/s (bytes a second), as in 1gbit"
    if text.rstrip().endswith(("b/s", "Bps")):
        raise ValueError(f"{text!r} is not a bandwidth: it may be in bits or in bytes. Write one of {accepted}.")
    return _parse(text, _RATES, "a bandwidth", accepted)


def format_seconds(seconds: float) -> str:
    """Three figures and a unit: ``1.23 ms``."""
    if not math.isfinite(seconds):
        return "never"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{_figures(seconds / size)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.3g} ns"


def format_rate(bytes_per_second: float) -> str:
    """In bits, as networks are sold: ``1 Gbit/s``."""
    if not math.isfinite(bytes_per_second):
        return "no limit"
    bits = 8 * bytes_per_second
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{_figures(bits / size)} {unit}"
    return f"{bits:.3g} bit/s"


def _figures(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _parse(text: str, units: Mapping[str, float], what: str, accepted: str, *, allow_zero: bool = False) -> float:
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not {what}. Write a number and a unit: {accepted}.")
    number, unit = float(found[1] + (found[2] or "")), found[3].lower()
    if allow_zero and number == 0.0 and not unit:
        return 0.0
    if unit not in units:
        problem = f"{found[3]!r} is no unit of it" if unit else "it has no unit"
        raise ValueError(f"{text!r} is not {what}: {problem}. Write one of {accepted}.")
    value = number * units[unit]
    if not math.isfinite(value) or (value == 0.0 and not allow_zero):
        raise ValueError(f"{text!r} is not {what}: it must be {'finite' if allow_zero else 'above zero and finite'}.")
    return value


DIFFERENCE = 0.01
"""The difference of agents' gradients at the begin of training on shuffled data, whose batches still differ."""
ACCURACY = 0.1
"""The share of the mean gradient's length that is left at the end of training."""
COMPRESSION = "0.5 (half of the bytes), topk:0.01, randomk:0.01, qsgd:127 (levels), sign or uint8"
"""How compression is written."""
