"""Exact synchronization of whole models, optimizer states and plain objects over all agents."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..dtensors import local, parts_of_state, spread_as
from ..engine.discovery import submit_to_all
from ..errors import Mismatch, NotFinite
from ..execution.operation import Handle, Operation
from ..execution.stage import Steps
from ..runtime.agent import current
from ..transport.messages import MOVABLE
from . import safe_serialization
from .arguments import Group, Internal, as_ranks, caller_group, check_dense, check_out, check_tensor, detached, put
from .collective import allreduce_nonblocking_, as_root, broadcast_nonblocking_, broadcast_steps, gather_by_rank
from .grouped import in_batches

T = TypeVar("T")
Parameters = Mapping[str, torch.Tensor] | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def broadcast_object(
    value: T,
    root_rank: int = 0,
    name: str | None = None,
    *,
    trusted: bool = False,
    group: Group | None = None,
    timeout: float | None = None,
) -> T:
    """The root's object on every agent: plain data and tensors, equal in type and value, in the order it had.

    Plain are None, bool, int, float (NaN and -0.0 too), complex, str, bytes, bytearray, torch's dtype, device and Size,
    and list, tuple, set, frozenset, dict, OrderedDict and Counter of plain data: what the ``state_dict`` of a model, an
    optimizer or a learning rate's schedule holds. A tensor of any dtype arrives on the CPU, even if the root's is on an
    accelerator, a Parameter as one. Tensors that are one in memory (tied weights) arrive as one; other views of one
    memory arrive apart. A tensor's own attributes and its ``grad`` stay behind.

    Plain data is sent as JSON, and tensors as their numbers. No data is unpickled, and no agent allocates more memory
    than the received message needs.

    Args:
        value: The object; ignored on the other agents.
        root_rank: The rank whose object is sent; the same on all agents.
        name: Matches the calls of different agents; unnamed calls match by their order.
        trusted: Send any object that ``torch.save`` can pickle. To read it **runs code that the root's message names**,
            with the rights of this process: set it only if every agent is trusted to run any code here, and set it on
            all agents. If only some set it, the root and the agents that differ from it raise Mismatch. An agent that
            has not set it unpickles nothing.
        group: Among these ranks only, which include the root: a list, or a process group of ``torch.distributed``.
        timeout: Seconds until the deadline.

    Raises:
        TypeError: At the root: a part of the object is not plain (the message names it and its place), such as an
            instance of a subclass, a sparse or quantized tensor. Nothing is sent; pass data from which the others can
            rebuild it.
        ValueError: At the root: more than 100 objects in each other, or one in itself; NaN or a tensor as a key.
        Mismatch: Agents name other roots, or only some set ``trusted``; or the received message is malformed.
    """
    agent = current("broadcast_object")
    root_rank, members = as_root("broadcast_object", root_rank, agent), caller_group("broadcast_object", group, agent)
    members.check("broadcast_object", "root_rank", [root_rank])
    tensor = None
    if agent.rank == root_rank:
        tensor = _pickled(value) if trusted else _written(value)

    def steps(operation: Operation) -> Steps[torch.Tensor]:
        data = yield from broadcast_steps(agent, operation, tensor, root_rank, torch.uint8)
        return data.clone() if agent.rank != root_rank else data

    op = "broadcast_object"
    kind = f"{op} (trusted)" if trusted else op
    channel, named = members.channel(op, name), name is not None
    data = submit_to_all(agent.engine, kind, channel, steps, timeout, named, among=members.ranks).wait()
    if agent.rank == root_rank:
        return value
    try:
        loaded: T = _unpickled(data) if trusted else safe_serialization.read(data)
    except Exception as error:
        raise Mismatch(
            f"{op} on rank {agent.rank}: the data from rank {root_rank} cannot be read: {error}", (root_rank,)
        ) from error
    return loaded


def _written(value: object) -> torch.Tensor:
    try:
        return safe_serialization.write(value)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"broadcast_object sends plain data and tensors, and {error}. Send data from which it can be rebuilt; or, "
            "where all agents may run each other's code, pass trusted=True on all of them"
        ) from None


def _pickled(value: object) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=False)


def _named(op: str, params: Parameters) -> list[tuple[str, torch.Tensor]]:
    """The tensors with a name each: given, or their position."""
    if isinstance(params, torch.nn.Module) or not isinstance(params, Iterable):
        raise TypeError(f"{op} takes model.state_dict() or model.parameters(), not a {type(params).__name__}")
    items: Iterable[Any] = sorted(params.items()) if isinstance(params, Mapping) else params
    named = []
    for position, item in enumerate(items):
        name, tensor = item if isinstance(item, tuple) else (str(position), item)
        if isinstance(tensor, torch.Tensor):
            named.append((str(name), check_dense(op, local(tensor))))
        elif tensor is not None:
            raise TypeError(f"{op}: {name!r} is a {type(tensor).__name__}, not a tensor")
    if len({name for name, _ in named}) != len(named):
        raise ValueError(f"{op}: two tensors have the same name")
    return named


def broadcast_parameters(
    params: Parameters, root_rank: int = 0, *, group: Group | None = None, timeout: float | None = None
) -> None:
    """Give every agent the root's values, in place.

    Small tensors of one dtype are sent together, so many small tensors cost what :func:`grouped_broadcast` costs. Names
    of one memory (tied weights) are one tensor, exchanged once. If some share a part of their memory on any agent, all
    are exchanged one after the other. Of a ``DTensor`` the part that lies here is exchanged, among counterparts
    (``init(mesh=)``).

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or a dict or list of
            tensors; the same names, shapes and ties on all agents.
        root_rank: The rank whose values are sent.
        group: Among these ranks only, the root one of them; as for :func:`broadcast_object`.
        timeout: Seconds until the deadline of each exchange.

    Raises:
        Mismatch: Agents have other names, shapes, dtypes, or other names tied; nothing has been changed.
    """
    op = "broadcast_parameters"
    root_rank = as_root(op, root_rank, current(op))
    caller_group(op, group, current(op)).check(op, "root_rank", [root_rank])

    def start(tensor: torch.Tensor, name: str) -> Handle[torch.Tensor]:
        return broadcast_nonblocking_(tensor, root_rank, Internal(name), group=group, timeout=timeout)

    _exchange(op, _named(op, params), start, group, timeout)


def allreduce_parameters(params: Parameters, *, group: Group | None = None, timeout: float | None = None) -> None:
    """Give every agent the average over all agents, in place. Integer tensors are left alone: they have no average.

    Small tensors, and tensors that share memory, are treated as in :func:`broadcast_parameters`.

    Args:
        params: As for :func:`broadcast_parameters`.
        group: Over these ranks only; as for :func:`broadcast_object`.
        timeout: Seconds until the deadline of each exchange.

    Raises:
        Mismatch: As for :func:`broadcast_parameters`.
    """
    op = "allreduce_parameters"
    named = [(name, tensor) for name, tensor in _named(op, params) if tensor.is_floating_point() or tensor.is_complex()]

    def start(tensor: torch.Tensor, name: str) -> Handle[torch.Tensor]:
        return allreduce_nonblocking_(tensor, name=Internal(name), group=group, timeout=timeout)

    _exchange(op, named, start, group, timeout)


def _exchange(
    op: str,
    named: list[tuple[str, torch.Tensor]],
    start: Callable[[torch.Tensor, str], Handle[torch.Tensor]],
    group: Group | None,
    timeout: float | None,
) -> None:
    """Exchange each tensor once, in place."""
    first: dict[Hashable, str] = {}  # of each memory
    distinct: list[tuple[str, torch.Tensor]] = []
    aliases = []
    for name, given in sorted(named, key=lambda pair: pair[0]):
        check_tensor(op, detached(given), MOVABLE)
        tensor = _once_each(given.detach())
        check_out(op, tensor, tensor.shape, tensor.dtype)
        place = _place(tensor) if tensor.numel() else name
        tied = first.setdefault(place, name)
        aliases.append(f"{name!r} ({shape_of(tensor)}{'' if tied == name else f', tied to {tied!r}'})")
        if tied == name and tensor.numel():
            distinct.append((name, tensor))
    # Which tensors overlap may differ between agents, and the batches must not.
    if agree_on_tensors(op, aliases, _overlap([tensor for _, tensor in distinct]), group, timeout):
        for name, tensor in distinct:
            start(tensor, f"{op}.{name}").wait()
        return
    under_way = []
    for batch in in_batches([tensor for _, tensor in distinct]):
        names, tensors = zip(*(distinct[number] for number in batch), strict=True)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        flat = _flat(tensors) if more else tensors[0]
        under_way.append((names, tensors, flat, start(flat, f"{op}.{names[0]}{more}")))
    for names, tensors, flat, handle in under_way:
        try:
            handle.wait()
        except NotFinite as error:
            wrong = [
                name for name, tensor in zip(names, tensors, strict=True) if not bool(torch.isfinite(tensor).all())
            ]
            raise NotFinite(f"{error}. The tensors with such numbers: {', '.join(wrong)}", error.ranks) from None
        if flat is not tensors[0]:
            for tensor, piece in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
                put(piece.view(tensor.shape), tensor)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their numbers, one behind the other, on their device, or on the CPU where they have several."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _overlap(tensors: list[torch.Tensor]) -> bool:
    """Whether two of them share memory."""
    ends: dict[int, int] = {}  # of the preceding views, by storage
    for storage, (begin, end) in sorted(
        (tensor.untyped_storage().data_ptr(), bytes_spanned(tensor)) for tensor in tensors
    ):
        if begin < ends.get(storage, 0):
            return True
        ends[storage] = end
    return False


def _once_each(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the repetitions of an expanded one."""
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _place(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are one in memory."""
    at = tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    shape = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return *at, tensor.dtype, tuple(tensor.shape), tuple(shape), tensor.is_conj(), tensor.is_neg()


def bytes_spanned(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    begin = int(tensor.storage_offset())
    last = begin + sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.element_size(), (last + 1) * tensor.element_size()


def shape_of(tensor: torch.Tensor) -> str:
    """A tensor's shape and dtype, for errors."""
    return f"{list(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


def agree_on_tensors(
    op: str,
    descriptions: list[str],
    overlap: bool = False,
    group: Group | None = None,
    timeout: float | None = None,
) -> bool:
    """Whether tensors overlap on any agent; the same result on all. For calls of several rounds, before these begin.

    Raises:
        Mismatch: The agents have different tensors. Without it the counts of their rounds would differ for good.
    """
    agent = current(op)
    text = ("\n" + "\n".join(descriptions)).encode()
    digest = torch.tensor([zlib.crc32(text), len(text), overlap], device="cpu")
    digests = gather_by_rank(digest, Internal(f"{op}: what there is"), group=group, timeout=timeout)
    if all(torch.equal(received[:2], digest[:2]) for received in digests.values()):
        return any(bool(received[2]) for received in digests.values())
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    found = gather_by_rank(own, Internal(f"{op}: names"), group=group, timeout=timeout)
    texts = {rank: names.numpy().tobytes().decode().split("\n") for rank, names in found.items()}
    first = min(texts)
    other = next((rank for rank, lines in texts.items() if lines != texts[first]), None)
    if other is None:  # the agent that differed is lost, and perhaps the one whose tensors overlap
        return True
    mine = [line for line in texts[first] if line not in texts[other]]
    theirs = [line for line in texts[other] if line not in texts[first]]
    raise Mismatch(
        f"{op} on rank {agent.rank}: the agents have different tensors. Only rank {first} has "
        f"{', '.join(mine[:3]) or 'none'}{', ...' if len(mine) > 3 else ''}; only rank {other} has "
        f"{', '.join(theirs[:3]) or 'none'}{', ...' if len(theirs) > 3 else ''}. Pass the same names, shapes and ties "
        "everywhere",
        (first, other),
    )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, *, timeout: float | None = None
) -> None:
    """Give every agent the root's optimizer state and options, exactly: no step is taken, no number is converted.

    Args:
        optimizer: An optimizer over the same parameters on all agents. State that it has and the root lacks is dropped.
        root_rank: The rank whose state is sent.
        timeout: Seconds until the deadline.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"broadcast_optimizer_state takes an optimizer, not a {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state: the state of LBFGS belongs to one agent's own line search")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = optimizer.state_dict()
    state = broadcast_object({**own, "state": parts_of_state(own["state"], params)}, root_rank, timeout=timeout)
    agent = current()
    if agent.rank != root_rank and not agent.engine.is_joining:
        optimizer.load_state_dict({**state, "state": spread_as(state["state"], params)})


def InferSourceFromDestinationRanks(
    dst_ranks: Iterable[int], construct_adjacency_matrix: bool = False
) -> list[int] | tuple[list[int], torch.Tensor]:
    """The ranks that send to this agent, given the ranks that it sends to. All agents call it.

    Args:
        dst_ranks: Distinct ranks of other agents.
        construct_adjacency_matrix: Return the mixing weights too: ``A[i, j]``, the weight of the edge from i to j,
            float32 ``[n, n]``, each agent weighing itself and its sources equally. BlueFog means the same, and
            normalises the rows instead of the columns, which is wrong wherever in- and out-degrees differ.

    Returns:
        The sorted sources, or ``(sources, A)``.

    Raises:
        TypeError, ValueError: A rank is no int, out of range, this agent itself, or named twice.
    """
    return _infer("InferSourceFromDestinationRanks", "dst_ranks", dst_ranks, construct_adjacency_matrix)


def InferDestinationFromSourceRanks(
    src_ranks: Iterable[int], construct_adjacency_matrix: bool = False
) -> list[int] | tuple[list[int], torch.Tensor]:
    """The ranks that this agent sends to, given the ranks that send to it. See
    :func:`InferSourceFromDestinationRanks`.
    """
    return _infer("InferDestinationFromSourceRanks", "src_ranks", src_ranks, construct_adjacency_matrix)


def _infer(op: str, argument: str, ranks: Iterable[int], construct: bool) -> list[int] | tuple[list[int], torch.Tensor]:
    agent = current(op)
    given = as_ranks(op, argument, ranks, agent.rank, agent.size)
    row = torch.zeros(agent.size, device="cpu")
    row[list(given)] = 1.0
    rows = torch.zeros(agent.size, agent.size, device="cpu")  # a lost agent has no edges
    for rank, theirs in gather_by_rank(row, Internal(op)).items():
        rows[rank] = theirs
    sends = rows if argument == "dst_ranks" else rows.T  # sends[i, j]: i sends to j
    other = sends[:, agent.rank] if argument == "dst_ranks" else sends[agent.rank]
    found = [int(rank) for rank in other.nonzero().view(-1)]
    if not construct:
        return found
    sends = sends + torch.eye(agent.size, device="cpu")
    return found, sends / sends.sum(dim=0, keepdim=True)
