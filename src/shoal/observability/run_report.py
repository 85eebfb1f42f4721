"""The report of a folder of traces: read, aligned to one clock, matched, broken down, with the findings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from . import breakdown, clocks, findings, message_matching, trace_merge, traces
from .breakdown import Share
from .clocks import ClockFit
from .findings import EdgeStatistics, Finding, Typical
from .message_matching import Flow
from .traces import Trace, TracedCall, TraceFolder


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
        known = clocks.align(found.traces, message_matching.match(found.traces))
        laid = [clocks.on_one_clock(one, clock) for one, clock in zip(found.traces, known, strict=True)]
        matched = message_matching.match(laid)
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
        return any(one.number for one in self.shares)

    @property
    def optimizer(self) -> str:
        """The optimizer of the steps."""
        for one in self.traces:
            for name in (step.optimizer for step in one.steps if (step.number, step.start) in self._marked):
                return name
        return ""

    @cached_property
    def _marked(self) -> set[tuple[int, int]]:
        return {(one.number, one.start) for one in self.shares}

    @property
    def unended(self) -> list[tuple[Trace, TracedCall]]:
        """The oldest call of each agent that its trace ends in."""
        found = []
        for one in self.traces:
            begun = [call for call in one.calls if call.end is None]
            if begun:
                found.append((one, min(begun, key=lambda call: call.start)))
        return found

    def merge(self, path: Path) -> int:
        """Write one trace of all; how many messages are arrows in it."""
        return trace_merge.merge(self.found.traces, self.clocks, self.flows, path)
