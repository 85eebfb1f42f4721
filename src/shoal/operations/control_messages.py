"""Control messages: JSON, or a tensor, that agents send each other outside of all operations.

Agreements, rejoining and the result cache use them. A control message travels as a published tensor of bytes, so it
takes its turn among the other messages of a link and is retransmitted like them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from ..errors import NONSENSE
from ..transport.wire import Kind, Message, Payload, ProtocolError

T = TypeVar("T")


class Post(Protocol):
    """Sends a peer a copy of a tensor; ``background``: it does not count as the caller's traffic."""

    def __call__(self, peer: int, message: Message, tensor: torch.Tensor, background: bool = False, /) -> None: ...


class ControlMessages:
    """The control messages of one agent. Used under the engine's lock.

    Args:
        post: Sends a tensor outside of any operation; see :func:`~.sender.send_alone`.
        acknowledge: Confirms that a message has been read, so that the sender can reuse its memory.
    """

    def __init__(self, post: Post, acknowledge: Callable[[int, Message], None]) -> None:
        self._post, self.acknowledge = post, acknowledge

    def send(self, peers: Iterable[int], name: str, content: Any, op: str = "", background: bool = False) -> None:
        """Send plain data as JSON.

        Args:
            peers: The destinations, without this agent.
            name: The name of the message, which begins with the prefix of the service that receives it.
            content: Anything that ``json`` can write.
            op: The operation of the message; its name if empty.
            background: Whether the message does not count as the caller's traffic.
        """
        text = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        for peer in peers:
            self._post(peer, Message(Kind.DATA, op or name, name), text, background)

    def send_tensor(self, peer: int, message: Message, tensor: torch.Tensor, background: bool = False) -> None:
        """Send a tensor of any dtype with the operation, name, round, stage and digest of ``message``."""
        self._post(peer, message, tensor, background)

    def receive(
        self,
        source: int,
        message: Message,
        about: str,
        parse: Callable[[Any], T],
        then: Callable[[T], object],
        limit: float = float("inf"),
    ) -> None:
        """Parse the JSON of a message when it has arrived completely, confirm it, and call ``then`` with the value.

        Args:
            source: The sender.
            message: The message.
            about: Its subject, for the error.
            parse: Makes the value from the content; raises one of :data:`~shoal.errors.NONSENSE` if it is malformed.
            then: Takes the value. Its errors are errors of this agent, not of the sender.
            limit: The largest number of bytes.

        Raises:
            ProtocolError: The message has no bytes, more than ``limit``, or another content. It ends the connection.
        """
        if message.dtype != torch.uint8:
            raise ProtocolError("a control message without text")

        def take(data: torch.Tensor) -> None:
            try:
                if data.numel() > limit:
                    raise ValueError(f"{data.numel():,} bytes")
                value = parse(json.loads(bytes(data.numpy())))
            except NONSENSE as error:
                raise ProtocolError(f"a message about {about} makes no sense: {error}") from None
            # Acknowledged first: an error in then() is this agent's, and must not keep the sender waiting.
            self.acknowledge(source, message)
            then(value)

        when_arrived(message, take)


def when_arrived(message: Message, then: Callable[[torch.Tensor], None]) -> None:
    """Call ``then`` with the elements of a message, flat, when all have arrived. ProtocolError if it has none."""
    payload = message.payload
    if payload is None:
        raise ProtocolError("a control message without content")
    if payload.complete:
        then(payload.data)
    else:
        payload.on_more = partial(_wait_for_rest, payload, then)


def _wait_for_rest(payload: Payload, then: Callable[[torch.Tensor], None]) -> None:
    if payload.complete:
        payload.on_more = None
        then(payload.data)
