"""Floods: a client that only connects, however often, blocks no agent and takes little of its time."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from shoal.transport import listeners, router
from shoal.transport.listeners import AT_ONCE_SECONDS, SHARE, RateLimitedListener
from shoal.transport.poller import Poller
from support.agent_main import holdings
from support.flooders import NOBODY, Flooder, flood, may_become_others
from support.limits import scaled
from support.world import World

SIZE = 6
"""Of these the agents opposite each other have no link after init."""
NETWORK = {"SHOAL_TRANSPORT": "network"}
ELSEWHERE = [f"127.0.0.{k}" for k in (2, 3, 4)]


def endpoint() -> tuple[str, str, int]:
    """Where this agent listens: the name of its Unix socket, its address and its port."""
    own_endpoint = current().engine.router.endpoints[shoal.rank()]
    return own_endpoint.unix, own_endpoint.host, own_endpoint.port


def in_a_ring() -> float:
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    return shoal.neighbor_allreduce(torch.ones(3), name="ring")[0].item()


def average_with_all() -> float:
    """Uses links that the ring has no use for. Seconds."""
    began = time.monotonic()
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    for numel in (5, 100_000):
        out = shoal.neighbor_allreduce(torch.full((numel,), float(shoal.rank())), name=f"all {numel}")
        assert torch.allclose(out, torch.tensor((shoal.size() - 1) / 2))
    return time.monotonic() - began


def averages(count: int) -> float:
    """So many calls one after another, each checked. The seconds that the longest took."""
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    rank, size = shoal.rank(), shoal.size()
    mean = sum({(rank + step) % size for step in (-1, 0, 1)}) / min(size, 3)
    longest = 0.0
    for k in range(count):
        began = time.monotonic()
        out = shoal.neighbor_allreduce(torch.tensor([float(shoal.rank()), float(k)]), name="x")
        assert torch.allclose(out, torch.tensor([mean, float(k)]))
        longest = max(longest, time.monotonic() - began)
    return longest


# New links


@pytest.mark.transport("network")
def test_half_open_connections_from_foreign_addresses_block_no_agent() -> None:
    with World(SIZE, environment=NETWORK) as world:
        world.results(in_a_ring)
        _, host, port = world.results(endpoint, on=[0])[0]
        with flood(*(Flooder(host, port, source=source, keep=800) for source in ELSEWHERE), after=0.5):
            assert max(world.results(average_with_all)) < 5.0


@pytest.mark.soak
@pytest.mark.transport("network")
def test_half_open_connections_from_the_agents_addresses_block_no_agent() -> None:
    with World(SIZE, environment=NETWORK, timeout=60.0) as world:
        world.results(in_a_ring)
        _, host, port = world.results(endpoint, on=[0])[0]
        with flood(*(Flooder(host, port, keep=5000, seconds=100.0) for _ in range(3)), after=2.0):
            world.results(average_with_all, patience=70.0)


@pytest.mark.transport("shared_memory")
@pytest.mark.skipif(not may_become_others(), reason="becoming another user needs root")
def test_a_flood_by_another_user_blocks_no_agent() -> None:
    with World(SIZE) as world:
        world.results(in_a_ring)
        name, _, _ = world.results(endpoint, on=[0])[0]
        with flood(Flooder(name, uid=NOBODY)):
            assert max(world.results(average_with_all)) < 5.0


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["shared_memory", "network"])
def test_agents_connect_beside_a_flood_in_one_shared_queue(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system where the agents cannot have a queue of their own."""
    monkeypatch.setattr(listeners, "listen_privately", lambda: None)
    monkeypatch.setattr(listeners, "listen_for", lambda *_: None)

    def run() -> float:
        in_a_ring()
        with_flood: Any = []
        if shoal.rank() == 0:
            name, host, port = endpoint()
            with_flood = [Flooder(host if port else name, port, keep=300 if port else 0)]
        with flood(*with_flood):
            shoal.barrier()
            return average_with_all()

    assert max(shoal.Fleet(SIZE, transport=transport, timeout=30.0).run(run)) < 25.0


# A link that is cut while it begins


def reject_connections(count: int) -> None:
    """Let this agent have no room for so many connections."""
    intruders = current().engine.router.acceptor.unauthenticated
    has_room, left = intruders.has_room, [count]

    def has_room_later(origin: str, now: float) -> bool:
        left[0] -= 1
        return left[0] < 0 and has_room(origin, now)

    setattr(intruders, "has_room", has_room_later)  # noqa: B010 - mypy: a method


@pytest.mark.parametrize("transport", ["shared_memory", "network"])
def test_a_link_cut_during_its_handshake_is_retried_with_all_queued_messages(transport: str) -> None:
    def run() -> list[float]:
        in_a_ring()
        reject_connections(5)
        shoal.barrier()
        shoal.set_topology(shoal.topology.FullyConnectedGraph(SIZE))
        tensors = [torch.full((numel,), float(shoal.rank())) for numel in (3, 200_000, 3, 5000, 100_000)]
        handles = [shoal.nonblocking.neighbor_allreduce(x, name=str(k)) for k, x in enumerate(tensors)]
        return [handle.wait().mean().item() for handle in handles]

    assert shoal.Fleet(SIZE, transport=transport, timeout=20.0).run(run) == [[2.5] * 5] * SIZE


@pytest.mark.parametrize("transport", ["shared_memory", "network"])
def test_an_operation_whose_link_is_cut_repeatedly_keeps_its_deadline(transport: str) -> None:
    def run() -> float:
        in_a_ring()
        if shoal.rank() == 0:
            reject_connections(1_000_000)
        shoal.barrier()
        shoal.set_topology(shoal.topology.FullyConnectedGraph(SIZE))
        began = time.monotonic()
        if shoal.rank() == 0:
            with pytest.raises(shoal.DeadlineExceeded) as caught:
                shoal.neighbor_allreduce(torch.ones(3), name="x", timeout=1.0)
            assert caught.value.ranks == (3,)  # the others had a link before
        else:
            shoal.neighbor_allreduce(torch.ones(3), name="x")
        return time.monotonic() - began

    assert 1.0 <= shoal.Fleet(SIZE, transport=transport, timeout=20.0).run(run)[0] < 3.0


@pytest.mark.parametrize("environment", [{}, NETWORK], ids=["shared_memory", "network"])
def test_an_agent_that_exits_during_a_reconnection_is_soon_reported_failed(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment) as world:
        world.results(in_a_ring)
        world.results(reject_connections, 1_000_000, on=[0])
        others = range(1, SIZE)
        pending = [world.run_on(rank, average_with_all) for rank in others]
        time.sleep(0.3)
        world.kill(0)
        killed = time.monotonic()
        for one in [waiting.outcome() for waiting in pending]:
            assert (one.error, one.ranks) == ("PeerLost", (0,)), f"rank {one.rank}: {one.error}: {one.trace}"
            assert one.ended - killed < scaled(2.0)
        world.destroy()


# Its cost to the job


@pytest.mark.transport("shared_memory")
@pytest.mark.skipif(not may_become_others(), reason="becoming another user needs root")
def test_a_flood_by_another_user_does_not_stop_a_job() -> None:
    """Its longest call took seconds when connections were accepted without a rate limit."""
    with World(2) as world:
        world.results(averages, 50)
        name, _, _ = world.results(endpoint, on=[0])[0]
        with flood(Flooder(name, uid=NOBODY)):
            assert min(max(world.results(averages, 200)) for _ in range(3)) < 0.5


def test_a_listener_uses_only_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of work is queued, a millisecond for each connection, in simulated time."""
    poller, let_in, now = Poller(), 0, 1000.0
    monkeypatch.setattr(listeners.clock, "monotonic", lambda: now)
    monkeypatch.setattr(listeners.clock, "thread_time", lambda: now)

    def slowly(sock: socket.socket, _: Any) -> None:
        nonlocal let_in, now
        sock.close()
        let_in, now = let_in + 1, now + 0.001

    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener:
        listener.setblocking(False)
        server = RateLimitedListener(listener, poller, slowly)
        arrived = [socket.create_connection(listener.getsockname()) for _ in range(500)]
        while now < 1001.0:
            server.check(now)
            for callback, events in poller.poll(0.0):
                callback(events)
            now += 0.001
        fair = AT_ONCE_SECONDS + SHARE * 1.0
        assert fair / 2 < 0.001 * let_in < fair + listeners.A_TURN * 0.003
        server.close()
        for sock in arrived:
            sock.close()
    poller.close()


def test_a_listener_does_not_pause_for_time_in_which_its_process_was_stopped() -> None:
    """A process stopped during an accept would otherwise accept nothing for 33 times as long."""
    poller = Poller()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        server = RateLimitedListener(listener, poller, lambda sock, _: (sock.close(), time.sleep(0.3)))
        with socket.create_connection(listener.getsockname()):
            for callback, events in poller.poll(5.0):
                callback(events)
        assert server.next_turn == float("inf")
        server.close()
    poller.close()


def test_a_listener_does_not_pause_for_interpreter_work_during_an_accept() -> None:
    """For example a garbage collection, which may run at any time: it would block accepts for 33 times as long."""

    def collect(sock: socket.socket, _: object) -> None:
        sock.close()
        ends = time.thread_time() + 0.3
        while time.thread_time() < ends:
            pass

    poller = Poller()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        server = RateLimitedListener(listener, poller, collect)
        with socket.create_connection(listener.getsockname()):
            for callback, events in poller.poll(5.0):
                callback(events)
        assert server.next_turn == float("inf")
        server.close()
    poller.close()


# Where the kernel sends whom


@pytest.mark.parametrize(
    ("address", "known", "stranger"), [("127.0.0.1", "127.0.0.5", "127.0.0.6"), ("::1", "::1", "")]
)
def test_connections_from_known_addresses_have_their_own_queue(address: str, known: str, stranger: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind((address, 0))
        first.listen()
        first.settimeout(2.0)
        others = ["fd77::3%lo", "fd77::4", "10.0.0.1", "10.0.0.2"]
        second = listeners.listen_for([*others, known], first)
        assert second is not None
        second.settimeout(2.0)
        with second:
            for source, listener in [(known, second), (stranger, first)] * 3:
                if source:
                    with socket.socket(family) as sock:
                        sock.bind((source, 0))
                        sock.connect(first.getsockname()[:2])
                        listener.accept()[0].close()


@pytest.mark.skipif(not may_become_others(), reason="becoming another user needs root")
def test_other_users_cannot_connect_to_this_users_socket() -> None:
    import os
    import subprocess

    private = listeners.listen_privately()
    assert private is not None
    sock, descriptor = private
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    code = (
        "import os, socket, sys\nif int(sys.argv[2]):\n    os.setgid(65534)\n    os.setuid(65534)\n"
        "socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])"
    )
    run = lambda other: subprocess.run(  # noqa: E731
        [sys.executable, "-I", "-c", code, path, other], capture_output=True, text=True, timeout=scaled(20)
    )
    assert run("0").returncode == 0
    assert "PermissionError" in run("1").stderr
    sockets = [name.stat().st_ino for name in Path("/tmp").glob("shoal-*/socket")]
    assert os.fstat(descriptor).st_ino not in sockets
    sock.close()
    os.close(descriptor)


# Connections of agents


def open_more(count: int) -> None:
    """Connections to rank 0 besides this agent's link."""
    own = current().engine.router
    kind: Any = type(own.link(0))
    stub: Any = SimpleNamespace(on_closed=lambda *_, **__: None)
    for _ in range(count):
        sock, greeting = own._connect(0)
        OPENED.append(kind(sock, 0, greeting, own.poller, stub))


OPENED: list[Any] = []


def test_over_a_network_a_new_connection_replaces_an_older_one() -> None:
    def run() -> int:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        shoal.barrier()
        if shoal.rank() == 2:
            with current().engine.lock:
                open_more(router.CONNECTIONS)
        for _ in range(200):
            assert shoal.neighbor_allreduce(torch.full((3,), float(shoal.rank())), name="x")[0] == 1.0
        most = max(len(connections) for connections in current().engine.router.incoming.values())
        shoal.barrier()
        if shoal.rank() == 2:
            while OPENED:
                OPENED.pop().close()
        return most

    assert shoal.Fleet(3, transport="network", timeout=20.0).run(run) == [1, 1, 1]


@pytest.mark.parametrize("transport", ["shared_memory"])
def test_an_agent_that_opens_connections_repeatedly_is_reported_failed(transport: str) -> None:
    def run() -> str:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        with pytest.raises(shoal.ShoalError) as caught:
            shoal.barrier()
            if shoal.rank() == 2:
                with current().engine.lock:
                    open_more(router.CONNECTIONS)
            while True:
                shoal.neighbor_allreduce(torch.ones(3), name="x")
        if shoal.rank() == 0:
            assert isinstance(caught.value, shoal.PeerLost) and caught.value.ranks == (2,)
            assert 2 not in current().engine.router.incoming
        elif shoal.rank() == 2:
            while OPENED:
                OPENED.pop().close()
        return str(caught.value)

    assert "connection more than the 2" in shoal.Fleet(3, transport=transport, timeout=20.0).run(run)[0]


# All of it


def connect_and_leave(count: int, host: str, port: int, source: str) -> None:
    for k in range(count):
        with socket.socket() as sock:
            sock.bind((source, 0))
            sock.settimeout(5.0)
            try:
                sock.connect((host, port))
                if k % 3 == 0:
                    sock.sendall(bytes(k % 200))
            except OSError:
                pass  # it was not let in


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    now = holdings()
    return len(now.descriptors), len(now.threads)


@pytest.mark.soak
@pytest.mark.transport("network")
def test_ten_thousand_unauthenticated_peers_change_no_result_and_leave_nothing() -> None:
    with World(4, environment=NETWORK) as world:
        world.results(averages, 20)
        before = world.results(held)
        _, host, port = world.results(endpoint, on=[0])[0]
        pending = [world.run_on(rank, averages, 4000) for rank in range(4)]
        for source in [*ELSEWHERE, "127.0.0.1"]:
            connect_and_leave(2500, host, port, source)
        for one in pending:
            assert not (output := one.outcome(300.0)).error, output.trace
        with flood(*(Flooder(host, port, source=source, keep=2000) for source in ELSEWHERE), after=1.0):
            world.results(averages, 500)
        assert settled(lambda: world.results(held) == before), (before, world.results(held))


@pytest.mark.soak
@pytest.mark.transport("shared_memory")
@pytest.mark.skipif(not may_become_others(), reason="becoming another user needs root")
def test_floods_by_this_user_and_another_change_no_result_and_leave_nothing() -> None:
    with World(4) as world:
        world.results(averages, 20)
        before = world.results(held)
        name, _, _ = world.results(endpoint, on=[0])[0]
        with flood(Flooder(name, uid=NOBODY), Flooder(name, uid=NOBODY), Flooder(name)):
            world.results(averages, 1500, patience=120.0)
        assert settled(lambda: world.results(held) == before), (before, world.results(held))


def settled(done: Callable[[], bool]) -> bool:
    """Whether it is so within the time in which strangers are forgotten."""
    limit = time.monotonic() + 15.0
    while not done():
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True
