"""Averaging between machines, with the fast links inside a machine doing the rest.

``hierarchical_neighbor_allreduce`` computes ``W_machine kron (1/L) 11^T``: every agent of a machine ends with the
weighted average of the machines' means. BlueFog lets one leader of each machine carry all of it; here every
agent of a machine averages one share of the tensor and exchanges that share with its counterparts, so that no agent is
a bottleneck and the machine's links to the outside are used by all. A small tensor costs its messages and not its
bytes: the first agent of each machine carries it, in as few as there can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..arithmetic import complete, weighted_sum
from ..compression import Compressor
from ..engine.discovery import submit_to_all
from ..execution.operation import FusionSpec, Handle, Operation
from ..execution.stage import BackendRequest, Exchange, Send, Steps
from ..kernels.sums import copy
from ..runtime.agent import Agent, StaticTopology, current
from ..topology import Mixing
from .arguments import WEIGHABLE, Result, channel_name, check_out, check_tensor, detached, payload, rotated, split_name
from .encoded import check_compression, encoded_for
from .fused_ops import HierarchicalFamily, copied, is_small
from .reduction import allgather_shares, reduce_scatter, reduced, shape_digest

OP = "hierarchical_neighbor_allreduce"
_BETWEEN_LEADERS, _FROM_LEADER = 8, 9
"""Numbers of stages after all stages of a mean within a machine."""


def hierarchical_neighbor_allreduce(
    tensor: torch.Tensor,
    self_weight: float | str | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Mapping[int, float] | Iterable[int] | None = None,
    *,
    enable_topo_check: bool = True,
    compression: Compressor | None = None,
    name: str | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """The weighted average of this machine's mean and its neighbour machines' means (BlueFog paper, section V-B).

    Without weights over the static machine topology (``set_machine_topology``); with all three weights over the
    machines that they name. ``y = self_weight mean + sum src_machine_weights[m] s_m mean_m``, where ``mean`` is the
    mean over the agents of a machine, and ``s_m`` the weight in ``dst_machine_weights`` of machine m for this one.

    Args:
        tensor: As for :func:`~shoal.neighbor_allreduce`; equal shape and dtype on all agents.
        self_weight: Weight of this machine's mean; equal on all agents of a machine, as are the next two. A string
            here is the ``name``.
        src_machine_weights: ``{source machine: weight}``, by machine rank.
        dst_machine_weights: ``{destination machine: weight}``, or a list for weights of 1.
        enable_topo_check: Confirm on each edge that both sides know of it.
        compression: Between machines, a :mod:`message <shoal.compression>` is sent instead of each agent's share of the
            mean. The part that a message leaves out stays with the machine, as in :func:`~shoal.neighbor_allreduce`.
            Within a machine nothing is compressed. The same on all agents.
        name: Matches the calls of different agents; unnamed calls match by their order.
        out: Takes the result; it may be ``tensor`` itself.
        timeout: Seconds until the deadline.

    Returns:
        A tensor of the same shape and dtype, equal on all agents of a machine.

    Raises:
        ValueError: The machines have different numbers of agents (the message lists them), no machine topology is
            set, or the weights are incomplete.
    """
    agent = current(OP)
    self_weight, name = split_name(OP, self_weight, name)
    mixing = machine_mixing(agent, self_weight, src_machine_weights, dst_machine_weights)
    compressor = None if compression is None else check_compression(OP, tensor, compression)
    return submit(
        agent, tensor, mixing, name, checked=enable_topo_check, compressor=compressor, out=out, timeout=timeout
    ).wait()


def hierarchical_neighbor_allreduce_nonblocking(
    tensor: torch.Tensor,
    self_weight: float | str | None = None,
    src_machine_weights: Mapping[int, float] | None = None,
    dst_machine_weights: Mapping[int, float] | Iterable[int] | None = None,
    *,
    enable_topo_check: bool = True,
    compression: Compressor | None = None,
    name: str | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> Handle[torch.Tensor]:
    """:func:`hierarchical_neighbor_allreduce` without waiting.

    Small tensors that are submitted one after another, of calls with the same weights, are sent together.
    """
    agent = current(OP)
    self_weight, name = split_name(OP, self_weight, name)
    mixing = machine_mixing(agent, self_weight, src_machine_weights, dst_machine_weights)
    compressor = None if compression is None else check_compression(OP, tensor, compression)
    return submit(
        agent,
        tensor,
        mixing,
        name,
        checked=enable_topo_check,
        compressor=compressor,
        out=out,
        timeout=timeout,
        fusible=True,
    )


def submit(
    agent: Agent,
    tensor: torch.Tensor,
    mixing: Mixing | None,
    name: str | None = None,
    *,
    checked: bool = False,
    compressor: Compressor | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
    zero_copy: bool = False,
    fusible: bool = False,
    layout: int = 0,
) -> Handle[torch.Tensor]:
    """Start an average between machines over a given round; as :func:`shoal.ops.neighbor.submit`.

    Args:
        mixing: The round as this agent's machine knows it; None: the static machine topology.
        compressor: For the messages between machines.
        fusible: A small tensor may wait for others of the same round, to be sent with them.
        layout: A digest of the joined tensors, if it is made of several; all agents must have the same.
    """
    tensor = check_tensor(OP, tensor if out is None else detached(tensor), WEIGHABLE)
    check_out(OP, out, tensor.shape, tensor.dtype)
    agent.engine.check_joined(OP)
    # An agent's share is averaged with the same position on the other machines. With unequal machines a position would
    # be missing on some.
    if not agent.machines.homogeneous:
        raise ValueError(
            f"{OP} needs machines with equally many agents and consecutive ranks; the machines here have "
            f"{list(agent.machines.sizes)} agents (rank by rank, machines {list(agent.machines.of)})"
        )
    static = agent.machine_topology if mixing is None else None
    known = _static(agent, static) if mixing is None else mixing

    engine = agent.engine
    small = is_small(tensor) and compressor is None and engine.backend is None
    is_fused = fusible and small and engine.can_fuse_multistage
    if is_fused:
        # The caller may change its tensor when the call returns; a fused call is read later.
        tensor = copied(tensor)
    by_first = HierarchicalFamily(agent, known, (static.digest if static else 0) ^ layout, checked and static is None)

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        if small and not operation.excluded_ranks:
            return by_first.alone(operation, tensor, out)
        # The machines may have different numbers of agents now, so shares have no counterparts. All agents know the
        # same excluded ranks, and take the same way.
        if operation.excluded_ranks:
            return _by_leaders(agent, operation, tensor, known, static, compressor, out, layout)
        return _hierarchical(
            agent, operation, tensor, known, static, compressor, out, layout, checked=checked, zero_copy=zero_copy
        )

    begins: Callable[[Operation], Steps[torch.Tensor]] | FusionSpec = steps
    if is_fused:
        begins = FusionSpec(tensor.view(-1), tuple(tensor.shape), out, steps, by_first)
    return submit_to_all(engine, OP, channel_name(OP, name), begins, timeout, name is not None)


def machine_mixing(
    agent: Agent,
    self_weight: float | None,
    sources: Mapping[int, float] | None,
    destinations: Mapping[int, float] | Iterable[int] | None,
) -> Mixing | None:
    """The round that the arguments of a call describe, checked; None if it is the static machine topology's.

    Raises:
        TypeError, ValueError: The weights are incomplete, or name an invalid machine or weight.
    """
    if self_weight is None and sources is None and destinations is None:
        return None
    if self_weight is None or sources is None or destinations is None:
        raise ValueError(f"{OP}: give self_weight, src_machine_weights and dst_machine_weights, or none of the three")
    return Mixing(agent.machine_rank, self_weight, sources, destinations, size=agent.machines.count)


def _static(agent: Agent, static: StaticTopology | None) -> Mixing:
    if static is not None:
        return static.mixing
    if agent.machines.count == 1:
        return Mixing(0, 1.0)
    raise ValueError(
        f"{OP}: no machine topology is set; call shoal.bluefog.set_machine_topology(graph), or give the weights"
    )


def _hierarchical(
    agent: Agent,
    operation: Operation,
    tensor: torch.Tensor,
    mixing: Mixing,
    static: StaticTopology | None,
    compressor: Compressor | None,
    out: torch.Tensor | None,
    layout: int,
    *,
    checked: bool,
    zero_copy: bool,
) -> Steps[torch.Tensor]:
    engine, group = agent.engine, agent.local_ranks
    shape = tuple(tensor.shape)
    published = engine.publish(operation, tensor, zero_copy=zero_copy)
    position = group.index(agent.rank)
    share = yield from reduce_scatter(agent, operation, published, shape, "average", group, layout)
    mean = share.data

    # Valid because the machines have equally many agents of consecutive ranks, which submit() has checked.
    counterparts = [machine * len(group) + position for machine in range(agent.machines.count)]
    # Of the whole shape: shares of different shapes may have the same length.
    digest = shape_digest(shape) ^ (static.digest if static else 0) ^ layout
    mixed = yield from _mixed(
        agent,
        operation,
        mean,
        mixing,
        counterparts,
        compressor,
        digest=digest,
        properties=f"machine topology {static.digest ^ layout:08x}" if static is not None else "",
        checked=checked and static is None,
    )
    result = Result(agent, out, tensor, shape)
    yield from allgather_shares(agent, operation, engine.publish(operation, mixed), result.flat, group)
    return result.finish()


def _mixed(
    agent: Agent,
    operation: Operation,
    mean: torch.Tensor,
    mixing: Mixing,
    speakers: Sequence[int],
    compressor: Compressor | None,
    *,
    digest: int,
    properties: str = "",
    checked: bool = False,
    stage: int | None = None,
) -> Steps[torch.Tensor]:
    """The weighted average of the flat tensors of this agent and its counterparts on the other machines.

    Args:
        speakers: The rank that represents each machine.
        digest: Of the data that must be equal on all of them.
        properties: A description of the topology, if all agents share it.
    """
    engine, total = agent.engine, mean.numel()
    encoded = None if compressor is None else encoded_for(operation, mean.view(-1), compressor, agent.rank)
    share = engine.publish(operation, mean) if encoded is None else engine.keep_unpublished(operation, encoded.numbers)
    sources = {speakers[machine]: weight for machine, weight in mixing.sources.items()}
    sends = [
        Send(speakers[machine], share, 0, total, (total,), scale) for machine, scale in mixing.destinations.items()
    ]
    if encoded is not None:
        # With its digest: two machines with different compressors would decode each other's bytes to other numbers.
        sends, digest = encoded.published(engine, operation, sends), digest ^ encoded.digest
    arrived = yield Exchange(
        rotated(sends, agent),
        list(sources),
        mean.dtype if encoded is None else None,
        (total,) if encoded is None else None,
        checked=checked,
        digest=digest,
        digest_of="shape, machine topology or compression",
        stage=stage,
        carried=BackendRequest(properties=properties, confirm=not properties) if stage is None else None,
    )
    payloads = [payload(arrived, rank) for rank in sources]
    if encoded is not None:
        payloads = yield from encoded.decoded(operation, agent, [(rank, arrived[rank]) for rank in sources])
    weights = [weight * arrived[rank].scale for rank, weight in sources.items()]
    mixed = engine.result_memory((total,), mean.dtype)
    yield from weighted_sum(mixed, share.data, [mixing.self_weight, *weights], payloads)
    # What the message leaves out stays with this machine. Without it the mean over the machines would change in each
    # round.
    if encoded is not None and encoded.rest is not None:
        mixed.add_(encoded.rest)
    return mixed


def _by_leaders(
    agent: Agent,
    operation: Operation,
    tensor: torch.Tensor,
    mixing: Mixing,
    static: StaticTopology | None,
    compressor: Compressor | None,
    out: torch.Tensor | None,
    layout: int,
) -> Steps[torch.Tensor]:
    """The same if agents are lost and machines have no counterparts any more: the first agent of each machine exchanges
    the machine's whole mean. A machine without agents is treated as a lost agent of a topology.
    """
    engine, machines = agent.engine, agent.machines
    groups = [operation.left_of(machines.ranks(machine)) for machine in range(machines.count)]
    # A machine of which one agent is left still counts as a whole; its mean is over the agents that it has.
    lost = tuple(machine for machine, ranks in enumerate(groups) if not ranks)
    here = static.without(lost).mixing if static is not None else mixing.without(lost)
    group, shape = groups[agent.machine_rank], tuple(tensor.shape)
    mean = yield from reduced(agent, operation, tensor, "average", group, None, False, layout)
    result = Result(agent, out, tensor, shape)
    # The stage has a fixed number: a leader passes one stage more, between machines, which the other agents of its
    # machine do not see.
    if agent.rank != group[0]:
        arrived = yield Exchange([], [group[0]], tensor.dtype, shape, stage=_FROM_LEADER)
        yield from complete([payload(arrived, group[0])])
        copy(result.flat, payload(arrived, group[0]).data)
        return result.finish()
    # -1 is never used: the mixing has no edge to a machine without agents.
    leaders = [ranks[0] if ranks else -1 for ranks in groups]
    # With the machine topology: leaders that differ in it would give a wrong average without an error.
    digest = shape_digest(shape) ^ (static.digest if static is not None else 0) ^ layout
    mixed = yield from _mixed(agent, operation, mean, here, leaders, compressor, digest=digest, stage=_BETWEEN_LEADERS)
    published = engine.publish(operation, mixed)
    yield Exchange([Send(rank, published, 0, mixed.numel(), shape) for rank in group[1:]], [], stage=_FROM_LEADER)
    copy(result.flat, mixed)
    return result.finish()
