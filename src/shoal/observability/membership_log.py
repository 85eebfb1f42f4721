"""The membership log: ``SHOAL_RECORD=folder`` makes every agent record the membership changes that it agrees on.

There is one file for each agent and each start of it, with a JSON object a line, each written at once. So the lines of
a killed agent are kept, and the other agents record when it was lost. ``shoal report`` makes a picture of a folder.
``membership_recorder.py`` writes the log.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAME, CHANGED, LEFT = "came", "changed", "left"


@dataclass(frozen=True)
class MembershipEvent:
    """One line.

    Attributes:
        at: Seconds since 1970, by the clock of the agent's machine.
        rank: The writing agent.
        incarnation: How often it had been restarted.
        what: ``"came"``, ``"changed"`` (the membership) or ``"left"``.
        lost, entered: The ranks, in a change.
        alive: The members after the event, as this agent knows them.
    """

    at: float
    rank: int
    incarnation: int
    what: str
    lost: tuple[int, ...] = ()
    entered: tuple[int, ...] = ()
    alive: tuple[int, ...] = ()


PATTERN = "agent*.jsonl"


def exist(folder: Path) -> bool:
    """Whether a folder has files that look like records."""
    return next(folder.glob(PATTERN), None) is not None


def read(folder: Path) -> list[MembershipEvent]:
    """All lines of all agents, the oldest first.

    Raises:
        FileNotFoundError: There are none.
        ValueError: A file is no record; the message names it. (A last line that was cut off is left out.)
    """
    found = []
    for path in sorted(folder.glob(PATTERN)):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                try:
                    data: dict[str, Any] = json.loads(line)
                    ranks: dict[str, Any] = {name: tuple(data.pop(name)) for name in ("lost", "entered", "alive")}
                    found.append(MembershipEvent(**data, **ranks))
                except (ValueError, TypeError, AttributeError, KeyError) as error:
                    raise ValueError(f"{path} is no record of an agent: {error}") from None
    if not found:
        raise FileNotFoundError(f"there is no record of an agent in {folder}; run with SHOAL_RECORD={folder}")
    return sorted(found, key=lambda entry: entry.at)
