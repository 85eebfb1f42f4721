"""Which message at its receiver is which at its sender: what travels from one agent's trace to another's."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from .traces import MessageKey, Trace, TracedCall, TracedMessage, is_fused


@dataclass(frozen=True)
class Flow:
    """One message, as both its agents saw it.

    Attributes:
        source, destination: Their places in the list of traces.
        sent, received: What each saw; times are each by its own clock.
    """

    source: int
    destination: int
    sent: TracedMessage
    received: TracedMessage

    @property
    def key(self) -> MessageKey:
        return self.sent.key


def match(traces: Sequence[Trace]) -> list[Flow]:
    """The messages that were sent in one of these traces and received in another, by when they were received.

    What comes on an edge comes in the order in which it was sent, also where a key is there more than once.
    """
    outgoing: dict[tuple[int, int, MessageKey], deque[tuple[int, TracedMessage]]] = defaultdict(deque)
    for number, trace in enumerate(traces):
        for message in trace.sent:
            outgoing[trace.rank, message.peer, message.key].append((number, message))
    found = []
    for number, trace in enumerate(traces):
        for message in trace.received:
            candidates = outgoing.get((message.peer, trace.rank, message.key))
            if candidates:
                source, sent = candidates.popleft()
                found.append(Flow(source, number, sent, message))
    return sorted(found, key=lambda one: one.received.at)


def members(trace: Trace) -> dict[MessageKey, tuple[tuple[str, int, int], ...]]:
    """Of the messages of an agent that are of several small calls: which calls those are."""
    return {key_of(call): call.of for call in trace.calls if is_fused(call) and call.of}


def key_of(call: TracedCall) -> MessageKey:
    """What the messages of its first stage are told by."""
    if not call.of:
        return MessageKey(call.name, call.round, 0, 1)
    name, first, _ = call.of[0]
    return MessageKey(name, first, 0, sum(count for _, _, count in call.of))
