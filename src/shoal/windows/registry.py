"""All windows of one agent: creating them, freeing them, and lookup by name for its neighbours.

``Worker`` is the thread that runs an agent's nonblocking window calls one after the other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import networkx as nx
import torch

from .. import clock
from .._signals import SLICE, deferred
from ..errors import DeadlineExceeded, Mismatch, NotInitialized, PeerLost
from ..execution.control_messages import Service
from ..execution.events import deferred_span, profiler
from ..execution.operation import FailurePolicy, Handle, Operation
from ..execution.stage import Exchange, Send, Steps
from ..kernels.native import by_value
from ..runtime.agent import Agent, bind
from ..transport.messages import DTYPES, Message
from ..transport.shared_regions import Segment
from .locks import ByteLocks
from .owner_requests import PREFIX, UNLOCK, channel_of, name_of
from .owner_service import RETRY_SECONDS, OwnerService
from .window_memory import WindowLayout, WindowMemory
from .window_part import WindowPart

T = TypeVar("T")
_STOP_SECONDS = 5.0
"""Seconds in which a call ends after its window has been freed."""
_calls = count()
"""Distinguishes the calls of this process for listeners to their events."""
_LONGEST_POLL = 60.0
"""The driving thread checks the clock at least so often, in seconds, also if it is not woken."""
# Weak: the windows own their memories. A strong reference would keep the memory of a freed window until the process
# ends.
_local_memories: weakref.WeakValueDictionary[tuple[str, str, int], WindowMemory] = weakref.WeakValueDictionary()
"""The memories of this process, by the owner's inbox, the name and the number: for agents that are threads."""


class _CallWait(NamedTuple):
    """A wait of a thread for other ranks."""

    ranks: Callable[[], Sequence[int]]
    call: tuple[str, ...]  # the operation, and its window
    since: float


class WindowCall(Operation):
    """A nonblocking call on a window, which this agent's worker makes."""

    __slots__ = ("_waiting_for", "_window")

    def __init__(self, op: str, window: str, deadline: float, waiting_for: Callable[[], list[int]]) -> None:
        super().__init__(op, "~window", 0, deadline - clock.monotonic())  # its events are emitted when the call is made
        self.deadline = deadline
        self._window = window
        self._waiting_for = waiting_for

    def __str__(self) -> str:
        return f"{self.op} {self._window!r}"

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that the worker's current call waits for."""
        return self._waiting_for()


class Windows(Service):
    """The windows of one agent, and the service that serves its neighbours' requests."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.engine = agent.engine
        self.with_p = False
        self._lost: dict[int, PeerLost] = {}  # by thread: the loss that its last call that moved a tensor met, if any
        self._because: dict[int, int] = {}  # by agent that has left because of a loss: the lost rank
        self._requests = OwnerService(self, self.engine)
        self._windows: dict[str, WindowPart] = {}
        self._being_made: set[str] = set()
        self._segments: dict[str, Segment] = {}
        self._worker: Worker | None = None
        self._closing = False
        self._queue: dict[WindowCall, Handle[Any]] = {}  # calls whose turn has not come, under the engine's lock
        self._due = float("inf")  # no call of them is overdue before
        self._waiting: dict[int, _CallWait] = {}  # of threads of this agent
        self._lock = threading.Lock()

    def find(self, channel: str) -> WindowPart | None:
        return self._windows.get(name_of(channel))

    def missed(self, error: PeerLost | None) -> None:
        me = threading.get_ident()
        if error is None:
            self._lost.pop(me, None)
        else:
            self._lost[me] = error

    def cause_of(self, rank: int) -> int | None:
        return self._because.get(rank)

    def get(self, op: str, name: str) -> WindowPart:
        """The window of this name.

        Raises:
            KeyError: There is none on this agent.
        """
        window = self._windows.get(name)
        if window is None:
            known = ", ".join(map(repr, self.names)) or "none"
            raise KeyError(f"{op}: there is no window {name!r} on rank {self.engine.rank}; there are: {known}")
        return window

    @property
    def names(self) -> list[str]:
        return sorted(self._windows)

    # Making and freeing

    def create(self, name: str, tensor: torch.Tensor, zero_init: bool, timeout: float | None) -> bool:
        """Make a window together with all neighbours. False if this agent has one of that name, or is making it."""
        # Under the lock: of two threads that make one window, the second would wait for a window that no neighbour
        # makes, in the round after the first one's.
        with self.engine.lock:
            if name in self._windows or name in self._being_made:
                return False
            self._being_made.add(name)
        try:
            return self._create(name, tensor, zero_init, timeout)
        finally:
            self._being_made.discard(name)

    def _create(self, name: str, tensor: torch.Tensor, zero_init: bool, timeout: float | None) -> bool:
        # The lost ranks come from the plan of the name, on which all agents agree. An agent's own view could be newer,
        # and its slots would be others than its neighbours assume.
        static = self.agent.topology.without(self.engine.plan(f"~plan {PREFIX} {name}").gone)  # the same on all
        # Only memory that neighbours can map, and in which the numbers lie as in a flat tensor, can be read in place.
        plain = tensor.is_contiguous() and tensor.is_cpu and not by_value(tensor)
        found = self.engine.find_shared(tensor) if plain else None
        layout = WindowLayout(tuple(tensor.shape), tensor.dtype, static.mixing.source_ranks, found is None)
        segment = Segment(self.engine.next_region(), layout.nbytes)
        try:
            locks = ByteLocks(segment.fd)
        except BaseException:  # such as too many open files; the next attempt would have one less
            segment.close()
            raise
        value = tensor.detach().reshape(-1).cpu()
        memory = WindowMemory(layout, segment.data, locks, None if found is None else value)
        # Before the identifiers are sent: a neighbour may map the memory and write to it at once, and this would then
        # overwrite its first write.
        memory.begin(None if zero_init else value)
        if found is None:
            memory.own.copy_(value)
        window = WindowPart(self, name, tensor, memory, found is not None, static.mixing)
        peers = sorted({*window.sources, *window.destinations})
        regions = [(segment.ident, segment.fd, True)]
        own = (segment.ident, layout.slot(len(layout.sources), 0))
        if found is not None:
            regions.append((found.segment.ident, found.segment.fd, False))
            own = (found.segment.ident, found.offset)
        header = [segment.ident, *own, DTYPES.index(tensor.dtype), *tensor.shape]

        def steps(operation: Operation) -> Steps[bool]:
            # The round of the name is equal on all neighbours. So a request for a freed window of this name does not
            # reach its successor.
            window.number = operation.round
            _local_memories[(self.engine.inbox_address, name, window.number)] = memory
            # Registered and shared before the header leaves. A neighbour that has all its headers writes at once, and
            # would be refused as by an owner that has freed the window.
            with self.engine.lock:
                self._windows[name] = window
                self._segments[name] = segment
                # The plan may be older than a loss: on_departure() was called before the window was registered here.
                for rank in peers:
                    if rank not in self.engine.alive or rank in operation.lost_ranks:
                        window.lose(rank)
                # The descriptor goes ahead of the header on the same link, because the receiver looks it up when the
                # header arrives.
                for rank in peers:
                    for ident, fd, lockable in regions:
                        self.engine.share_region(rank, ident, fd, lockable)
            published = self.engine.publish(operation, torch.tensor(header, device="cpu"))
            sends = [Send(rank, published, 0, len(header), (len(header),)) for rank in peers]
            arrived = yield Exchange(sends, peers, torch.int64, digest=static.digest)
            for rank, message in arrived.items():  # an agent lost since then has sent nothing
                assert message.payload is not None
                self._open(window, rank, static.graph, message.payload.data.tolist())
            return True

        try:
            create = f"~create {PREFIX} {name}"
            return self.engine.submit("win_create", create, steps, timeout, on_loss=FailurePolicy.SKIP_MISSING).wait()
        except BaseException:
            # Neighbours may know it by now. free() marks the memory as freed, so that their calls fail instead of
            # writing to memory that no update reads.
            if self._windows.get(name) is window:
                self.free(name)
            else:  # it was refused before it began
                window.close()
                segment.close()
            raise

    def _open(self, window: WindowPart, rank: int, graph: nx.DiGraph, header: list[int]) -> None:
        """Find or map the memory of a neighbour on this machine."""
        ident, own_ident, own_offset, code, *shape = header
        mine = window.memory.layout
        if (tuple(shape), DTYPES[code]) != (mine.shape, mine.dtype):
            raise Mismatch(
                f"win_create {window.name!r}: rank {rank} has a tensor of shape {shape} and {DTYPES[code]}, and rank "
                f"{self.engine.rank} one of shape {list(mine.shape)} and {mine.dtype}; they must be equal",
                (rank, self.engine.rank),
            )
        router = self.engine.router
        kind = router.transport_to(rank)
        # A neighbour with no other neighbours may have freed its window by now: it refuses later messages.
        if kind == "threads":
            memory = _local_memories.get((router.endpoints[rank].inbox, window.name, window.number))
            if memory is not None:
                window.direct[rank] = memory
        elif kind == "shared_memory":
            try:
                (data, fd), (own, _) = router.shared_by(rank, ident), router.shared_by(rank, own_ident)
            except KeyError:
                return
            sources = tuple(sorted(graph.predecessors(rank)))
            sources = tuple(source for source in sources if source != rank)
            # The owner lays out its slots by its own in-neighbours, not by those of this agent. With a wrong list this
            # agent would write to another one's slot.
            layout = WindowLayout(mine.shape, mine.dtype, sources, ident == own_ident)
            nbytes = mine.numel * mine.dtype.itemsize
            flat = own[own_offset : own_offset + nbytes].view(mine.dtype)
            window.map(rank, WindowMemory(layout, data, ByteLocks(fd), flat))

    def free(self, name: str | None) -> bool:
        """Free one window, or all. Neighbours that write to it afterwards get an error."""
        with self.engine.lock:
            for window_name in self.names if name is None else [name]:
                # Under the engine's lock: the engine's thread serves requests, and would otherwise find a window whose
                # memory is being closed.
                window, segment = self._windows.pop(window_name), self._segments.pop(window_name)
                # The mark is in the pages that neighbours on this machine have mapped. It reaches them without a
                # message, also in the middle of a wait.
                window.close(self.cause)
                # Closing the locks does not end a wait for the reply of a far owner. It would keep the worker, and all
                # nonblocking calls behind it, until the deadline.
                if not self._closing:
                    self._end_requests(window)
                self.engine.retire_region(segment.ident)
                segment.close()
                self._requests.forget_window(window, channel_of(window_name))
            self.engine.wake()  # the driving thread has refusals to send
        return True

    def _end_requests(self, window: WindowPart) -> None:
        """Fail this agent's requests to far owners of a window that it has freed, except that a mutex is given back."""
        for operation in self.engine.in_flight():
            if operation.one_sided and operation.name == channel_of(window.name) and operation.op != UNLOCK:
                self.engine.fail(operation, window.freed_by(operation.op, self.engine.rank))

    @property
    def cause(self) -> int | None:
        """The rank whose loss makes this agent free a window now; its own rank if it shuts down with windows open."""
        # A loss that is survived makes nobody free a window.
        losses = [] if self.engine.survives_losses else list(self._lost.values())
        for error in (self.engine.ended, *losses):
            for rank in error.ranks if error is not None else ():
                if rank >= 0:
                    return rank
        return self.engine.rank if self._closing else None

    # Running

    def call(self, op: str, name: str, move: Callable[[], T]) -> T:
        """Run a call on a window, and report its begin and end to the listeners for the agent's events."""
        with deferred_span(op, name, "call") if profiler._is_profiler_enabled else deferred:
            # Signals are deferred around the call: an exception of a signal handler between a lock and its release
            # would leave the slot locked for the neighbours.
            events = self.engine.events
            if not events.active:
                return move()
            channel = channel_of(name)
            number = -1 - next(_calls)  # below zero: its exchanges between machines have this name, and rounds of 0 on
            events.emit("submitted", op, channel, number)
            try:
                result = move()
            except BaseException as error:
                events.emit("failed", op, channel, number, detail=f"{type(error).__name__}: {error}")
                raise
            events.emit("finished", op, channel, number)
            return result

    def start(self, op: str, name: str, function: Callable[[], T], deadline: float) -> Handle[T]:
        """Run something in this agent's worker, in the order of calls, if its turn comes before the deadline."""
        with self._lock:
            if self._worker is None:
                self._worker = Worker(f"shoal-{self.engine.rank}-windows")
        call = WindowCall(op, name, deadline, self._worker_waits_for)
        handle: Handle[T] = Handle(self.engine, call)
        with self.engine.lock:
            self._queue[call] = handle
            # The driving thread ends overdue calls: the worker itself may be in an earlier call that waits for ever.
            self._due = min(self._due, deadline)
            self.engine.check_by(deadline)
            if call.timeout < _LONGEST_POLL:
                self.engine.wake()

        def run() -> None:
            with self.engine.lock:
                # Under the lock, as in _end_overdue: only one of the two takes the call out, so a call that was
                # reported as overdue is never made after all.
                if self._queue.pop(call, None) is None:  # it has waited for too long
                    return
            result, error = None, None
            try:
                # close() frees the windows while calls are queued. Each of these calls still has to end its handle, or
                # its caller would wait for ever.
                if self._closing:
                    raise NotInitialized("this agent has shut down while a call of its on a window waited for its turn")
                result = function()
            except BaseException as caught:
                error = caught
            self.engine.finish(handle, result, error)

        self._worker.submit(bind(run))
        return handle

    @contextmanager
    def waiting(self, ranks: Callable[[], Sequence[int]], *call: str) -> Iterator[None]:
        """Note that the calling thread may have to wait for these ranks; ``call`` names the call, unless an operation
        of the engine does.
        """
        me = threading.get_ident()
        before = self._waiting.get(me)
        since = clock.monotonic()
        self._waiting[me] = _CallWait(ranks, call, since)
        if call:
            self.engine.check_after_wait(since)
        try:
            yield
        finally:
            # Calls nest: an update that waits for its own mutex restores the wait of the call around it, which reports
            # of stalls would otherwise lose.
            if before is None:
                del self._waiting[me]
            else:
                self._waiting[me] = before

    def _worker_waits_for(self) -> list[int]:
        wait = self._waiting.get(self._worker.ident) if self._worker is not None else None
        return sorted(wait.ranks()) if wait is not None else []

    def calls_that_wait(self) -> list[tuple[str, list[int], float]]:
        # A copy: other threads of the agent begin and end waits while this runs in the driving thread.
        waits = [wait for wait in list(self._waiting.values()) if wait.call]
        return [(f"{wait.call[0]} {wait.call[1]!r}", sorted(wait.ranks()), wait.since) for wait in waits]

    def _end_overdue(self, now: float) -> None:
        """Fail the calls whose deadline passes before their turn: an earlier call waits for other agents, perhaps for
        ever.
        """
        for call in [call for call in self._queue if now >= call.deadline]:
            ranks, seconds = call.waiting_for, round(call.timeout, 2)  # it is slightly shorter than the given timeout
            self.engine.finish(
                self._queue.pop(call),
                None,
                DeadlineExceeded(
                    f"{call} on rank {self.engine.rank} waited {seconds:g} s for its turn: a call on windows "
                    f"that this agent made before it waits for ranks {ranks}. If they are only slow, raise "
                    "SHOAL_TIMEOUT or pass timeout=",
                    ranks,
                ),
            )
        self._due = min((call.deadline for call in self._queue), default=float("inf"))

    # Callbacks of the engine

    def serve(self, source: int, message: Message) -> None:
        self._requests.serve(source, message)

    def on_departure(self, rank: int, because: int | None) -> None:
        self._requests.forget(rank)
        for window in self._windows.values():
            window.lose(rank)
        view, cause = self.engine.view, self.cause if because is None else because
        if rank in view.left and cause is not None:
            # An agent that left on purpose is no cause by itself: errors name the rank whose loss made it leave.
            self._because[rank] = cause

    def check(self, now: float) -> float:
        if now >= self._due:
            self._end_overdue(now)
        return min(self._due, now + RETRY_SECONDS if self._requests.again() else float("inf"))

    def holds_topology(self) -> list[str]:
        return self.names

    def descriptors(self) -> list[int]:
        found = [segment.fd for segment in self._segments.values()]
        for window in self._windows.values():
            found += [memory.locks.descriptor for memory in (window.memory, *window.direct.values())]
        return [fd for fd in found if fd >= 0]

    def close(self, deadline: float) -> None:
        # First the queued calls, then the windows: in the other order calls that were made before the shutdown would
        # fail.
        ended = self._worker is None or self._worker.end(deadline)
        self._closing = True
        self.free(None)  # calls that wait for a lock raise
        if self._worker is not None and not ended:
            gone = NotInitialized("this agent has shut down while a call of its on a window was under way")
            with self.engine.lock:
                # The worker may wait for the reply of a far owner, which closing the locks does not end. Without this
                # it would wait until the deadline of that call.
                for operation in self.engine.in_flight():
                    if operation.one_sided:
                        self.engine.fail(operation, gone)
            self._worker.end(clock.monotonic() + _STOP_SECONDS)


def windows_of(agent: Agent) -> Windows:
    """An agent's windows; it has none before the first call."""
    # Two threads may make an agent's first call at the same time. Without the lock each would get its own Windows, and
    # requests would reach only one of them.
    with deferred, agent.engine.lock:
        found = agent.engine.service(PREFIX)
        if not isinstance(found, Windows):
            found = Windows(agent)
            agent.engine.add_service(PREFIX, found)
        return found


class Worker:
    """A thread for window calls. It is a daemon, because the interpreter joins all other threads at exit, before the
    agent could leave.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        """The identifier of its thread."""
        return self._thread.ident or 0

    def submit(self, call: Callable[[], None]) -> None:
        """Run a call, which must not raise, after all before it."""
        self._calls.put(call)

    def end(self, deadline: float) -> bool:
        """Take no more calls, and wait for the submitted ones; False if they have not ended by the deadline, or if a
        signal has arrived.
        """
        self._calls.put(None)
        while self._thread.is_alive() and clock.monotonic() < deadline and not deferred.pending:
            self._thread.join(min(SLICE, max(0.0, deadline - clock.monotonic())))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it holds a window
