"""Firewalls between the agents of a fleet: packets to their listeners are dropped, or refused."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import struct
from collections.abc import Collection, Iterable, Iterator

import pytest

from shoal.transport import addresses, listeners
from shoal.transport.router import Router

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)


def _close(sock: socket.socket) -> None:
    """Drop every packet to a listener, so that a request to connect has no answer."""
    program = ctypes.create_string_buffer(_DROP_ALL)
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


class ClosedPorts:
    """The ports of some ranks, which can be opened again."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = ranks
        self._closed: dict[int, socket.socket] = {}

    def close(self, rank: int, listener: socket.socket | None) -> None:
        if rank in self._ranks and listener is not None:
            _close(listener)
            self._closed[rank] = listener

    def is_closed(self, listener: socket.socket) -> bool:
        return listener in self._closed.values()

    def open(self, rank: int) -> None:
        """Accept connections to a rank again."""
        self._closed.pop(rank).setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


@contextlib.contextmanager
def closed_ports(*ranks: int) -> Iterator[ClosedPorts]:
    """Agents of this process, over a network, that no connection reaches: packets to them are dropped."""
    ports = ClosedPorts(ranks)
    listen, listen_for = Router.listen, listeners.listen_for

    def closed_listen(router: Router, *args: object, **options: object) -> object:
        result = listen(router, *args, **options)  # type: ignore[arg-type]
        ports.close(router.rank, router.acceptor._far)
        return result

    def closed_listen_for(known: Iterable[str], other: socket.socket) -> socket.socket | None:
        return None if ports.is_closed(other) else listen_for(known, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "listen", closed_listen)
        patch.setattr(listeners, "listen_for", closed_listen_for)
        yield ports


@contextlib.contextmanager
def refused(code: int, *ranks: int) -> Iterator[None]:
    """Connections to these ranks of this process fail with an error, as a firewall that answers has it."""
    ports: set[int] = set()
    listen, start = Router.listen, addresses.start_connecting

    def noted_listen(router: Router, *args: object, **options: object) -> object:
        result = listen(router, *args, **options)  # type: ignore[arg-type]
        if router.rank in ranks:
            ports.add(result.port)
        return result

    def refuse(address: str, port: int) -> socket.socket:
        if port not in ports:
            return start(address, port)
        if code != errno.ECONNREFUSED:
            raise OSError(code, "no way there")
        with socket.create_server((address, 0)) as unused:
            name = unused.getsockname()
        return start(*name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "listen", noted_listen)
        patch.setattr(addresses, "start_connecting", refuse)
        yield
