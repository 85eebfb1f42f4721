"""The mean over all agents in messages of a compressor: a reduce-scatter and an all-gather, each compressed.

Every agent has the same bits, because all decode the mean of a share from the message of the one agent that summed it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..arithmetic import complete
from ..compression import Compressor
from ..compression.draws import Redrawn
from ..engine.discovery import submit_to_all
from ..errors import Mismatch
from ..operations.operation import BackendRequest, Exchange, Handle, Operation, Send, Steps
from ..runtime.agent import Agent
from ..transport.wire import Payload
from .arguments import payload, rotated
from .encoded import name_of
from .reduce_scatter import shares


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
            raise Mismatch(
                f"{operation} on rank {agent.rank}: what rank {rank} sent is no message of {compressor!r}: {error}. Is "
                "the code of both the same?",
                (rank, agent.rank),
            ) from None

    # The parts
    own = flat.detach().cpu()
    if rest is not None and rest.sent is not None:
        own = own + rest.sent
    messages = [compressor.encode(own[low:high], draws(agent.rank, part)) for part, (low, high) in enumerate(cut)]
    same = f"{flat.numel()} {flat.dtype} {layout}"
    data, ends = torch.cat(messages), list(accumulate(len(one) for one in messages))
    arrived = yield from _exchanged(agent, operation, group, data, list(zip([0, *ends], ends, strict=False)), same)
    mean = own.new_zeros(stop - start)
    for rank in group:
        mean += decoded(messages[position] if rank == agent.rank else arrived[rank].data, rank, position, len(mean))
    mean /= len(group)

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
            decoded(one, agent.rank, part, high - low)
            for part, (one, (low, high)) in enumerate(zip(messages, cut, strict=True))
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
