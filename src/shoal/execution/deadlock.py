"""Detects agents that wait for each other in a cycle, so that they fail before their deadlines.

The problem: rank 0 waits in one call for rank 1, which waits in another call for rank 0. Neither can make the call that
the other waits for.

The method is edge chasing (Chandy, Misra and Haas 1983, "Distributed deadlock detection", the AND model):

- An agent whose only calling thread has waited for a second sends a probe to all ranks that it waits for.
- An agent that has not made the call in question passes the probe on to all ranks that it waits for, if its only
  calling thread waits as well.
- A probe that returns to its origin proves a cycle. Each agent on the probe's path waits until the next one makes a
  call, and the origin still waits. So none of them has advanced since the probe passed it.

The proof requires that nothing else can make the missing call. An agent drops the probe if it cannot rule that out:

- its process has another thread that could call Shoal: a thread of the script, or a thread that has called Shoal
  before;
- a callback or a listener could make the call;
- the waiting call has a shorter timeout than the agent's, so its caller is prepared to continue without it;
- the survivors are agreeing on a loss.

In these cases only the deadlines remain. An agent that computes drops the probe as well. So does an agent that waits in
a call on a window, such as a mutex: this call matches no call of another agent, so its wait has no edge in the graph.
Such a call has a deadline of its own.

The origin fails its call and sends the verdict to the agent that waits for it. Each agent passes the verdict on before
it fails its own call. Its later messages use the same link, so they arrive after the verdict. So every call of the
cycle fails, with the same error.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar
from weakref import WeakSet

from ..errors import NONSENSE, Mismatch, ProtocolError
from ..transport.messages import Kind, Message
from .lifecycle import Lifecycle
from .operation import SAME_CALLS, Handle, Operation, describe
from .shared_parts import SharedParts

T = TypeVar("T")
DEADLOCK = "~deadlock"
"""The operation of probes and verdicts. A probe has the name, round and stage of the awaited message."""
LOOK_AFTER = 1.0
"""Seconds that an operation waits before its agent sends the first probe."""
LONGEST_CIRCLE = 64
"""The largest number of agents in a cycle that is detected."""
_REMEMBERED = 1024
"""The number of probes that an agent remembers, to pass each on once, and of waits that it has condemned."""
_OWN_THREADS = re.compile(r"shoal-(\d+(-\w+)?|(watch|timeline)-\d+|rendezvous)")
"""The names of Shoal's own threads; these begin no operation that another agent waits for."""
_FEEDERS = ("multiprocessing.queues", "multiprocessing.resource_sharer")
"""Modules of the standard library whose threads call no code of the script, unlike the threads of a pool or a timer."""
_STDLIB = sysconfig.get_paths()["stdlib"]


class _WaitEdge(NamedTuple):
    """An agent on the path of a probe, and the call in which it waits for the next agent."""

    rank: int
    op: str
    name: str
    round: int


class Deadlocks:
    """The deadlock detector of one agent. Used under the engine's lock, by the driving thread.

    Attributes:
        bystanders: Threads that are known not to call Shoal.
    """

    def __init__(self, parts: SharedParts, lifecycle: Lifecycle, timeout: float) -> None:
        self.bystanders: WeakSet[threading.Thread] = WeakSet()
        self._rank, self._matcher, self._sender = parts.rank, parts.matcher, parts.sender
        self._lifecycle, self._progress, self._events = lifecycle, parts.progress, parts.events
        self._timeout = timeout
        self._probes = 0
        self._passed_on: OrderedDict[tuple[int, int], None] = OrderedDict()  # by the probe's origin and number
        self._condemned: OrderedDict[tuple[_WaitEdge, int], None] = OrderedDict()  # each wait, and the awaited rank

    def look(self, operation: Operation) -> None:
        """Send a probe for an operation that has waited for a while, if the only calling thread waits for it."""
        awaited = self._progress.awaited
        # Compared first: the other checks look at each operation in flight, and this is called for thousands of them.
        if isinstance(awaited, Handle) and awaited.operation is operation and self._stuck_in() is operation:
            self._probes += 1
            self._send(operation, [], self._probes)

    # Whether this agent is blocked

    def _stuck_in(self) -> Operation | None:
        """The operation in which the only thread that could make a call of this agent waits; None if other threads
        could make a call, or if the operation may continue by itself.
        """
        handle = self._progress.awaited
        gate = self._lifecycle.gate
        if not isinstance(handle, Handle) or handle.done or gate.paused or gate.closing or gate.ended is not None:
            return None
        operation = handle.operation
        # In each of these cases the agent may still advance. A verdict would fail the calls of a correct program.
        if operation.one_sided or operation.is_runnable or not operation.is_started or self._events.has_listeners:
            return None
        if operation.timeout < self._timeout:  # the caller is prepared to continue without it
            return None
        # Two kinds of callbacks may still make a call: those that have not returned yet, and those of operations in
        # flight.
        if self._lifecycle.callbacks.pending:
            return None
        if any(call.handle is not None and call.handle.has_callbacks for call in self._matcher.in_flight()):
            return None
        return None if self._others_could_call() else operation

    def _others_could_call(self) -> bool:
        me = threading.current_thread()
        others = [
            thread
            for thread in threading.enumerate()
            if thread is not me and thread not in self.bystanders and not _OWN_THREADS.fullmatch(thread.name)
        ]
        if not others:
            return False
        callers, frames = self._lifecycle.callers, sys._current_frames()
        # A thread that has called Shoal before may do so again, even if it runs only library code at the moment.
        return any(
            thread.ident in callers or not _is_of_a_library(thread, frames.get(thread.ident or 0)) for thread in others
        )

    # Probes

    def _send(self, operation: Operation, path: Sequence[_WaitEdge], number: int) -> None:
        """Probe all ranks that an operation waits for."""
        part = operation.fused or operation
        # Without a stage it waits only for confirmations. A receiver sends them when it leaves the stage of the
        # message, so the awaited message is that of a later stage.
        at = max(1, part.next_stage) if part.stage is None else part.stage.number
        here = _WaitEdge(self._rank, operation.op, operation.name, operation.round)
        text = json.dumps([*path, here])
        for rank in operation.waiting_for:
            if rank != self._rank:
                place = operation.name, operation.round, at, number
                self._sender.send_message(rank, Message(Kind.ASK, DEADLOCK, *place, text=text))

    def serve(self, source: int, message: Message) -> None:
        """Handle a probe: another agent waits for this one in a call, and others may wait for that agent."""
        path = _read(message.text, source)
        first = path[0]
        # Such a call ends when the verdict arrives there. Meanwhile this agent may wait in its next call, and would be
        # found in a cycle with a call that is over.
        if any(wait in self._condemned for wait in _waits([*path, _WaitEdge(self._rank, "", "", 0)])):
            return
        operation = self._blocking_operation(message)
        if operation is None:
            return
        if first.rank == self._rank:
            # If this agent has made the awaited call meanwhile, or waits in another call than the probe's first, it has
            # advanced. Then there is no cycle any more.
            begun = message.round < self._matcher.rounds_begun(message.name)
            if not begun and (operation.name, operation.round) == (first.name, first.round):
                self._condemn(path, 0)
            return
        key = first.rank, message.token
        on_path = any(edge.rank == self._rank for edge in path)  # a cycle without the origin: its own agents detect it
        if on_path or key in self._passed_on or len(path) >= LONGEST_CIRCLE:
            return
        # Without this record, a probe would be passed on once for each path that leads here.
        _remember(self._passed_on, key)
        self._send(operation, path, message.token)

    def _blocking_operation(self, message: Message) -> Operation | None:
        """The operation that must end here before the awaited message can be sent; None if it is not blocked."""
        if message.round >= self._matcher.rounds_begun(message.name):
            return self._stuck_in()
        operation = self._matcher.active_operation(message.name, message.round)
        stage = operation.current_stage if operation is not None else None
        # This agent has made the call. It is blocked only if an earlier stage of it still lacks a message.
        before = stage is not None and bool(stage.missing) and stage.number < message.stage
        return operation if before else None

    # The verdict

    def judge(self, source: int, message: Message) -> None:
        """Handle a verdict: an agent that this one waits for has detected a cycle."""
        circle = _read(message.text)
        at = next((at for at, edge in enumerate(circle) if edge.rank == self._rank), 0)
        # Only the next agent of the cycle passes the verdict on to this one. Any other sender has no evidence for it.
        if at and circle[(at + 1) % len(circle)].rank == source:
            self._condemn(circle, at)

    def _condemn(self, circle: list[_WaitEdge], at: int) -> None:
        """Fail this agent's call in a cycle.

        The agent that waits for it is notified first, before any later message of this agent's script: that message may
        be the awaited one.
        """
        mine, before, after = circle[at], circle[at - 1].rank, circle[(at + 1) % len(circle)].rank
        operation = self._matcher.active_operation(mine.name, mine.round)
        # In a cycle, this call waits for the next agent. A verdict about any other call is wrong, and that call may
        # still end well.
        if operation is None or operation.error is not None or after not in operation.waiting_for:
            return
        for wait in _waits([*circle, circle[0]]):
            _remember(self._condemned, wait)
        if at != 1:  # the origin knows
            self._sender.send_message(before, Message(Kind.DENY, DEADLOCK, DEADLOCK, text=json.dumps(circle)))
        ranks = tuple(sorted(edge.rank for edge in circle))
        self._lifecycle.fail(operation, Mismatch(f"{operation} on rank {self._rank}: {_explained(circle)}", ranks))


def _waits(path: Sequence[_WaitEdge]) -> Iterator[tuple[_WaitEdge, int]]:
    """The wait of each agent for the next one on a path."""
    return ((edge, after.rank) for edge, after in pairwise(path))


def _remember(known: OrderedDict[T, None], item: T) -> None:
    known[item] = None
    if len(known) > _REMEMBERED:
        known.popitem(last=False)


def _is_of_a_library(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Whether an installed package started the thread, and the thread runs no code of the script now.

    Examples are the monitor of a progress bar and the feeder of a data loader.
    """
    kind = type(thread)
    begins = getattr(thread, "_target", None) if kind.run is threading.Thread.run else kind.run
    module = str(getattr(begins, "__module__", ""))
    if module not in _FEEDERS and not _is_installed(getattr(sys.modules.get(module), "__file__", None)):
        return False
    # Library code may call a function of the script, such as a callback, and that may call Shoal.
    while frame is not None:
        file = frame.f_code.co_filename
        if not (_is_installed(file) or file.startswith((_STDLIB, "<frozen "))):
            return False
        frame = frame.f_back
    return True


def _is_installed(file: str | None) -> bool:
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _read(text: str, source: int | None = None) -> list[_WaitEdge]:
    """The path of a probe that ``source`` has sent; ProtocolError if it is malformed."""
    try:
        path = [_WaitEdge(int(rank), str(op), str(name), int(round_)) for rank, op, name, round_ in json.loads(text)]
        if not 0 < len(path) <= LONGEST_CIRCLE or (source is not None and path[-1].rank != source):
            raise ValueError(f"{len(path)} agents")
    except NONSENSE as error:
        raise ProtocolError(f"an invalid cycle of agents: {error}") from None
    return path


def _explained(circle: list[_WaitEdge]) -> str:
    """A description of the cycle, equal on all agents."""
    first = min(range(len(circle)), key=lambda at: circle[at].rank)
    waits = circle[first:] + circle[:first]
    sentences = [
        f"rank {edge.rank} waits in {describe(edge.op, edge.name, edge.round)} for rank {after.rank}"
        for edge, after in zip(waits, [*waits[1:], waits[0]], strict=True)
    ]
    return f"agents wait for each other, and none can go on: {'; '.join(sentences)}. {SAME_CALLS}"
