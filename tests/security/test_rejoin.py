"""Requests from outside the job to rejoin a run; and the membership records of real agents."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import Any

import pytest

import shoal
from shoal.errors import ProtocolError
from shoal.rendezvous.bootstrap_barrier import DIRECTORY
from shoal.rendezvous.launch import Launch
from shoal.rendezvous.peer_directory import PeerDirectory, _proof, _verified_peer, add_to_directory, directory
from shoal.rendezvous.store import ThreadStore
from shoal.transport.acceptor import ENTRY, BufferingReceiver
from shoal.transport.authentication import QUESTION, REVERSED, Accepting, Connecting
from shoal.transport.messages import Kind, Message
from shoal.transport.peer_address import Endpoint, local_peer_id
from shoal.transport.quotas import MESSAGES

SECRET = "a secret that nobody writes down"
SIZE = 3


def met(store: ThreadStore) -> PeerDirectory:
    """The membership records that the agents of a job have written."""
    output: list[dict[str, Any]] = [
        {"place": asdict(local_peer_id(rank)), "alike": {}, "reached": ""} for rank in range(SIZE)
    ]
    endpoints = [asdict(Endpoint(unix=f"shoal-{rank}")) for rank in range(SIZE)]
    proofs = [_proof(SECRET.encode(), "attempt", rank, output, endpoints[rank]) for rank in range(SIZE)]
    received: list[dict[str, Any]] = [
        {"endpoint": endpoint, "proof": proof} for endpoint, proof in zip(endpoints, proofs, strict=True)
    ]
    result = PeerDirectory("attempt", output, received, b"key", True)
    store.set(DIRECTORY, result.written())
    return result


def read(store: ThreadStore, secret: str = SECRET) -> PeerDirectory:
    return directory(store, Launch(1, SIZE, "torchrun", incarnation=1), time.monotonic() + 1.0, secret)


def test_the_secret_is_not_written_and_its_owner_accepts_markers() -> None:
    store = ThreadStore()
    result = met(store)
    add_to_directory(store, Launch(2, SIZE, "torchrun", incarnation=1), result, SECRET)
    for key in (DIRECTORY, f"{DIRECTORY}/2"):
        text = store.get(key, time.monotonic())
        assert SECRET.encode() not in text and b"key" not in text
    assert read(store).endpoints == result.endpoints


@pytest.mark.parametrize("secret", ["", "another one"])
def test_a_process_with_another_secret_rejects_markers(secret: str) -> None:
    store = ThreadStore()
    met(store)
    with pytest.raises(shoal.Mismatch, match="do not know this job's secret"):
        read(store, secret)


def test_foreign_markers_are_rejected() -> None:
    store = ThreadStore()
    result = met(store)
    attempt, output, received = json.loads(store.get(DIRECTORY, time.monotonic()))
    elsewhere = {**received[0], "endpoint": {**received[0]["endpoint"], "unix": "shoal-stranger"}}
    for forged in (
        [attempt, output, [elsewhere, *received[1:]]],
        [attempt, output, received[:2]],
        ["another", output, received],
    ):
        store.set(DIRECTORY, json.dumps(forged).encode())
        with pytest.raises(shoal.Mismatch):
            read(store)
    for nonsense in (b"", b"[]", b"{}", b"[1, 2, 3]", b'["attempt", [], []]', b"\xff"):
        store.set(DIRECTORY, nonsense)
        with pytest.raises(shoal.Mismatch):
            read(store)
    store.set(DIRECTORY, result.written())
    arrived = [output[0], elsewhere]
    for proof in (
        "",
        _verified_peer(b"guessed", "attempt", 0, arrived),
        _verified_peer(SECRET.encode(), "before", 0, arrived),
    ):
        store.set(f"{DIRECTORY}/0", json.dumps([*arrived, proof]).encode())
        assert read(store).endpoints == result.endpoints
    store.set(f"{DIRECTORY}/0", json.dumps([*arrived, _verified_peer(SECRET.encode(), "attempt", 0, arrived)]).encode())
    assert read(store).endpoints[0].unix == "shoal-stranger"


@pytest.mark.parametrize("purpose", [0, QUESTION, REVERSED])
@pytest.mark.parametrize("changed", [4, 12, 16], ids=["how often it was started", "whom it means", "its purpose"])
def test_the_restart_count_is_part_of_the_authentication(changed: int, purpose: int) -> None:
    """So are the process of the peer, and the purpose of the connection."""
    accepting, connecting = Accepting(b"key", 0, SIZE), Connecting(b"key", 2, 0, 3, 4, purpose)
    answer = bytearray(connecting.answer(accepting.hello))
    assert accepting.check(bytes(answer)) == 2 and accepting.incarnation == 3
    assert (accepting.expected, accepting.purpose) == (4, purpose)
    answer[changed] ^= 1
    with pytest.raises(ProtocolError, match="secret"):
        accepting.check(bytes(answer))


class RecordingReceiver:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_message(self, source: int, message: Message) -> None:
        self.lines.append(message.name)

    def on_closed(self, peer: int, cause: str, final: bool = False, certain: bool = False) -> None:
        self.lines.append(cause)

    def on_arrived(self, source: int, message: object) -> None: ...
    def on_left(self, peer: int, lost: int = -1, cause: str = "") -> None: ...


def test_messages_of_pending_peers_are_buffered_in_order_within_a_quota() -> None:
    received = RecordingReceiver()
    threshold = BufferingReceiver(received)
    for name in ("a", ENTRY, "b"):
        threshold.on_message(1, Message(Kind.DATA, name, name))
    threshold.on_closed(1, "it ended")
    assert received.lines == [ENTRY]
    threshold.open()
    assert received.lines == [ENTRY, "a", "b", "it ended"]
    other = BufferingReceiver(received)
    for _ in range(MESSAGES):
        other.on_message(1, Message(Kind.DATA, "a", "a"))
    with pytest.raises(ProtocolError, match="quota"):
        other.on_message(1, Message(Kind.DATA, "a", "a"))


@pytest.mark.parametrize(
    "change",
    [{"rank": 2}, {"pid": "1"}, {"incarnation": -1}, {"incarnation": 1 << 40}, {"host": 7}, {"started": None}],
    ids=str,
)
def test_an_invalid_peer_address_is_rejected(change: dict[str, Any]) -> None:
    from shoal.errors import NONSENSE
    from shoal.fault_tolerance.rejoin import JoiningPeer

    status = json.loads(JoiningPeer(replace(local_peer_id(1), incarnation=1), Endpoint()).as_json())
    assert JoiningPeer.of(status, 1).place.rank == 1
    status[0].update(change)
    with pytest.raises(NONSENSE):
        JoiningPeer.of(status, 1)
