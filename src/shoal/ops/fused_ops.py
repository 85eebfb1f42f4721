"""The operations that can be fused, and how: calls that differ only in their tensors become one over the joined
tensors.

The sum of a number does not depend on its neighbours in memory, so each tensor has the same bits as by itself. Senders,
receivers and stages are the same as for a single call, so an agent that fuses works with one that does not
(``execution/fusion.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..arithmetic import complete, reduce, weighted_sum
from ..engine.discovery import discover
from ..execution.operation import FusionSpec, Operation
from ..execution.publishing import PUBLISH_BYTES
from ..execution.stage import Arrived, Exchange, Send, Steps
from ..runtime.agent import Agent
from ..topology import Mixing
from ..transport.link import Published
from .arguments import Result, payload, put, rotated
from .reduction import reduced_by_owners

MOST_BYTES = PUBLISH_BYTES
"""The limit of a tensor that may be fused: it is sent inside its message, and its all-reduce has one owner, for
which it must stay below 32 KiB. ``benchmarks/fusion.py`` measures what fusing gains, and what larger ones would."""


def is_small(tensor: torch.Tensor) -> bool:
    """A tensor costs its bookkeeping, and not its bytes: it is sent inside a message."""
    return tensor.is_cpu and 0 < tensor.numel() * tensor.element_size() <= MOST_BYTES


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the current values, of the same shape, for an operation that begins later."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class NeighborFamily:
    """The weighted averages of one round, whose edges both of their ends know.

    Attributes:
        digest: The digest of the data on which both ends must agree.
        confirmed: Each end has to confirm the edge.
    """

    agent: Agent = field(compare=False, repr=False)
    mixing: Mixing
    digest: int
    confirmed: bool

    def fused_steps(self, operation: Operation, parts: list[FusionSpec]) -> Steps[list[torch.Tensor | Exception]]:
        return (yield from _averaged(self.agent, operation, parts, self.mixing, self.digest, self.confirmed))


@dataclass(frozen=True)
class DiscoveryFamily:
    """Pure pushes to the same ranks, or pure pulls from them: one discovery serves all of them.

    Attributes:
        form: ``"push"`` or ``"pull"``.
    """

    agent: Agent = field(compare=False, repr=False)
    mixing: Mixing
    form: str

    def fused_steps(self, operation: Operation, parts: list[FusionSpec]) -> Steps[list[torch.Tensor | Exception]]:
        agent, mixing = self.agent, self.mixing
        sources, destinations = mixing.sources, mixing.destinations
        pushes = self.form == "push"
        found = yield from discover(agent.engine, operation, destinations if pushes else sources)
        if pushes:
            sources = dict.fromkeys(found, 1.0)
        else:
            destinations = dict.fromkeys(found, 1.0)
        known = Mixing(agent.rank, mixing.self_weight, sources, destinations, size=agent.size)
        return (yield from _averaged(agent, operation, parts, known))


def _averaged(
    agent: Agent,
    operation: Operation,
    parts: list[FusionSpec],
    mixing: Mixing,
    digest: int = 0,
    checked: bool = False,
) -> Steps[list[torch.Tensor | Exception]]:
    published = agent.engine.publish_joined(operation, [part.flat for part in parts])
    total = published.data.numel()
    sends = [Send(rank, published, 0, total, (total,), weight) for rank, weight in mixing.destinations.items()]
    arrived = yield Exchange(
        rotated(sends, agent), mixing.source_ranks, published.data.dtype, (total,), checked=checked, digest=digest
    )
    payloads, weights = [payload(arrived, rank) for rank in mixing.sources], _weights(mixing, arrived, mixing.sources)
    joined = torch.empty_like(published.data)
    yield from weighted_sum(joined, published.data, weights, payloads)
    return split_joined(joined, parts)


def _weights(mixing: Mixing, arrived: Arrived, sources: Mapping[int, float]) -> list[float]:
    """The weights of this agent's own tensor and of its sources'."""
    return [mixing.self_weight, *(weight * arrived[rank].scale for rank, weight in sources.items())]


@dataclass(frozen=True)
class AllreduceFamily:
    """Reductions over a group, each of tensors so small that they have one owner, the first of the group, or that two
    agents send them to each other."""

    agent: Agent = field(compare=False, repr=False)
    how: str
    group: tuple[int, ...]

    def fused_steps(self, operation: Operation, parts: list[FusionSpec]) -> Steps[list[torch.Tensor | Exception]]:
        agent, group = self.agent, self.group
        published = agent.engine.publish_joined(operation, [part.flat for part in parts])
        shape = (published.data.numel(),)
        if len(group) > 2:
            mine, arrived = yield from reduced_by_owners(
                agent, operation, published, shape, self.how, group, group[:1], layout=0
            )
            theirs = [payload(arrived, rank) for rank in arrived]
            yield from complete(theirs)
            joined = mine.data if mine is not None else theirs[0].data
        else:
            others = [rank for rank in group if rank != agent.rank]
            sends = [Send(rank, published, 0, *shape, shape) for rank in others]
            arrived = yield Exchange(sends, others, published.data.dtype, shape)
            joined = torch.empty_like(published.data)
            theirs = [payload(arrived, rank) for rank in others]
            yield from reduce(joined, self.how, published.data, group.index(agent.rank), theirs)
        return split_joined(joined, parts)


_TERMS, _BETWEEN, _RESULT = 0, 1, 2
"""The stages of an average between machines, of small tensors."""


@dataclass(frozen=True)
class HierarchicalFamily:
    """The weighted averages of machines' means in one round, of small tensors: the first agent of each machine takes
    its mean, exchanges it with the first of others, and sends the result to the rest of the machine.

    Attributes:
        mixing: The mixing of machines.
        digest: The digest of the machine topology.
        confirmed: Each end of an edge between machines has to confirm it.
    """

    agent: Agent = field(compare=False, repr=False)
    mixing: Mixing
    digest: int
    confirmed: bool

    def alone(self, operation: Operation, tensor: torch.Tensor, out: torch.Tensor | None) -> Steps[torch.Tensor]:
        shape = tuple(tensor.shape)
        published = self.agent.engine.publish(operation, tensor)
        found = yield from self._averaged(operation, published, shape)
        result = Result(self.agent, out, tensor, shape)
        result.flat.copy_(found)
        return result.finish()

    def fused_steps(self, operation: Operation, parts: list[FusionSpec]) -> Steps[list[torch.Tensor | Exception]]:
        published = self.agent.engine.publish_joined(operation, [part.flat for part in parts])
        found = yield from self._averaged(operation, published, (published.data.numel(),))
        return split_joined(found, parts)

    def _averaged(self, operation: Operation, published: Published, shape: tuple[int, ...]) -> Steps[torch.Tensor]:
        agent, mixing, group = self.agent, self.mixing, self.agent.local_ranks
        engine, total, dtype = agent.engine, published.data.numel(), published.data.dtype
        # All agents of a machine have the same weights; only the first agent's are used.
        here = self.digest ^ zlib.crc32(repr(mixing).encode())
        compared = "machine topology, or weights within the machine"
        if agent.rank != group[0]:
            term = Send(group[0], published, 0, total, shape)
            arrived = yield Exchange(
                [term],
                group[:1],
                dtype,
                shape,
                digest=here,
                digest_of=compared,
                stage=_RESULT,
                stage_lead=_RESULT - _TERMS,
            )
            yield from complete([payload(arrived, group[0])])
            return payload(arrived, group[0]).data
        others = group[1:]
        arrived = yield Exchange([], others, dtype, shape, digest=here, digest_of=compared, stage=_TERMS)
        mean, result = engine.reserve(operation, total, dtype), engine.reserve(operation, total, dtype)
        yield from reduce(mean.data, "average", published.data, 0, [payload(arrived, rank) for rank in others])
        sends = [
            Send(self._first(machine), mean, 0, total, shape, scale) for machine, scale in mixing.destinations.items()
        ]
        sources = {self._first(machine): weight for machine, weight in mixing.sources.items()}
        arrived = yield Exchange(
            rotated(sends, agent),
            list(sources),
            dtype,
            shape,
            checked=self.confirmed,
            digest=self.digest,
            digest_of="machine topology",
            stage=_BETWEEN,
        )
        payloads = [payload(arrived, rank) for rank in sources]
        yield from weighted_sum(result.data, mean.data, _weights(mixing, arrived, sources), payloads)
        sends = [Send(rank, result, 0, total, shape) for rank in others]
        yield Exchange(sends, [], dtype, shape, digest=here, digest_of=compared, stage=_RESULT)
        return result.data

    def _first(self, machine: int) -> int:
        return self.agent.machines.ranks(machine)[0]


def split_joined(joined: torch.Tensor, parts: list[FusionSpec]) -> list[torch.Tensor | Exception]:
    """The results of several operations in one, each in its caller's place; or an error for each whose ``out`` does not
    fit, which does not affect the others.
    """
    results = torch.split(joined, [part.flat.numel() for part in parts])
    return [_placed(part, result.view(part.shape)) for part, result in zip(parts, results, strict=True)]


def _placed(part: FusionSpec, result: torch.Tensor) -> torch.Tensor | Exception:
    try:
        if part.out is None:
            return result.clone()
        put(result, part.out)
        return part.out
    except Exception as error:
        return error
