"""Launchers that report to the first one: authentication, and equal reports on both sides."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.observability.watch import launcher_link
from shoal.observability.watch.launcher_link import NONCE, StatusCollector, StatusSender
from support.leftovers import nothing_is_left


class RecordingViewer:
    """Keeps the messages that it receives."""

    def __init__(self) -> None:
        self.summaries: list[dict[str, Any]] = []
        self.processes: dict[int, tuple[int, str, str]] = {}
        self.ends: dict[int, tuple[str, bool]] = {}

    def take(self, summary: dict[str, Any]) -> None:
        self.summaries.append(summary)

    def process(self, rank: int, pid: int, host: str, state: str) -> None:
        self.processes[rank] = pid, host, state

    def ended(self, rank: int, how: str, well: bool) -> None:
        self.ends[rank] = how, well


class Both:
    """The two sides, in one loop."""

    def __init__(self, secret: str = "secret", other: str = "secret") -> None:
        self.viewer = RecordingViewer()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.gatherer = StatusCollector(listener, secret, self.viewer, 2)
        self.teller = StatusSender(socket.AF_INET, self.address, other)

    def until(self, true: Callable[[], object]) -> None:
        limit = time.monotonic() + 10.0
        while not true():
            assert time.monotonic() < limit
            self.turn()

    def turn(self) -> None:
        self.teller.serve()
        self.gatherer.serve()
        time.sleep(0.001)


@contextlib.contextmanager
def both(**secrets: str) -> Iterator[Both]:
    with nothing_is_left():
        one = Both(**secrets)
        try:
            yield one
        finally:
            one.teller.close()
            one.gatherer.close()


def test_the_first_launcher_receives_what_another_observes() -> None:
    with both() as one:
        one.teller.process(2, 77, "there", "S")
        one.until(lambda: one.viewer.processes == {2: (77, "there", "S")})
        one.teller.take({"rank": 2, "text": "x" * 60_000})
        one.teller.ended(2, "rank 2 was killed", False)
        one.until(lambda: one.viewer.ends == {2: ("rank 2 was killed", False)})
        assert one.viewer.summaries == [{"rank": 2, "text": "x" * 60_000}]
        one.teller.process(2, 78, "there", "R")  # in its place
        one.viewer.ends.clear()
        one.until(lambda: one.viewer.processes[2] == (78, "there", "R"))
        assert not one.viewer.ends


def test_a_launcher_without_the_secret_gets_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_link, "RETRY_SECONDS", 0.0)
    with both(other="another") as one:
        one.teller.process(0, 1, "there", "S")
        for _ in range(100):
            one.teller.take({"rank": 0})
            one.turn()
        assert not one.viewer.processes and not one.viewer.summaries


def test_a_first_launcher_without_the_secret_gets_nothing() -> None:
    with nothing_is_left(), socket.create_server(("127.0.0.1", 0)) as listener:
        sender = StatusSender(socket.AF_INET, listener.getsockname(), "secret")
        sender.serve()
        sock, _ = listener.accept()
        sock.sendall(struct.pack(">I", NONCE) + bytes(NONCE))
        _serve_for(sender, 0.05)
        sock.sendall(struct.pack(">I", 32) + bytes(32))  # no proof
        sender.process(0, 1, "there", "S")
        _serve_for(sender, 0.05)
        received = b""
        while data := sock.recv(4096):
            received += data
        assert len(received) == 4 + 2 * NONCE  # its own number and proof, and no word more
        sock.close()
        sender.close()


def _serve_for(teller: StatusSender, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        teller.serve()
        time.sleep(0.001)


def test_a_broken_connection_is_reestablished_and_sends_the_full_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_link, "RETRY_SECONDS", 0.01)
    with both() as one:
        one.teller.process(1, 5, "there", "S")
        one.until(lambda: one.viewer.processes)
        one.gatherer._end(one.gatherer._guests[0])
        one.viewer.processes.clear()
        one.until(lambda: one.viewer.processes == {1: (5, "there", "S")})


def test_a_modified_message_ends_the_connection() -> None:
    with both() as one:
        one.until(lambda: one.teller._sealed is not None)
        sealed = one.teller._sealed
        assert sealed is not None and one.teller._stream is not None
        message = b'{"summary": {"rank": 0}}'
        one.teller._stream.put(sealed.seal(message) + message.replace(b"0", b"1"))
        guest = one.gatherer._guests[0]
        one.teller._write()
        one.until(lambda: guest not in one.gatherer._guests)
        assert not one.viewer.summaries


def test_foreign_connections_block_no_launcher() -> None:
    with both() as one:
        idle = [socket.create_connection(one.address) for _ in range(8)]
        for _ in range(20):
            one.gatherer.serve()
        one.teller.process(1, 5, "there", "S")
        one.until(lambda: one.viewer.processes)
        idle += [socket.create_connection(one.address) for _ in range(8)]
        one.viewer.processes.clear()
        one.until(lambda: one.viewer.processes)
        assert len(one.gatherer._guests) <= 4
        for sock in idle:
            sock.close()


@pytest.mark.parametrize("packet", [b"\xff\xff\xff\xff", b"\0\0\0\x01x", b"GET / HTTP/1.1\r\n\r\n"])
def test_invalid_messages_close_the_connection(packet: bytes) -> None:
    with both() as one, socket.create_connection(one.address) as sock:
        one.until(lambda: one.gatherer._guests)
        guest = one.gatherer._guests[0]
        sock.sendall(packet)
        one.until(lambda: guest not in one.gatherer._guests)
