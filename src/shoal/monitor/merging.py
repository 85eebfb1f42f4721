"""One Chrome trace of a whole run: the traces of its agents on one clock, and an arrow for each message.

An arrow begins in the bar of the operation at the sender, where the message was posted, and ends in that at the
receiver, where it came; a viewer shows it when either is selected.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .clocks import Clock
from .flows import Flow
from .own_files import open_own
from .traces import Key, Trace, lines_of

_ID_BYTES = 6
"""Viewers count with numbers of 53 bits."""


def merge(traces: Sequence[Trace], clocks: Sequence[Clock], flows: Sequence[Flow], path: Path) -> int:
    """Write it. Times begin with the first of all.

    Args:
        traces: As they were read.
        clocks: Of each.
        flows: Between them, by these clocks.
        path: Where to; the folder must be there.

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
        for flow in flows:
            for event in _arrow(flow, traces, begins):
                file.write(_line(event))
        # The last line has no comma, so it is one that says nothing.
        file.write(json.dumps({"name": "shoal", "ph": "M", "pid": 0, "tid": 0, "args": {"agents": len(traces)}}))
        file.write("\n]\n")
    return len(flows)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + ",\n"


def _moved(event: dict[str, Any], number: int, trace: Trace, clock: Clock, begins: int) -> dict[str, Any]:
    """An event as one of several agents': a rank may be there twice, so that processes are numbered anew."""
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


def _arrow(flow: Flow, traces: Sequence[Trace], begins: int) -> list[dict[str, Any]]:
    name = ident(traces[flow.source].rank, traces[flow.destination].rank, flow.key)
    ends = (("s", flow.source, flow.sent), ("f", flow.destination, flow.received))
    found: list[dict[str, Any]] = [
        {
            "ph": phase,
            "cat": "message",
            "name": "message",
            "id": name,
            "pid": number,
            "tid": message.row,
            "ts": (message.at - begins) / 1000,
        }
        for phase, number, message in ends
    ]
    found[1]["bp"] = "e"  # in the bar that is there at that time
    return found


def ident(source: int, destination: int, key: Key) -> int:
    """A number for a message, made of its edge, name, round and stage."""
    text = json.dumps([source, destination, *key])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_ID_BYTES).digest(), "big")
