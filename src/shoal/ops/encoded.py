"""Tensors that are sent as a compressor's messages between machines, and as they are within a machine.

Both ways give the same numbers: the ones that a receiver decodes from the message. Within a machine they are read in
place, which costs less than decoding, unless ``SHOAL_COMPRESS_LOCALLY`` is 1.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, is_dataclass, replace

import torch

from ..arithmetic import complete
from ..compression import Compressor
from ..compression.compressor import DTYPES
from ..compression.draws import Draws, Redrawn
from ..engine.engine import Engine
from ..errors import Mismatch
from ..operations.operation import Arrived, Operation, Send
from ..runtime.agent import Agent
from ..transport.wire import Message, Payload
from .arguments import check_tensor, detached

DrawsOf = Callable[[int], Draws]
"""The random draws of the agent of a rank for this message."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """The data that one agent sends in one call.

    Attributes:
        compressor: The compressor that encoded the tensor.
        numbers: The decoded numbers, equal on all agents, including this one: the tensor's shape and dtype, on the CPU.
        message: uint8 ``[nbytes]``, or fewer, if the compressor's length varies.
        draws: The random draws of each agent for its message.
        rest: The part of the tensor that the message leaves out, flat, if it is to be added to the result; else None.
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
        """A digest of the data that must be equal on both sides of an edge."""
        name = name_of(self.compressor)
        return zlib.crc32(f"{name} {list(self.numbers.shape)} {self.numbers.dtype}".encode())

    def published(self, engine: Engine, operation: Operation, sends: Sequence[Send]) -> list[Send]:
        """The sends with their data: the message for agents on other machines, the numbers for the rest. Each of the
        two is copied to shared memory only if an agent reads it.
        """
        far = [engine.is_far(send.destination) for send in sends]
        numbers = None if all(far) else engine.publish(operation, self.numbers)
        message = engine.publish(operation, self.message) if any(far) else None
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
        """The numbers of other agents, once their messages are complete.

        Raises:
            Mismatch: A message is malformed; the error names its sender and the fault.
        """
        payloads = [self._payload(operation, agent, source, message) for source, message in arrived]
        yield from complete(payloads)
        found = []
        for (source, _), one in zip(arrived, payloads, strict=True):
            if one.data.dtype != torch.uint8:
                found.append(one)
                continue
            room = agent.engine.result_memory((self.numbers.numel(),), self.numbers.dtype)
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
    """A name that is the same for equal compressors on all agents."""
    return repr(compressor) if is_dataclass(compressor) else type(compressor).__qualname__  # others have addresses


def check_compression(op: str, tensor: object, compressor: object) -> Compressor:
    """Check the argument ``compression`` of a call.

    Raises:
        TypeError: It is no compressor, or has no wire format; or the tensor's dtype cannot be encoded.
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
    """Returns the encoded tensor, made once even if the call restarts. Raises as :func:`check_compression`."""
    checked, made = check_compression(op, tensor, compressor), list[Encoded]()

    def encoded(operation: Operation) -> Encoded:
        if not made:
            made.append(encoded_for(operation, tensor, checked, rank))
        return made[0]

    return encoded
