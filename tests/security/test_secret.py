"""The job's secret: never shown where it was given, and nobody believed who does not know it."""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import shoal
from shoal.rendezvous.store import ThreadStore
from support.limits import scaled
from support.world import World, reserved_port

Fleets = Callable[..., shoal.Fleet]
SECRET = "a word that the user has chosen"


@contextmanager
def relay(to: int) -> Iterator[tuple[int, list[bytes]]]:
    """A relay in front of a server that records every byte; its port, and the recorded bytes."""
    received: list[bytes] = []
    over = threading.Event()

    def forward() -> None:
        with selectors.DefaultSelector() as selector, ExitStack() as opened:
            selector.register(listener, selectors.EVENT_READ)
            while not over.is_set():
                for key, _ in selector.select(0.05):
                    if key.fileobj is listener:
                        near = opened.enter_context(listener.accept()[0])
                        far = opened.enter_context(socket.create_connection(("127.0.0.1", to)))
                        selector.register(near, selectors.EVENT_READ, far)
                        selector.register(far, selectors.EVENT_READ, near)
                        continue
                    assert isinstance(key.fileobj, socket.socket)
                    try:
                        data = key.fileobj.recv(1 << 16)
                        key.data.sendall(data)
                    except OSError:
                        data = b""
                    received.append(data)
                    if not data:
                        selector.unregister(key.fileobj)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=forward)
        thread.start()
        try:
            yield listener.getsockname()[1], received
        finally:
            over.set()
            thread.join()


def rank_and_answer() -> tuple[int, float]:
    import torch

    return shoal.rank(), float(shoal.allreduce(torch.tensor([float(shoal.rank())]), average=False))


@pytest.mark.transport("shared_memory")
@pytest.mark.parametrize("secret", [SECRET, ""], ids=["given", "made up"])
def test_an_explicit_secret_is_never_sent_to_the_store(secret: str) -> None:
    """A secret chosen by rank 0 is sent, which shows that the test would detect it. It is removed afterwards."""
    with reserved_port() as port:
        pass
    server = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )  # as a launcher's, it stays when init is over
    with relay(port) as (near, received):
        environment = {"SHOAL_SECRET": secret, "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(near)}
        with World(3, environment=environment) as world:
            assert world.results(rank_and_answer) == [(rank, 3.0) for rank in range(3)]
            text = b"".join(received)
            assert b"endpoint" in text  # they met here
            if secret:
                assert SECRET.encode() not in text and b"proof" in text
            else:
                assert b'"secret"' in text
            kept = [key for key in server.list_keys() if "endpoint" in key] if hasattr(server, "list_keys") else []
            assert not kept
    del server


def altered(monkeypatch: pytest.MonkeyPatch, key: str, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Make the store change the value of a key, for all clients."""
    honest = ThreadStore.set

    def set_(self: ThreadStore, name: str, value: bytes) -> None:
        if name.endswith(key):
            content = json.loads(value)
            change(content)
            value = json.dumps(content).encode()
        honest(self, name, value)

    monkeypatch.setattr(ThreadStore, "set", set_)


CHANGES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], object]]] = {
    "port": ("endpoint/all", lambda all_: all_[1]["endpoint"].update(port=1)),
    "host": ("endpoint/all", lambda all_: all_[1]["endpoint"].update(host="192.0.2.1")),
    "no proof": ("endpoint/all", lambda all_: all_[1].pop("proof")),
    "no text": ("endpoint/all", lambda all_: all_[1].update(proof=["é"])),
    "another's": ("endpoint/all", lambda all_: all_[1].update(all_[2])),
    "exchanged": ("endpoint/all", lambda all_: all_.insert(1, all_.pop(2))),
    "one more": ("endpoint/all", lambda all_: all_.append(all_[1])),
    "place": ("place/all", lambda all_: all_[1]["data"]["place"].update(pid=1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_store_with_false_entries_is_not_trusted(change: str, fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SECRET", SECRET)
    altered(monkeypatch, *CHANGES[change])
    # The misreported agent detects it, or all do; the detecting agent reports it.
    expected = (shoal.Mismatch, shoal.PeerLost)
    with pytest.raises(expected, match="do not know this job's secret, or the rendezvous store"):
        fleet(3).run(rank_and_answer)


def test_honest_agents_authenticate_each_other(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SECRET", SECRET)
    assert fleet(3).run(rank_and_answer) == [(rank, 3.0) for rank in range(3)]


@pytest.mark.parametrize("without", [[0], [1], [0, 2]])
def test_a_secret_on_some_agents_only_is_a_mismatch_on_all(without: list[int]) -> None:
    """No agent waits for long."""
    with World(3, environment={"SHOAL_SECRET": SECRET}, init=False) as world:
        outcomes = world.run(init_with, dict.fromkeys(without, ""))
    for outcome in outcomes:
        assert (outcome.error, "SHOAL_SECRET" in outcome.message) == ("Mismatch", True), outcome
        assert outcome.seconds < scaled(10)


def init_with(secrets: dict[int, str]) -> None:
    os.environ["SHOAL_SECRET"] = secrets.get(int(os.environ["RANK"]), SECRET)
    shoal.init()
