"""The membership log: ``SHOAL_RECORD=folder`` makes every agent record the membership changes that it agrees on.

There is one file for each agent and each start of it, with a JSON object a line, each written at once. So the lines of
a killed agent are kept, and the other agents record when it was lost. ``shoal report`` makes a picture of a folder.

This module does not import torch, because readers of the log need none.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NONSENSE
from .run_files import LOGS, check_fields, check_ranks, open_own

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..fault_tolerance.agreement import MembershipChange
    from ..runtime.agent import Agent

log = logging.getLogger("shoal")

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


def read(folder: Path) -> list[MembershipEvent]:
    """All lines of all agents, the oldest first.

    Raises:
        FileNotFoundError: There are none.
        ValueError: A file is no record; the message names it. (A last line that was cut off is left out.)
    """
    found = []
    for path in sorted(folder.glob(LOGS)):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            if line.endswith("\n"):
                try:
                    data: dict[str, Any] = json.loads(line)
                    ranks: dict[str, Any] = {name: check_ranks(data.pop(name)) for name in ("lost", "entered", "alive")}
                    check_fields(data)
                    found.append(MembershipEvent(**data, **ranks))
                except NONSENSE as error:
                    raise ValueError(f"{path} is no record of an agent: {error}") from None
    if not found:
        raise FileNotFoundError(f"there is no record of an agent in {folder}; run with SHOAL_RECORD={folder}")
    return sorted(found, key=lambda entry: entry.at)


class MembershipRecorder:
    """Writes the log of one agent."""

    def __init__(self, agent: Agent, folder: Path) -> None:
        self._agent = agent
        incarnation = agent.engine.incarnation
        stem = f"agent{agent.rank}" + (f".{incarnation}" if incarnation else "")
        stem += f"-restart{agent.launch.attempt}" if agent.launch.attempt else ""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open_own(folder / f"{stem}.jsonl")
        self._write(CAME, alive=agent.engine.agreed_members)
        agent.engine.on_membership_change(self._changed)

    def _changed(self, change: MembershipChange) -> None:
        self._write(CHANGED, change.lost, change.entered, change.alive)

    def _write(
        self, what: str, lost: tuple[int, ...] = (), entered: tuple[int, ...] = (), alive: tuple[int, ...] = ()
    ) -> None:
        agent = self._agent
        event = MembershipEvent(time.time(), agent.rank, agent.engine.incarnation, what, lost, entered, alive)
        if self._file >= 0:
            os.write(self._file, (json.dumps(asdict(event)) + "\n").encode())

    def close(self) -> None:
        self._write(LEFT)
        os.close(self._file)
        self._file = -1


_recorders: dict[Engine, MembershipRecorder] = {}


def attach(agent: Agent) -> None:
    """Begin the log of a new agent, if one is wanted."""
    folder = agent.config.record
    if not folder:
        return
    try:
        _recorders[agent.engine] = MembershipRecorder(agent, Path(folder) / agent.launch.beside)
    except OSError as error:
        log.error("SHOAL_RECORD=%s: rank %d continues without a record: %s", folder, agent.rank, error)


def detach(agent: Agent) -> None:
    """End the log of an agent that shuts down."""
    recorder = _recorders.pop(agent.engine, None)
    if recorder is not None:
        recorder.close()
