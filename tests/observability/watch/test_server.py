"""The server of the page: what it says to whom, and how much anybody can cost it."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.observability.watch import server
from shoal.observability.watch.server import PageServer, path_of
from support.leftovers import nothing_is_left, wait_until

TOKEN = "its-token"


def head(
    target: str = f"/{TOKEN}/", host: str = "127.0.0.1:80", method: str = "GET", version: str = "HTTP/1.1"
) -> bytes:
    return f"{method} {target} {version}\r\nHost: {host}\r\nAccept: */*\r\n\r\n".encode()


def test_paths_are_resolved_after_the_token() -> None:
    assert path_of(head(), TOKEN) == ""
    assert path_of(head(f"/{TOKEN}/watch.js"), TOKEN) == "watch.js"
    assert path_of(head(host="localhost:8080"), TOKEN) == "" == path_of(head(host="LOCALHOST"), TOKEN)


@pytest.mark.parametrize(
    "request_",
    [
        head("/"),
        head("/favicon.ico"),
        head(f"/{TOKEN}"),
        head(f"/{TOKEN}x/"),
        head(f"/{TOKEN[:-1]}/"),
        head(f"//{TOKEN}/"),
        head(f"http://127.0.0.1/{TOKEN}/"),
        head(method="POST"),
        head(method="HEAD"),
        head(version="HTTP/2"),
        head(host="attacker.example:80"),
        head(host="127.0.0.1.attacker.example"),
        head(host=""),
        b"GET / \r\n\r\n",
        f"GET /{TOKEN}/ HTTP/1.1\r\n\r\n".encode(),
        f"GET /{TOKEN}/ HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: attacker.example\r\n\r\n".encode(),
        f"GET /{TOKEN}/ HTTP/1.1\r\nX: Host: 127.0.0.1\r\n\r\nHost: 127.0.0.1".encode(),
        "GET /ä/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode(),
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"\r\n\r\n",
    ],
)
def test_requests_without_the_token_or_with_another_host_are_refused(request_: bytes) -> None:
    assert path_of(request_, TOKEN) is None


class Served:
    """A server that runs, in a thread, as a launcher's loop runs it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"over": None, "number": 0}
        self.server = PageServer(lambda: self.state)
        self.port = int(self.server.address.split(":")[2].split("/")[0])
        self.token = self.server.address.rstrip("/").rpartition("/")[2]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.server, selectors.EVENT_READ)
            while not self._stop.is_set():
                selector.select(max(0.0, min(0.02, self.server.due - time.monotonic())))
                self.server.serve()
        self.server.close()

    def publish(self, number: Any) -> None:
        self.state = {"over": None, "number": number}
        self.server.mark_changed()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10.0)

    def answer(self, request_: bytes) -> bytes:
        """The complete response."""
        with self.connect() as sock:
            sock.sendall(request_)
            return read_all(sock)

    def open_page(self) -> socket.socket:
        """A page that is open."""
        sock = self.connect()
        sock.sendall(head(f"/{self.token}/news"))
        return sock

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def read_all(sock: socket.socket) -> bytes:
    result = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            result += data
    return result


@pytest.fixture
def served() -> Iterator[Served]:
    with nothing_is_left():
        one = Served()
        yield one
        one.end()


def test_the_page_is_served_with_a_content_security_policy(served: Served) -> None:
    for name in server.ASSETS:
        answer, _, body = served.answer(head(f"/{served.token}/{name}")).partition(b"\r\n\r\n")
        lines = answer.decode().split("\r\n")
        assert lines[0] == "HTTP/1.1 200 OK" and f"Content-Length: {len(body)}" in lines and body, name
        (policy,) = [line for line in lines if line.startswith("Content-Security-Policy: ")]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert {"X-Content-Type-Options: nosniff", "Referrer-Policy: no-referrer", "Cache-Control: no-store"} <= {
            *lines
        }


def test_without_the_token_every_request_gets_the_same_refusal(served: Served) -> None:
    for target in ("/", "/favicon.ico", f"/{served.token}", "/wrong/", "/wrong/news", f"/{served.token[:-1]}/"):
        assert served.answer(head(target)) == b"", target
    for other in (head(f"/{served.token}/", host="attacker.example"), head(f"/{served.token}/", method="POST")):
        assert served.answer(other) == b""
    assert served.answer(head(f"/{served.token}/nowhere")).startswith(b"HTTP/1.1 404 ")


def test_it_listens_on_the_loopback_interface_only(served: Served) -> None:
    with socket.socket() as elsewhere, pytest.raises(ConnectionRefusedError):
        elsewhere.connect(("127.0.0.2", served.port))  # another address of the same interface


def test_an_open_page_gets_updates_and_a_final_event(served: Served) -> None:
    with served.open_page() as page:
        stream = page.makefile("rb")
        assert contains_number(stream, 0)
        served.publish(1)
        assert contains_number(stream, 1)
        served.publish("last")
        served.end()
        assert contains_number(stream, "last") and stream.read() in (b"\n", b"")
        stream.close()


def contains_number(stream: Any, number: Any) -> bool:
    return any(line.startswith(b"data: ") and json.loads(line[6:])["number"] == number for line in stream)


def test_a_client_without_a_request_blocks_no_other(served: Served) -> None:
    idle = [served.connect() for _ in range(server.MOST_ASKING + 30)]
    assert served.answer(head(f"/{served.token}/")).startswith(b"HTTP/1.1 200")
    assert read_all(idle[0]) == b""  # the oldest have made room
    for sock in idle:
        sock.close()


def test_the_number_of_open_pages_is_limited(served: Served) -> None:
    pages = [served.open_page() for _ in range(server.MOST_LOOKING)]
    for page in pages:
        assert page.recv(15) == b"HTTP/1.1 200 OK"
    with served.open_page() as another:
        assert another.recv(12) == b"HTTP/1.1 503"
    for page in pages:
        page.close()
    assert wait_until(lambda: not served.server.is_looked_at)


def test_slow_and_oversized_requests_are_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ASKING_SECONDS", 0.2)
    with served.connect() as slow:
        slow.sendall(b"GET /")
        assert read_all(slow) == b""
    with served.connect() as much, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        much.sendall(b"x" * (server.MOST_REQUEST + 1))
        assert read_all(much) == b""


def test_a_page_that_does_not_read_fills_no_memory_and_blocks_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "UPDATE_SECONDS", 0.0)
    monkeypatch.setattr(server, "ASKING_SECONDS", 60.0)
    with served.open_page() as deaf, served.open_page() as page:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream = page.makefile("rb")
        for number in range(30):
            served.publish([number, "x" * 200_000])
            assert contains_number(stream, [number, "x" * 200_000])
        assert max(len(connection.out) for connection in served.server._connections) <= server.MOST_WAITING
        # Bytes that the page has read may not be counted as sent yet.
        assert wait_until(lambda: sum(bool(connection.out) for connection in served.server._connections) <= 1)
        stream.close()
