"""The report of a folder of traces: read, aligned to one clock, matched, broken down, with the findings.

``merge`` writes one Chrome trace of a whole run: the traces of its agents on one clock, and an arrow for each message.
An arrow begins in the operation's bar at the sender, when the message was posted. It ends in the operation's bar at the
receiver, when the message arrived, or at the begin of that bar if the message arrived before. A viewer shows it when
either bar is selected. Messages without a bar, as of the rendezvous of process groups, or late messages, have no arrow.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from . import breakdown, clocks, findings, traces
from .breakdown import Share
from .clocks import ClockFit
from .findings import EdgeStatistics, Finding, Typical
from .run_files import open_own
from .traces import Flow, MessageKey, Trace, TracedCall, TracedMessage, TraceFolder, key_of, lines_of


@dataclass(frozen=True)
class RunReport:
    """The report of one run.

    Attributes:
        found: The content of the folder.
        clocks: The clock of each trace.
        traces, flows: Aligned to one clock.
        shares: The use of time, by agent and step, without the first step of each.
    """

    found: TraceFolder
    clocks: list[ClockFit]
    traces: list[Trace]
    flows: list[Flow]
    shares: list[Share]

    @staticmethod
    def of(folder: Path) -> RunReport:
        """The report of the traces in a folder.

        Raises:
            FileNotFoundError, ValueError: See :func:`~.traces.read`.
        """
        found = traces.read(folder)
        known, laid = clocks.aligned(found.traces)
        matched = traces.match(laid)
        shares = findings.without_the_first(breakdown.break_down(laid, matched))
        return RunReport(found, known, laid, matched, shares)

    @cached_property
    def typical(self) -> list[Typical]:
        """A step of each agent, on the average."""
        return findings.typical(self.traces, self.shares)

    @cached_property
    def links(self) -> list[EdgeStatistics]:
        """The throughput of the network's edges."""
        return findings.links(self.traces, self.flows)

    @cached_property
    def findings(self) -> list[Finding]:
        """The findings of the run."""
        return findings.findings(self.traces, self.shares, self.typical, self.links)

    @property
    def has_steps(self) -> bool:
        """An optimizer marked its steps."""
        return any(share.number for share in self.shares)

    @property
    def optimizer(self) -> str:
        """The optimizer of the steps."""
        for trace in self.traces:
            for name in (step.optimizer for step in trace.steps if (step.number, step.start) in self._marked):
                return name
        return ""

    @cached_property
    def _marked(self) -> set[tuple[int, int]]:
        return {(share.number, share.start) for share in self.shares}

    @property
    def unended(self) -> list[tuple[Trace, TracedCall]]:
        """The oldest call of each agent that its trace ends in."""
        found = []
        for trace in self.traces:
            begun = [call for call in trace.calls if call.end is None]
            if begun:
                found.append((trace, min(begun, key=lambda call: call.start)))
        return found

    def merge(self, path: Path) -> int:
        """Write one trace of all; how many messages are arrows in it."""
        return merge(self.found.traces, self.clocks, self.flows, path)


_ID_BYTES = 6
"""Viewers count with numbers of 53 bits."""
_Bars = dict[MessageKey, tuple[int, int, int]]
"""Of one agent's calls: the row, the beginning and the end of their bars."""
_NONE = (0, 0, 0)


def merge(traces: Sequence[Trace], clocks: Sequence[ClockFit], flows: Sequence[Flow], path: Path) -> int:
    """Write it. Times begin with the first of all.

    Args:
        traces: The traces, unchanged since they were read.
        clocks: The clock of each.
        flows: Between them, by these clocks.
        path: The file to write; its folder must exist.

    Returns:
        How many arrows there are.
    """
    begins = min(clock.corrected(trace.start) for trace, clock in zip(traces, clocks, strict=True))
    with os.fdopen(open_own(path), "w", encoding="utf-8") as file:
        file.write("[\n")
        for number, (trace, clock) in enumerate(zip(traces, clocks, strict=True)):
            for event in lines_of(trace.path):
                if event is not None:
                    file.write(_line(_moved(event, number, trace, clock, begins)))
        arrows = 0
        bars = [_bars_of(trace, clock) for trace, clock in zip(traces, clocks, strict=True)]
        for flow in flows:
            ends = _arrow(flow, traces, bars, begins)
            arrows += bool(ends)
            for event in ends:
                file.write(_line(event))
        # The last line has no comma, so it is an empty event.
        file.write(json.dumps({"name": "shoal", "ph": "M", "pid": 0, "tid": 0, "args": {"agents": len(traces)}}))
        file.write("\n]\n")
    return arrows


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + ",\n"


def _moved(event: dict[str, Any], number: int, trace: Trace, clock: ClockFit, begins: int) -> dict[str, Any]:
    """An event for the merged trace. A rank may occur twice, so processes get new numbers."""
    event["pid"] = number
    if event["ph"] == "M":
        if event["name"] == "process_name":
            event["args"] = {"name": f"agent {trace}".replace("agent rank", "agent")}
        elif event["name"] == "process_sort_index":
            event["args"] = {"sort_index": number}
        return event
    start = round(event["ts"] * 1000) + trace.shift
    event["ts"] = (clock.corrected(start) - begins) / 1000
    return event


def _bars_of(trace: Trace, clock: ClockFit) -> _Bars:
    found = {}
    for call in trace.calls:
        end = trace.end if call.end is None else call.end
        found[key_of(call)] = call.row, clock.corrected(call.start), clock.corrected(end)
    return found


def _in_bar(message: TracedMessage, bars: _Bars) -> tuple[int, int] | None:
    """The row of a message's own bar, and when it is there; just before the end at the latest, since a viewer ends a
    bar before it begins or ends an arrow."""
    whole = message.key._replace(stage=0)
    for key in (whole, whole._replace(calls=1)):  # an agent that fused other calls has a bar for the first of them
        row, start, end = bars.get(key, _NONE)
        if message.at <= end:  # else it arrived after the call had failed
            return row, max(start, min(message.at, end - 1))
    return None


def _arrow(flow: Flow, traces: Sequence[Trace], bars: Sequence[_Bars], begins: int) -> list[dict[str, Any]]:
    """The two ends of a message's arrow; empty if one of them is in no bar."""
    sent, received = _in_bar(flow.sent, bars[flow.source]), _in_bar(flow.received, bars[flow.destination])
    if sent is None or received is None:
        return []
    name = ident(traces[flow.source].rank, traces[flow.destination].rank, flow.key)
    ends = (("s", flow.source, sent), ("f", flow.destination, received))
    found: list[dict[str, Any]] = [
        {
            "ph": phase,
            "cat": "message",
            "name": "message",
            "id": name,
            "pid": number,
            "tid": row,
            "ts": (at - begins) / 1000,
        }
        for phase, number, (row, at) in ends
    ]
    found[1]["bp"] = "e"  # in the bar that is there at that time
    return found


def ident(source: int, destination: int, key: MessageKey) -> int:
    """A number for a message, made of its edge, name, round and stage."""
    text = json.dumps([source, destination, *key])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_ID_BYTES).digest(), "big")
