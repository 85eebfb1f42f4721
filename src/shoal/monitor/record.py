"""Who was there, and when: ``SHOAL_RECORD=folder`` makes every agent write down what it agrees on with the others.

One file for each agent and each time that it was started, a JSON object a line, each written at once: what a killed
agent has written stays, and when it died say the others. ``shoal report`` makes a picture of a folder.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..engine.agreement import MembershipChange
from ..engine.engine import Engine
from ..world.agent import Agent
from ..world.bootstrap import on_start, on_stop
from .own_files import open_own

log = logging.getLogger("shoal")
CAME, CHANGED, LEFT = "came", "changed", "left"


@dataclass(frozen=True)
class Entry:
    """One line.

    Attributes:
        at: Seconds since 1970, of the machine of the agent.
        rank: Who writes.
        incarnation: How often it had been started again.
        what: ``"came"``, ``"changed"`` (with whom it is) or ``"left"``.
        lost, entered: Who, in a change.
        alive: Who is there from then on, as this agent knows it.
    """

    at: float
    rank: int
    incarnation: int
    what: str
    lost: tuple[int, ...] = ()
    entered: tuple[int, ...] = ()
    alive: tuple[int, ...] = ()


PATTERN = "agent*.jsonl"


def are_there(folder: Path) -> bool:
    """Whether a folder has files that look like records."""
    return next(folder.glob(PATTERN), None) is not None


def read(folder: Path) -> list[Entry]:
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
                    said: dict[str, Any] = json.loads(line)
                    ranks: dict[str, Any] = {name: tuple(said.pop(name)) for name in ("lost", "entered", "alive")}
                    found.append(Entry(**said, **ranks))
                except (ValueError, TypeError, AttributeError, KeyError) as error:
                    raise ValueError(f"{path} is no record of an agent: {error}") from None
    if not found:
        raise FileNotFoundError(f"there is no record of an agent in {folder}; run with SHOAL_RECORD={folder}")
    return sorted(found, key=lambda entry: entry.at)


class Record:
    """The file of one agent."""

    def __init__(self, agent: Agent, folder: Path) -> None:
        self._agent = agent
        incarnation = agent.engine.router.place.incarnation
        stem = f"agent{agent.rank}" + (f".{incarnation}" if incarnation else "")
        stem += f"-restart{agent.launch.attempt}" if agent.launch.attempt else ""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open_own(folder / f"{stem}.jsonl")
        self._write(CAME, MembershipChange((), agent.engine.agreement.alive))
        agent.engine.agreement.listeners.append(self._changed)

    def _changed(self, change: MembershipChange) -> None:
        self._write(CHANGED, change)

    def _write(self, what: str, change: MembershipChange) -> None:
        agent = self._agent
        one = Entry(time.time(), agent.rank, agent.engine.router.place.incarnation, what, *_of(change))
        if self._file >= 0:
            os.write(self._file, (json.dumps(asdict(one)) + "\n").encode())

    def close(self) -> None:
        self._write(LEFT, MembershipChange((), ()))
        os.close(self._file)
        self._file = -1


def _of(change: MembershipChange) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return change.lost, change.entered, change.alive


_records: dict[Engine, Record] = {}


def _attach(agent: Agent) -> None:
    folder = os.environ.get("SHOAL_RECORD", "")
    if not folder:
        return
    try:
        _records[agent.engine] = Record(agent, Path(folder) / agent.launch.beside)
    except OSError as error:
        log.error("SHOAL_RECORD=%s: rank %d goes without a record: %s", folder, agent.rank, error)


def _detach(agent: Agent) -> None:
    record = _records.pop(agent.engine, None)
    if record is not None:
        record.close()


on_start.append(_attach)
on_stop.append(_detach)
