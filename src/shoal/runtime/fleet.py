"""Agents as threads of one process, for notebooks and tests."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..errors import PeerLost
from ..topology._validate import check_size
from ..transport.router import TRANSPORTS
from .agent import Seat, take_seat
from .bootstrap import init, leave
from .launch import Launch
from .rendezvous import ThreadStore

log = logging.getLogger("shoal")
T = TypeVar("T")
GRACE_SECONDS = 5.0
"""After one agent failed: how long the others may take to notice at their next operation."""


class Fleet:
    """``n`` agents in this process, each a thread.

    >>> import shoal, torch
    >>> def average():
    ...     return shoal.neighbor_allreduce(torch.tensor([float(shoal.rank())])).item()
    >>> shoal.Fleet(2).run(average)
    [0.5, 0.5]

    Args:
        size: How many agents.
        agents_per_machine: Group them into machines of this many; one machine if not given.
        timeout: Seconds for every wait; ``SHOAL_TIMEOUT`` (300) if not given.
        transport: ``"threads"``; or ``"shared_memory"`` or ``"network"``, to send everything the way that processes
            would.
    """

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
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout}: it must be a positive number of seconds")
        if transport and transport not in TRANSPORTS:
            raise ValueError(f"transport={transport!r}; it may be one of {', '.join(TRANSPORTS)}")
        self.size = size
        self._per_machine = agents_per_machine
        self._timeout = timeout
        self._transport = transport

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Call ``function(*args, **kwargs)`` in every agent, after ``init`` and before ``shutdown``.

        Returns:
            The results, by rank.

        Raises:
            Whatever the first failing agent raised, with its traceback; the others are ended. An agent that does not
            notice, because it is in a loop without any operation, is left to itself and named in a note.
        """
        store = ThreadStore()
        seats = [
            Seat(Launch(rank, self.size, "fleet", None, None, False, 0), store, self._transport, self._per_machine)
            for rank in range(self.size)
        ]
        for one in seats:
            one.timeout = self._timeout
        run = _Run(function, args, kwargs, seats)
        return run.results()


class _Run:
    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, seats: list[Seat]) -> None:
        self._call = (function, args, kwargs)
        self._seats = seats
        self._results: list[Any] = [None] * len(seats)
        self._failure: tuple[int, BaseException] | None = None
        self._running = len(seats)
        self._ended = threading.Event()  # all agents have ended, or one has failed
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=contextvars.Context().run, args=(self._agent, rank), name=f"agent-{rank}", daemon=True
            )
            for rank in range(len(seats))
        ]

    def _agent(self, rank: int) -> None:
        mine = self._seats[rank]
        take_seat(mine)
        torch.set_num_threads(1)  # one for each agent, or they would fight for the cores
        function, args, kwargs = self._call
        try:
            init()
            self._results[rank] = function(*args, **kwargs)
        except BaseException as error:
            self._fail(rank, error)
        finally:
            failed = self._failure is not None
            leave(mine, "its fleet ended" if failed else "", died=failed)
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._ended.set()

    def _fail(self, rank: int, error: BaseException) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = (rank, error)
        self._ended.set()
        lost = PeerLost(f"agent {rank} of the fleet failed with {type(error).__name__}: {error}", (rank,))
        for other, one in enumerate(self._seats):
            if other != rank and one.agent is not None:
                one.agent.engine.abort(lost)

    def results(self) -> list[Any]:
        threads = torch.get_num_threads()
        for thread in self._threads:
            thread.start()
        try:
            self._ended.wait()
        except BaseException as error:
            self._fail(-1, error)
        limit = time.monotonic() + GRACE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))
        torch.set_num_threads(threads)  # new threads take what was set last
        if self._failure is None:
            return self._results
        failure = self._failure[1]
        busy = [other for other, thread in enumerate(self._threads) if thread.is_alive()]
        if busy:
            log.warning(
                "agents %s of the fleet are still in their own code; a thread cannot be ended from outside", busy
            )
        raise failure
