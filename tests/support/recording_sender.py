"""A sender whose links record the messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from shoal.execution.events import Events
from shoal.execution.membership import Membership
from shoal.execution.sender import Sender
from shoal.transport.messages import Message


class _Link:
    def __init__(self, put: Callable[[Message], None]) -> None:
        self.post = put

    def flush(self) -> None: ...


def recording_sender(rank: int, membership: Membership, put: Callable[[int, Message], None]) -> Sender:
    """A sender that calls ``put`` with each destination and message."""
    router: Any = SimpleNamespace(links={}, arena=SimpleNamespace(retired=[]))
    router.link = lambda peer: _Link(partial(put, peer))
    return Sender(rank, router, membership, Events(), lambda peer, cause: None)
