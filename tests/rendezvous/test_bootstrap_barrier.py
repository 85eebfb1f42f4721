"""Agents that meet in a store: each event has one outcome, whatever an agent was doing when it happened."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any

import pytest

from shoal.errors import DeadlineExceeded, Mismatch, ShoalError
from shoal.rendezvous import bootstrap_barrier
from shoal.rendezvous.bootstrap_barrier import gather_agents
from shoal.rendezvous.launch import Launch
from shoal.rendezvous.rendezvous import open_store
from shoal.rendezvous.store import Store, TcpStore, ThreadStore
from support.world import reserved_port

SIZE = 3


def launch(rank: int, port: int) -> Launch:
    return Launch(rank, SIZE, "torchrun", "127.0.0.1", port)


def deadline_in(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


class Proxy:
    """A store that is used through another one."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class SlowToJoin(Proxy):
    """Its agent is connected, and says where it is when the attempt of rank 0 is over."""

    def set(self, key: str, value: bytes) -> None:
        attempt, _, what = key.partition("/")
        while what == "place/2" and not self._store.has(f"{attempt}/over"):
            time.sleep(0.01)
        self._store.set(key, value)


def test_an_agent_absent_at_rank_0s_deadline_raises_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(of: Launch, deadline: float) -> Store:
        store = open_store(of, deadline)
        return store if of.rank == 0 else SlowToJoin(store)

    monkeypatch.setattr(bootstrap_barrier, "open_store", opened)
    outcomes: dict[int, ShoalError] = {}

    def meet(rank: int, port: int, seconds: float) -> None:
        try:
            with gather_agents(None, launch(rank, port), deadline_in(seconds), {}):
                pass
        except ShoalError as error:
            outcomes[rank] = error

    with reserved_port() as port:
        agents = [threading.Thread(target=meet, args=(rank, port, 4.0 + rank)) for rank in (0, 2)]
        for agent in agents:
            agent.start()
        for agent in agents:
            agent.join()
    assert {rank: (type(error), error.ranks) for rank, error in outcomes.items()} == dict.fromkeys(
        (0, 2), (DeadlineExceeded, (1, 2))
    )
    assert "rank 0 began no other one in time" in str(outcomes[2])


class SlowToJoinAnAttempt(Proxy):
    """Its agent finds the attempt only when it is over."""

    def has(self, key: str) -> bool:
        while key.endswith("/over") and not self._store.has(key):
            time.sleep(0.01)
        return self._store.has(key)


def test_the_second_of_two_with_one_rank_raises_at_once_also_if_the_attempt_is_over() -> None:
    store = ThreadStore()
    outcomes: dict[str, ShoalError] = {}

    def meet(name: str, rank: int, mine: Store) -> None:
        try:
            with gather_agents(mine, launch(rank, 0), deadline_in(), {}):
                pass
        except ShoalError as error:
            outcomes[name] = error

    def started(*args: Any) -> threading.Thread:
        agent = threading.Thread(target=meet, args=args)
        agent.start()
        return agent

    agents = [started("leader", 0, store), started("first", 1, store)]
    while not any(key.endswith("/place/1") for key in list(store._values)):
        time.sleep(0.01)
    agents.append(started("second", 1, SlowToJoinAnAttempt(store)))
    for agent in agents:
        agent.join()
    for name in ("first", "second"):
        assert isinstance(outcomes[name], Mismatch), outcomes
        assert "also calls itself rank 1" in str(outcomes[name])


def test_a_key_set_before_another_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be set just after it was read, and the other key just before that one is read."""
    with reserved_port() as port, closing(open_store(launch(0, port), deadline_in())) as store:
        assert isinstance(store, TcpStore)
        check = store._check

        def set_after_check(key: str) -> bool:
            result = check(key)
            if key == "all" and not result:
                store._store.set(store._prefix + "all", "x")  # type: ignore[arg-type]
                store._store.set(store._prefix + "over", "y")  # type: ignore[arg-type]
            return result

        monkeypatch.setattr(store, "_check", set_after_check)
        assert store.first(["all", "over"], deadline_in()) == ("all", b"x")
