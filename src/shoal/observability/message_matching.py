"""Matches each received message with the sent one in another agent's trace."""

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
        sent, received: The message as each agent recorded it; times are each by its own clock.
    """

    source: int
    destination: int
    sent: TracedMessage
    received: TracedMessage

    @property
    def key(self) -> MessageKey:
        return self.sent.key


def match(traces: Sequence[Trace]) -> list[Flow]:
    """The messages that were sent in one of these traces and received in another, in the order of their arrival.

    Messages on an edge arrive in the order in which they were sent, even if a key occurs more than once.
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
    """The fused calls of the messages of an agent that contain several."""
    return {key_of(call): call.of for call in trace.calls if is_fused(call) and call.of}


def key_of(call: TracedCall) -> MessageKey:
    """The key of the messages of a call's first stage."""
    if not call.of:
        return MessageKey(call.name, call.round, 0, 1)
    name, first, _ = call.of[0]
    return MessageKey(name, first, 0, sum(count for _, _, count in call.of))
