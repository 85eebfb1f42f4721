"""Turns the events of an agent into the lines of a Chrome trace. It runs beside training, under the interpreter's lock,
ten times for each step and each call. So the common text of many lines is made once, and numbers are inserted into it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from .._version import __version__
from ..execution.events import Event, Fields
from ..execution.fused_operation import PREFIX, decode_fused_name, keys
from ..execution.operation import INTERNAL
from .run_files import ASKED, FUSED, MOVING, ORDERING, open_own

log = logging.getLogger("shoal")

ROW_LIMIT = 1000
"""Rows of one kind; later names share one, since a script that invents a name a step would fill memory with rows."""
STEPS, MEASURED, WAITS, ACTIVITIES, EXCHANGE = KINDS = ("steps", "measured", "waits", "activities", "exchange")
"""The kinds of rows, from the top."""
_WAYS = {"sent": "to", "received": "from", "arrived": "all from"}
OTHERS = "other names"


class Activity(NamedTuple):
    """An activity that the user began (``name`` given) or ended."""

    tensor: str
    name: str | None
    time: int


class _TraceRows:
    """The rows of one name: bars on one row must nest, so overlapping bars go to further rows.

    Attributes:
        at: Of each row, the text of its lines between their phase and their time.
        quoted: The shown form of the name.
        unlike: The title is not the name, or not the name of all bars.
    """

    __slots__ = ("at", "kind", "quoted", "taken", "title", "unlike")

    def __init__(self, kind: str, title: str, unlike: bool) -> None:
        self.kind, self.title, self.unlike = kind, title, unlike
        self.quoted = json.dumps(title)
        self.at: list[str] = []
        self.taken: set[int] = set()

    def take(self) -> int:
        """The first of the rows where nothing is in flight."""
        row = 0 if 0 not in self.taken else next(row for row in count(1) if row not in self.taken)
        self.taken.add(row)
        return row


class TraceWriter:
    """The file of one agent. One thread at a time uses it.

    Args:
        rank: The rank of the agent.
        path: The path of the file.
        about: More data for its header, for tools that merge traces.
    """

    def __init__(self, rank: int, path: Path, **about: Any) -> None:
        self._rank = rank
        self._file: int | None = open_own(path)
        self._rows: dict[tuple[str, str], _TraceRows] = {}
        self._number = 0  # of rows
        self._names: Counter[str] = Counter()  # that have rows, by kind
        self._in_flight: dict[tuple[str, int], tuple[str, _TraceRows, int]] = {}
        self._since: dict[tuple[str, int], int] = {}  # the last event of a process group for each operation in flight
        self._lines: list[str] = []
        self._line_of: dict[str, Callable[[Fields], None]] = {
            "submitted": self._submitted,
            "finished": self._ended,
            "failed": self._failed,
            "prepared": self._computed,
            "summed": self._computed,
            "sent": self._message,
            "received": self._message,
            "arrived": self._message,
            "waited": self._waited,
            "asked": self._asked,
            "ordered": self._carried,
            "moved": self._carried,
            "fused": self._fused,
            "parted": self._parted,
            "stepped": self._stepped,
            "measured": self._measured,
            "lost": self._lost,
        }
        host = socket.gethostname()
        self._metadata("process_name", 0, name=f"agent {rank} on {host}")
        self._metadata("process_sort_index", 0, sort_index=rank)
        # Viewers ignore this event; it allows to align traces of machines whose clocks begin at different boots.
        clock = {"perf_counter_ns": time.perf_counter_ns(), "unix_time_ns": time.time_ns()}
        self._metadata("shoal", 0, version=__version__, rank=rank, host=host, **clock, **about)
        self._flush("[\n")

    def write(self, entries: Iterable[Fields | Activity]) -> None:
        """Write what happened."""
        for entry in entries:
            if isinstance(entry, Activity):
                self._activity(entry)
            else:
                line = self._line_of.get(entry[0])
                if line is not None:
                    line(entry)
        if self._lines:
            self._flush(",\n")

    def close(self) -> None:
        if self._file is None:
            return
        try:
            self._append("\n]\n")
        except OSError as error:
            log.error("the timeline of rank %d could not be completed: %s", self._rank, error)
        self.fail()

    def fail(self) -> None:
        """Close the file as it is."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _flush(self, before: str) -> None:
        text = before + ",\n".join(self._lines)
        self._lines = []
        self._append(text)

    def _append(self, text: str) -> None:
        rest = memoryview(text.encode())
        while rest and self._file is not None:
            rest = rest[os.write(self._file, rest) :]

    # What happened

    def _submitted(self, fields: Fields) -> None:
        _, operation, name, round_, _, end, _, _, _, _ = fields
        rows = self._of(EXCHANGE, name)
        at = self._begin(name, round_, rows)
        named = _named(name) if rows.unlike else ""
        self._lines.append(
            f'{{"ph":"B",{at}{_us(end)},"name":{_quoted(operation)},"args":{{"round":{round_}{named}}}}}'
        )

    def _begin(self, name: str, round_: int, rows: _TraceRows) -> str:
        row = rows.take()
        at = self._at(rows, row)
        self._in_flight[name, round_] = at, rows, row
        return at

    def _ended(self, fields: Fields) -> None:
        _, _, name, round_, _, end, _, _, _, _ = fields
        found = self._in_flight.pop((name, round_), None)
        if found is not None:  # else it was submitted before the timeline began
            at, rows, row = found
            rows.taken.discard(row)
            self._since.pop((name, round_), None)
            self._lines.append(f'{{"ph":"E",{at}{_us(end)}}}')

    def _failed(self, fields: Fields) -> None:
        event = Event(*fields)
        found = self._in_flight.get((event.name, event.round))
        if found is not None:
            arguments = f'{{"error":{json.dumps(event.detail)},"round":{event.round}}}'
            self._lines.append(f'{{"ph":"i",{found[0]}{_us(event.end)},"name":"failed","s":"t","args":{arguments}}}')
        self._ended(fields)

    def _computed(self, fields: Fields) -> None:
        kind, _, name, round_, start, end, _, _, _, _ = fields
        activity = "sum" if kind == "summed" else "prepare"
        times = f'{_us(start)},"name":"{activity}","dur":{_us(end - start)},"args":'
        of = [(name, round_)]
        if name.startswith(PREFIX):
            of += keys(decode_fused_name(name))
        for key in of:
            found = self._in_flight.get(key)
            if found is not None:  # else it has failed since, and the bar would extend beyond it
                self._lines.append(f'{{"ph":"X",{found[0]}{times}{{"round":{key[1]}}}}}')

    def _asked(self, fields: Fields) -> None:
        _, _, name, round_, _, end, _, _, among, stage = fields
        found = self._in_flight.get((name, round_))
        if found is not None:
            self._since[name, round_] = end
            arguments = json.dumps({"round": round_, "stage": stage, "among": [int(rank) for rank in among.split()]})
            self._lines.append(f'{{"ph":"i",{found[0]}{_us(end)},"name":"{ASKED}","s":"t","args":{arguments}}}')

    def _carried(self, fields: Fields) -> None:
        kind, _, name, round_, _, end, _, _, _, stage = fields
        since = self._since.get((name, round_))
        if since is not None:
            self._since[name, round_] = end + 1  # the next bar is beside this one, also when times are rounded
            self._lines.append(
                f'{{"ph":"X",{self._in_flight[name, round_][0]}{_us(since)},'
                f'"name":"{ORDERING if kind == "ordered" else MOVING}","dur":{_us(max(0, end - since))},'
                f'"args":{{"round":{round_},"stage":{stage}}}}}'
            )

    def _message(self, fields: Fields) -> None:
        kind, _, name, round_, _, end, peer, nbytes, why, stage = fields
        found = self._in_flight.get((name, round_))
        fused = name.startswith(PREFIX)
        if found is not None:
            at, rows, _ = found
        else:  # it arrived before its call, or after it
            rows = self._of(EXCHANGE, FUSED if fused else name)
            at = self._at(rows, 0)
        more = f',"stage":{stage}' if stage else ""
        if why:
            more += f',"for":"{why}"'
        if fused:
            calls = decode_fused_name(name)
            first, round_ = (calls[0].name, calls[0].first) if calls else ("", 0)
            more += f',"calls":{sum(run.length for run in calls)},"name":{json.dumps(first)}'
        elif rows.unlike:
            more += _named(name)
        self._lines.append(
            f'{{"ph":"i",{at}{_us(end)},"name":"{_WAYS[kind]} {peer}","s":"t",'
            f'"args":{{"peer":{peer},"bytes":{nbytes},"round":{round_}{more}}}}}'
        )

    def _waited(self, fields: Fields) -> None:
        _, _, name, round_, start, end, _, _, thread, _ = fields
        at, what = self._at(self._of(WAITS, thread), 0), self._of(EXCHANGE, name)
        named = _named(name) if what.unlike else ""
        self._lines.append(
            f'{{"ph":"X",{at}{_us(start)},"name":{what.quoted},"dur":{_us(end - start)},'
            f'"args":{{"round":{round_}{named}}}}}'
        )

    def _fused(self, fields: Fields) -> None:
        event = Event(*fields)
        calls = event.calls
        at = self._begin(event.name, event.round, self._of(EXCHANGE, FUSED))
        many, of = sum(run.length for run in calls), json.dumps([run[:3] for run in calls], separators=(",", ":"))
        self._lines.append(
            f'{{"ph":"B",{at}{_us(event.end)},"name":{json.dumps(f"{event.operation} x {many}")},'
            f'"args":{{"calls":{many},"of":{of}}}}}'
        )

    def _parted(self, fields: Fields) -> None:
        event = Event(*fields)
        found = self._in_flight.get((event.name, event.round))
        if found is not None and event.detail:
            arguments = json.dumps({"why": event.detail})
            self._lines.append(f'{{"ph":"i",{found[0]}{_us(event.end)},"name":"parted","s":"t","args":{arguments}}}')
        self._ended(fields)

    def _stepped(self, fields: Fields) -> None:
        _, _, name, round_, start, end, _, _, _, _ = fields
        self._lines.append(
            f'{{"ph":"X",{self._at(self._of(STEPS, name), 0)}{_us(start)},"name":"step {round_}",'
            f'"dur":{_us(end - start)},"args":{{"step":{round_}}}}}'
        )

    def _measured(self, fields: Fields) -> None:
        event = Event(*fields)
        at, name = self._at(self._of(MEASURED, event.name), 0), json.dumps(event.name)
        if event.detail != "{}":  # a graph cannot show a value that is no number
            self._lines.append(f'{{"ph":"C",{at}{_us(event.end)},"name":{name},"args":{event.detail}}}')

    def _lost(self, fields: Fields) -> None:
        event = Event(*fields)
        at = self._at(self._of(EXCHANGE, "agents"), 0)
        name, arguments = f"agent {event.peer} {event.operation}", {"rank": event.peer, "cause": event.detail}
        self._lines.append(
            f'{{"ph":"i",{at}{_us(event.end)},"name":{json.dumps(name)},"s":"p","args":{json.dumps(arguments)}}}'
        )

    def _activity(self, activity: Activity) -> None:
        at = self._at(self._of(ACTIVITIES, activity.tensor), 0)
        what = '"ph":"E"' if activity.name is None else f'"ph":"B","name":{json.dumps(activity.name)}'
        self._lines.append(f"{{{what},{at}{_us(activity.time)}}}")

    # Rows

    def _of(self, kind: str, name: str) -> _TraceRows:
        """The rows of a name, or the shared rows."""
        rows = self._rows.get((kind, name))
        if rows is not None:
            return rows
        if self._names[kind] < ROW_LIMIT:
            self._names[kind] += 1
            label = name.removeprefix(INTERNAL).removeprefix("~")
            rows = self._rows[kind, name] = _TraceRows(kind, label, label != name)
            return rows
        return self._rows.setdefault((kind, OTHERS), _TraceRows(kind, OTHERS, True))

    def _at(self, rows: _TraceRows, row: int) -> str:
        while row >= len(rows.at):
            self._number += 1
            what = {"name": f"{rows.kind}: {rows.title}"}
            if rows.at:
                what = {"name": f"{what['name']} ({len(rows.at) + 1})", "of": what["name"]}
            self._metadata("thread_name", self._number, **what)
            sort_index = KINDS.index(rows.kind) * 10**6 + self._number
            self._metadata("thread_sort_index", self._number, sort_index=sort_index)
            rows.at.append(f'"pid":{self._rank},"tid":{self._number},"ts":')
        return rows.at[row]

    def _metadata(self, what: str, row: int, **arguments: Any) -> None:
        line = {"name": what, "ph": "M", "pid": self._rank, "tid": row, "args": arguments}
        self._lines.append(json.dumps(line, separators=(",", ":")))


_quoted = functools.cache(json.dumps)
"""Of the names of operations, which are few."""


def _named(name: str) -> str:
    """One more argument: the name, where its row does not say it."""
    return f',"name":{json.dumps(name)}'


def _us(nanoseconds: int) -> str:
    """The trace format's unit, without the rounding of a float."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"
