"""Records the membership changes that an agent agrees on: the lines of ``membership_log.py``."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict
from pathlib import Path

from ..engine.engine import Engine
from ..fault_tolerance.agreement import MembershipChange
from ..runtime.agent import Agent
from ..runtime.bootstrap import on_start, on_stop
from .membership_log import CAME, CHANGED, LEFT, MembershipEvent
from .run_files import open_own

log = logging.getLogger("shoal")


class MembershipRecorder:
    """The file of one agent."""

    def __init__(self, agent: Agent, folder: Path) -> None:
        self._agent = agent
        incarnation = agent.engine.incarnation
        stem = f"agent{agent.rank}" + (f".{incarnation}" if incarnation else "")
        stem += f"-restart{agent.launch.attempt}" if agent.launch.attempt else ""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open_own(folder / f"{stem}.jsonl")
        self._write(CAME, MembershipChange((), agent.engine.agreed_members))
        agent.engine.on_membership_change(self._changed)

    def _changed(self, change: MembershipChange) -> None:
        self._write(CHANGED, change)

    def _write(self, what: str, change: MembershipChange) -> None:
        agent = self._agent
        event = MembershipEvent(time.time(), agent.rank, agent.engine.incarnation, what, *_of(change))
        if self._file >= 0:
            os.write(self._file, (json.dumps(asdict(event)) + "\n").encode())

    def close(self) -> None:
        self._write(LEFT, MembershipChange((), ()))
        os.close(self._file)
        self._file = -1


def _of(change: MembershipChange) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return change.lost, change.entered, change.alive


_records: dict[Engine, MembershipRecorder] = {}


def _attach(agent: Agent) -> None:
    folder = agent.config.record
    if not folder:
        return
    try:
        _records[agent.engine] = MembershipRecorder(agent, Path(folder) / agent.launch.beside)
    except OSError as error:
        log.error("SHOAL_RECORD=%s: rank %d goes without a record: %s", folder, agent.rank, error)


def _detach(agent: Agent) -> None:
    record = _records.pop(agent.engine, None)
    if record is not None:
        record.close()


on_start.append(_attach)
on_stop.append(_detach)
