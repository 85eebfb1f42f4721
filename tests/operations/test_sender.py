"""The messages of an agent after its shutdown message."""

from __future__ import annotations

from shoal.operations.membership import Departure, Membership
from shoal.transport.wire import Kind, Message
from support.recording_sender import recording_sender


def test_no_message_follows_the_shutdown_message() -> None:
    """The peers close their connections after it. A message that nobody reads keeps a link from being idle."""
    posted: list[tuple[int, Kind, int]] = []

    def put(peer: int, message: Message) -> None:
        posted.append((peer, message.kind, message.token))

    sender = recording_sender(0, Membership(4), put)
    for peer in (1, 2):
        sender.send_message(peer, Message(Kind.WAITS))
    posted.clear()
    sender.send_shutdown("it called shoal.shutdown()", died=False, ended=None)
    assert posted == [(1, Kind.NOTICE, 0), (2, Kind.NOTICE, 0)]
    sender.pass_on(Departure(1, "it called shoal.shutdown()", died=False, told_by=1))
    sender.send_message(2, Message(Kind.WAITS))
    sender.send_message(3, Message(Kind.WAITS))
    assert len(posted) == 2
