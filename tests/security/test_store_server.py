"""The store that a launcher serves: torch's clients can use it, and strangers can store only a limited amount."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shoal.cli.run import SERVE
from shoal.rendezvous import store_server
from shoal.rendezvous.store_server import CONNECTION_COST, LOCAL_QUOTA, StoreServer
from shoal.transport.addresses import address_of, owner_of
from support.flooders import NOBODY, may_become_others

VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
Client = Any


def client(port: int) -> Client:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False)


@pytest.fixture
def served() -> Iterator[tuple[int, int]]:
    """The port and the process of a store as a launcher serves it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", SERVE, str(listener.fileno())]
        process = subprocess.Popen(command, pass_fds=(listener.fileno(),))
        port = listener.getsockname()[1]
    yield port, process.pid
    process.kill()
    process.wait()


def fails(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()!r}"
    except Exception as error:
        return type(error).__name__


def later(call: Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
    """In another thread, a moment after the block begins; the block ends after it."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        thread = threading.Thread(target=lambda: (time.sleep(0.2), call()))
        thread.start()
        yield
        thread.join()

    return block()


def all_requests(port: int) -> list[Any]:
    one, other = client(port), client(port)
    short = timedelta(seconds=0.2)
    one.set("key", "value")
    results: list[Any] = [other.get("key"), one.add("n", 3), other.add("n", -1), one.get("n")]
    results += [one.check(["key"]), one.check(["key", "none"]), one.check([])]
    swaps = (("new", "", "x"), ("new", "y", "z"), ("new", "x", "z"), ("none", "y", "z"))
    results += [one.compare_set(*arguments) for arguments in swaps]
    one.append("long", "1")
    one.append("long", "2")
    one.multi_set(["a", "b"], ["", "y" * 100_000])
    results += [other.get("long"), *other.multi_get(["a", "b"]), one.delete_key("a"), one.delete_key("a")]
    with later(lambda: other.set("late", "1")):
        one.wait(["late", "key"])
    results += [fails(lambda: one.wait(["none"], short)), one.get("key")]
    with later(lambda: other.add("counted", 1)):
        results.append(one.get("counted"))
    one.queue_push("queue", "one")
    one.queue_push("queue", "two")
    results += [other.queue_len("queue"), other.queue_pop("queue"), other.queue_pop("queue")]
    results += [other.queue_len("queue"), fails(lambda: other.queue_pop("queue", False))]
    with later(lambda: other.queue_push("queue", "three")):
        results.append(one.queue_pop("queue"))
    for size in (2, 3, 4):  # earlier arrivals count
        with later(lambda: other.barrier("barrier", 2)):
            results.append(fails(partial(one.barrier, "barrier", size, 10 * short)))
    one.set("big", "z" * (8 << 20))
    results += [sorted(one.list_keys()), one.num_keys(), len(other.get("big")), one.clone().get("key")]
    return results


def test_torchs_clients_read_the_same_values_as_from_torchs_store() -> None:
    # The server has a process of its own: some calls of torch keep the interpreter.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        text = "import socket, sys; from shoal.rendezvous.store_server import StoreServer; "
        text += "StoreServer(socket.socket(fileno=int(sys.argv[1])), {}).serve()"
        server = subprocess.Popen([sys.executable, "-c", text, str(listener.fileno())], pass_fds=(listener.fileno(),))
        port = listener.getsockname()[1]
    try:
        torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        assert all_requests(port) == all_requests(torchs.port)
    finally:
        server.kill()
        server.wait()


def test_all_requests_of_this_torch_are_implemented() -> None:
    """A newer torch may have more: check its TCPStoreBackend.hpp before NEWEST_TORCH is raised."""
    assert store_server.is_known()


# Strangers


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    """One in this process, to which this process is a stranger, unless it connects from 127.0.0.2."""

    def owner(peer: Any, own: Any) -> int:
        return os.geteuid() if str(peer[0]) == "127.0.0.2" else NOBODY

    monkeypatch.setattr(store_server, "owner_of", owner)
    made = StoreServer(socket.create_server(("127.0.0.1", 0)), {"job": b"name"})
    yield made
    made.close()
    while _sockets:
        _sockets.pop().close()


_sockets: list[socket.socket] = []


def connect(server: StoreServer, source: str = "127.0.0.1") -> socket.socket:
    sock = socket.create_connection(server._listener.getsockname(), source_address=(source, 0))
    _sockets.append(sock)
    sock.sendall(VALIDATE)
    sock.settimeout(5.0)
    return sock


def settle(server: StoreServer) -> None:
    for _ in range(300):
        server.step(0.0)


def string(text: bytes) -> bytes:
    return struct.pack("=Q", len(text)) + text


def set_(key: bytes, value: bytes) -> bytes:
    return b"\1" + string(key) + string(value)


GET, WAIT, PUSH = b"\3" + string(b"key"), b"\6", b"\16" + string(b"queue")
HELD = {
    "values": [set_(b"%d" % k, bytes(10_000)) for k in range(500)],
    "small values": [set_(b"%d" % k, b"") for k in range(20_000)],
    "one value that grows": [b"\11" + string(b"key") + string(bytes(10_000))] * 500,
    "a queue": [PUSH + string(bytes(10_000))] * 500,
    "half a request": [b"\1" + string(b"key") + struct.pack("=Q", 8 << 20), bytes(2 << 20)],
    "keys that are waited for": [WAIT + struct.pack("=Q", 10_000), *[string(b"%d" % k) for k in range(10_000)]],
    "answers that are not read": [set_(b"key", bytes(500_000)), *[GET] * 1000],
}


@pytest.mark.parametrize("what", HELD)
def test_a_foreign_client_has_a_quota_and_others_are_served(server: StoreServer, what: str) -> None:
    intruders = [connect(server) for _ in range(8)]
    for data in HELD[what]:
        for sock in intruders:
            with contextlib.suppress(OSError, TimeoutError):
                sock.settimeout(0.0)
                sock.sendall(data)
        server.step(0.0)
    settle(server)
    assert 0 < server._total.used <= LOCAL_QUOTA + store_server.KEY_COST
    member = connect(server, "127.0.0.2")
    member.sendall(set_(b"own", bytes(100_000)) + b"\3" + string(b"/job"))
    settle(server)
    assert member.recv(100) == string(b"name")
    for sock in (*intruders, member):
        sock.close()
    settle(server)
    kept = sum(value.cost for value in server._values.values() if value.quota is not server._trusted)
    kept += sum(one.cost for queue in server._queues.values() for one in queue)
    assert server._total.used == kept + store_server.KEY_COST  # that it has been there
    assert not server._connections and not server._waiting


def test_a_foreign_client_may_keep_only_some_connections_open(server: StoreServer) -> None:
    intruders = [connect(server) for _ in range(2 * LOCAL_QUOTA // CONNECTION_COST)]
    settle(server)
    assert len(server._connections) == LOCAL_QUOTA // CONNECTION_COST - 1  # and their messages
    assert connect(server, "127.0.0.2") is not None
    settle(server)
    assert any(connection.quota is server._trusted for connection in server._connections)
    for sock in intruders:
        sock.close()


@pytest.mark.parametrize(
    "data", [b"\x50", b"\x13", b"\1" + struct.pack("=Q", 1 << 60), b"\4" + string(b"/job") + bytes(8)], ids=repr
)
def test_an_invalid_request_closes_its_connection(server: StoreServer, data: bytes) -> None:
    bad, good = connect(server, "127.0.0.2"), connect(server, "127.0.0.2")
    bad.sendall(data)
    settle(server)
    assert bad.recv(1) == b""
    good.sendall(b"\3" + string(b"/job"))
    settle(server)
    assert good.recv(100) == string(b"name")


def test_a_connection_without_torchs_greeting_is_closed(server: StoreServer) -> None:
    sock = socket.create_connection(server._listener.getsockname())
    _sockets.append(sock)
    sock.sendall(set_(b"key", b"value"))
    sock.settimeout(5.0)
    settle(server)
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""
    assert b"key" not in server._values


# Real users

_FLOOD = """
import encodings.idna, os, socket, struct, sys, time
os.setgid(65534); os.setuid(65534)
string = lambda text: struct.pack("=Q", len(text)) + text
end, sent, k = time.monotonic() + float(sys.argv[2]), 0, 0
while time.monotonic() < end:
    try:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=1.0) as sock:
            sock.sendall(struct.pack("=BI", 0, 0x3C85F7CE))
            while time.monotonic() < end:
                k += 1
                sock.sendall(b"\\1" + string(b"%d" % k) + string(bytes(1 << 16)))
                sent += 1 << 16
    except OSError:
        pass
print(sent)
"""


def memory_of(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not may_become_others(), reason="only root can be another user")
def test_another_user_cannot_fill_the_stores_memory_and_agents_still_meet(served: tuple[int, int]) -> None:
    port, pid = served
    one, other = client(port), client(port)
    one.set("own", "z" * (8 << 20))  # what the user of the job stores is not limited
    before = memory_of(pid)
    flood = subprocess.Popen([sys.executable, "-I", "-c", _FLOOD, str(port), "3"], stdout=subprocess.PIPE, text=True)
    try:
        while flood.poll() is None:
            one.add("met", 1)
            assert other.get("met") and client(port).get("own")[:1] == b"z"
        assert flood.stdout is not None
        assert int(flood.stdout.read()) > 4 * LOCAL_QUOTA  # else it was no flood
    finally:
        flood.kill()
        flood.communicate()
    assert memory_of(pid) - before < 16 << 20


def test_the_owner_of_an_open_connection_is_found() -> None:
    for family, where in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.create_server((where, 0), family=family) as listener:
            remote = socket.create_connection(listener.getsockname()[:2])
            own, _ = listener.accept()
            ends = address_of(own.getpeername()), address_of(own.getsockname())
            assert owner_of(*ends) == os.geteuid()
            assert owner_of((ends[0][0], ends[1][1]), ends[1]) is None  # the listener's
            remote.close()
            assert owner_of(*ends) is None
            own.close()


def test_the_process_of_the_store_does_not_import_torch(served: tuple[int, int]) -> None:
    port, pid = served
    assert client(port).get("shoal/claimed") == b"0 nobody"
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    os.kill(pid, signal.SIGTERM)


def test_a_client_that_sets_the_key_for_which_it_waits_and_leaves_does_not_end_the_server(
    served: tuple[int, int],
) -> None:
    """Its late answer is sent in the middle of its own request, and may find the connection closed."""

    def text(value: bytes) -> bytes:
        return struct.pack("=Q", len(value)) + value

    port, pid = served
    for pairs in (1, 3, 3000):
        requests = [
            part
            for number in range(pairs)
            for key in [b"/k%d" % number]
            for part in (b"\x06" + struct.pack("=Q", 1) + text(key), b"\x01" + text(key) + text(b"v"))
        ]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(VALIDATE + b"".join(requests))
        one = client(port)
        one.set("key", f"{pairs}")
        assert one.get("key") == f"{pairs}".encode()
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
