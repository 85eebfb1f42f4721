"""A trace of each agent, between two calls."""

from __future__ import annotations

from pathlib import Path

from ...observability import timeline
from ...runtime.agent import current


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to write this agent's trace to a file: rank 0 to ``file_path``, rank r to ``name.rank<r>.json`` beside it.

    Args:
        file_path: ``name.json``; the folder must exist.
        mark_cycles: Ignored: there are no cycles.

    Raises:
        ValueError: A trace is being written already.
    """
    agent, path = current("start_timeline"), Path(file_path)
    if agent.rank:
        path = path.with_name(f"{path.stem}.rank{agent.rank}{path.suffix}")
    timeline.start(agent, path)


def stop_timeline() -> None:
    """End the trace; the file is complete then."""
    timeline.stop(current("stop_timeline"))
