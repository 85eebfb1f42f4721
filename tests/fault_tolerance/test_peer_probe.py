"""Connections that end with the handshake: of an agent that counts as lost, or that only asks where the others are."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

import shoal
from shoal.fault_tolerance.partition import PeerProbe
from shoal.runtime.agent import current
from shoal.transport.authentication import HELLO_SIZE, SHUT_OUT, WELCOME_SIZE, Connecting
from support.leftovers import nothing_is_left, wait_until
from support.unauthenticated_peers import is_closed, listener_address

OVER = [pytest.param(name, marks=pytest.mark.transport(name)) for name in ("shared_memory", "network")]
ASKER, ASKED = 0, 1


def shake_hands(incarnation: int) -> int:
    """Connect to an agent as another one; what it says."""
    way = listener_address()
    with way.connect() as sock:
        greeting = Connecting(way.secret, ASKER, ASKED, incarnation)
        sock.sendall(greeting.answer(sock.recv(HELLO_SIZE)))
        had = greeting.check(sock.recv(WELCOME_SIZE))
        assert is_closed(sock)
    return had


def probe_actions(prepare: Callable[[], None], incarnation: int) -> Callable[[], dict[int, str]]:
    """The actions of the probed and the probing agent; the dead agents as each counts them."""

    def run() -> dict[int, str]:
        shoal.barrier()
        if shoal.rank() == ASKED:
            engine = current().engine
            router = engine.router
            with engine.lock:
                prepare()
            before = {rank: list(one) for rank, one in router.incoming.items()}
            assert shake_hands(incarnation) == SHUT_OUT
            assert wait_until(lambda: not list(router.acceptor.unauthenticated)), "it is kept as one that says nothing"
            assert router.next_check > time.monotonic() and router.incoming == before
        shoal.barrier()
        return current().engine.membership.view.died

    return run


def count_as_lost() -> None:
    current().engine.router._shut_out.add(ASKER)


def let_in_another() -> None:
    places = current().engine.router.places
    places[ASKER] = replace(places[ASKER], incarnation=2)


@pytest.mark.parametrize("transport", OVER)
@pytest.mark.parametrize(("prepare", "incarnation"), [(count_as_lost, 0), (let_in_another, 1)])
def test_an_excluded_process_leaves_nothing_and_is_no_ones_failure(
    transport: str, prepare: Callable[[], None], incarnation: int
) -> None:
    """So does a process that another one on its rank has replaced."""
    fleet = shoal.Fleet(2, transport=transport, timeout=10.0)
    assert fleet.run(probe_actions(prepare, incarnation)) == [{}, {}]


def waits(asking: PeerProbe) -> bool:
    with current().engine.lock:
        return asking.is_pending


def question(secret: Callable[[bytes], bytes] = bytes) -> tuple[list[int], dict[int, str]]:
    """One agent probes another, which is running; the answers, and the dead agents as each counts them."""
    engine, received = current().engine, []
    router = engine.router
    if shoal.rank() == ASKED:
        router.answer_by(lambda rank, incarnation: 1000 + 10 * rank + incarnation)
    before = {one for known in router.incoming.values() for one in known}
    shoal.barrier()
    if shoal.rank() == ASKER:
        router._secret, kept = secret(router._secret), router._secret
        asking = PeerProbe(router)
        with engine.lock:
            asking.ask(ASKED, received.append)
        assert wait_until(lambda: not waits(asking))
        asking.cancel()
        router._secret = kept
    shoal.barrier()
    if shoal.rank() == ASKED:
        assert wait_until(lambda: not list(router.acceptor.unauthenticated))
        assert {one for known in router.incoming.values() for one in known} <= before
    return received, engine.membership.view.died


@pytest.mark.parametrize("transport", OVER)
def test_a_prober_gets_the_reply_and_the_other_side_keeps_nothing(transport: str) -> None:
    with nothing_is_left():
        fleet = shoal.Fleet(2, transport=transport, timeout=10.0)
        assert fleet.run(question) == [([1000 + 10 * ASKER], {}), ([], {})]


@pytest.mark.parametrize("transport", OVER)
def test_a_refused_prober_gets_no_reply(transport: str) -> None:
    with nothing_is_left():
        fleet = shoal.Fleet(2, transport=transport, timeout=10.0)
        assert fleet.run(question, lambda secret: secret + b"?") == [([], {}), ([], {})]


@pytest.mark.parametrize("transport", OVER)
def test_a_stopped_process_and_a_closed_port_give_no_reply(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel accepts connections for a stopped process."""

    def run() -> list[int]:
        if shoal.rank() == ASKED:
            return []
        engine, received = current().engine, []
        asking, router = PeerProbe(engine.router), engine.router
        family = socket.AF_INET if transport == "network" else socket.AF_UNIX
        kind = socket.SOCK_STREAM if transport == "network" else socket.SOCK_SEQPACKET
        with socket.socket(family, kind) as stopped:
            stopped.bind(("127.0.0.1", 0) if transport == "network" else "\0shoal-test-stopped")
            stopped.listen(1)
            local = stopped.getsockname()
            port, name = (local[1], "") if transport == "network" else (0, local[1:].decode())
            shut = replace(router.endpoints[ASKED], unix=name, port=port, listener=-1)
            router.endpoints[ASKED] = shut
            for _ in range(5):  # the last ones find the queue full
                with engine.lock:
                    asking.ask(ASKED, received.append)
                time.sleep(0.01)
            withdrawn = asking._question
            with engine.lock:
                asking.cancel()
            assert withdrawn is None or withdrawn.sock.fileno() < 0
        with engine.lock:
            asking.ask(ASKED, received.append)
        assert wait_until(lambda: not waits(asking))
        return received

    with nothing_is_left():
        assert shoal.Fleet(2, transport=transport, timeout=10.0).run(run) == [[], []]
