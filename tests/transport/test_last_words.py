"""What an agent said when it left is heard also by one that finds the connection broken while it sends."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, cast

import pytest

from shoal.transport.handshake import Connecting
from shoal.transport.link import Receiver
from shoal.transport.network import NetworkLink
from shoal.transport.poller import Poller
from shoal.transport.shared_memory import SharedMemoryLink
from shoal.transport.sockets import GOODBYE, SAID, Outgoing
from shoal.transport.wire import Kind, Message
from support.leftovers import wait_until


class Ear:
    """Writes down what it is told of the peer."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def on_left(self, peer: int, lost: int = -1, cause: str = "") -> None:
        self.heard.append(("left", peer, lost, cause))

    def on_closed(self, peer: int, cause: str, final: bool = False, certain: bool = False) -> None:
        self.heard.append(("closed", peer))


def over_tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def on_one_machine() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.mark.parametrize(("connect", "kind"), [(over_tcp, NetworkLink), (on_one_machine, SharedMemoryLink)])
def test_a_goodbye_is_heard_before_the_failure_of_what_is_sent_after_it(
    connect: Callable[[], tuple[socket.socket, socket.socket]], kind: type[Outgoing]
) -> None:
    ours, theirs = connect()
    ours.setblocking(False)
    ear, poller = Ear(), Poller()
    link = kind(ours, 4, cast(Connecting, None), poller, cast(Receiver, ear))
    link.open = True
    link._seal, link._goodbye = kind.seal_of(b"one"), kind.seal_of(b"other")
    theirs.send(kind.seal_of(b"other").close(SAID.pack(GOODBYE, 0, 2, b"its process ended")))
    theirs.close()

    def has_failed() -> bool:
        link.post(Message(Kind.ASK, "barrier", "x"))
        link.flush()
        return ours.fileno() < 0

    assert wait_until(has_failed)
    assert ear.heard == [("left", 4, 2, "its process ended"), ("closed", 4)]
    poller.close()
