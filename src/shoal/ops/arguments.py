"""The arguments of operations: checks of tensors, ranks and groups, the name of a call, and the memory of its result.

``group=`` names the callers of an operation, if not all agents. Calls of a group are matched among its members alone.
So they do not match calls of other groups that share members, or calls of all agents, even under the same name. Agents
outside the group make no call, and need not know of it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from zlib import crc32

import torch
import torch.distributed as dist

from ..arithmetic import complete
from ..dtensors import is_sharded
from ..execution.operation import INTERNAL
from ..execution.stage import Arrived, Send, Steps
from ..kernels.sums import copy
from ..runtime.agent import Agent
from ..topology._validate import as_int
from ..transport.messages import DTYPES, MOVABLE, Message, Payload

LAYOUT = "list of tensors (their number, shapes or dtypes)"
"""The subject of the mismatch if agents' groups differ."""
WEIGHABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_tensor(
    op: str, tensor: object, dtypes: tuple[torch.dtype, ...] = DTYPES, *, detach: bool = False
) -> torch.Tensor:
    """A dense tensor of a supported dtype; warns where the result would lose its graph, or with ``detach`` drops it."""
    dense = check_dense(op, tensor)
    if dense.dtype not in dtypes:
        raise TypeError(_wrong_dtype(op, dense.dtype, dtypes))
    if dense.requires_grad and detach:
        dense = dense.detach()
    elif dense.requires_grad:
        warn_of_lost_graph(op)
    if dense.is_conj() or dense.is_neg():
        return dense.resolve_conj().resolve_neg()
    return dense


def check_dense(op: str, tensor: object) -> torch.Tensor:
    """A tensor whose numbers lie in one block of memory of this process.

    Raises:
        TypeError: It is no tensor, or has no such block; the message names an alternative.
    """
    if type(tensor) not in _PLAIN:
        _refuse_other_kinds(op, tensor)
    assert isinstance(tensor, torch.Tensor)
    if tensor.is_nested:
        raise TypeError(
            f"{op} takes dense tensors, and this one is nested; give tensor.to_padded_tensor(0.0), or its parts from "
            "tensor.unbind() one by one"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{op} takes dense tensors, not {tensor.layout}; use tensor.to_dense()")
    if tensor.is_meta:
        raise TypeError(
            f"{op}: the tensor (shape {list(tensor.shape)}) is on the meta device and has no numbers; make it on a "
            'device first, as module.to_empty(device="cpu") does for a model'
        )
    return tensor


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _refuse_other_kinds(op: str, tensor: object) -> None:
    """TypeError for an object that is no tensor, and for subclasses of tensors whose numbers are elsewhere."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op} takes a torch.Tensor, not {type(tensor).__name__}; torch.as_tensor() makes one")
    if is_sharded(tensor):
        raise TypeError(
            f"{op}: the tensor is a DTensor, of which a part lies here. Give the part, tensor.to_local(), among agents "
            'that have the same part of theirs: shoal.init(mesh=mesh["replicate"])'
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(
            f"{op}: the tensor is an uninitialized {type(tensor).__name__} of a lazy module; run one batch through the "
            "model first, so that it gets its shape"
        )
    if any(kind.__name__ == "FakeTensor" for kind in type(tensor).__mro__):
        raise TypeError(f"{op}: the tensor is a FakeTensor and has no numbers; call it outside of FakeTensorMode")


def _wrong_dtype(op: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str:
    hint = "; convert it with tensor.float()" if dtype in DTYPES else ""
    if dtype in MOVABLE and dtype not in DTYPES:
        wider = "to(torch.complex64)" if dtype.is_complex else "float()" if dtype.is_floating_point else "long()"
        hint = f", which only broadcast, allgather and their like move; convert it with tensor.{wider}"
    allowed = ", ".join(str(kind).removeprefix("torch.") for kind in dtypes)
    return f"{op} takes {allowed}, not {str(dtype).removeprefix('torch.')}{hint}"


def detached(tensor: object) -> object:
    """The tensor without a graph, for callers that compute the gradient themselves, or that need none."""
    return tensor.detach() if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor) else tensor


_WARNED: set[str] = set()
"""The operations of this process that have warned."""


def warn_of_lost_graph(op: str) -> None:
    """Once for each operation, and at the line outside of this package that called it."""
    called = op.split()[0]
    if called in _WARNED or not torch.is_grad_enabled():
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("shoal."):
        frame, level = frame.f_back, level + 1
    with_gradient = called in ("allgather", "allreduce", "broadcast", "neighbor_allreduce")
    instead = f"take shoal.autograd.{called} for a gradient, or " if with_gradient else ""
    warnings.warn(
        f"{called}: the tensor requires grad, and no gradient flows back from the result; {instead}give "
        "tensor.detach()",
        UserWarning,
        stacklevel=level,
    )
    _WARNED.add(called)


def check_out(op: str, out: torch.Tensor | None, shape: Iterable[int], dtype: torch.dtype) -> None:
    """``out`` must be able to hold the result."""
    if out is None:
        return
    if not isinstance(out, torch.Tensor) or out.layout is not torch.strided or out.is_meta:
        found = f"a tensor of layout {out.layout} on {out.device}" if isinstance(out, torch.Tensor) else repr(out)
        raise ValueError(f"{op}: out is {found}; it must be a dense tensor with memory of its own")
    shape = tuple(shape)
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise ValueError(
            f"{op}: out has shape {list(out.shape)} and dtype {out.dtype}; the result has shape {list(shape)} and "
            f"dtype {dtype}"
        )
    if out.requires_grad:
        raise ValueError(f"{op}: out requires grad; pass out.detach() or out.data, since the result has no gradient")
    check_own_elements(op, out, "out", "out.clone() or a tensor of torch.empty()")


def check_own_elements(op: str, tensor: torch.Tensor, name: str, instead: str) -> None:
    """ValueError if elements of a tensor that will be written to share memory, as those of an expanded tensor do."""
    if tensor.is_contiguous():
        return
    extent, shape, strides = 0, list(tensor.shape), list(tensor.stride())
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride <= extent and tensor.numel():
            raise ValueError(
                f"{op}: elements of {name} share memory (shape {shape}, strides {strides}), as in an expanded tensor; "
                f"pass {instead}"
            )
        extent += stride * (size - 1)


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that every thread may write to, even if it was made in inference mode."""
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(False):
        alias = tensor.new_empty(0)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():  # its memory holds other numbers than its values, and so for negative views
            alias = alias.conj()
        return torch._neg_view(alias) if tensor.is_neg() else alias


class Internal(str):
    """The name of a call that Shoal makes for a caller, which no name of the caller's can equal."""

    __slots__ = ()


def channel_name(op: str, name: str | None) -> str:
    """The key that matches an operation: the caller's name, or the kind of operation for unnamed calls, which match in
    order.
    """
    if name is None:
        return f"~{op}"
    if isinstance(name, Internal):
        return f"{INTERNAL}{name}"
    if not isinstance(name, str) or not name or name.startswith("~") or len(name.encode()) > 1024:
        shown = repr(name) if len(repr(name)) < 100 else f"{repr(name)[:100]}..."
        raise ValueError(
            f"{op}: name={shown}; a name is a non-empty string of at most 1024 bytes not starting with '~'"
        )
    return name


def split_name(op: str, self_weight: float | str | None, name: str | None) -> tuple[float | None, str | None]:
    """The weight and the name of a call: a string given as the weight is the name, as in the BlueFog paper."""
    if not isinstance(self_weight, str):
        return self_weight, name
    if name is not None:
        raise ValueError(f"{op}: the name is given twice, {self_weight!r} and {name!r}")
    return None, self_weight


class Result:
    """The destination of a result: ``out``, or memory from the pool, or with ``on_device`` memory of the device of
    ``like``. ``flat`` is what the sum is written to.
    """

    def __init__(
        self,
        agent: Agent,
        out: torch.Tensor | None,
        like: torch.Tensor,
        shape: tuple[int, ...],
        *,
        on_device: bool = False,
    ) -> None:
        if out is not None and tuple(out.shape) != shape:
            raise RuntimeError(f"out was given with shape {list(shape)} and has shape {list(out.shape)} now")
        self._out = out
        self._device_like = None if like.is_cpu or on_device else like
        plain = out is not None and not out.is_conj() and not out.is_neg() and out.is_contiguous()
        self._direct = out is not None and plain and (out.device == like.device if on_device else out.is_cpu)
        if out is not None and self._direct:
            self._target = writable(out)
        else:
            self._target = like.new_empty(shape) if on_device else agent.engine.result_memory(shape, like.dtype)
        self.flat = self._target if self._target.dim() == 1 else self._target.view(-1)

    def finish(self) -> torch.Tensor:
        if self._out is None:
            return self._target if self._device_like is None else on_device_of(self._device_like, self._target)
        if not self._direct:
            put(self._target, self._out)
        return self._out


def on_device_of(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """A result on the device of the caller's tensor."""
    return result if tensor.is_cpu else tensor.new_empty(result.shape, dtype=result.dtype).copy_(result)


def put(result: torch.Tensor, out: torch.Tensor) -> None:
    """Copy a result to where the caller wants it."""
    writable(out).copy_(result)


def rotated(sends: Iterable[Send], agent: Agent) -> list[Send]:
    """Serve rank + 1 first, then rank + 2, ...: so that not all agents send to rank 0 first."""
    rank, size = agent.rank, agent.size
    return sorted(sends, key=lambda send: (send.destination - rank) % size)


def payload(arrived: Arrived, source: int) -> Payload:
    """The payload from a source, in CPU memory."""
    found = arrived[source].payload
    assert found is not None, "every DATA message has a payload once it is matched"
    return found if found.data.is_cpu else Payload(found.data.cpu(), found.available)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number."""


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers as integers with the same bits, which may be NaN's, even if ``SHOAL_CHECK_FINITE`` refuses to
    send NaN. In the same memory where it is contiguous; the tensor itself where no integer is as long.

    ``view(dtype)`` turns them into numbers again.
    """
    tensor = tensor.contiguous()
    return tensor.view(_INTEGERS.get(tensor.element_size(), tensor.dtype))


def check_gatherable(op: str, tensor: object) -> torch.Tensor:
    """A tensor with a dimension 0 to join along."""
    checked = check_tensor(op, tensor, MOVABLE)
    if not checked.dim():
        raise ValueError(f"{op} joins along dimension 0, and a 0-dimensional tensor has none; use tensor.view(1)")
    return checked


def joined(agent: Agent, like: torch.Tensor, parts: Sequence[tuple[int, Message]]) -> Steps[torch.Tensor]:
    """The tensors of several agents, joined along dimension 0. Their exchange states the other dimensions, ``rest``."""
    payloads = [message.payload for _, message in parts if message.payload is not None]
    yield from complete(payloads)
    shape = (sum(message.shape[0] for _, message in parts), *like.shape[1:])
    result = Result(agent, None, like, shape)
    at = 0
    for payload in payloads:
        copy(result.flat[at : at + payload.data.numel()], payload.data)
        at += payload.data.numel()
    return result.finish()


def as_ranks(
    op: str, argument: str, ranks: object, rank: int, size: int, *, or_itself: bool = False
) -> tuple[int, ...]:
    """Distinct ranks of other agents, and with ``or_itself`` of this one, in the order given."""
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise TypeError(f"{op}: {argument} must be a list of ranks, not {ranks!r}")
    found = list(ranks)
    for index, other in enumerate(found):
        try:
            other = found[index] = as_int(other, argument)
        except TypeError:
            raise TypeError(f"{op}: {argument} holds {other!r}, which is no rank") from None
        if not 0 <= other < size or (other == rank and not or_itself):
            problem = "this agent itself" if other == rank else f"not one of the {size} ranks"
            raise ValueError(f"{op} on rank {rank}: {argument} names rank {other}, which is {problem}")
    if len(set(found)) != len(found):
        raise ValueError(f"{op} on rank {rank}: {argument} names a rank twice: {found}")
    return tuple(found)


Group: TypeAlias = "Sequence[int] | dist.ProcessGroup"
"""Ranks, in any order, or a process group of ``torch.distributed`` whose ranks are the agents' ranks."""
_LISTED = 8
"""Ranks that the name of a group's calls lists."""


@dataclass(frozen=True, slots=True)
class CallerGroup:
    """The callers of an operation.

    Attributes:
        ranks: Ascending; None for all agents.
    """

    ranks: tuple[int, ...] | None = None

    def channel(self, op: str, name: str | None) -> str:
        """The key that matches a call."""
        channel = channel_name(op, name)
        return channel if self.ranks is None else f"{channel} of {_as_text(self.ranks)}"

    def check(self, op: str, argument: str, ranks: Iterable[int]) -> None:
        """ValueError for ranks that are not of it."""
        beyond = [] if self.ranks is None else [rank for rank in ranks if rank not in self.ranks]
        if beyond:
            raise ValueError(f"{op}: {argument} names ranks {beyond}, and its group is ranks {list(self.ranks or ())}")

    def rest(self, size: int) -> tuple[int, ...]:
        """The ranks of ``size`` agents that do not call it."""
        return () if self.ranks is None else tuple(rank for rank in range(size) if rank not in self.ranks)


ALL = CallerGroup()


def caller_group(op: str, group: Group | None, agent: Agent) -> CallerGroup:
    """The callers of an operation, from its ``group`` argument.

    Raises:
        TypeError, ValueError: It has an invalid rank, or lacks this agent; or ranks of processes differ from ranks of
            agents.
    """
    if group is None:
        return ALL
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
        if dist.get_rank() != agent.rank or dist.get_world_size() != agent.size:
            raise ValueError(
                f"{op}: the process that is rank {dist.get_rank()} of {dist.get_world_size()} in torch.distributed is "
                f"rank {agent.rank} of {agent.size} here, so its groups name other processes; give a list of ranks"
            )
    elif isinstance(group, (str, bytes)) or not isinstance(group, Iterable):
        raise TypeError(f"{op}: group must be a list of ranks or a process group, not {group!r}")
    else:
        ranks = [as_int(other, "group") for other in group]
    beyond = sorted(rank for rank in ranks if not 0 <= rank < agent.size)
    if beyond or len(set(ranks)) != len(ranks):
        problem = f"ranks {beyond}, of {agent.size} agents" if beyond else "a rank twice"
        raise ValueError(f"{op} on rank {agent.rank}: group names {problem}: {list(ranks)}")
    if agent.rank not in ranks:
        raise ValueError(
            f"{op} on rank {agent.rank}: group is ranks {sorted(ranks)}, and this agent, which is none of them, must "
            "not call it"
        )
    return ALL if len(ranks) == agent.size else CallerGroup(tuple(sorted(ranks)))


def _as_text(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= _LISTED:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks ({crc32(repr(ranks).encode()):08x})"
