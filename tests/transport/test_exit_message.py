"""An agent's exit message is received also by a peer that finds the connection broken while it sends."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from shoal.transport import sockets
from shoal.transport.authentication import Connecting
from shoal.transport.link import Receiver
from shoal.transport.messages import Kind, Message
from shoal.transport.network_link import NetworkLink
from shoal.transport.poller import Poller
from shoal.transport.shared_memory import SharedMemoryLink
from shoal.transport.sockets import CONTROL, GOODBYE, Outgoing
from support.leftovers import wait_until


class RecordingReceiver:
    """Records the calls about the peer."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_left(self, peer: int, lost: int = -1, cause: str = "") -> None:
        self.calls.append(("left", peer, lost, cause))

    def on_closed(self, peer: int, cause: str, final: bool = False, certain: bool = False) -> None:
        self.calls.append(("closed", peer))


def over_tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def on_one_machine() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.mark.parametrize(("connect", "kind"), [(over_tcp, NetworkLink), (on_one_machine, SharedMemoryLink)])
def test_an_exit_message_is_received_before_later_sends_fail(
    connect: Callable[[], tuple[socket.socket, socket.socket]], kind: type[Outgoing]
) -> None:
    ours, remote = connect()
    ours.setblocking(False)
    receiver, poller = RecordingReceiver(), Poller()
    link = kind(ours, 4, cast(Connecting, None), poller, cast(Receiver, receiver))
    link.open = True
    link._seal, link._goodbye = kind.seal_of(b"one"), kind.seal_of(b"other")
    remote.send(kind.seal_of(b"other").close(CONTROL.pack(GOODBYE, 0, 2, b"its process ended")))
    remote.close()

    def has_failed() -> bool:
        link.post(Message(Kind.ASK, "barrier", "x"))
        link.flush()
        return ours.fileno() < 0

    assert wait_until(has_failed)
    assert receiver.calls == [("left", 4, 2, "its process ended"), ("closed", 4)]
    poller.close()


@pytest.mark.transport("network")
def test_a_departed_agent_does_not_retransmit_to_peers_that_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They continue, and would take it for messages of rounds that have ended."""
    monkeypatch.setattr(sockets, "SHORT_SECONDS", 0.0)  # as after an hour: a link that is cut is made again at once

    def run() -> None:
        x = torch.ones(4)
        for _ in range(10):
            shoal.neighbor_allreduce(x)
        if shoal.rank() == 0:
            return
        if shoal.rank() == 2:  # a departing agent waits for this one, too, and the other has closed
            with current("test").engine.lock:
                time.sleep(0.5)
        other = {3 - shoal.rank(): 0.5}
        for _ in range(10):
            shoal.neighbor_allreduce(x, 0.5, other, other)

    shoal.Fleet(3, transport="network", timeout=20.0).run(run)
