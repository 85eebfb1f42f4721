"""Unauthenticated connections: their maximum number, and which one is closed to make room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.transport.acceptor import HURRY_SECONDS, KNOWN_ROOM, MOST_UNKNOWN, ROOM, Unauthenticated, origin_of
from shoal.transport.sockets import Incoming


class PendingConnections:
    """Connections that stand for ones of others, and what became of them."""

    def __init__(self) -> None:
        self.strangers = Unauthenticated()
        self.closed: list[Any] = []
        self.now = 100.0

    def connect(self, origin: str) -> Any:
        """Someone comes from there; None where there is no room."""
        if not self.strangers.has_room(origin, self.now):
            return None
        one = SimpleNamespaceWithHash(since=self.now)
        one.fail = lambda cause: (self.closed.append(one), self.strangers.remove(cast(Incoming, one)))
        self.strangers.add(cast(Incoming, one), origin)
        self.now += 1e-6
        return one


class SimpleNamespaceWithHash(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def test_many_connections_from_one_address_take_no_slot_of_another() -> None:
    crowd = PendingConnections()
    for _ in range(10 * ROOM):
        crowd.connect("10.0.0.9")
    assert crowd.connect("10.0.0.1") is not None
    assert not crowd.closed


def test_the_oldest_connection_of_an_address_is_evicted_but_not_a_new_one() -> None:
    crowd = PendingConnections()
    first = [crowd.connect("10.0.0.9") for _ in range(ROOM)]
    assert crowd.connect("10.0.0.9") is None
    crowd.now += HURRY_SECONDS
    assert crowd.connect("10.0.0.9") is not None
    assert crowd.closed == first[:1]


def test_if_all_slots_are_used_the_address_with_most_loses_one() -> None:
    crowd = PendingConnections()
    greedy = [crowd.connect("10.9.9.9") for _ in range(ROOM)]
    for k in range(MOST_UNKNOWN - ROOM):
        assert crowd.connect(f"10.0.{k // 250}.{k % 250}") is not None
    crowd.now += HURRY_SECONDS
    assert crowd.connect("10.1.1.1") is not None
    assert crowd.closed == greedy[:1]


def test_addresses_of_the_jobs_agents_have_reserved_slots() -> None:
    crowd = PendingConnections()
    for _ in range(3):
        crowd.strangers.expect("10.0.0.1")
    for k in range(2 * MOST_UNKNOWN):
        crowd.connect(f"10.{k // 250}.9.{k % 250}")
    assert all(crowd.connect("10.0.0.1") is not None for _ in range(KNOWN_ROOM + 3))
    assert crowd.connect("10.0.0.1") is None
    assert not crowd.closed


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("fd77::1", "fd77::2", True),
        ("fe80::1%eth0", "fe80::9%eth1", True),
        ("fd77:0:0:1::1", "fd77:0:0:2::1", False),
    ],
)
def test_all_ipv6_addresses_of_one_network_count_as_one_origin(one: str, other: str, same: bool) -> None:
    assert (origin_of(one) == origin_of(other)) == same


def test_authenticated_and_expired_connections_are_not_counted() -> None:
    crowd = PendingConnections()
    first, second, third = (crowd.connect(origin) for origin in ("10.0.0.1", "10.0.0.1", "10.0.0.2"))
    assert list(crowd.strangers.origins) == [first, second, third]
    assert crowd.strangers.remove(first) and not crowd.strangers.remove(first)
    crowd.strangers.forget(second.since)
    assert crowd.closed == [second] and list(crowd.strangers) == [third]
    assert crowd.strangers.remove(third) and not crowd.strangers.origins
