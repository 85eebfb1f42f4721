"""Traces as agents would write them, of a run that a test makes up: every time in them is known."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MS = 1_000_000
BEGAN = 1_700_000_000_000_000_000
"""Nanoseconds since 1970 at which all of it begins."""


@dataclass
class Written:
    """One agent's file. Times are milliseconds from the beginning; its clock may be wrong.

    Args:
        rank, size: Whose.
        host: On which machine; it is the name of its clock, too.
        ahead: Milliseconds by which its time of day is ahead.
        drift: Milliseconds that this grows by in a second.
        run, incarnation: As in a trace.
    """

    rank: int
    size: int = 2
    host: str = "here"
    ahead: float = 0.0
    drift: float = 0.0
    run: str = "this"
    incarnation: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)

    def _at(self, ms: float) -> float:
        """Microseconds of its own clock, which began when it booted, an hour before."""
        return 3_600_000_000 + 1000 * (ms + self.drift * ms / 1000)

    def _row(self, title: str) -> int:
        if title not in self.rows:
            self.rows[title] = len(self.rows) + 1
            self._line("M", self.rows[title], name="thread_name", args={"name": title})
        return self.rows[title]

    def _line(self, phase: str, row: int, **what: Any) -> None:
        self.lines.append({"ph": phase, "pid": self.rank, "tid": row, **what})

    def call(
        self,
        start: float,
        end: float | None,
        name: str = "x",
        round_: int = 0,
        *,
        sums: list[tuple[float, float]] | None = None,
        prepare: tuple[float, float] | None = None,
        moves: list[tuple[float, float, float]] | None = None,
        among: list[int] | None = None,
        error: str = "",
        operation: str = "neighbor_allreduce",
    ) -> None:
        """An operation; ``moves``: when a process group got the request, gave it its turn, and was done."""
        row = self._row(f"exchange: {name}")
        self._line("B", row, ts=self._at(start), name=operation, args={"round": round_})
        for what, (begins, ends) in [("sum", one) for one in sums or []] + ([("prepare", prepare)] if prepare else []):
            length = self._at(ends) - self._at(begins)
            self._line("X", row, ts=self._at(begins), name=what, dur=length, args={"round": round_})
        for stage, (requested, ordered, moved) in enumerate(moves or []):
            output = {"round": round_, "stage": stage}
            self._line("i", row, ts=self._at(requested), name="asked", s="t", args=output | {"among": among or []})
            for what, begins, ends in (("ordering", requested, ordered), ("moving", ordered, moved)):
                length = self._at(ends) - self._at(begins)
                self._line("X", row, ts=self._at(begins), name=what, dur=length, args=output)
        if error:
            self._line(
                "i", row, ts=self._at(end or start), name="failed", s="t", args={"error": error, "round": round_}
            )
        if end is not None:
            self._line("E", row, ts=self._at(end))

    def message(
        self, way: str, peer: int, at: float, name: str = "x", round_: int = 0, nbytes: int = 1000, **more: Any
    ) -> None:
        """``to``, ``from`` or ``all from`` another agent."""
        output = {"peer": peer, "bytes": nbytes, "round": round_, **more}
        row = self._row(f"exchange: {name}")
        self._line("i", row, ts=self._at(at), name=f"{way} {peer}", s="t", args=output)

    def wait(self, start: float, end: float, name: str = "x", round_: int = 0, thread: str = "MainThread") -> None:
        """A thread stood still for an operation."""
        row, length = self._row(f"waits: {thread}"), self._at(end) - self._at(start)
        self._line("X", row, ts=self._at(start), name=name, dur=length, args={"round": round_})

    def step(self, number: int, start: float, end: float, optimizer: str = "optimizer") -> None:
        """A step of an optimizer."""
        row, length = self._row(f"steps: {optimizer}"), self._at(end) - self._at(start)
        self._line("X", row, ts=self._at(start), name=f"step {number}", dur=length, args={"step": number})

    def lost(self, rank: int, at: float, cause: str) -> None:
        """Another agent died."""
        row = self._row("exchange: agents")
        self._line("i", row, ts=self._at(at), name=f"agent {rank} died", s="p", args={"rank": rank, "cause": cause})

    def head(self) -> dict[str, Any]:
        """The line that says whose it is."""
        clock = {
            "perf_counter_ns": 3_600_000_000_000,
            "unix_time_ns": BEGAN + round(self.ahead * MS),
        }
        output = {"version": "0", "rank": self.rank, "host": self.host, **clock, "run": self.run, "size": self.size}
        output |= {"boot": self.host, "incarnation": self.incarnation}
        return {"name": "shoal", "ph": "M", "pid": self.rank, "tid": 0, "args": output}

    def into(self, folder: Path, suffix: str = "", *, closed: bool = True, torn: str = "") -> Path:
        """Write the file."""
        lines = [
            {"name": "process_name", "ph": "M", "pid": self.rank, "tid": 0, "args": {"name": "agent"}},
            self.head(),
        ]
        text = "[\n" + ",\n".join(json.dumps(line) for line in [*lines, *self.lines])
        path = folder / f"shoal-rank{self.rank}{suffix}.json"
        path.write_text(text + (f",\n{torn}" if torn else "") + ("\n]\n" if closed else ""))
        return path


def exchange(
    agents: list[Written], source: int, destination: int, sent: float, came: float, arrived: float = 0.0, **what: Any
) -> None:
    """A message, as both its agents saw it; ``arrived``: its last byte, where it came in pieces."""
    agents[source].message("to", destination, sent, **what)
    agents[destination].message("from", source, came, **what)
    if arrived:
        agents[destination].message("all from", source, arrived, **what)
