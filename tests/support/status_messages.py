"""Status messages of an agent, made up by tests."""

from __future__ import annotations

from typing import Any


def summary(rank: int, size: int = 4, **of_it: Any) -> dict[str, Any]:
    """A complete message of a computing agent, with the given fields changed."""
    output: dict[str, Any] = {
        "rank": rank,
        "size": size,
        "incarnation": 0,
        "attempt": 0,
        "pid": 1000 + rank,
        "host": "here",
        "leaves": False,
        "waiting": [],
        "stands_still": False,
        "agrees_with": [],
        "lost": [],
        "left": [],
        "over": "",
        "step": 0,
        "step_seconds": None,
        "measured": {},
        "bytes_sent": 0,
        "sent": [],
        "edges": [],
    }
    return output | of_it
