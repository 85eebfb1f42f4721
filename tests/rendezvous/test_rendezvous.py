"""The store that agents meet in: what it keeps, its deadlines, and that it leaves its port free."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.errors import DeadlineExceeded, PeerLost
from shoal.rendezvous import rendezvous, store_server
from shoal.rendezvous.launch import Launch, current
from shoal.rendezvous.rendezvous import listen, open_store, publish_end
from shoal.rendezvous.store import Store, ThreadStore
from support.limits import scaled

EVERY_BYTE = bytes(range(256))


def deadline_in(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def launch(rank: int, port: int, size: int = 2) -> Launch:
    return Launch(rank, size, "torchrun", "127.0.0.1", port)


def threads_of_the_store() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "shoal-rendezvous"]


def descriptors_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(params=["threads", "tcp"])
def stores(request: pytest.FixtureRequest) -> Iterator[tuple[Store, Store]]:
    """The stores of rank 0 and of rank 1."""
    if request.param == "threads":
        store = ThreadStore()
        yield store, store
        return
    port = free_port()
    with ExitStack() as closes:
        first = closes.enter_context(closing(open_store(launch(0, port), deadline_in())))
        second = closes.enter_context(closing(open_store(launch(1, port), deadline_in())))
        yield first, second


def test_a_value_is_read_as_another_agent_has_set_it_byte_for_byte(stores: tuple[Store, Store]) -> None:
    stores[0].set("key/0", EVERY_BYTE)
    stores[0].set("empty", b"")
    assert stores[1].get("key/0", deadline_in()) == EVERY_BYTE
    assert stores[1].get("empty", deadline_in()) == b""


def test_a_later_value_replaces_an_earlier_one(stores: tuple[Store, Store]) -> None:
    stores[0].set("key", b"1")
    stores[1].set("key", b"2")
    assert stores[0].get("key", deadline_in()) == b"2"


def test_get_waits_for_a_value_that_is_set_later(stores: tuple[Store, Store]) -> None:
    late = threading.Timer(0.2, stores[0].set, ("late", b"x"))
    late.start()
    assert stores[1].get("late", deadline_in()) == b"x"
    late.join()


def test_a_counter_sums_the_increments_of_all_agents(stores: tuple[Store, Store]) -> None:
    assert stores[0].add("n", 2) == 2
    assert stores[1].add("n", 40) == 42
    assert stores[0].add("n", 0) == 42
    assert stores[0].get("n", deadline_in()) == b"42"


def test_get_ends_at_its_deadline_and_names_the_key(stores: tuple[Store, Store]) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="'absent/7'"):
        stores[1].get("absent/7", started + 0.3)
    assert 0.3 <= time.monotonic() - started < scaled(2.0)


def test_a_value_is_returned_at_an_expired_deadline(stores: tuple[Store, Store]) -> None:
    stores[0].set("there", b"x")
    assert stores[1].get("there", time.monotonic() - 1.0) == b"x"


def test_jobs_and_attempts_do_not_see_each_others_keys() -> None:
    port = free_port()
    with closing(open_store(launch(0, port), deadline_in())) as host:
        host.set("key", b"x")
        other = Launch(1, 2, "torchrun", "127.0.0.1", port, store_is_served=True, attempt=1)
        with closing(open_store(other, deadline_in())) as store, pytest.raises(DeadlineExceeded):
            store.get("key", deadline_in(0.1))


def test_closing_frees_the_port_and_ends_the_thread() -> None:
    port = free_port()
    threads = threads_of_the_store()
    before = descriptors_open()
    for _ in range(3):
        first = open_store(launch(0, port), deadline_in())
        second = open_store(launch(1, port), deadline_in())
        second.close()
        first.close()
        with socket.socket() as plain, pytest.raises(ConnectionRefusedError):
            plain.connect(("127.0.0.1", port))
        with listen("127.0.0.1", port):
            pass
    first.close()
    with pytest.raises(RuntimeError, match="closed"):
        first.set("key", b"")
    assert threads_of_the_store() == threads
    assert descriptors_open() == before


def test_a_kept_error_does_not_keep_the_port() -> None:
    port = free_port()
    store = open_store(launch(0, port), deadline_in())
    with pytest.raises(DeadlineExceeded) as kept:
        store.get("absent", deadline_in(0.05))
    store.close()
    listen("127.0.0.1", port).close()
    assert kept.value.__traceback__ is not None


def test_a_single_agent_opens_no_port() -> None:
    store = open_store(Launch(0, 1, "none", "127.0.0.1", 1), deadline_in())
    assert isinstance(store, ThreadStore)


def test_agents_wait_for_rank_0_to_start() -> None:
    port = free_port()
    results: list[bytes] = []

    def come_early() -> None:
        with closing(open_store(launch(1, port), deadline_in())) as store:
            results.append(store.get("key", deadline_in()))

    early = threading.Thread(target=come_early)
    early.start()
    time.sleep(0.2)
    with closing(open_store(launch(0, port), deadline_in())) as host:
        host.set("key", b"x")
        early.join()
    assert results == [b"x"]


def test_without_rank_0_the_error_comes_in_time_with_the_address() -> None:
    port = free_port()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=rf"rank 1 .*rank 0 hosts at 127\.0\.0\.1:{port}") as caught:
        open_store(launch(1, port), started + 0.4)
    assert caught.value.ranks == (0,)
    assert 0.4 <= time.monotonic() - started < scaled(3.0)


def test_an_unresponsive_server_does_not_outlast_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as intruder:
        port = intruder.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=f"127.0.0.1:{port} is not the rendezvous store"):
            open_store(launch(1, port), started + 0.5)
        assert time.monotonic() - started < scaled(4.0)


def test_an_agent_accepted_by_a_previous_server_finds_the_right_one() -> None:
    port = free_port()
    old = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    results: list[bytes] = []

    def open_and_get() -> None:
        with closing(open_store(launch(1, port), deadline_in())) as store:
            results.append(store.get("key", deadline_in()))

    agent = threading.Thread(target=open_and_get)
    agent.start()
    time.sleep(0.3)
    del old
    with closing(open_store(launch(0, port), deadline_in())) as host:
        host.set("key", b"right")
        agent.join()
    assert results == [b"right"]


def test_foreign_clients_have_a_quota_in_the_store_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "owner_of", lambda peer, own: 65534 if str(peer[0]) == "127.0.0.1" else 0)
    port = free_port()
    request = struct.pack("=BQ3sQ", 1, 3, b"key", 1 << 19) + bytes(1 << 19)
    with closing(open_store(Launch(0, 2, "a test", "127.0.0.2", port), deadline_in())) as host:
        with socket.create_connection(("127.0.0.2", port), source_address=("127.0.0.1", 0)) as intruder:
            intruder.settimeout(20.0)
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                intruder.sendall(struct.pack("=BI", 0, 0x3C85F7CE))
                for number in range(64):  # more than any socket buffers
                    intruder.sendall(request.replace(b"key", b"%03d" % number))
        host.set("key", b"x")
        assert host.get("key", deadline_in()) == b"x"


@pytest.mark.slow
def test_clients_of_a_newer_torch_use_its_features_if_available(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_server, "NEWEST_TORCH", (1, 0))
    assert rendezvous._clients_agree(deadline_in())
    assert not caplog.records
    monkeypatch.setattr(store_server.StoreServer, "_add", lambda self, one, arguments: self._send(one, bytes(8)))
    assert not rendezvous._clients_agree(deadline_in())
    assert "the rendezvous store is torch's own" in caplog.text
    with closing(open_store(launch(0, free_port()), deadline_in())) as host:
        assert host.add("key", 2) == 2


def test_an_occupied_port_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.rendezvous.rendezvous._PORT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}.*in use.*SHOAL_RENDEZVOUS"):
            open_store(launch(0, port), deadline_in())


def test_losing_the_host_is_an_error_that_names_rank_0() -> None:
    port = free_port()
    host = open_store(launch(0, port), deadline_in())
    with closing(open_store(launch(1, port), deadline_in())) as store:
        host.close()
        with pytest.raises(PeerLost, match="its server is gone") as caught:
            store.get("key", deadline_in())
    assert caught.value.ranks == (0,)


def test_a_loopback_rendezvous_is_not_open_to_the_network() -> None:
    with listen("127.0.0.1", 0) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    with listen("localhost", 0) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    with listen("some-other-name", 0) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def test_a_launch_that_contradicts_the_process_group_is_refused() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        result = current({"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"})
        assert result == Launch(0, 1, "torch.distributed", "10.0.0.7", 29500)
        with pytest.raises(
            ValueError, match=r"initialised as rank 0 of 1, but the launch \(torchrun\) says rank 1 of 2"
        ):
            open_store(launch(1, 29500), deadline_in())
    finally:
        dist.destroy_process_group()


SAME_PORT = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
from shoal.rendezvous.launch import current
from shoal.rendezvous.rendezvous import open_store

here = Path(os.environ["HERE"])
rank = current().rank
for round in range(2):
    store = open_store(current(), time.monotonic() + 20)
    store.set(f"{round}/{rank}", b"x")
    for other in range(2):
        store.get(f"{round}/{other}", time.monotonic() + 20)
    store.add(f"{round}/done", 1)
    while rank == 0 and store.add(f"{round}/done", 0) < 2:
        pass
    store.close()
    # Nobody goes on before rank 0 has closed the store.
    (here / f"{round}.{rank}").touch()
    while not all((here / f"{round}.{other}").exists() for other in range(2)):
        time.sleep(0.01)
    dist.init_process_group("gloo")
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    assert total.item() == 3
    lent = open_store(current(), time.monotonic() + 20)
    lent.set(f"lent/{rank}", bytes([rank]))
    assert lent.get(f"lent/{1 - rank}", time.monotonic() + 20) == bytes([1 - rank])
    lent.close()
    # The group still works with its store in its own hands: a new group is made through it.
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    assert total.item() == 6
    dist.destroy_process_group()
"""


def test_a_process_group_finds_the_port_free_and_provides_its_own_store(tmp_path: Path) -> None:
    environ = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    agents = [
        subprocess.Popen([sys.executable, "-c", SAME_PORT], env=environ | {"RANK": rank, "HERE": str(tmp_path)})
        for rank in "01"
    ]
    assert [agent.wait(50) for agent in agents] == [0, 0]


def test_an_invalid_host_name_is_refused_with_the_setting() -> None:
    started = time.monotonic()
    impossible = Launch(rank=1, size=2, launcher="test", host="no..host", port=free_port())
    with pytest.raises(ValueError, match=r"'no\.\.host'.*cannot be the name.*SHOAL_RENDEZVOUS=host:port"):
        open_store(impossible, deadline_in())
    assert time.monotonic() - started < scaled(5.0)


SERVE_LATE = "import sys, time; time.sleep(8); from shoal.rendezvous.rendezvous import serve; serve(int(sys.argv[1]))"


@pytest.mark.slow
def test_the_end_of_an_agent_is_recorded_also_in_a_store_not_yet_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port is open before the serving process has imported torch, which takes long on a slow disk."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", SERVE_LATE, str(listener.fileno())]
    with subprocess.Popen(command, pass_fds=[listener.fileno()]) as server, listener:
        try:
            publish_end("lost", "it was killed")
            with closing(open_store(current(), deadline_in())) as store:
                assert b"it was killed" in store.get("lost", deadline_in())
        finally:
            server.kill()


def test_ctrl_c_ends_a_wait(tmp_path: Path) -> None:
    code = f"""
import os, signal, threading, time
from contextlib import closing
from shoal.rendezvous.launch import Launch
from shoal.rendezvous.rendezvous import open_store

with closing(open_store(Launch(0, 2, "torchrun", "127.0.0.1", {free_port()}), time.monotonic() + 50)) as store:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        store.get("absent", started + 50)
    except KeyboardInterrupt:
        assert time.monotonic() - started < {scaled(1.0)}
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(50))
