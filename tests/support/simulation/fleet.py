"""Replaces the real threads, clock and network with simulated ones, and runs agents on them."""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import ModuleType
from typing import Any

import shoal.windows.registry  # noqa: F401 - all modules with replaced names are imported
from shoal import clock
from shoal._signals import deferred
from shoal.engine import engine as engines
from shoal.rendezvous.launch import Launch
from shoal.runtime import bootstrap
from shoal.runtime.agent import AgentContext, enter_context
from shoal.transport import acceptor, addresses, listeners, router, shared_regions, status_socket
from shoal.transport.peer_address import PeerId

from . import threads
from .network import Network, Poller, Weather
from .scheduler import Scheduler
from .store import Store

SECRET = "SHOAL_SECRET"


@lru_cache(maxsize=1)
def _with_threads(_count: int) -> list[tuple[ModuleType, str]]:
    """The modules that use threads or queues, and their names for them; cached by the number of loaded modules."""
    core = [module for name, module in sys.modules.items() if name.startswith("shoal.")]
    locks = [(module, "threading") for module in core if getattr(module, "threading", None) is threading]
    queues = [(module, "SimpleQueue") for module in core if getattr(module, "SimpleQueue", None) is queue.SimpleQueue]
    return locks + queues


class Simulated:
    """One run: its scheduler and its network, installed."""

    def __init__(self, seed: int, weather: Weather | None = None) -> None:
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler, weather or Weather())
        self.store = Store(self.scheduler, self.network.address)


CALM = Weather(0.02, 0.0, 1 << 14)
"""Latencies of up to 20 ms, and no cut."""


@contextmanager
def simulated(seed: int, weather: Weather | None = None) -> Iterator[Simulated]:
    """Within it, what the core takes from the operating system is simulated."""
    world = Simulated(seed, weather)
    scheduler, network = world.scheduler, world.network
    threads.use(scheduler)

    def local_peer(rank: int, incarnation: int = 0) -> PeerId:
        return PeerId(
            rank, f"host{rank}", f"boot{rank}", rank, 0, f"process{rank}.{incarnation}", rank + 1, 1, incarnation
        )

    replaced: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    secret = os.environ.get(SECRET)
    os.environ[SECRET] = "of a simulated job"  # without one no agent is let in later
    collects = gc.isenabled()
    gc.disable()  # a tenth of the time of a run; and memory would come back at steps that earlier runs decide
    try:
        for module, name in _with_threads(len(sys.modules)):
            put(module, name, threads if name == "threading" else threads.SimpleQueue)
        put(clock, "monotonic", lambda: scheduler.now)
        put(clock, "monotonic_ns", lambda: int(scheduler.now * 1e9))
        put(clock, "perf_counter_ns", lambda: int(scheduler.now * 1e9))
        put(clock, "thread_time", lambda: scheduler.now)
        put(clock, "time", lambda: scheduler.now)
        put(clock, "sleep", scheduler.sleep)
        put(clock, "random_bytes", scheduler.chance.randbytes)
        put(clock, "uniform", scheduler.chance.uniform)
        put(deferred, "_main", -1)
        put(bootstrap, "open_store", lambda *_: world.store)
        put(engines, "Poller", lambda: Poller(network))
        put(router, "local_peer_id", local_peer)
        put(router, "address_for_listening", lambda mine, *_: network.address(mine.rank))
        put(shared_regions, "_populate", lambda *_: None)  # a few pages of each area are touched
        put(status_socket, "here", status_socket.StatusSocket())  # agents that crash do not leave it
        put(listeners, "listen_for", lambda *_: None)
        put(acceptor.Acceptor, "listen_locally", lambda self: "")
        put(listeners, "listen_privately", lambda: None)
        put(addresses, "listen_tcp", network.listen)
        put(addresses, "start_connecting", network.start_connecting)
        put(addresses, "unconnected", network.unconnected)
        put(sys.modules["shoal.transport.network_link"], "tune", lambda sock: None)
        yield world
    finally:
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)
        os.environ.pop(SECRET)
        if secret is not None:
            os.environ[SECRET] = secret
        if collects:
            gc.enable()


class Agents:
    """The agents of one run, each with its program.

    Args:
        begin_with: How many of them the run begins with; the others join.

    Attributes:
        away: Agents that leave to be started again, and after how many seconds.
        returning: These, until they are started.
        crashed: When each agent that has crashed did, the last time.
        contexts: One for each time that an agent was started.
        done: Agents that have ended for good.
        engines: Of the agents that have been through ``init()``, by rank.
        starts: How often each agent was started.
        loaded: Agents that have the state of the run, and can hand it over.
        failed: The errors that ended agents.
    """

    def __init__(self, world: Simulated, size: int, timeout: float, on_loss: str, begin_with: int = 0) -> None:
        self.world, self.size, self.on_loss = world, size, on_loss
        self.contexts: list[AgentContext] = []
        self.done: set[int] = set()
        self.engines: dict[int, Any] = {}
        self.loaded: set[int] = set()
        self.failed: dict[int, BaseException] = {}
        self._timeout, self._begin_with = timeout, begin_with
        self.starts = [0] * size
        self.crashed: dict[int, float] = {}
        self.away: dict[int, float] = {}
        self.returning: set[int] = set()
        self.absent: set[int] = set()
        self._program: Callable[[int], None] = lambda rank: None

    def start(self, program: Callable[[int], None]) -> None:
        self._program = program
        for rank in range(self._begin_with or self.size):
            self.start_one(rank)

    def start_one(self, rank: int) -> None:
        """Start an agent: restarted if its process has ended, or new if it joins."""
        joins = int(0 < self._begin_with <= rank)
        launch = Launch(
            rank,
            self.size,
            "fleet",
            store_is_served=True,
            incarnation=self.starts[rank] + joins,
            begin_with=self._begin_with,
        )
        self.starts[rank] += 1
        self.world.scheduler.dead.discard(rank)
        self.returning.discard(rank)
        self.absent.discard(rank)
        own = AgentContext(launch, self.world.store, timeout=self._timeout)
        self.contexts.append(own)
        self.world.scheduler.spawn(lambda: self._run_agent(own, rank), rank, f"agent-{rank}")

    def _run_agent(self, mine: AgentContext, rank: int) -> None:
        enter_context(mine)
        try:
            bootstrap.init(on_loss=self.on_loss)
            self.engines[rank] = mine.engine
            self._program(rank)
        except Exception as error:
            self.failed[rank] = error
        finally:
            if not self.world.scheduler.over:
                try:
                    bootstrap.leave(mine)
                except Exception as error:
                    self.failed.setdefault(rank, error)
                if rank in self.away:
                    self.absent.add(rank)
                    self._start_later(rank, self.away.pop(rank))
                else:
                    self._end_one(rank)

    def depart(self, rank: int, seconds: float) -> None:
        """The agent leaves with ``shutdown()`` now, and is started again so many seconds later."""
        self.away[rank] = seconds
        self.returning.add(rank)
        self.loaded.discard(rank)

    def crash(self, rank: int, seconds: float | None = None) -> None:
        """An agent's process ends at once; it is started again after so many seconds, or never."""
        self.crashed[rank] = self.world.scheduler.now
        self.world.scheduler.crash(rank)
        self.world.network.crash(rank)
        self.engines.pop(rank, None)
        self.loaded.discard(rank)
        self.away.pop(rank, None)
        if seconds is None:
            self._end_one(rank)
        else:
            self._start_later(rank, seconds)

    def _start_later(self, rank: int, seconds: float) -> None:
        self.world.scheduler.at(self.world.scheduler.now + seconds, self.start_one, rank)

    def _end_one(self, rank: int) -> None:
        self.done.add(rank)
        self.world.scheduler.done = len(self.done) == self.size

    def run(self, seconds: float, most_steps: int = 400_000) -> None:
        self.world.scheduler.run(1000.0 + seconds, most_steps)

    def end(self) -> None:
        self.world.scheduler.end()
        for own in self.contexts:
            bootstrap._taken.pop(id(own), None)
            engine = own.engine
            if engine is not None:
                with suppress(Exception):
                    engine.arena.close()
                engine.rejoin.close(0.0)  # the memory file that tells the launcher that it waits


@contextmanager
def agents_of(
    size: int, *, seed: int = 1, weather: Weather = CALM, timeout: float = 20.0, on_loss: str = "continue"
) -> Iterator[Agents]:
    """The agents of a simulated fleet, whose tasks end with the block."""
    with simulated(seed, weather) as world:
        agents = Agents(world, size, timeout, on_loss)
        yield agents
        agents.end()
