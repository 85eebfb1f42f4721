"""A connection that cannot begin: which errors a first read raises, and which raise at once."""

from __future__ import annotations

import errno
import socket

import pytest

from shoal.transport import addresses


def connecting_raises(code: int, monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Let the system refuse to connect with this error. The sockets that try it."""
    made: list[socket.socket] = []

    class Refused(socket.socket):
        def connect(self, address: object) -> None:
            made.append(self)
            raise OSError(code, "no")

    monkeypatch.setattr(socket, "socket", Refused)
    return made


def test_without_a_free_local_port_the_first_read_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    made = connecting_raises(errno.EADDRNOTAVAIL, monkeypatch)
    with addresses.start_connecting("127.0.0.1", 9) as sock:
        assert made == [sock]
        with pytest.raises(OSError, match="not connected"):
            sock.recv(1)


def test_another_error_is_raised_at_once_and_the_socket_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = connecting_raises(errno.ENETUNREACH, monkeypatch)
    with pytest.raises(OSError, match="no") as caught:
        addresses.start_connecting("127.0.0.1", 9)
    assert caught.value.errno == errno.ENETUNREACH
    assert [sock.fileno() for sock in made] == [-1]
