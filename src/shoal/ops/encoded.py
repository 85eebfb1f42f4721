"""Tensors in a compressor's messages: between neighbours, and their mean over all agents.

Between neighbours they are sent as messages between machines, and as they are within a machine. Both ways give the same
numbers: the ones that a receiver decodes from the message. Within a machine they are read in place, which costs less
than decoding, unless ``SHOAL_COMPRESS_LOCALLY`` is 1.

The mean over all agents is a reduce-scatter and an all-gather, each compressed. Every agent has the same bits, because
all decode the mean of a share from the message of the one agent that summed it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from itertools import accumulate

import torch

from ..arithmetic import complete
from ..compression import Compressor
from ..compression.compressor import DTYPES
from ..compression.random_numbers import Draws, Redrawn
from ..engine.discovery import submit_to_all
from ..engine.engine import Engine
from ..errors import Mismatch
from ..execution.operation import Handle, Operation
from ..execution.stage import Arrived, BackendRequest, Exchange, Send, Steps
from ..runtime.agent import Agent
from ..transport.messages import Message, Payload
from .arguments import check_tensor, detached, payload, rotated
from .reduction import shares

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
        for (source, _), incoming in zip(arrived, payloads, strict=True):
            if incoming.data.dtype != torch.uint8:
                found.append(incoming)
                continue
            room = agent.engine.result_memory((self.numbers.numel(),), self.numbers.dtype)
            try:
                self.compressor.decode(incoming.data, len(room), room.dtype, self.draws(source), out=room)
            except ValueError as error:
                raise _malformed(operation, agent, source, self.compressor, error) from None
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


def _malformed(operation: Operation, agent: Agent, source: int, compressor: Compressor, error: ValueError) -> Mismatch:
    return Mismatch(
        f"{operation} on rank {agent.rank}: what rank {source} sent is no message of {compressor!r}: {error}. Is the "
        "code of both the same?",
        (source, agent.rank),
    )


def name_of(compressor: Compressor) -> str:
    """A name that is the same for equal compressors on all agents."""
    return repr(compressor) if is_dataclass(compressor) else type(compressor).__qualname__  # others have addresses


def check_compression(op: str, tensor: object, compressor: object) -> Compressor:
    """Check the argument ``compression`` of a call.

    Raises:
        TypeError: It is no compressor, or has no wire format; or the tensor's dtype cannot be encoded.
    """
    if not isinstance(compressor, Compressor) or not compressor.encodes:
        problem = (
            "has no wire format (define _encode and _pieces)"
            if isinstance(compressor, Compressor)
            else "is no compressor"
        )
        raise TypeError(f"{op}: compression={compressor!r} {problem}; take one of shoal.compression, such as Sign()")
    check_tensor(op, detached(tensor), DTYPES)
    return compressor


def encoded_for(
    operation: Operation, tensor: torch.Tensor, compressor: Compressor, rank: int, part: int = 0
) -> Encoded:
    """The message of a call of its own: what it leaves out stays."""
    seed = zlib.crc32((f"{operation.name}.{part}" if part else operation.name).encode())
    return Encoded.of(tensor, compressor, rank, lambda sender: Redrawn(seed, operation.round, sender), keep_rest=True)


def encoded_by_call(
    op: str, tensor: torch.Tensor, compressor: object, rank: int, part: int = 0
) -> Callable[[Operation], Encoded]:
    """Returns the encoded tensor, made once even if the call restarts. Raises as :func:`check_compression`.

    ``part``: the number of the tensor in its call; each has random draws of its own.
    """
    checked, messages = check_compression(op, tensor, compressor), list[Encoded]()

    def encoded(operation: Operation) -> Encoded:
        if not messages:
            messages.append(encoded_for(operation, tensor, checked, rank, part))
        return messages[0]

    return encoded


@dataclass
class Rest:
    """The numbers that an agent's messages have left out, to be added to the next ones (error feedback).

    Attributes:
        sent: From its own numbers, ``[numel]``; None if nothing has been sent.
        mean: From the mean of its share, ``[share]``; None if there is none.
    """

    sent: torch.Tensor | None = None
    mean: torch.Tensor | None = None


def submit_encoded_mean(
    agent: Agent, flat: torch.Tensor, compressor: Compressor, name: str, rest: Rest | None = None, layout: int = 0
) -> Handle[torch.Tensor]:
    """Start the mean of a flat tensor over all agents; the tensor takes the result, and must not be touched until then.

    Each agent compresses its part of every share, sums its own share of all, in rank order, and compresses the mean.
    After Gan et al. 2021, arXiv:2107.01499 (ByteGrad); with ``rest`` after Tang et al. 2019, arXiv:1905.05957
    (DoubleSqueeze): the error of a message is added to the next, for the parts and for the mean.

    Args:
        agent: The calling agent.
        flat: ``[numel]``, of a dtype that compressors encode.
        compressor: With a wire format.
        name: Matches the calls of different agents.
        rest: The errors of the earlier messages; updated when the result is available.
        layout: A digest of the composition of the tensor; all agents must have the same.
    """
    seed = zlib.crc32(name.encode())

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        return _mean(agent, operation, flat, compressor, seed, rest, layout)

    def take(result: torch.Tensor) -> torch.Tensor:
        return flat.copy_(result.view(-1))

    return submit_to_all(agent.engine, f"allreduce ({name_of(compressor)})", name, steps, take=take)


def _mean(
    agent: Agent,
    operation: Operation,
    flat: torch.Tensor,
    compressor: Compressor,
    seed: int,
    rest: Rest | None,
    layout: int,
) -> Steps[torch.Tensor]:
    group = list(operation.left_of(range(agent.size)))
    cut, position = shares(flat.numel(), len(group)), group.index(agent.rank)
    (start, stop), last = cut[position], len(group)

    def draws(rank: int, part: int) -> Redrawn:  # of the messages of an agent in a round; the mean is the last
        return Redrawn(seed, operation.round * (last + 1) + part, rank)

    def decoded(data: torch.Tensor, rank: int, part: int, numel: int) -> torch.Tensor:
        try:
            return compressor.decode(data, numel, flat.dtype, draws(rank, part))
        except ValueError as error:
            raise _malformed(operation, agent, rank, compressor, error) from None

    # The parts
    own = flat.detach().cpu()
    if rest is not None and rest.sent is not None:
        own = own + rest.sent
    messages = [compressor.encode(own[low:high], draws(agent.rank, part)) for part, (low, high) in enumerate(cut)]
    same = f"{flat.numel()} {flat.dtype} {layout}"
    data, ends = torch.cat(messages), list(accumulate(len(sent) for sent in messages))
    arrived = yield from _exchanged(agent, operation, group, data, list(zip([0, *ends], ends, strict=False)), same)
    # 16-bit numbers are summed in float32, as everywhere: finite ones would overflow, and each sum would be rounded.
    total = own.new_zeros(stop - start, dtype=torch.promote_types(own.dtype, torch.float32))
    for rank in group:
        total += decoded(messages[position] if rank == agent.rank else arrived[rank].data, rank, position, len(total))
    mean = total.div_(len(group)).to(own.dtype)

    # The means
    if rest is not None and rest.mean is not None and len(rest.mean) == len(mean):
        mean += rest.mean
    message = compressor.encode(mean, draws(agent.rank, last))
    arrived = yield from _exchanged(agent, operation, group, message, [(0, len(message))] * len(group), same)
    result = torch.empty_like(own)
    for rank, (low, high) in zip(group, cut, strict=True):
        result[low:high] = decoded(message if rank == agent.rank else arrived[rank].data, rank, last, high - low)
    if rest is not None:
        as_received = [
            decoded(sent, agent.rank, part, high - low)
            for part, (sent, (low, high)) in enumerate(zip(messages, cut, strict=True))
        ]
        rest.sent, rest.mean = own - torch.cat(as_received), mean - result[start:stop]
    return flat.copy_(result)


def _exchanged(
    agent: Agent, operation: Operation, group: list[int], data: torch.Tensor, cut: list[tuple[int, int]], same: str
) -> Steps[dict[int, Payload]]:
    """Send each of the others its piece of the data; returns theirs, once all have arrived."""
    published = agent.engine.publish(operation, data)
    sends = [
        Send(rank, published, low, high, (high - low,))
        for rank, (low, high) in zip(group, cut, strict=True)
        if rank != agent.rank
    ]
    others = [send.destination for send in sends]
    digest = zlib.crc32(same.encode())
    arrived = yield Exchange(
        rotated(sends, agent),
        others,
        torch.uint8,
        digest=digest,
        digest_of="number of elements or dtype, or list of tensors",
        carried=BackendRequest(),
    )
    payloads = {rank: payload(arrived, rank) for rank in others}
    yield from complete(list(payloads.values()))
    return payloads
