"""Agents that have run out of data take part in the others' operations until all have run out.

An agent in :func:`join` cannot know the others' calls. Once the others have learned that it has joined, they announce
their calls to it: first the calls in flight at that time. It then makes the same calls, with tensors that do not change
the results. Messages between two agents arrive in order: after an agent's state no call from before it is announced.

While no agent has joined, no messages are sent for this: each agent records its calls in flight.
"""

from __future__ import annotations

import math
import queue
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..._signals import deferred
from ...engine.engine import Engine
from ...errors import DeadlineExceeded, NotInitialized
from ...execution.control_messages import Service, read_json
from ...execution.operation import Handle
from ...ops.arguments import Internal
from ...ops.collective import allgather_nonblocking, allreduce_nonblocking, barrier, gather_by_rank
from ...ops.grouped import grouped_allgather_nonblocking, grouped_allreduce_nonblocking
from ...runtime.agent import current
from ...transport.messages import MOVABLE, Message

HOROVOD = "~horovod"
_CALL, _STATE = "call", "state"
_MOST_BYTES = 1 << 24
"""The limit of one message: a list of a hundred thousand tensors has fewer."""
_REDUCES, _GATHERS = ("allreduce", "grouped_allreduce"), ("allgather", "grouped_allgather")


class AnnouncedCall(NamedTuple):
    """A call of one agent, which a joined agent may have to make as well.

    Attributes:
        called: The operation.
        how: Shoal's ``op`` of an all-reduce.
        name: The caller's name for it.
        channel, round: The key that matches it.
        tensors: The shape and the dtype's number of each.
    """

    called: str
    how: str
    name: str | None
    channel: str
    round: int
    tensors: list[tuple[list[int], int]]


class JoinState(NamedTuple):
    """The state of an agent's joins.

    Attributes:
        joined: How often it has called :func:`join`.
        received: The number of the receiver's calls of :func:`join` that it knows.
    """

    joined: int
    received: int


class JoinCoordinator(Service):
    """The part of one agent. Data without a lock of its own is used under the engine's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._in_flight: deque[AnnouncedCall] = deque()
        self._joined: dict[int, JoinState] = {}  # the last state of each other agent
        self._calls = 0  # that its script has made since the last join
        self._own = self._ended = 0  # joins that it has begun, and that are over
        self._since = 0.0
        self._news: queue.SimpleQueue[AnnouncedCall | None] = queue.SimpleQueue()

    # Calls of this agent

    def calls(
        self, called: str, how: str, name: str | None, tensors: Sequence[torch.Tensor], handle: Handle[Any]
    ) -> None:
        """This agent has started an operation of all agents."""
        operation = handle.operation
        layouts = [(list(tensor.shape), MOVABLE.index(tensor.dtype)) for tensor in tensors]
        call = AnnouncedCall(called, how, name, operation.name, operation.round, layouts)
        engine = self._engine
        with deferred, engine.lock:
            self._calls += 1
            while self._in_flight and not self._is_in_flight(self._in_flight[0]):
                self._in_flight.popleft()
            self._in_flight.append(call)
            for rank, state in self._joined.items():
                if state.joined > self._ended:
                    self._send(rank, _CALL, call)
                    engine.wake()

    def _is_in_flight(self, call: AnnouncedCall) -> bool:
        return self._engine.active_operation(call.channel, call.round) is not None

    def _send_state(self, rank: int) -> None:
        received = self._joined[rank].joined if rank in self._joined else 0
        self._send(rank, _STATE, JoinState(self._own, received))

    def _send(self, rank: int, op: str, content: AnnouncedCall | JoinState) -> None:
        self._engine.send_control([rank], HOROVOD, content, op=op, background=True)

    # Messages of others

    def serve(self, source: int, message: Message) -> None:
        if message.op == _STATE:
            self._take_state(source, read_json(message, "a join", _parsed_state, _MOST_BYTES))
        else:
            self._news.put(read_json(message, "a join", _parsed_call, _MOST_BYTES))

    def _take_state(self, source: int, state: JoinState) -> None:
        before = self._joined.get(source, JoinState(0, 0)).joined
        self._joined[source] = state
        if state.joined > before:
            for call in self._in_flight:
                if self._is_in_flight(call):
                    self._send(source, _CALL, call)
            self._send_state(source)
        self._news.put(None)

    def on_departure(self, rank: int, because: int | None) -> None:
        self._news.put(None)

    def calls_that_wait(self) -> list[tuple[str, list[int], float]]:
        if self._own == self._ended:
            return []
        with self._engine.lock:
            return [("join", self._missing(), self._since)]

    # A join

    def _missing(self) -> list[int]:
        """The ranks that have not joined, or whose announced calls may not all have arrived."""
        engine, found = self._engine, []
        for rank in engine.alive:
            state = self._joined.get(rank, JoinState(0, 0))
            if rank != engine.rank and min(state.joined, state.received) < self._own:
                found.append(rank)
        return found

    def join(self) -> int:
        """Take part until all agents have joined; the rank that joined last."""
        engine = self._engine
        joined_at, self._since = time.time(), time.monotonic()
        with deferred, engine.lock:
            self._own += 1
            for rank in engine.alive:
                if rank != engine.rank:
                    self._send_state(rank)
            engine.wake()
        engine.check_after_wait(self._since)
        own_calls = self._calls
        self._follow()
        mine = torch.tensor([own_calls, joined_at], dtype=torch.float64, device="cpu")
        found = gather_by_rank(mine, Internal("horovod.join"))
        with deferred, engine.lock:
            self._ended, self._calls = self._own, 0
        return max(found, key=lambda rank: (*found[rank].tolist(), rank))

    def _follow(self) -> None:
        engine = self._engine
        handles: deque[Handle[Any]] = deque()
        while True:
            with deferred, engine.lock:
                missing = self._missing()
            try:
                news = self._news.get(timeout=engine.timeout if missing else 0.0)
            except queue.Empty:
                if not missing:
                    break
                raise DeadlineExceeded(
                    f"join on rank {engine.rank}: nothing was received for {engine.timeout:g} s from ranks {missing}, "
                    "which have not joined; all agents call join()",
                    missing,
                ) from None
            over = engine.reason_against(False)
            if over is not None:
                raise over
            if news is not None and engine.rounds_begun(news.channel) <= news.round:
                handles.append(self._take_part(news))
            while handles and handles[0].poll():
                handles.popleft().wait()
        for handle in handles:
            handle.wait()

    def _take_part(self, call: AnnouncedCall) -> Handle[Any]:
        tensors = _identities(call)
        if call.called == "allreduce":
            return allreduce_nonblocking(tensors[0], name=call.name, op=call.how)
        if call.called == "grouped_allreduce":
            return grouped_allreduce_nonblocking(tensors, name=call.name, op=call.how)
        if call.called == "allgather":
            return allgather_nonblocking(tensors[0], name=call.name)
        if call.called == "grouped_allgather":
            return grouped_allgather_nonblocking(tensors, name=call.name)
        raise ValueError(
            f"join on rank {self._engine.rank}: others have called {call.called}"
            f"{f' {call.name!r}' if call.name else ''}, and an agent that has joined takes part in all-reduces and "
            "all-gathers of all agents only; call it before join(), or after it"
        )


def _parsed_state(content: Any) -> JoinState:
    return JoinState(*map(int, content))


def _parsed_call(content: Any) -> AnnouncedCall:
    call = AnnouncedCall(*content)
    _identities(call)
    return call


def _identities(call: AnnouncedCall) -> list[torch.Tensor]:
    """Tensors that do not change the others' results: zeros, no rows, or the least or greatest value."""
    found = []
    for shape, number in call.tensors:
        dtype, sizes = MOVABLE[number], [int(size) for size in shape]
        if call.called in _GATHERS:
            found.append(torch.empty([0, *sizes[1:]], dtype=dtype, device="cpu"))
        elif call.called in _REDUCES:
            found.append(
                torch.full([1] * len(sizes), _identity(call.how, dtype), dtype=dtype, device="cpu").expand(sizes)
            )
    return found


def _identity(how: str, dtype: torch.dtype) -> float | int | bool:
    if how == "product":
        return 1
    if how not in ("min", "max"):
        return 0
    if dtype == torch.bool:
        return how == "min"
    if dtype.is_floating_point:
        return math.inf if how == "min" else -math.inf
    limits = torch.iinfo(dtype)
    return int(limits.max if how == "min" else limits.min)


_of: weakref.WeakKeyDictionary[Engine, JoinCoordinator] = weakref.WeakKeyDictionary()


def attach() -> None:
    """Enable :func:`join`. All agents call it, and none continues before all have."""
    engine = current("init").engine
    if engine in _of:
        return
    with deferred, engine.lock:
        _of[engine] = coordinator = JoinCoordinator(engine)
        engine.add_service(HOROVOD, coordinator)
    barrier(Internal("horovod.init"))


def note(called: str, how: str, name: str | None, tensors: Sequence[torch.Tensor], handle: Handle[Any]) -> None:
    """Record that the agent has started an operation of all agents, which joined agents may have to follow."""
    joining = _of.get(current(called).engine)
    if joining is not None:
        joining.calls(called, how, name, tensors, handle)


def join(device: int = -1) -> int:
    """Announce that this agent has no more data, and take part in the others' operations until all have joined.

    In their all-reduces it has zeros (for Min, Max and Product a neutral value), and an average is over all agents,
    including joined ones; in an all-gather it has no rows. Other operations raise an error.

    Args:
        device: Ignored.

    Returns:
        The rank that joined last: among the agents with the most calls, the last one.

    Raises:
        ValueError: Others call an operation that a joined agent cannot take part in.
        PeerLost: An agent is gone.
        DeadlineExceeded: Agents that have not joined sent nothing.
    """
    joining = _of.get(current("join").engine)
    if joining is None:
        raise NotInitialized(
            "join: the other agents must take part in it; call hvd.init() at the beginning, on all agents"
        )
    return joining.join()
