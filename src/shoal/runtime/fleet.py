"""Agents as threads of one process, for notebooks and tests."""

from __future__ import annotations

import contextvars
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from .. import clock
from .._signals import deferred
from ..clock import parse_timeout
from ..coordination.attach import check_transport
from ..errors import PeerLost
from ..rendezvous.launch import Launch
from ..rendezvous.store import ThreadStore
from ..topology._validate import check_size
from .agent import AgentContext, bind, enter_context, fleet_runs
from .bootstrap import init, leave

log = logging.getLogger("shoal")
T = TypeVar("T")
GRACE_SECONDS = 5.0
"""Seconds after the failure of one agent in which the other agents may notice it at their next operation."""


class Fleet:
    """``n`` agents in this process, each a thread.

    The agents share torch's random generator. ``torch.manual_seed`` in an agent therefore causes a warning; give each
    agent a generator of its own, ``torch.Generator().manual_seed(seed + shoal.rank())``.

    A thread that an agent starts belongs to that agent if it runs ``shoal.Fleet.bind(function)``, called in the agent.

    >>> import shoal, torch
    >>> def average():
    ...     return shoal.neighbor_allreduce(torch.tensor([float(shoal.rank())])).item()
    >>> shoal.Fleet(2).run(average)
    [0.5, 0.5]

    Args:
        size: The number of agents.
        agents_per_machine: The number of agents of each machine into which they are grouped; one machine if not given.
        timeout: Seconds for every wait; ``SHOAL_TIMEOUT`` (300) if not given.
        transport: ``"threads"``; or ``"shared_memory"``, ``"network"`` or ``"process-group"``, to send all messages as
            processes would.
    """

    bind = staticmethod(bind)

    def __init__(
        self,
        size: int,
        *,
        agents_per_machine: int | None = None,
        timeout: float | None = None,
        transport: str = "",
    ) -> None:
        try:
            size = check_size(size)
        except (TypeError, ValueError):
            raise ValueError(f"Fleet({size!r}): the number of agents must be a positive integer") from None
        try:
            agents_per_machine = None if agents_per_machine is None else check_size(agents_per_machine)
        except (TypeError, ValueError):
            raise ValueError(f"agents_per_machine={agents_per_machine!r}: it must be a positive integer") from None
        check_transport(transport, "transport")
        self.size = size
        self._per_machine = agents_per_machine
        self._timeout = None if timeout is None else parse_timeout(timeout, 0.0)
        self._transport = transport

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Call ``function(*args, **kwargs)`` in every agent, after ``init`` and before ``shutdown``.

        Returns:
            The results, by rank.

        Raises:
            Exception: That of the first agent that failed, with its traceback. The other agents are ended, and the
                fleets that they run. An agent in a loop without any operation does not notice; it continues to run and
                is named in the log.
            TypeError: A call of ``function`` would only create a generator or a coroutine, and run nothing.
        """
        for kind, test in _UNRUN:
            if test(function):
                raise TypeError(f"{function!r} is {kind}, and calling it runs none of its code. Give a plain function")
        store = ThreadStore()
        with _seeds_watched():
            return self._run(function, args, kwargs, store)

    def _run(self, function: Callable[..., T], args: Any, kwargs: Any, store: ThreadStore) -> list[T]:
        contexts = [
            AgentContext(Launch(rank, self.size, "fleet"), store, self._transport, self._per_machine)
            for rank in range(self.size)
        ]
        for context in contexts:
            context.timeout = self._timeout
        return _FleetRun(function, args, kwargs, contexts, store).results()


_watching = 0
"""Fleets that run now."""
_watch_lock = threading.Lock()
_manual_seed = torch.manual_seed


def _seed_with_a_warning(seed: int) -> torch.Generator:
    """As ``torch.manual_seed``; an agent of a fleet with several agents is warned."""
    run = _around.get()
    if run is not None and len(run._contexts) > 1:
        warnings.warn(
            "torch.manual_seed() in an agent of a Fleet: the agents are threads, and share torch's generator, so the "
            "numbers that each draws depend on the others' speed. Give each agent a generator of its own: "
            "g = torch.Generator().manual_seed(seed + shoal.rank()), then torch.randn(3, generator=g). Create a model "
            "before Fleet.run, and let each agent train copy.deepcopy(model). Or start processes: shoal run",
            stacklevel=2,
        )
    return _manual_seed(seed)


@contextmanager
def _seeds_watched() -> Iterator[None]:
    """While some fleet runs, ``torch.manual_seed`` warns the agents; then it is torch's own again.

    Rejected: a generator for each thread. torch has one for all of them, and dropout, for example, takes no other.
    """
    global _watching, _manual_seed
    with _watch_lock:
        if not _watching:
            _manual_seed = torch.manual_seed
            torch.manual_seed = torch.random.manual_seed = _seed_with_a_warning
        _watching += 1
    try:
        yield
    finally:
        with _watch_lock:
            _watching -= 1
            if not _watching:
                torch.manual_seed = torch.random.manual_seed = _manual_seed


_UNRUN = (
    ("a generator function", inspect.isgeneratorfunction),
    ("a coroutine function", inspect.iscoroutinefunction),
    ("an asynchronous generator function", inspect.isasyncgenfunction),
)
_around: contextvars.ContextVar[_FleetRun | None] = contextvars.ContextVar("shoal_fleet", default=None)
"""The run of a fleet to which the calling thread's agent belongs."""


class _FleetRun:
    def __init__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, contexts: list[AgentContext], store: ThreadStore
    ) -> None:
        self._call = (function, args, kwargs)
        self._contexts = contexts
        self._store = store
        self._results: list[Any] = [None] * len(contexts)
        self._failure: BaseException | None = None
        self._why = ""  # the reason in the agents' shutdown messages
        self._inside: set[_FleetRun] = set()  # the runs that agents of this run have begun
        self._running = len(contexts)
        self._ended = threading.Event()  # all agents have ended, or one has failed
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=contextvars.Context().run, args=(self._agent, rank), name=f"agent-{rank}", daemon=True
            )
            for rank in range(len(contexts))
        ]

    def _agent(self, rank: int) -> None:
        """Run one agent. Its end is always recorded for the caller."""
        try:
            self._live(rank)
        except BaseException as error:
            self._fail(rank, error)
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._ended.set()

    def _live(self, rank: int) -> None:
        mine = self._contexts[rank]
        enter_context(mine)
        _around.set(self)
        torch.set_num_threads(1)  # one for each agent, or they would compete for the cores
        function, args, kwargs = self._call
        try:
            init()
            self._results[rank] = function(*args, **kwargs)
        except BaseException as error:
            self._fail(rank, error)
        finally:
            # With the cause: a peer may learn of this before its own engine is aborted.
            leave(mine, self._why, died=bool(self._why))

    def _fail(self, rank: int | None, error: BaseException) -> None:
        """End all agents because one agent, or the caller (None), has failed."""
        with deferred, self._lock:
            if self._failure is not None:
                return
            failed = "the caller of the fleet" if rank is None else f"agent {rank} of the fleet"
            lost = PeerLost(f"{failed} failed with {type(error).__name__}: {error}", () if rank is None else (rank,))
            self._failure, self._why = error, f"its fleet ended: {lost}"
            inside = list(self._inside)
        self._ended.set()
        self._store.abort(lost)
        for other, context in enumerate(self._contexts):
            engine = context.engine
            if other != rank and engine is not None:
                engine.abort(lost)
        for run in inside:
            run._fail(None, lost)

    def results(self) -> list[Any]:
        around = _around.get()
        if around is None:
            return self._results_of_all()
        with around._lock:
            around._inside.add(self)
            over = around._failure
        try:
            if over is not None:
                raise PeerLost(f"the fleet around this one has failed with {type(over).__name__}: {over}")
            return self._results_of_all()
        finally:
            with around._lock:
                around._inside.discard(self)

    def _results_of_all(self) -> list[Any]:
        threads = torch.get_num_threads()
        fleet_runs.add(self)
        try:
            try:
                for thread in self._threads:
                    thread.start()
                self._ended.wait()
            except BaseException as error:  # Ctrl-C, or no more threads
                self._fail(None, error)
            limit = clock.monotonic() + GRACE_SECONDS
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(max(0.0, limit - clock.monotonic()))
        finally:
            fleet_runs.discard(self)
            torch.set_num_threads(threads)  # new threads take the last value
        if self._failure is None:
            return self._results
        busy = [other for other, thread in enumerate(self._threads) if thread.is_alive()]
        if busy:
            log.warning(
                "agents %s of the fleet are still in their own code; a thread cannot be ended from outside", busy
            )
        raise self._failure
