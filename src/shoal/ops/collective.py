"""Operations over all agents, or all of a machine, built on the same exchange and matched by name in any order.

The algorithm of an all-reduce depends on its size (``reduction.py``); the order of the sum does not
(``arithmetic.py``), so every agent has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..arithmetic import complete
from ..engine.discovery import discover, submit_to_all
from ..errors import PeerLost
from ..execution.operation import FusionSpec, Handle, Operation
from ..execution.stage import BackendRequest, Exchange, Send, Steps
from ..kernels.sums import REDUCTIONS, copy
from ..runtime.agent import Agent, current
from ..topology._validate import check_rank
from ..transport.messages import DTYPES, MOVABLE, Kind, Message, Payload
from .arguments import (
    ALL,
    LAYOUT,
    WEIGHABLE,
    CallerGroup,
    Group,
    Result,
    caller_group,
    check_dense,
    check_gatherable,
    check_out,
    check_tensor,
    detached,
    joined,
    on_device_of,
    payload,
    rotated,
    warn_of_lost_graph,
)
from .backend_ops import broadcast_by_backend
from .backend_ops import members as members_of
from .fused_ops import AllreduceFamily, copied, is_small
from .reduction import reduced


def allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
    *,
    op: str | None = None,
    out: torch.Tensor | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """The sum, average, minimum, maximum or product over all agents, in rank order; the same bits on every agent.

    Over several machines with as many agents each, numbers of more than 16 bits are reduced on each machine and then
    between them: each NIC then carries large tensors once, and not once for each agent.

    Args:
        tensor: Any supported dtype for sum, min, max and product (min and max not complex); floating or complex for
            the average. Equal shape and dtype on all agents. It is not changed.
        average: Average (True) or sum (False); ``op`` has more choices.
        is_hierarchical_local: Over the agents of this machine only.
        name: Matches the calls of different agents; unnamed calls match by their order.
        op: ``"average"``, ``"sum"``, ``"min"``, ``"max"`` or ``"product"``, instead of ``average``.
        out: Takes the result; it may be ``tensor`` itself.
        group: Over these ranks only, and only they call it: a list, or a process group of ``torch.distributed``.
        timeout: Seconds until the deadline.

    Returns:
        A tensor of the same shape and dtype (``out`` if given). It is detached: no gradient flows back from it, and a
        tensor that requires grad is warned about once. :func:`shoal.autograd.allreduce` has a gradient.
    """
    how, agent, among, members = _reduction_of(average, op, is_hierarchical_local, group)
    return submit_allreduce(agent, tensor, how, name, among, members=members, out=out, timeout=timeout).wait()


def allreduce_nonblocking(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
    *,
    op: str | None = None,
    out: torch.Tensor | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> Handle[torch.Tensor]:
    """:func:`shoal.allreduce` without waiting.

    Small tensors that are submitted one after another, and reduced in the same way, are sent together.
    """
    how, agent, among, members = _reduction_of(average, op, is_hierarchical_local, group)
    return submit_allreduce(agent, tensor, how, name, among, members=members, out=out, timeout=timeout, fusible=True)


def _reduction_of(
    average: bool, op: str | None, is_hierarchical_local: bool, group: Group | None
) -> tuple[str, Agent, Sequence[int] | None, CallerGroup]:
    """The reduction that the arguments of a call request, the ranks it reduces over, and its callers."""
    agent = current("allreduce")
    how = op if op is not None else ("average" if average else "sum")
    if is_hierarchical_local and group is not None:
        raise ValueError("allreduce: is_hierarchical_local=True is a group of its own; leave one of the two out")
    among = agent.local_ranks if is_hierarchical_local else None
    return how, agent, among, caller_group("allreduce", group, agent)


def submit_allreduce(
    agent: Agent,
    tensor: torch.Tensor,
    how: str,
    name: str | None = None,
    among: Sequence[int] | None = None,
    *,
    members: CallerGroup = ALL,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
    zero_copy: bool = False,
    layout: int = 0,
    fusible: bool = False,
) -> Handle[torch.Tensor]:
    """Start an all-reduce, for the public functions and the optimizers.

    Args:
        agent: The calling agent.
        tensor, name, out, timeout: As for :func:`allreduce`; ``how`` is its ``op``.
        among: Over these ranks, which include this agent; all if not given. All agents call it, and the ranks of
            ``among`` all pass the same ``among``.
        members: The callers.
        zero_copy: Others read ``tensor`` in place, where they can: see :meth:`Publisher.publish`.
        layout: Digest of the joined tensors, if it is made of several.
        fusible: A small tensor may wait for others, to be sent with them.
    """
    tensor = check_tensor(f"allreduce with op {how}", tensor, reducible(how), detach=out is not None)
    if out is not None:
        check_out("allreduce", out, tensor.shape, tensor.dtype)
    engine = agent.engine
    is_fused = fusible and engine.can_fuse_multistage and not layout and is_small(tensor)
    if is_fused:
        # The caller may change its tensor when the call returns; a fused call is read later, when a thread drives.
        tensor = copied(tensor)

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        # From the operation and not from this agent's own view of the members: all agents have agreed on it, so each
        # number has one owner.
        group = operation.callers(agent.size) if among is None else operation.left_of(among)
        return reduced(agent, operation, tensor, how, group, out, zero_copy, layout)

    def take(reduction: torch.Tensor) -> torch.Tensor:
        result = Result(agent, out, tensor, tuple(tensor.shape))
        result.flat.copy_(reduction.view(-1))
        return result.finish()

    kind = f"allreduce ({how}{'' if among is None else ', within the machine'})"
    channel, named = members.channel("allreduce", name), name is not None
    # With ``among`` there are several results, and a finished agent may not have the one that another lacks.
    taken = take if among is None and members is ALL else None
    begins: Callable[[Operation], Steps[torch.Tensor]] | FusionSpec = steps
    if is_fused:
        whole = tuple(members.ranks or range(agent.size) if among is None else among)
        begins = FusionSpec(tensor.view(-1), tuple(tensor.shape), out, steps, AllreduceFamily(agent, how, whole))
    return submit_to_all(engine, kind, channel, begins, timeout, named, taken, among=members.ranks)


def reducible(how: str) -> tuple[torch.dtype, ...]:
    """The dtypes of which there is such a reduction.

    Raises:
        ValueError: There is none.
    """
    if how not in REDUCTIONS:
        raise ValueError(f"allreduce: op={how!r}; it may be one of {', '.join(REDUCTIONS)}")
    if how in ("min", "max"):
        return tuple(dtype for dtype in DTYPES if not dtype.is_complex)
    return WEIGHABLE if how == "average" else DTYPES


def allreduce_(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
    *,
    op: str | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """:func:`allreduce` in place: ``tensor`` takes the result and is returned."""
    return allreduce_nonblocking_(
        tensor, average, is_hierarchical_local, name, op=op, group=group, timeout=timeout
    ).wait()


def allreduce_nonblocking_(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
    *,
    op: str | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> Handle[torch.Tensor]:
    """:func:`shoal.allreduce_` without waiting; ``tensor`` must not be touched until then."""
    out = _memory_of("allreduce", tensor)
    return allreduce_nonblocking(
        out, average, is_hierarchical_local, name, op=op, out=out, group=group, timeout=timeout
    )


def _memory_of(op: str, tensor: torch.Tensor) -> torch.Tensor:
    """The memory to which an in-place operation writes: the tensor without its graph, with a warning if it has one. A
    parameter has no graph to lose.
    """
    out = check_dense(op, tensor).detach()
    if tensor.grad_fn is not None:
        warn_of_lost_graph(op)
    return out


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    *,
    out: torch.Tensor | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """The tensor of ``root_rank``, on every agent.

    It is sent along a binomial tree: ``ceil(log2(n))`` steps, and each agent sends to as many others at most. The
    result is detached; :func:`shoal.autograd.broadcast` has a gradient.

    Args:
        tensor: Any dtype. On the other agents it only gives shape and dtype, which must equal the root's.
        root_rank: The rank whose tensor is sent; the same on all agents.
        name: Matches the calls of different agents; unnamed calls match by their order.
        out: Takes the result; it may be ``tensor`` itself.
        group: Among these ranks only, which include the root; as for :func:`allreduce`.
        timeout: Seconds until the deadline.
    """
    return broadcast_nonblocking(tensor, root_rank, name, out=out, group=group, timeout=timeout).wait()


def broadcast_nonblocking(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    *,
    out: torch.Tensor | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> Handle[torch.Tensor]:
    """:func:`shoal.broadcast` without waiting."""
    agent = current("broadcast")
    tensor = check_tensor("broadcast", tensor if out is None else detached(tensor), MOVABLE)
    root_rank, members = as_root("broadcast", root_rank, agent), caller_group("broadcast", group, agent)
    members.check("broadcast", "root_rank", [root_rank])
    check_out("broadcast", out, tensor.shape, tensor.dtype)

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        data = yield from broadcast_steps(agent, operation, tensor, root_rank, tensor.dtype, tuple(tensor.shape))
        result = Result(agent, out, tensor, tuple(tensor.shape))
        copy(result.flat, data)
        return result.finish()

    channel, named = members.channel("broadcast", name), name is not None
    return submit_to_all(agent.engine, "broadcast", channel, steps, timeout, named, among=members.ranks)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    *,
    group: Group | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """:func:`broadcast` in place: ``tensor`` takes the result and is returned."""
    return broadcast_nonblocking_(tensor, root_rank, name, group=group, timeout=timeout).wait()


def broadcast_nonblocking_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    *,
    group: Group | None = None,
    timeout: float | None = None,
) -> Handle[torch.Tensor]:
    """:func:`shoal.broadcast_` without waiting; ``tensor`` must not be touched until then."""
    out = _memory_of("broadcast", tensor)
    return broadcast_nonblocking(out, root_rank, name, out=out, group=group, timeout=timeout)


def as_root(op: str, root_rank: object, agent: Agent) -> int:
    """The root of a call. An agent that waits to enter is alone, and its own."""
    size = agent.size
    try:
        root = check_rank(root_rank, size)
    except (TypeError, ValueError):
        raise ValueError(
            f"{op}: root_rank={root_rank!r} is no rank; there are {size} agents, 0 to {size - 1}"
        ) from None
    return agent.rank if agent.engine.is_joining else root


def broadcast_steps(
    agent: Agent,
    operation: Operation,
    tensor: torch.Tensor | None,
    root: int,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    layout: int = 0,
) -> Steps[torch.Tensor]:
    """The root's tensor, flat, from this agent's parent in a binomial tree, and passed on to its children.

    Every parent waits until its children confirm, so that agents with different roots find out.
    """
    group = operation.callers(agent.size)
    # All agents have the same group, so all raise here, and none waits for a parent that waits for the root.
    if root not in group:
        raise PeerLost(f"{operation} on rank {agent.rank}: its root, rank {root}, is gone", (root,))
    size, first = len(group), group.index(root)
    relative = (group.index(agent.rank) - first) % size
    if agent.engine.backend is not None and dtype is not None and shape is not None and size > 1:
        return (yield from broadcast_by_backend(agent, operation, tensor, root, dtype, shape, tuple(group), layout))
    digest, digest_of = root ^ layout, "root rank" + (f" or {LAYOUT}" if layout else "")
    # Agents at different depths pass different numbers of stages. A parent sends in the stage after its own, which is
    # the depth of its children.
    depth = relative.bit_count()
    lowest = relative & -relative if relative else 1 << (size - 1).bit_length()
    if relative:
        parent = group[(relative - lowest + first) % size]
        arrived = yield Exchange([], [parent], dtype, shape, digest=digest, digest_of=digest_of, stage=depth)
        yield from complete([payload(arrived, parent)])
        shape = arrived[parent].shape
        data = payload(arrived, parent).data.view(shape)
    else:
        assert tensor is not None
        data, shape = tensor, tuple(tensor.shape)
    published = agent.engine.publish(operation, data)
    children = []
    # The child with the most descendants first: its part of the tree is the deepest.
    step = lowest >> 1
    while step:
        if relative + step < size:
            children.append(group[(relative + step + first) % size])
        step >>= 1
    sends = [Send(child, published, 0, published.data.numel(), shape) for child in children]
    yield Exchange(sends, [], dtype, shape, checked=True, digest=digest, digest_of=digest_of, stage=depth + 1)
    return published.data


def allgather(
    tensor: torch.Tensor, name: str | None = None, *, group: Group | None = None, timeout: float | None = None
) -> torch.Tensor:
    """The tensors of all agents, joined along dimension 0 in rank order.

    The result is detached; :func:`shoal.autograd.allgather` has a gradient.

    Args:
        tensor: Any dtype, at least one dimension. The first dimension may differ between agents, the others not.
        name: Matches the calls of different agents; unnamed calls match by their order.
        group: The tensors of these ranks only; as for :func:`allreduce`.
        timeout: Seconds until the deadline.
    """
    return allgather_nonblocking(tensor, name, group=group, timeout=timeout).wait()


def allgather_nonblocking(
    tensor: torch.Tensor, name: str | None = None, *, group: Group | None = None, timeout: float | None = None
) -> Handle[torch.Tensor]:
    """:func:`shoal.allgather` without waiting."""
    agent = current("allgather")
    tensor = check_gatherable("allgather", tensor)

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        parts = yield from parts_of_all(agent, operation, tensor, rest=tuple(tensor.shape[1:]))
        return (yield from joined(agent, tensor, parts))

    def take(everything: torch.Tensor) -> torch.Tensor:
        return on_device_of(tensor, everything)

    members = caller_group("allgather", group, agent)
    channel, named, taken = members.channel("allgather", name), name is not None, take if members is ALL else None
    return submit_to_all(agent.engine, "allgather", channel, steps, timeout, named, taken, among=members.ranks)


def gather_by_rank(
    tensor: torch.Tensor,
    name: str | None,
    *,
    group: Group | None = None,
    timeout: float | None = None,
    by_links: bool = False,
) -> dict[int, torch.Tensor]:
    """The tensors of all present agents, by rank, ascending: for Shoal's internal calls. All agents get the same.

    Args:
        tensor: Any dtype, at least one dimension; shapes may differ between agents.
        name: Matches the calls of different agents; unnamed calls match by their order.
        group: The tensors of these ranks only.
        timeout: Seconds until the deadline.
        by_links: Over links, even if there is a backend.
    """
    agent = current("allgather")
    members = caller_group("allgather", group, agent)
    tensor = check_gatherable("allgather", tensor)

    def steps(operation: Operation) -> Steps[dict[int, torch.Tensor]]:
        parts = yield from complete_parts_of_all(agent, operation, tensor, by_links=by_links)
        # A copy: the numbers may lie in the sender's memory, which it uses again after the operation.
        return {rank: part.clone() for rank, part in parts.items()}

    channel, named = members.channel("allgather", name), name is not None
    return submit_to_all(agent.engine, "allgather", channel, steps, timeout, named, among=members.ranks).wait()


def parts_of_all(
    agent: Agent,
    operation: Operation,
    tensor: torch.Tensor,
    *,
    rest: tuple[int, ...] | None = None,
    by_links: bool = False,
) -> Steps[list[tuple[int, Message]]]:
    """The messages of all agents, by rank, including this agent's own. Their bytes may follow.

    ``rest``: the dimensions after the first, if they must not differ; ``by_links``: whatever carries tensors.
    """
    published = agent.engine.publish(operation, tensor)
    shape, total = tuple(tensor.shape), published.data.numel()
    group = operation.callers(agent.size)
    others = [rank for rank in group if rank != agent.rank]
    sends = rotated([Send(rank, published, 0, total, shape) for rank in others], agent)
    carried = None if by_links else BackendRequest(members_of(agent, operation, group))
    arrived = yield Exchange(sends, others, tensor.dtype, rest=rest, carried=carried)
    own = Message(Kind.DATA, dtype=tensor.dtype, shape=shape, payload=Payload(published.data, total))
    return [(rank, own if rank == agent.rank else arrived[rank]) for rank in group]


def complete_parts_of_all(
    agent: Agent, operation: Operation, tensor: torch.Tensor, *, by_links: bool = False
) -> Steps[dict[int, torch.Tensor]]:
    """The tensors of all agents, by rank, ascending. They may lie in the senders' memory."""
    parts = yield from parts_of_all(agent, operation, tensor, by_links=by_links)
    payloads = {rank: message.payload for rank, message in parts if message.payload is not None}
    yield from complete(list(payloads.values()))
    return {rank: payloads[rank].data.view(message.shape) for rank, message in parts}


def barrier(name: str | None = None, *, group: Group | None = None, timeout: float | None = None) -> None:
    """Return when all agents have called it, or all of a ``group``. ``ceil(log2(n))`` small messages for each agent."""
    agent = current("barrier")

    def steps(operation: Operation) -> Steps[None]:
        # With nobody named it is a dissemination: after its stages each agent has a message that depends on all the
        # others' calls.
        yield from discover(agent.engine, operation, ())

    members = caller_group("barrier", group, agent)
    channel, named, take = members.channel("barrier", name), name is not None, None if members.ranks else lambda _: None
    submit_to_all(agent.engine, "barrier", channel, steps, timeout, named, take, among=members.ranks).wait()
