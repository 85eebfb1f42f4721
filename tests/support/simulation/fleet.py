"""Puts the simulated world in the place of the real one, and runs agents in it."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import shoal.windows.worker  # noqa: F401 - all that is to be replaced has been imported
from shoal import clock
from shoal._signals import deferred
from shoal.engine import engine as engines
from shoal.rendezvous.launch import Launch
from shoal.rendezvous.store import ThreadStore
from shoal.runtime import bootstrap
from shoal.runtime.agent import AgentContext, enter_context
from shoal.transport import listeners, router, status_socket, tcp
from shoal.transport.peer_address import PeerId

from .network import Network, Poller, Weather
from .scheduler import Scheduler
from .threads import namespace

ROOMS = {
    *("_signals", "coordination", "engine", "fault_tolerance", "operations", "ops", "rendezvous", "runtime"),
    *("transport", "windows"),
}
"""Whose threads and clocks are simulated."""


class Simulated:
    """One run: its scheduler and its network, installed."""

    def __init__(self, seed: int, weather: Weather | None = None) -> None:
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler, weather or Weather())
        self.threading = namespace(self.scheduler)


@contextmanager
def simulated(seed: int, weather: Weather | None = None) -> Iterator[Simulated]:
    """Within it, what the core takes from the operating system is simulated."""
    world = Simulated(seed, weather)
    scheduler, network = world.scheduler, world.network

    def here(rank: int, incarnation: int = 0) -> PeerId:
        return PeerId(
            rank, f"host{rank}", f"boot{rank}", rank, 0, f"process{rank}.{incarnation}", rank + 1, incarnation
        )

    replaced: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        for name, module in list(sys.modules.items()):
            room = ([*name.split("."), ""])[1]
            if name.startswith("shoal.") and room in ROOMS and module is not None:
                if getattr(module, "threading", None) is threading:
                    put(module, "threading", world.threading)
                if getattr(module, "SimpleQueue", None) is queue.SimpleQueue:
                    put(module, "SimpleQueue", world.threading.SimpleQueue)
        put(clock, "monotonic", lambda: scheduler.now)
        put(clock, "monotonic_ns", lambda: int(scheduler.now * 1e9))
        put(clock, "perf_counter_ns", lambda: int(scheduler.now * 1e9))
        put(clock, "thread_time", lambda: scheduler.now)
        put(clock, "time", lambda: scheduler.now)
        put(clock, "sleep", scheduler.sleep)
        put(clock, "random_bytes", scheduler.chance.randbytes)
        put(clock, "uniform", scheduler.chance.uniform)
        put(deferred, "_main", -1)
        put(engines, "Poller", lambda: Poller(network))
        put(router, "local_peer_id", here)
        put(router, "address_for_listening", lambda mine, *_: network.address(mine.rank))
        put(status_socket, "here", status_socket.StatusSocket())  # agents that crash do not leave it
        put(listeners, "listen_for", lambda *_: None)
        put(listeners, "listen_privately", lambda: None)
        put(tcp, "listen", network.listen)
        put(tcp, "start_connecting", network.start_connecting)
        put(tcp, "unconnected", network.unconnected)
        put(sys.modules["shoal.transport.network_link"], "tune", lambda sock: None)
        yield world
    finally:
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)


class Agents:
    """The agents of one run, each with its program."""

    def __init__(self, world: Simulated, size: int, timeout: float, on_loss: str) -> None:
        self.world, self.size, self.on_loss = world, size, on_loss
        self.store = ThreadStore()
        self.contexts = [
            AgentContext(Launch(rank, size, "fleet", None, None, False, 0), self.store, timeout=timeout)
            for rank in range(size)
        ]
        self.done: set[int] = set()
        self.engines: dict[int, Any] = {}
        self.failed: dict[int, BaseException] = {}

    def start(self, program: Callable[[int], None]) -> None:
        for rank in range(self.size):
            self.world.scheduler.spawn(lambda rank=rank: self._live(rank, program), rank, f"agent-{rank}")

    def _live(self, rank: int, program: Callable[[int], None]) -> None:
        mine = self.contexts[rank]
        enter_context(mine)
        try:
            bootstrap.init(on_loss=self.on_loss)
            self.engines[rank] = mine.engine
            program(rank)
        except Exception as error:
            self.failed[rank] = error
        finally:
            if not self.world.scheduler.over:
                try:
                    bootstrap.leave(mine)
                except Exception as error:
                    self.failed.setdefault(rank, error)
                self.done.add(rank)

    def crash(self, rank: int) -> None:
        """An agent's process ends at once."""
        self.world.scheduler.dead.add(rank)
        self.world.network.crash(rank)
        self.done.add(rank)

    def run(self, seconds: float, most_steps: int = 400_000) -> None:
        self.world.scheduler.run(lambda: len(self.done) == self.size, 1000.0 + seconds, most_steps)

    def end(self) -> None:
        self.world.scheduler.end()
        for mine in self.contexts:
            bootstrap._taken.pop(id(mine), None)
            engine = mine.engine
            if engine is not None:
                with suppress(Exception):
                    engine.arena.close()
