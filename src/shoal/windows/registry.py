"""All windows of one agent: making and freeing them, and finding the one that a neighbour means."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

from ..errors import Mismatch, NotInitialized
from ..runtime.agent import Agent, bind
from ..runtime.operation import Exchange, Handle, Operation, Send, Steps
from ..transport.memory import Segment
from ..transport.wire import DTYPES, Message
from .locks import ByteLocks
from .memory import Layout, WindowMemory
from .service import AGAIN, Service
from .window import Window
from .worker import Worker

T = TypeVar("T")
PREFIX = "~window"
_STOP_SECONDS = 5.0
"""In which a call that has been told that its window is gone ends."""
_here: weakref.WeakValueDictionary[tuple[str, str, int], WindowMemory] = weakref.WeakValueDictionary()
"""The memories of this process, by the owner's inbox, the name and the number: for agents that are threads."""


class Windows:
    """The windows of one agent, and the service that its neighbours find at it."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.engine = agent.engine
        self.with_p = False
        self._service = Service(self)
        self._windows: dict[str, Window] = {}
        self._segments: dict[str, Segment] = {}
        self._worker: Worker | None = None
        self._closing = False
        self._lock = threading.Lock()

    @staticmethod
    def channel(name: str) -> str:
        """What requests for a window are matched by."""
        return f"{PREFIX} {name}"

    @staticmethod
    def name_of(channel: str) -> str:
        return channel.removeprefix(f"{PREFIX} ")

    def find(self, channel: str) -> Window | None:
        return self._windows.get(self.name_of(channel))

    def get(self, op: str, name: str) -> Window:
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
        """Make a window together with all neighbours. False if this agent has one of that name."""
        if name in self._windows:
            return False
        static = self.agent.topology
        found = self.engine.arena.find(tensor) if tensor.is_contiguous() and tensor.is_cpu else None
        layout = Layout(tuple(tensor.shape), tensor.dtype, static.mixing.source_ranks, found is None)
        segment = Segment(self.engine.arena.next_ident(), layout.nbytes)
        value = tensor.detach().reshape(-1).cpu()
        memory = WindowMemory(layout, segment.data, ByteLocks(segment.fd), None if found is None else value)
        memory.begin(None if zero_init else value)
        if found is None:
            memory.own.copy_(value)
        window = Window(self, name, tensor, memory, found is not None, static.mixing)
        peers = sorted({*window.sources, *window.destinations})
        regions = [(segment.ident, segment.fd, True)]
        own = (segment.ident, layout.slot(len(layout.sources), 0))
        if found is not None:
            regions.append((found.segment.ident, found.segment.fd, False))
            own = (found.segment.ident, found.offset)
        told = [segment.ident, *own, DTYPES.index(tensor.dtype), *tensor.shape]

        def steps(operation: Operation) -> Steps[bool]:
            window.number = operation.round
            _here[(self.engine.router.inbox.address, name, window.number)] = memory
            with self.engine.lock:
                self._windows[name] = window
                self._segments[name] = segment
                for rank in peers:
                    for ident, fd, lockable in regions:
                        self.engine.outbox.share(rank, ident, fd, lockable)
            published = self.engine.publisher.publish(operation, torch.tensor(told))
            sends = [Send(rank, published, 0, len(told), (len(told),)) for rank in peers]
            arrived = yield Exchange(sends, peers, torch.int64, digest=static.digest)
            for rank in peers:
                payload = arrived[rank].payload
                assert payload is not None
                self._open(window, rank, payload.data.tolist())
            return True

        try:
            return self.engine.submit("win_create", f"~create {PREFIX} {name}", steps, timeout).wait()
        except BaseException:
            if self._windows.get(name) is window:
                self.free(name)
            else:  # it was refused before it began
                window.close()
                segment.close()
            raise

    def _open(self, window: Window, rank: int, told: list[int]) -> None:
        """Find the way to the memory of a neighbour."""
        ident, own_ident, own_offset, code, *shape = told
        mine = window.memory.layout
        if (tuple(shape), DTYPES[code]) != (mine.shape, mine.dtype):
            raise Mismatch(
                f"win_create {window.name!r}: rank {rank} has a tensor of shape {shape} and {DTYPES[code]}, and rank "
                f"{self.engine.rank} one of shape {list(mine.shape)} and {mine.dtype}; they must be equal",
                (rank, self.engine.rank),
            )
        router = self.engine.router
        kind = router.transport_to(rank)
        # A neighbour that needed nobody else may have freed its window by now: what is sent to it then, it refuses.
        if kind == "threads":
            memory = _here.get((router.inbox_of(rank), window.name, window.number))
            if memory is not None:
                window.direct[rank] = memory
        elif kind == "shared_memory":
            try:
                (data, fd), (own, _) = router.shared_by(rank, ident), router.shared_by(rank, own_ident)
            except KeyError:
                return
            sources = tuple(sorted(self.agent.topology.graph.predecessors(rank)))
            sources = tuple(source for source in sources if source != rank)
            layout = Layout(mine.shape, mine.dtype, sources, ident == own_ident)
            nbytes = mine.numel * mine.dtype.itemsize
            flat = own[own_offset : own_offset + nbytes].view(mine.dtype)
            window.map(rank, WindowMemory(layout, data, ByteLocks(fd), flat))

    def free(self, name: str | None) -> bool:
        """Free one window, or all. Neighbours that go on writing to it get an error."""
        with self.engine.lock:
            for one in self.names if name is None else [name]:
                window, segment = self._windows.pop(one), self._segments.pop(one)
                window.close()
                self.engine.arena.retired.append(segment.ident)
                segment.close()
                self._service.forget_window(window, self.channel(one))
            self.engine.poller.wake()  # whoever drives has refusals to send
        return True

    # Running

    def start(self, function: Callable[[], T]) -> Handle[T]:
        """Run something in this agent's worker, in the order of calls."""
        with self._lock:
            if self._worker is None:
                self._worker = Worker(f"shoal-{self.engine.rank}-windows")
        handle: Handle[T] = Handle(self.engine, Operation("window", "~window", 0, self.engine.timeout))

        def run() -> None:
            result, error = None, None
            try:
                if self._closing:
                    raise NotInitialized("this agent has shut down while a call of its on a window waited for its turn")
                result = function()
            except BaseException as caught:
                error = caught
            self.engine.finish(handle, result, error)

        self._worker.submit(bind(run))
        return handle

    # What the engine tells

    def serve(self, source: int, message: Message) -> None:
        self._service.serve(source, message)

    def on_gone(self, rank: int) -> None:
        self._service.forget(rank)

    def check(self, now: float) -> float:
        return now + AGAIN if self._service.again() else float("inf")

    def holds_topology(self) -> list[str]:
        return self.names

    def descriptors(self) -> list[int]:
        found = [segment.fd for segment in self._segments.values()]
        for window in self._windows.values():
            found += [memory.locks.descriptor for memory in (window.memory, *window.direct.values())]
        return [fd for fd in found if fd >= 0]

    def close(self, deadline: float) -> None:
        ended = self._worker is None or self._worker.end(deadline)
        self._closing = True
        self.free(None)  # what waits for a lock hears of it
        if self._worker is not None and not ended:
            gone = NotInitialized("this agent has shut down while a call of its on a window was under way")
            with self.engine.lock:
                for operation in self.engine.rounds.in_flight():
                    if operation.one_sided:
                        self.engine.fail(operation, gone)
            self._worker.end(time.monotonic() + _STOP_SECONDS)
