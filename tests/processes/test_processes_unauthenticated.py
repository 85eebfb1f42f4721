"""Connections from outside the job get nothing and disturb no agent; an agent with protocol errors fails, by name."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import shoal
from shoal.errors import ProtocolError
from shoal.transport.acceptor import MOST_UNKNOWN
from shoal.transport.authentication import ANSWER_SIZE, HELLO_SIZE, Connecting, Keys, MacSeal
from shoal.transport.sockets import GREETING_SECONDS
from support.leftovers import wait_until
from support.limits import scaled
from support.packets import over_tcp
from support.unauthenticated_peers import (
    ASK,
    NOISE,
    NONSENSE,
    NONSENSE_OVER_TCP,
    NONSENSE_OVER_UNIX,
    SILENCE_SECONDS,
    ListenerAddress,
    Packets,
    be_impatient,
    count_of_descriptors,
    is_closed,
    leave_with,
    listener_address,
    rejected,
    send_packets,
)
from support.world import World

SIZE, VICTIM, CLAIMED = 3, 0, 2
NETWORK = {"SHOAL_TRANSPORT": "network"}
OVER = [
    pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
    pytest.param(NETWORK, id="network", marks=pytest.mark.transport("network")),
]


@pytest.fixture(scope="module", params=OVER)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(SIZE, environment=request.param) as agents:
        agents.results(average)
        yield agents


def average() -> None:
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    for numel in (5, 100_000):
        out = shoal.neighbor_allreduce(torch.full((numel,), float(shoal.rank())))
        rank, size = shoal.rank(), shoal.size()
        assert torch.allclose(out, torch.tensor(sum({(rank + step) % size for step in (-1, 0, 1)}) / min(size, 3)))


@contextlib.contextmanager
def undisturbed(world: World, rejections: int = 1) -> Iterator[ListenerAddress]:
    """Yields the address of one agent.

    Afterwards the given number of strangers were rejected, no descriptor is left, and all agents work.
    """
    before = world.results(count_of_descriptors)
    [known] = world.results(rejected, on=[VICTIM])
    [way] = world.results(listener_address, on=[VICTIM])
    yield way
    assert wait_until(lambda: world.results(rejected, on=[VICTIM])[0] == known + rejections)
    assert wait_until(lambda: world.results(count_of_descriptors) == before), "a descriptor was left"
    world.results(average)


@pytest.mark.parametrize("nbytes", [1, ANSWER_SIZE - 1, ANSWER_SIZE, 5000])
def test_garbage_is_rejected(world: World, nbytes: int) -> None:
    with undisturbed(world) as way, way.connect() as sock:
        leave_with(sock, random.Random(nbytes).randbytes(nbytes))
        if nbytes >= ANSWER_SIZE:
            assert is_closed(sock)


@pytest.mark.parametrize("part", [0, 1, ANSWER_SIZE // 2])
def test_a_peer_that_leaves_during_the_handshake_is_removed(world: World, part: int) -> None:
    with undisturbed(world) as way, way.connect() as sock:
        answer = Connecting(way.secret, CLAIMED, VICTIM).answer(sock.recv(HELLO_SIZE))
        if part:
            sock.sendall(answer[:part])


@pytest.mark.parametrize("part", [0, 1, ANSWER_SIZE // 2])
def test_a_peer_that_stops_during_the_handshake_is_closed_after_a_while(world: World, part: int) -> None:
    world.results(be_impatient, on=[VICTIM])
    with undisturbed(world) as way, way.connect() as sock:
        answer = Connecting(way.secret, CLAIMED, VICTIM).answer(sock.recv(HELLO_SIZE))
        if part:
            sock.sendall(answer[:part])
        assert not is_closed(sock, SILENCE_SECONDS / 2)
        assert is_closed(sock, SILENCE_SECONDS + 1.0)


@pytest.mark.soak
@pytest.mark.parametrize("environment", OVER)
def test_a_silent_peer_is_closed_after_ten_seconds(environment: dict[str, str]) -> None:
    with World(SIZE, environment=environment) as world, undisturbed(world) as way, way.connect() as sock:
        assert not is_closed(sock, GREETING_SECONDS - 1.0)
        assert is_closed(sock, 3.0)


@pytest.mark.parametrize(
    ("source", "destination", "secret"),
    [
        (CLAIMED, VICTIM, b"another"),
        (CLAIMED, CLAIMED, b""),
        (CLAIMED, SIZE, b""),
        (SIZE, VICTIM, b""),
        ((1 << 32) - 1, VICTIM, b""),
        (VICTIM, VICTIM, b""),
    ],
    ids=["wrong secret", "for another rank", "for no rank", "from no rank", "from an absurd rank", "from itself"],
)
def test_a_peer_without_the_secret_or_the_rank_is_refused(
    world: World, source: int, destination: int, secret: bytes
) -> None:
    with undisturbed(world) as way, pytest.raises((ConnectionError, ProtocolError)):
        way.enter(source, secret, destination)[0].close()


def test_a_recorded_reply_opens_no_other_connection(world: World) -> None:
    with undisturbed(world, rejections=2) as way:
        with way.connect() as sock:
            overheard = Connecting(way.secret, CLAIMED, VICTIM).answer(sock.recv(HELLO_SIZE))
        with way.connect() as sock:
            sock.recv(HELLO_SIZE)
            sock.sendall(overheard)
            assert is_closed(sock)


def test_unauthenticated_peers_above_the_limit_block_no_agent() -> None:
    with World(SIZE + 1, environment=NETWORK) as world:
        [way] = world.results(listener_address, on=[VICTIM])
        with contextlib.ExitStack() as crowd:
            for _ in range(MOST_UNKNOWN + 50):
                crowd.enter_context(way.connect())
            # Every agent opens links that it had no use for before.
            world.results(gather_from_all)
            world.results(average)


def gather_from_all() -> None:
    ranks = shoal.allgather(torch.tensor([shoal.rank()]))
    assert ranks.tolist() == list(range(shoal.size()))


TOO_MUCH = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.setgid(65534)
os.setuid(65534)
sock.settimeout(5.0)
sock.connect("\\0" + sys.argv[1])
try:
    print(len(sock.recv(100)))
except ConnectionResetError:
    print(0)
"""


@pytest.mark.transport("shared_memory")
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_users_connection_gets_no_greeting() -> None:
    with World(SIZE) as world, undisturbed(world) as way:
        command = [sys.executable, "-I", "-c", TOO_MUCH, way.unix]
        stdout = subprocess.run(command, check=True, capture_output=True, text=True, timeout=scaled(20)).stdout
        assert stdout == "0\n"


# Peers with the secret that then send invalid messages


def fail_the_claimed_rank(world: World, speak: Callable[[socket.socket, Keys], None]) -> None:
    """Connect to one agent as if one were rank ``CLAIMED`` and speak; the others lose that rank, and nothing else."""
    world.results(average)
    before = world.results(count_of_descriptors, on=[VICTIM])
    [way] = world.results(listener_address, on=[VICTIM])
    world.kill(CLAIMED, signal.SIGSTOP)  # or it would connect again, and end the false connection before it is read
    sock, keys = way.enter(CLAIMED)
    with sock:
        speak(sock, keys)
        assert is_closed(sock)
    world.kill(CLAIMED, signal.SIGCONT)
    for one in world.run(average_until_lost, on=[VICTIM, 1]):
        assert (one.error, one.ranks) == ("PeerLost", (CLAIMED,)), f"rank {one.rank}: {one.error}: {one.trace}"
    assert world.results(count_of_descriptors, on=[VICTIM]) <= before
    assert world.results(shoal.is_initialized, on=[VICTIM]) == [True]


def average_until_lost() -> None:
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    while True:
        shoal.neighbor_allreduce(torch.ones(5), name="x")


SAID = NONSENSE | NONSENSE_OVER_TCP


@pytest.mark.transport("network")
@pytest.mark.parametrize("packet", SAID.values(), ids=SAID)
def test_an_agent_with_a_protocol_error_over_tcp_fails(packet: bytes) -> None:
    def speak(sock: socket.socket, keys: Keys) -> None:
        leave_with(sock, over_tcp(MacSeal(keys.messages), packet))
        with contextlib.suppress(OSError):  # it has been closed already
            sock.shutdown(socket.SHUT_WR)

    with World(SIZE, environment=NETWORK) as world:
        fail_the_claimed_rank(world, speak)


@pytest.mark.transport("network")
@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_corruption_on_the_network_ends_a_connection_and_no_agent(noise: Callable[[MacSeal], bytes]) -> None:
    with World(SIZE, environment=NETWORK) as world:
        world.results(average)
        with undisturbed(world, rejections=0) as way:
            sock, keys = way.enter(CLAIMED)
            with sock:
                leave_with(sock, noise(MacSeal(keys.messages)))
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                assert is_closed(sock)


UNIX_NONSENSE: dict[str, Packets] = {
    **{name: [(output, [])] for name, output in NONSENSE.items()},
    **NONSENSE_OVER_UNIX,
}


@pytest.mark.transport("shared_memory")
@pytest.mark.parametrize("packets", UNIX_NONSENSE.values(), ids=UNIX_NONSENSE)
def test_an_agent_with_a_protocol_error_over_a_unix_socket_fails(packets: Packets) -> None:
    with World(SIZE) as world:
        fail_the_claimed_rank(world, lambda sock, _: send_packets(sock, packets))


@pytest.mark.transport("shared_memory")
def test_an_agent_whose_packets_are_corrupt_fails() -> None:
    with World(SIZE) as world:
        fail_the_claimed_rank(world, lambda sock, _: send_packets(sock, [(ASK, [])], sealed=False))
