"""The rendezvous store: open where agents come from, and quiet about others who come."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shoal
from shoal.cli.run import SERVE
from shoal.rendezvous.rendezvous import listen
from shoal.transport.addresses import numeric
from support.leftovers import wait_until
from support.namespaces import INTERFACE, network_namespaces
from support.world import World

ALL = ("::", "0.0.0.0")
OWN4, OWN6, OTHER = "10.77.0.1", "fd77::1", "10.77.0.50"

# The address of a name on rank 0's machine, SHOAL_INTERFACE there, and where the store may listen.
PLACES: list[tuple[str, list[str], str, tuple[str, ...]]] = [
    (OWN4, [], "", (OWN4,)),
    (OWN6, [], "", (OWN6,)),
    (f"::ffff:{OWN4}", [], "", (OWN4,)),
    ("node", [OWN4], "", (OWN4,)),
    ("node", [OWN4, OWN4], "", (OWN4,)),
    ("node", ["127.0.1.1", OWN4], "", (OWN4,)),
    ("node", [OWN4], OTHER, (OWN4,)),  # it is there that others come
    ("node", ["127.0.1.1"], "", ALL),  # Debian's /etc/hosts
    ("node", ["127.0.1.1"], INTERFACE, (OWN4,)),
    ("node", ["127.0.1.1"], OTHER, (OTHER,)),
    ("node", [OWN4, OWN6], "", ALL),  # others may know one of them only
    ("node", [OWN4, "192.0.2.1"], "", ALL),
    ("node", ["192.0.2.1"], "", ALL),  # a NAT's
    ("node", ["192.0.2.1"], INTERFACE, (OWN4,)),
    ("192.0.2.1", [], "", ALL),
    ("node", [], "", ALL),
    ("n\u00f6 .. such name", [], "", ALL),
    ("0.0.0.0", [], "", ALL),
    ("::", [], "", ALL),
    ("127.0.0.1", [], INTERFACE, ("127.0.0.1",)),
    ("127.0.1.1", [], "", ("127.0.1.1",)),
    ("localhost", ["::1", "127.0.0.1"], INTERFACE, ("127.0.0.1",)),
    ("localhost", ["::1"], "", ("::1",)),
]


def places() -> list[tuple[str, str]]:
    """Where this machine listens for each of ``PLACES``, and what came of a connection to it."""
    results = []
    real = socket.getaddrinfo
    for host, addresses, interface, _ in PLACES:

        def resolve(name: Any, *args: Any, host: str = host, addresses: list[str] = addresses, **options: Any) -> Any:
            if name != host or numeric(host) or not host.isascii():
                return real(name, *args, **options)
            if not addresses:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [one for address in addresses for one in real(address, *args, **options)]

        socket.getaddrinfo = resolve
        try:
            with listen(host, 0, interface) as server:
                results.append(server.getsockname()[0])
        finally:
            socket.getaddrinfo = real
    return results


def test_the_store_listens_on_the_reachable_address_or_on_all_if_that_is_unknown() -> None:
    with network_namespaces(1) as machines:
        machines[0].add_address(f"{OTHER}/24", INTERFACE, f"{INTERFACE}:1")
        with World(1, namespaces=machines, init=False) as world:
            [result] = world.results(places)
    for (host, addresses, interface, expected), address in zip(PLACES, result, strict=True):
        assert address in expected, (host, addresses, interface)


def listeners(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports that some process of the machine of ``pid`` listens on."""
    results = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, state = (line.split()[at] for at in (1, 3))
            if state == "0A":
                address, port = local.split(":")
                requests = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                packed = struct.pack(f"={len(requests)}I", *requests)
                family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
                results.append((socket.inet_ntop(family, packed), int(port, 16)))
    return results


def listeners_here() -> list[tuple[str, int]]:
    """The listeners of this agent's machine. An agent that calls this is on its own machine, not on the test's."""
    return listeners(os.getpid())


@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
@pytest.mark.parametrize("version", [4, 6])
def test_rank_0_hosts_the_store_on_the_one_interface_of_its_address(version: int) -> None:
    with network_namespaces(2) as machines:
        address = machines[0].address if version == 4 else machines[0].address6
        with World(2, namespaces=machines, environment={"MASTER_ADDR": address}, init=False) as world:
            assert world.results(listeners_here) == [[], []]
            first = world.run_on(0, shoal.init)
            assert wait_until(lambda: listeners(world.members[0].pid))
            assert listeners(world.members[0].pid) == [(address, 29400)]
            second = world.run_on(1, shoal.init)
            assert [first.outcome().error, second.outcome().error] == ["", ""]


def leave(sock: socket.socket, number: int) -> None:
    """Send a message that no agent sends, and leave; every other one without a goodbye."""
    greeting = struct.pack("<BI", 0, 0x3C85F7CE)  # enough of torch's protocol that it continues to read
    chance = random.Random(number)
    requests: list[Callable[[], bytes]] = [
        lambda: chance.randbytes(chance.randrange(1, 200)),
        lambda: greeting + chance.randbytes(chance.randrange(1, 200)),
        lambda: greeting + bytes([number % 20]) + struct.pack("<Q", 1 << 60) + chance.randbytes(100),
        lambda: b"GET / HTTP/1.0\r\n\r\n",
    ]
    sock.sendall(requests[number % 4]())
    if number % 8 < 4:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_hundred_foreign_clients_print_nothing_and_agents_are_served(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with listen("127.0.0.1", 0) as listener, log.open("wb") as terminal:
        port = listener.getsockname()[1]
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(listener.fileno())],
            pass_fds=(listener.fileno(),),
            stdout=terminal,
            stderr=terminal,
        )
    try:
        for number in range(100):
            with closing(socket.create_connection(("127.0.0.1", port))) as sock:
                leave(sock, number)
        client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
        client.set("key", "value")  # it has seen all of them, as they came before
        assert client.get("key") == b"value"
        assert server.poll() is None
    finally:
        server.terminate()
        server.wait(30)
    assert log.read_text() == ""
