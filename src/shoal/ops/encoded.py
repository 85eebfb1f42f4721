"""Tensors that travel as a compressor's messages between machines, and as they are within one.

Whichever way a tensor has come, it is the same numbers: those that a receiver makes of the message. Within a machine
they are read where they lie, which costs less than decoding, unless ``SHOAL_COMPRESS_LOCALLY`` is 1.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, is_dataclass, replace

import torch

from ..arithmetic import complete
from ..compression import Compressor
from ..compression.draws import Draws, Redrawn
from ..compression.message import DTYPES
from ..engine.engine import Engine
from ..errors import Mismatch
from ..operations.operation import Arrived, Operation, Send
from ..runtime.agent import Agent
from ..transport.wire import Message, Payload
from .arguments import check_tensor, detached

DrawsOf = Callable[[int], Draws]
"""What the agent of a rank draws for this message."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """What one agent sends in one call.

    Attributes:
        compressor: What made it of a tensor.
        numbers: What everybody makes of it, this agent, too: the tensor's shape and dtype, on the CPU.
        message: uint8 ``[nbytes]``, or fewer, where the compressor varies.
        draws: What each agent draws for its own.
        rest: What it leaves out of the tensor, flat, where that is to be added to the result; else None.
    """

    compressor: Compressor
    numbers: torch.Tensor
    message: torch.Tensor
    draws: DrawsOf
    rest: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        tensor: torch.Tensor,
        compressor: Compressor,
        rank: int,
        draws: DrawsOf,
        *,
        by: Draws | None = None,
        keep_rest: bool = False,
    ) -> Encoded:
        """The message of the agent ``rank``; ``by``: draws the same as ``draws(rank)``, and counts.

        Raises:
            ValueError: The tensor is neither of float64, float32, float16 and bfloat16.
            TypeError: The compressor has no wire format.
        """
        flat = tensor.detach().cpu().reshape(-1)
        message = compressor.encode(flat, draws(rank) if by is None else by)
        numbers = compressor.decode(message, flat.numel(), flat.dtype, draws(rank))
        return cls(compressor, numbers.view(tensor.shape), message, draws, flat - numbers if keep_rest else None)

    @property
    def digest(self) -> int:
        """Of all that has to be the same on both sides of an edge."""
        name = name_of(self.compressor)
        return zlib.crc32(f"{name} {list(self.numbers.shape)} {self.numbers.dtype}".encode())

    def published(self, engine: Engine, operation: Operation, sends: Sequence[Send]) -> list[Send]:
        """The same sends: of the message to agents that are far, of the numbers to the others. Each of the two is
        copied to where others can read it only if one of them does."""
        far = [engine.is_far(send.destination) for send in sends]
        numbers = None if all(far) else engine.publisher.publish(operation, self.numbers)
        message = engine.publisher.publish(operation, self.message) if any(far) else None
        nbytes = self.message.numel()
        found = []
        for send, is_far in zip(sends, far, strict=True):
            if is_far:
                assert message is not None
                found.append(Send(send.destination, message, 0, nbytes, (nbytes,), send.scale))
            else:
                assert numbers is not None
                found.append(replace(send, published=numbers))
        return found

    def decoded(
        self, operation: Operation, agent: Agent, arrived: Sequence[tuple[int, Message]]
    ) -> Generator[str, Arrived, list[Payload]]:
        """The numbers of others, once all of their messages is here.

        Raises:
            Mismatch: Such a message is sent by nobody; it says by whom it was, and what is wrong with it.
        """
        payloads = [self._payload(operation, agent, source, message) for source, message in arrived]
        yield from complete(payloads)
        found = []
        for (source, _), one in zip(arrived, payloads, strict=True):
            if one.data.dtype != torch.uint8:
                found.append(one)
                continue
            room = agent.engine.pool.empty((self.numbers.numel(),), self.numbers.dtype)
            try:
                self.compressor.decode(one.data, len(room), room.dtype, self.draws(source), out=room)
            except ValueError as error:
                raise Mismatch(
                    f"{operation} on rank {agent.rank}: what rank {source} sent is no message of {self.compressor!r}: "
                    f"{error}. Is the code of both the same?",
                    (source, agent.rank),
                ) from None
            found.append(Payload(room, len(room)))
        return found

    def _payload(self, operation: Operation, agent: Agent, source: int, message: Message) -> Payload:
        most = self.compressor.nbytes(self.numbers.numel(), self.numbers.dtype)
        lengths = range(most + 1) if self.compressor.varies else (most,)
        encoded = message.dtype == torch.uint8 and len(message.shape) == 1 and message.shape[0] in lengths
        if message.payload is None or not (
            encoded or (message.dtype == self.numbers.dtype and message.shape == tuple(self.numbers.shape))
        ):
            raise Mismatch(
                f"{operation} on rank {agent.rank}: rank {source} sent {list(message.shape)} of {message.dtype}, which "
                f"is neither a message of {self.compressor!r} for {self.numbers.numel()} numbers in "
                f"{self.numbers.dtype}, {most} bytes, nor those numbers. Is the code of both the same?",
                (source, agent.rank),
            )
        return message.payload


def name_of(compressor: Compressor) -> str:
    """The same for equal ones on all agents."""
    return repr(compressor) if is_dataclass(compressor) else type(compressor).__qualname__  # others have addresses


def check_compression(op: str, tensor: object, compressor: object) -> Compressor:
    """What a call gives as ``compression``.

    Raises:
        TypeError: This is no compressor, or has no wire format; or no tensor of a dtype that it encodes.
    """
    if not isinstance(compressor, Compressor) or not compressor.encodes:
        what = (
            "has no wire format (define _encode and _pieces)"
            if isinstance(compressor, Compressor)
            else "is no compressor"
        )
        raise TypeError(f"{op}: compression={compressor!r} {what}; take one of shoal.compression, such as Sign()")
    check_tensor(op, detached(tensor), DTYPES)
    return compressor


def encoded_for(operation: Operation, tensor: torch.Tensor, compressor: Compressor, rank: int) -> Encoded:
    """The message of a call of its own: what it leaves out stays."""
    seed = zlib.crc32(operation.name.encode())
    return Encoded.of(tensor, compressor, rank, lambda one: Redrawn(seed, operation.round, one), keep_rest=True)


def encoded_by_call(op: str, tensor: torch.Tensor, compressor: object, rank: int) -> Callable[[Operation], Encoded]:
    """That, made once, however often the call begins. Raises as :func:`check_compression`."""
    checked, made = check_compression(op, tensor, compressor), list[Encoded]()

    def encoded(operation: Operation) -> Encoded:
        if not made:
            made.append(encoded_for(operation, tensor, checked, rank))
        return made[0]

    return encoded
