"""A relay in the middle of every connection between agents of this process, without the job's secret."""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from shoal.transport import addresses

RESET = struct.pack("ii", 1, 0)
"""To linger for no time: closing resets the connection."""


class Cut(Exception):
    """Raised by a change: both ends of the connection are closed, or reset."""

    def __init__(self, reset: bool) -> None:
        self.reset = reset


Change = Callable[[bytes, int], bytes]
"""Maps bytes of one direction of a connection, given how many came before them."""


class Relay:
    """Forwards, with changes. One thread for all connections."""

    def __init__(self, change: Callable[[], Change]) -> None:
        self._change = change
        self._selector = selectors.DefaultSelector()
        self._over = threading.Event()
        self._new: list[tuple[socket.socket, socket.socket]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self, near: socket.socket, far: socket.socket) -> None:
        """Forward between two connected sockets until they close."""
        near.setblocking(True)
        far.setblocking(True)
        self._new.append((near, far))

    def _run(self) -> None:
        with self._selector:
            while not self._over.is_set():
                while self._new:
                    near, far = self._new.pop()
                    self._selector.register(near, selectors.EVENT_READ, [far, self._change(), 0])
                    self._selector.register(far, selectors.EVENT_READ, [near, self._change(), 0])
                if not self._selector.get_map():
                    self._over.wait(0.001)
                    continue
                for key, _ in self._selector.select(0.002):
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj.fileno() >= 0:
                        self._forward(key.fileobj, key.data)
            for key in list(self._selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
            for pair in self._new:
                for one in pair:
                    one.close()

    def _forward(self, source: socket.socket, data: list) -> None:  # type: ignore[type-arg]
        target, change, before = data
        fds: list[int] = []
        output = b""
        with contextlib.suppress(OSError):
            output, fds, _, _ = socket.recv_fds(source, 1 << 17, 8)
        data[2] += len(output)
        try:
            changed = change(output, before)
            if changed:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                sent = target.sendmsg([changed], rights)
                target.sendall(changed[sent:]) if sent < len(changed) else None
        except OSError:
            output = b""
        except Cut as cut:
            output = b""
            for sock in (source, target) if cut.reset else ():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        finally:
            for fd in fds:
                os.close(fd)
        if not output:
            for sock in (source, target):
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(sock)
                sock.close()

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def in_the_middle(change: Callable[[], Change]) -> Iterator[None]:
    """During the block, every connection that an agent of this process opens passes through a relay."""
    relay = Relay(change)

    def over_tcp(address: str, port: int) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = start(*listener.getsockname())
            near = listener.accept()[0]
        try:
            far = socket.create_connection((address, port))
        except OSError:  # the listener has ended
            ours.close()
            near.close()
            raise
        relay.join(near, far)
        return ours

    def over_unix(name: str) -> socket.socket:
        ours, near = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            far = connect(name)
        except OSError:
            ours.close()
            near.close()
            raise
        relay.join(near, far)
        ours.setblocking(False)
        return ours

    start, connect = addresses.start_connecting, addresses.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(addresses, "start_connecting", over_tcp)
        patch.setattr(addresses, "connect", over_unix)
        try:
            yield
        finally:
            relay.close()
