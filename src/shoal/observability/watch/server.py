"""Serves the page to a browser on this machine, in one thread that never blocks.

It listens on 127.0.0.1, which every user of the machine and every page in a browser can reach. So a request without the
token of the address is disconnected without a response, like a malformed one. The host name must be one of this
machine: otherwise a foreign page whose name resolves to 127.0.0.1 could read the responses (DNS rebinding). Requests
change nothing. The number of connections, their duration and their output buffers are bounded.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

HOST = "127.0.0.1"
OWN_NAMES = ("127.0.0.1", "localhost")
"""The allowed host names of a request; at any port, as behind ``ssh -L``."""
MOST_ASKING, MOST_LOOKING = 16, 16
"""Limits of connections without a request, of which the oldest is closed; and of open pages."""
ASKING_SECONDS = 5.0
"""The time limit of a request, and of a client that does not read an answer."""
MOST_REQUEST = 1 << 13
"""Bytes of a request."""
MOST_WAITING = 1 << 20
"""Bytes that may be buffered for a page that does not read; it misses updates until there is room."""
UPDATE_SECONDS = 0.25
"""Between two updates of a page."""
SIGN_SECONDS = 5.0
"""Between two keep-alive messages without news."""
LAST_SECONDS = 0.5
"""The time in which open pages may receive the last state."""
A_TURN = 16
"""Connections that are accepted before other work."""
ASSETS = {
    "": ("index.html", "text/html; charset=utf-8"),
    "watch.css": ("watch.css", "text/css; charset=utf-8"),
    "watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "picture.js": ("picture.js", "text/javascript; charset=utf-8"),
}
NEWS = "news"
"""The path of the update stream."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEAD = (
    "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}Content-Security-Policy: {policy}\r\n"
    "Cache-Control: no-store\r\n"
    "X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n"
    "Cross-Origin-Opener-Policy: same-origin\r\nConnection: close\r\n\r\n"
)


def path_of(request: bytes, token: str) -> str | None:
    """The path of a request after the token; None if the request is not answered.

    Args:
        request: Its header, at least to the empty line.
        token: The required token.
    """
    try:
        head, _, _ = request.partition(b"\r\n\r\n")
        first, *lines = head.decode("ascii").split("\r\n")
        method, target, version = first.split(" ")
    except ValueError:
        return None
    hosts = [value.strip() for name, _, value in (line.partition(":") for line in lines) if name.lower() == "host"]
    name = hosts[0].rpartition(":")[0] or hosts[0] if len(hosts) == 1 else ""
    given, slash, path = target.removeprefix("/").partition("/")
    knows = hmac.compare_digest(given.encode(), token.encode())
    fits = method == "GET" and version in ("HTTP/1.0", "HTTP/1.1") and name.lower() in OWN_NAMES
    return path if knows and slash and fits else None


class PageServer:
    """The server of the page. An event loop calls :meth:`serve` when :meth:`fileno` is readable, and when it is due.

    Args:
        data: Returns the current data of the page, as JSON data.
        port: 0 takes a free one.

    Raises:
        OSError: The port is taken.
    """

    def __init__(self, data: Callable[[], dict[str, Any]], port: int = 0) -> None:
        self._data = data
        self._token = secrets.token_urlsafe(24)
        self._listener = socket.create_server((HOST, port), backlog=64)
        self._listener.setblocking(False)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: list[_BrowserConnection] = []
        self._news = False
        self._sent_at = 0.0

    @property
    def address(self) -> str:
        """The address of the page, which contains the token."""
        return f"http://{HOST}:{self._listener.getsockname()[1]}/{self._token}/"

    @property
    def is_looked_at(self) -> bool:
        """A page is open."""
        return any(browser.looks for browser in self._connections)

    def fileno(self) -> int:
        return self._selector.fileno()

    def mark_changed(self) -> None:
        """Send the page its new state when it is due."""
        self._news = True

    @property
    def due(self) -> float:
        """When to call :meth:`serve` at the latest, as ``time.monotonic()``."""
        asking = (browser.limit for browser in self._connections)
        update = self._sent_at + (UPDATE_SECONDS if self._news else SIGN_SECONDS) if self.is_looked_at else float("inf")
        return min(update, *asking, float("inf"))

    def serve(self) -> None:
        """Do what can be done now."""
        for key, events in self._selector.select(0):
            if key.data is None:
                self._accept()
            elif key.data in self._connections:
                self._attend(key.data, events)
        now = time.monotonic()
        for browser in [browser for browser in self._connections if now >= browser.limit]:
            self._end(browser)
        if self.is_looked_at and now >= self._sent_at + (UPDATE_SECONDS if self._news else SIGN_SECONDS):
            self._update()

    def _accept(self) -> None:
        for _ in range(A_TURN):
            try:
                sock, _ = self._listener.accept()
            except OSError:  # there is none, or no descriptor is left
                return
            asking = [browser for browser in self._connections if not browser.looks]
            if len(asking) >= MOST_ASKING:
                self._end(asking[0])
            sock.setblocking(False)
            connection = _BrowserConnection(sock)
            self._connections.append(connection)
            self._selector.register(sock, selectors.EVENT_READ, connection)

    def _attend(self, browser: _BrowserConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not browser.receive():
                self._end(browser)
                return
            if not browser.answered and browser.is_complete:
                self._answer(browser)
            elif events & selectors.EVENT_WRITE:
                self._write(browser)
        except OSError:
            self._end(browser)

    def _answer(self, browser: _BrowserConnection) -> None:
        path = path_of(browser.request, self._token)
        browser.answered = True
        if path is None:
            self._end(browser)
        elif path == NEWS and sum(other.looks for other in self._connections) < MOST_LOOKING:
            browser.looks = True
            browser.out += _head("200 OK", "text/event-stream; charset=utf-8")
            browser.out += self._event()
            self._write(browser)
        elif path in ASSETS:
            name, kind = ASSETS[path]
            browser.out += _asset(name, kind)
            self._write(browser)
        else:
            browser.out += _head(
                "503 Too many" if path == NEWS else "404 Not found", "text/plain", "Content-Length: 0\r\n"
            )
            self._write(browser)

    def _event(self) -> bytes:
        return f"data: {json.dumps(self._data(), separators=(',', ':'), allow_nan=False)}\n\n".encode()

    def _update(self) -> None:
        news, self._news, self._sent_at = self._news, False, time.monotonic()
        event = self._event() if news else b": still here\n\n"
        for browser in [browser for browser in self._connections if browser.looks]:
            if len(browser.out) + len(event) <= max(MOST_WAITING, len(event)):
                browser.out += event
                self._write(browser)

    def _write(self, browser: _BrowserConnection) -> None:
        try:
            browser.write()
        except OSError:
            self._end(browser)
            return
        if not browser.out and not browser.looks:
            self._end(browser)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if browser.out else 0)
        if self._selector.get_key(browser.sock).events != wanted:
            self._selector.modify(browser.sock, wanted, browser)

    def _end(self, browser: _BrowserConnection) -> None:
        if browser in self._connections:
            self._connections.remove(browser)
            self._selector.unregister(browser.sock)
            with contextlib.suppress(OSError):  # unread data would turn the close into a reset
                browser.sock.recv(MOST_REQUEST)
            browser.sock.close()

    def close(self) -> None:
        """Send the final state to open pages within a time limit, and close."""
        if self.is_looked_at:
            self._news = True
            with contextlib.suppress(Exception):  # its error was reported before; it must still be closed
                self._update()
        limit = time.monotonic() + LAST_SECONDS
        while any(browser.out for browser in self._connections) and time.monotonic() < limit:
            for key, events in self._selector.select(limit - time.monotonic()):
                if key.data is not None and key.data in self._connections:
                    self._attend(key.data, events)
                elif key.data is None:
                    self._selector.unregister(self._listener)
        for browser in list(self._connections):
            self._end(browser)
        self._selector.close()
        self._listener.close()


class _BrowserConnection:
    """One connection.

    Attributes:
        out: The data to be written.
        answered: Its request has been answered.
        looks: It receives updates.
        limit: The time at which it is closed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.request = b""
        self.out = bytearray()
        self.answered = self.looks = False
        self.limit = time.monotonic() + ASKING_SECONDS

    @property
    def is_complete(self) -> bool:
        """All of the request is here."""
        return b"\r\n\r\n" in self.request

    def receive(self) -> bool:
        """Read the received data; False if the connection is closed."""
        try:
            data = self.sock.recv(MOST_REQUEST)
        except BlockingIOError:
            return True
        if not self.answered:
            self.request += data
        return bool(data) and len(self.request) <= MOST_REQUEST

    def write(self) -> None:
        """As much as there is room for."""
        while self.out:
            try:
                del self.out[: self.sock.send(self.out)]
            except BlockingIOError:
                break
        # A page that does not read has the time limit of a request; one that reads has none.
        waiting = bool(self.out) or not self.looks
        self.limit = min(self.limit, time.monotonic() + ASKING_SECONDS) if waiting else float("inf")


def _head(status: str, kind: str, more: str = "") -> bytes:
    return _HEAD.format(status=status, kind=kind, more=more, policy=POLICY).encode()


@functools.cache
def _asset(name: str, kind: str) -> bytes:
    """One of the page's files, as it is sent."""
    data = files(__package__).joinpath("assets").joinpath(name).read_bytes()
    return _head("200 OK", kind, f"Content-Length: {len(data)}\r\n") + data
