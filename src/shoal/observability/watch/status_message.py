"""The status message of an agent, validated and bounded, because it comes from outside."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

NONSENSE = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""The errors of a malformed summary."""
_LONGEST = 400
_MOST_RANKS, _MOST_EDGES, _MOST_NAMES = 64, 1024, 32
Number = float | str
"""A text where JSON has no number: ``nan``, ``inf``."""


@dataclass(frozen=True)
class MetricSample:
    """The ``times``-th measurement of a number by the script: this agent's value, and all agents' values."""

    times: int
    own: Number
    mean: Number
    worst: Number


@dataclass(frozen=True)
class WorkStatus:
    """The work of an agent, if it had the time to report it.

    Attributes:
        waits_in: The call that it has waited in for longest; empty if it does not wait.
        waits_for: The ranks that it waits for.
        waits_seconds: The duration of the wait.
        stands_still: A thread of its script is blocked in a call.
        lost, left: The ranks that it knows as lost, or as shut down.
        over: The reason why it cannot exchange with others any more.
        step, step_seconds: The number of training steps, and the duration of one.
        measured: The measurements, by name.
        nbytes: The bytes that it has sent in all.
        sent: The same by destination, only on the edges with the most bytes.
        edges: The destinations of its last exchange with neighbours.
    """

    waits_in: str
    waits_for: tuple[int, ...]
    waits_seconds: float
    stands_still: bool
    lost: tuple[int, ...]
    left: tuple[int, ...]
    over: str
    step: int
    step_seconds: float | None
    measured: dict[str, MetricSample]
    nbytes: int
    sent: dict[int, int]
    edges: tuple[int, ...]


@dataclass(frozen=True)
class StatusMessage:
    """A summary.

    Attributes:
        rank, size, incarnation, attempt: The identity of the agent.
        pid, host: Its process and its machine.
        leaves: The agent has shut down.
        rejoins: The agent was restarted, and the others have not admitted it yet.
        work: None where it had no time for more.
    """

    rank: int
    size: int
    incarnation: int
    attempt: int
    pid: int
    host: str
    leaves: bool
    work: WorkStatus | None = field(default=None)
    rejoins: bool = False

    @staticmethod
    def of(data: dict[str, Any], size: int) -> StatusMessage:
        """The message from JSON data of an agent, in a run of ``size`` agents.

        Raises:
            One of :data:`NONSENSE`: The data is malformed.
        """
        rank = _rank(data["rank"], size)
        who = (rank, _count(data["size"]), _count(data["incarnation"]), _count(data["attempt"]), _count(data["pid"]))
        work = _work(data, size) if "step" in data else None
        return StatusMessage(*who, _text(data["host"]), bool(data.get("leaves")), work, bool(data.get("rejoins")))


def _work(data: dict[str, Any], size: int) -> WorkStatus:
    waits = sorted(data.get("waiting", ()), key=lambda wait: -_seconds(wait["seconds"]))[:1]
    agrees = _ranks(data["agrees_with"], size)
    call, ranks, seconds = "", agrees, 0.0
    if agrees:
        call = "the agreement on a loss"
    elif waits:
        call, ranks = _text(waits[0]["call"]), _ranks(waits[0]["ranks"], size)
        seconds = _seconds(waits[0]["seconds"])
    took = data["step_seconds"]
    return WorkStatus(
        call,
        ranks,
        seconds,
        bool(data["stands_still"]) or bool(agrees),
        _ranks(data["lost"], size),
        _ranks(data["left"], size),
        _text(data["over"]),
        _count(data["step"]),
        None if took is None else _seconds(took),
        {_text(name): _measure(measure) for name, measure in list(data.get("measured", {}).items())[:_MOST_NAMES]},
        _count(data["bytes_sent"]),
        {_rank(peer, size): _count(nbytes) for peer, nbytes in data.get("sent", ())[:_MOST_EDGES]},
        tuple(_rank(peer, size) for peer in data.get("edges", ())[:_MOST_EDGES]),
    )


def _measure(data: dict[str, Any]) -> MetricSample:
    return MetricSample(_count(data["times"]), *(_number(data[name]) for name in ("own", "mean", "worst")))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return "".join(char if char.isprintable() else "?" for char in value[:_LONGEST])


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no count")
    return int(value)


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{value!r} is no time")
    return max(0.0, seconds)


def _number(value: Any) -> Number:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _rank(value: Any, size: int) -> int:
    if not isinstance(value, int) or not 0 <= value < size:
        raise ValueError(f"{value!r} is no rank of {size} agents")
    return value


def _ranks(values: Any, size: int) -> tuple[int, ...]:
    return tuple(_rank(rank, size) for rank in values[:_MOST_RANKS])
