"""Partial averaging and gathering with neighbours: the operations on which the rest of Shoal builds.

``neighbor_allreduce`` computes equation 10 of the BlueFog paper (arXiv:2111.04287),

    x_i  <-  w_ii x_i + sum over sources j of r_ij s_ij x_j,

where the receiver i gives the r_ij and the sender j the s_ij. The messages of a round depend on which side of an edge
knows of it. On the static topology both sides do, and in push-pull both name each other: one message for each edge. In
pure push only the sender knows, in pure pull only the receiver: :func:`~shoal.engine.discovery.discover` informs the
other side.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping

import torch

from ..arithmetic import complete, weighted_sum
from ..compression import Compressor
from ..engine.discovery import discover
from ..execution.devices import PublishedOnDevice
from ..execution.operation import FailurePolicy, FusionSpec, Handle, Operation
from ..execution.stage import NOTHING, Arrived, BackendRequest, Exchange, Send, Steps
from ..runtime.agent import Agent, current
from ..topology import Mixing
from .arguments import (
    ALL,
    LAYOUT,
    WEIGHABLE,
    CallerGroup,
    Group,
    Result,
    caller_group,
    channel_name,
    check_out,
    check_tensor,
    payload,
    rotated,
    split_name,
)
from .device_ops import average as on_its_device
from .encoded import Encoded, encoded_by_call
from .fused_ops import copied, is_small
from .robust_rules import Robust, check_neighbours
from .round_plan import FORMS, AgentEdges, plan_of, submit_planned

OP = "neighbor_allreduce"
Weights = Mapping[int, float]
_MAY_BE_SILENT = 2
"""Beside the form, in the digest: a receiver that expects a tensor from each source takes no silent one for zeros."""


def neighbor_allreduce(
    tensor: torch.Tensor,
    self_weight: float | str | None = None,
    src_weights: Weights | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    *,
    enable_topo_check: bool = True,
    robust: Robust | None = None,
    compression: Compressor | None = None,
    name: str | None = None,
    out: torch.Tensor | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """The weighted average of this agent's tensor and its neighbours'.

    ========================================= =====================================================================
    arguments                                 what is computed on agent i
    ========================================= =====================================================================
    none                                      the static topology: its weights, or uniform ones
    ``self_weight, src_weights``              pull: ``self_weight x_i + sum src_weights[j] x_j``
    ``self_weight, dst_weights``              push: ``self_weight x_i + sum over all j that push to i of s_ij x_j``
    ``self_weight, src_weights, dst_weights`` push-pull: ``self_weight x_i + sum src_weights[j] s_ij x_j``
    ========================================= =====================================================================

    Sources and destinations may be any ranks, also beyond the static topology.

    Messages of each agent: one for each edge; in push-pull a few more bytes that confirm it. In pure push and pure pull
    sender discovery comes first, ``ceil(log2(n))`` small messages. With ``enable_topo_check=False`` the caller vouches
    for the edges: push-pull does not confirm, and pure push and pull stay within the static topology, where each
    neighbour gets the tensor or only a header that announces no tensor in this round.

    Args:
        tensor: float16, bfloat16, float32, float64 or complex, any shape, any strides; equal shape and dtype on all
            agents of an edge. It is not changed. 16-bit sums are taken in float32. Terms that all weigh 1 / k are
            summed and the sum is divided by k, rounded once: the mean of whole numbers is exact where it is whole; that
            of k equal values is that value but for the rounding of the sum, and infinite where the sum is (unless k is
            a power of two).
        self_weight: w_ii. A string here is the ``name``, as the BlueFog paper writes it.
        src_weights: ``{source: r_ij}``.
        dst_weights: ``{destination: s_ji}``, or a list of destinations for weights of 1.
        enable_topo_check: Confirm on each edge that both sides know of it (see above).
        robust: A rule of :mod:`shoal.robust` that replaces the weighted average, for faulty neighbours: ``FiniteOnly``,
            or with three neighbours in a round ``ClippedGossip``, ``TrimmedMean``. Agents' may differ.
        compression: Between machines a :mod:`message <shoal.compression>` is sent instead of the tensor, and the result
            is ``x_i - C(x_i) + w_ii C(x_i) + sum r_ij s_ij C(x_j)``: the part that a message leaves out stays with its
            agent, so weights whose columns sum to 1 preserve the mean. Within a machine tensors are read in place, with
            the same result bit for bit. Repeated calls with a coarse compressor do not bring agents to their mean; use
            :class:`~shoal.algorithms.ChocoSGD` for that. The same on all agents.
        name: Matches the calls of different agents. Unnamed calls match by their order.
        out: Takes the result; it may be ``tensor`` itself.
        group: Among these ranks only, and only they call it: a list, or a process group of ``torch.distributed``. The
            static topology is then used as if the others were lost (see :class:`~shoal.topology.Without`). Given ranks
            must be in the group.
        timeout: Seconds until the deadline; ``SHOAL_TIMEOUT`` (300) if not given.

    Returns:
        A tensor of the same shape and dtype (``out`` if given). It is detached: no gradient flows back from it, and a
        tensor that requires grad is warned about once. :func:`shoal.autograd.neighbor_allreduce` has a gradient.

    Raises:
        TypeError, ValueError: The arguments are wrong; nothing has been sent (but in a push too few for ``robust``).
        Mismatch: Agents disagree on shape, dtype, operation, topology, or on senders and receivers.
        PeerLost, DeadlineExceeded: Agents are gone, or did not call in time.
    """
    weights = self_weight, src_weights, dst_weights
    return _begin(
        tensor, *weights, enable_topo_check, robust, compression, name, out, group, timeout, fusible=False
    ).wait()


def neighbor_allreduce_nonblocking(
    tensor: torch.Tensor,
    self_weight: float | str | None = None,
    src_weights: Weights | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    *,
    enable_topo_check: bool = True,
    robust: Robust | None = None,
    compression: Compressor | None = None,
    name: str | None = None,
    out: torch.Tensor | None = None,
    group: Group | None = None,
    timeout: float | None = None,
) -> Handle[torch.Tensor]:
    """:func:`shoal.neighbor_allreduce` without waiting: ``handle.wait()`` returns the result.

    The tensor is copied now, so it may change before the wait. ``out`` must not be touched until then. Small tensors
    that are submitted one after another are sent together: those on the static topology, and else those of calls with
    the same weights.
    """
    weights = self_weight, src_weights, dst_weights
    return _begin(tensor, *weights, enable_topo_check, robust, compression, name, out, group, timeout, fusible=True)


def _begin(
    tensor: torch.Tensor,
    self_weight: float | str | None,
    src_weights: Weights | None,
    dst_weights: Weights | Iterable[int] | None,
    checked: bool,
    robust: Robust | None,
    compression: Compressor | None,
    name: str | None,
    out: torch.Tensor | None,
    group: Group | None,
    timeout: float | None,
    fusible: bool,
) -> Handle[torch.Tensor]:
    """Start the average that the arguments of a call describe; see :func:`neighbor_allreduce`."""
    agent = current(OP)
    self_weight, name = split_name(OP, self_weight, name)
    mixing, form = mixing_of(agent, self_weight, src_weights, dst_weights)
    return submit(
        agent,
        tensor,
        mixing,
        form,
        name,
        checked=checked,
        out=out,
        timeout=timeout,
        fusible=fusible,
        robust=robust,
        encoded=None if compression is None else encoded_by_call(OP, tensor, compression, agent.rank),
        everybody=False,
        members=caller_group(OP, group, agent),
    )


def submit(
    agent: Agent,
    tensor: torch.Tensor,
    mixing: Mixing | None,
    form: str = "push-pull",
    name: str | None = None,
    *,
    checked: bool = False,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
    zero_copy: bool = False,
    fusible: bool = True,
    replan: Callable[[tuple[int, ...]], Mixing] | None = None,
    robust: Robust | None = None,
    encoded: Callable[[Operation], Encoded] | None = None,
    speaks: bool | None = None,
    layout: int = 0,
    everybody: bool = True,
    members: CallerGroup = ALL,
) -> Handle[torch.Tensor]:
    """Start a weighted average over a given round, for the public functions, optimizers and algorithms.

    Args:
        agent: The calling agent.
        tensor, name, out, timeout: As for :func:`neighbor_allreduce`.
        mixing: The round as this agent knows it; None: the static topology.
        form: The side that knows the edges of ``mixing``: the source (``"push"``), the destination (``"pull"``), both
            (``"push-pull"``).
        checked: As ``enable_topo_check``; False if all agents follow the same schedule.
        zero_copy: Others read ``tensor`` in place, where they can: see :meth:`Publisher.publish`.
        fusible: A small tensor may wait for others of the same round, to be sent with them.
        replan: Returns the same round without lost agents, for a call that begins after a loss. If not given, this
            agent's own tensor takes the weights of the lost ones; on a directed graph that biases the mean.
        robust: As for :func:`neighbor_allreduce`.
        encoded: Makes the compressed form that is sent, if not the tensor itself.
        speaks: None: every agent sends its tensor. Otherwise an agent may send only a header, which counts as zeros:
            True if this agent sends its tensor in this round, False if only the header. All agents pass None, or none
            does.
        layout: Digest of the joined tensors, if it is made of several.
        everybody: All agents call it, whatever their edges; else only agents that name each other, in push-pull.
        members: The callers; they include the ranks of a given round.
    """
    tensor = check_tensor(OP, tensor, WEIGHABLE, detach=out is not None)
    if out is not None:
        check_out(OP, out, tensor.shape, tensor.dtype)
    engine = agent.engine
    plan = plan_of(agent, OP, name, mixing, form, checked, everybody, members)
    if robust is not None:
        if not isinstance(robust, Robust):
            raise TypeError(f"{OP}: robust={robust!r} is no rule; take one of shoal.robust, such as FiniteOnly()")
        whole = plan.form == "static" or replan is not None
        check_neighbours(agent, robust, plan.sources(agent), whole=whole)
    is_fused = fusible and plan.family is not None and is_small(tensor)
    if is_fused:
        # A fused call is a plain weighted sum over whole tensors, in one message. It could follow no rule, compressor
        # or silence of one of its members.
        plain = robust is None and encoded is None and speaks is None and not layout
        is_fused = plain and (engine.can_fuse_multistage if plan.in_stages else engine.can_fuse)
    if is_fused:
        # The caller may change its tensor when the call returns; a fused call is read later, when a thread drives.
        tensor = copied(tensor)

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        return mix_steps(
            agent,
            operation,
            tensor,
            plan.edges(agent, operation, replan),
            out,
            checked=checked,
            zero_copy=zero_copy,
            robust=robust,
            encoded=None if encoded is None else encoded(operation),
            speaks=speaks,
            layout=layout,
        )

    begins: Callable[[Operation], Steps[torch.Tensor]] | FusionSpec = steps
    if is_fused:
        assert plan.family is not None
        begins = FusionSpec(tensor.view(-1), tuple(tensor.shape), out, steps, plan.family)
    return submit_planned(agent, OP, plan, begins, timeout, name is not None, members.ranks)


def mixing_of(
    agent: Agent,
    self_weight: float | None,
    src_weights: Weights | None,
    dst_weights: Weights | Iterable[int] | None,
) -> tuple[Mixing | None, str]:
    """The round that the arguments of a call describe, checked, and its form; None if it is the static topology's.

    Raises:
        TypeError, ValueError: The weights are incomplete, or name an invalid rank or weight.
    """
    if self_weight is None and src_weights is None and dst_weights is None:
        return None, "static"
    if self_weight is None or (src_weights is None and dst_weights is None):
        raise ValueError(
            f"{OP}: give self_weight together with src_weights (pull), dst_weights (push) or both, or none of the "
            f"three (the static topology); got self_weight={self_weight}, src_weights={src_weights}, "
            f"dst_weights={dst_weights}"
        )
    if src_weights is not None and not isinstance(src_weights, Mapping):
        raise TypeError(f"{OP}: src_weights must be a dict {{rank: weight}}, not {type(src_weights).__name__}")
    if isinstance(dst_weights, str) or not isinstance(dst_weights, (Iterable, type(None))):
        raise TypeError(f"{OP}: dst_weights must be a dict {{rank: weight}} or a list of ranks, not {dst_weights!r}")
    form = "pull" if dst_weights is None else "push" if src_weights is None else "push-pull"
    sources = () if src_weights is None else src_weights
    destinations = () if dst_weights is None else dst_weights  # an array of rank 0 alone is as good as none to ``or``
    return Mixing(agent.rank, self_weight, sources, destinations, size=agent.size), form


def mix_steps(
    agent: Agent,
    operation: Operation,
    tensor: torch.Tensor,
    edges: AgentEdges,
    out: torch.Tensor | None,
    *,
    checked: bool = False,
    zero_copy: bool = False,
    robust: Robust | None = None,
    encoded: Encoded | None = None,
    speaks: bool | None = None,
    layout: int = 0,
) -> Steps[torch.Tensor]:
    """The steps of a weighted average over known edges; the other arguments are those of :func:`submit`."""
    engine, silent, callers = agent.engine, speaks is False, tensor
    backend = engine.backend
    if encoded is not None:
        tensor = encoded.numbers
    given = tensor.new_empty(0) if silent else tensor
    if encoded is None:
        on_device = robust is None and backend is None
        published = engine.publish(operation, given, zero_copy=zero_copy, on_device=on_device)
    else:  # others may read only the message, which is made when the destinations are known
        published = engine.keep_unpublished(operation, given)
    own_data = torch.zeros(tensor.numel(), dtype=tensor.dtype, device="cpu") if silent else published.data
    shape, total = tuple(tensor.shape), own_data.numel()
    mixing, form, static = edges.mixing, edges.form, edges.static.mixing
    sources, destinations = mixing.sources, edges.destinations
    nothing: list[int] = []
    if form == "push":
        found = yield from discover(engine, operation, mixing.destinations)
        # Only the sender of a push knows the weight: it is the scale of its message.
        sources = dict.fromkeys(found, 1.0)
    elif form == "pull":
        found = yield from discover(engine, operation, sources)
        # Only the receiver of a pull knows the weight, so the tensor leaves unscaled.
        destinations = dict.fromkeys(found, 1.0)
    elif form == "push within":
        sources = dict.fromkeys(operation.left_of(static.source_ranks), 1.0)
        # Each static out-neighbour waits for a message of this round. One that gets no tensor gets a header, or it
        # would wait until its deadline.
        nothing = [rank for rank in operation.left_of(static.destination_ranks) if rank not in destinations]
    elif form == "pull within":
        destinations = yield from _readers(agent, operation, static, sources)

    digest, digest_of = edges.digest, "topology, form, compression or place in its step"
    # The receivers still wait for one message from each source, so a silent agent sends them headers.
    if silent:
        nothing, destinations = [*destinations], {}
    # A receiver that expects a tensor from each source would take a silent one for zeros: the digests differ, which is
    # a Mismatch.
    if speaks is not None:
        digest ^= _MAY_BE_SILENT
    if layout:
        digest, digest_of = digest ^ layout, f"{digest_of}, or {LAYOUT}"
    sends = [Send(rank, published, 0, total, shape, weight) for rank, weight in destinations.items()]
    if encoded is not None:
        sends = encoded.published(engine, operation, sends)
        digest, digest_of = digest ^ encoded.digest, "topology, form, compression, shape or dtype"
    if nothing:
        # NaN is the mark of a header without a tensor: 0 is a weight that a tensor may have.
        sends += [Send(rank, published, 0, 0, (0,), NOTHING) for rank in nothing]
    # The destinations of a plan are in this order already; those found in this round are ascending. Unrotated, all
    # agents would send to rank 0 first.
    if nothing or form in ("pull", "pull within"):
        sends = rotated(sends, agent)
    carried = None
    if backend is not None:
        properties = f"topology {digest:08x}" if form in FORMS else ""
        carried = BackendRequest(edges.among, properties=properties, confirm=form == "push-pull")
    if isinstance(published, PublishedOnDevice):
        # Before the headers leave: a neighbour reads the device's memory as soon as it has one, and the copy may still
        # be queued.
        yield from published.written()
    arrived = yield Exchange(
        sends,
        list(sources),
        tensor.dtype if encoded is None else None,
        shape if encoded is None else None,
        checked=checked and form == "push-pull",
        digest=digest,
        digest_of=digest_of,
        carried=carried,
        on_device=not callers.is_cpu,
    )
    own = mixing.self_weight
    # Not in a push within the static topology: only the sender knows whether it sends here, and with which weight.
    if len(arrived) < len(sources) and form != "push within":
        # The weights of lost sources are added to this agent's own weight; but the values that they would have sent are
        # lost.
        own += sum(weight for rank, weight in sources.items() if rank not in arrived)
    # In this order the sum is taken on every transport and for every fusion. Another one would change the last bits.
    there, weights = [], []
    for rank, weight in sources.items():  # ascending, as in every Mixing
        message = arrived.get(rank)
        if message is not None and not message.nothing:
            there.append((rank, message))
            weights.append(weight * message.scale)
    if isinstance(published, PublishedOnDevice):
        return (yield from on_its_device(agent, published, out, shape, own, there, weights))
    result = Result(agent, out, callers, shape)
    if encoded is not None:
        payloads = yield from encoded.decoded(operation, agent, there)
    else:
        payloads = [payload(arrived, rank) for rank, _ in there]
    if robust is None:
        yield from weighted_sum(result.flat, own_data, [own, *weights], payloads)
    else:  # it has to look at all of a tensor first
        # They are known only now in a push, and after losses.
        check_neighbours(agent, robust, [rank for rank, _ in there], whole=False)
        yield from complete(payloads)
        theirs = [
            (rank, received.data, weight) for (rank, _), received, weight in zip(there, payloads, weights, strict=True)
        ]
        robust.combine(agent.rank, result.flat, published.data, own, theirs)
    # What the message leaves out stays with its agent. Without it the mean over all agents would change in each round.
    if encoded is not None and encoded.rest is not None:
        result.flat.add_(encoded.rest)
    return result.finish()


def _readers(
    agent: Agent, operation: Operation, static: Mixing, sources: Iterable[int]
) -> Generator[Exchange, Arrived, dict[int, float]]:
    """Tell each static in-neighbour whether this agent will read from it; learn which out-neighbours will read here."""
    wanted = set(sources)
    empty = agent.engine.publish(operation, torch.empty(0, device="cpu"))
    sends = [
        Send(rank, empty, 0, 0, (0,), 1.0 if rank in wanted else NOTHING)
        for rank in operation.left_of(static.source_ranks)
    ]
    arrived = yield Exchange(rotated(sends, agent), operation.left_of(static.destination_ranks), coordinates=True)
    return {rank: 1.0 for rank in sorted(arrived) if not arrived[rank].nothing}


def pair_gossip(
    tensor: torch.Tensor,
    target_rank: int,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
    *,
    timeout: float | None = None,
) -> torch.Tensor:
    """Average with one other agent; only the two take part. The result is detached.

    Both agents of the pair call it with each other's rank. Calls are counted for each pair separately.

    Args:
        tensor: As for :func:`neighbor_allreduce`.
        target_rank: The other agent.
        self_weight, pair_weight: ``self_weight x + pair_weight x_other``; the mean of the two if neither is given.
        name: Matches the calls of the two agents; unnamed calls match by their order.
        timeout: Seconds until the deadline.
    """
    return pair_gossip_nonblocking(tensor, target_rank, self_weight, pair_weight, name, timeout=timeout).wait()


def pair_gossip_nonblocking(
    tensor: torch.Tensor,
    target_rank: int,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
    *,
    timeout: float | None = None,
) -> Handle[torch.Tensor]:
    """:func:`shoal.pair_gossip` without waiting."""
    op = "pair_gossip"
    agent = current(op)
    tensor = check_tensor(op, tensor, WEIGHABLE)
    if (self_weight is None) != (pair_weight is None):
        raise ValueError(f"{op}: give both self_weight and pair_weight, or neither (the mean)")
    own, other = (0.5, 0.5) if self_weight is None or pair_weight is None else (self_weight, pair_weight)
    mixing = Mixing(agent.rank, own, {target_rank: other}, [target_rank], size=agent.size)
    low, high = sorted((agent.rank, int(target_rank)))
    channel = f"{channel_name(op, name)} of ranks {low} and {high}"
    edges = AgentEdges.of(agent, mixing, "push-pull", agent.topology, (low, high))

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        return mix_steps(agent, operation, tensor, edges, None)

    return agent.engine.submit(op, channel, steps, timeout, name is not None, on_loss=FailurePolicy.SKIP_MISSING)
