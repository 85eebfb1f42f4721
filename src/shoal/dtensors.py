"""Tensors that are sharded over several processes (torch's ``DTensor``), and their local parts.

``fully_shard`` and tensor parallelism turn parameters into such tensors. Agents average the parts at the same position,
so exchanges use the plain tensor of :func:`local`. This module does not import ``torch.distributed.tensor`` itself,
which takes a second: if no other code has, there is no such tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_PLAIN = (Tensor, torch.nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a ``DTensor``, on however many processes it lies."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # another thread may be importing it right now
    return kind is not None and isinstance(tensor, kind)


def local(tensor: Tensor) -> Tensor:
    """The part that lies here, in its own memory; of a plain tensor, the tensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = cast("DTensor", tensor).to_local()
        return part


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The parts of all of these that lie here."""
    return [local(tensor) for tensor in tensors]


def like(part: Tensor, whole: Tensor) -> Tensor:
    """A tensor of which ``part`` is what lies here, spread as ``whole`` is; ``part`` itself where that is plain."""
    if not is_sharded(whole):
        return part
    from torch.distributed.tensor import DTensor

    whole = cast("DTensor", whole)
    shard: Tensor = DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return shard


def placed_as(tensor: Tensor, whole: Tensor) -> Tensor:
    """The part of ``tensor`` that lies here once it is spread as ``whole`` is. The processes of its mesh may have to
    exchange something for that."""
    if is_sharded(tensor) and is_sharded(whole) and cast("DTensor", tensor).placements != placements(whole):
        tensor = cast("DTensor", tensor).redistribute(placements=placements(whole))
    return local(tensor)


def placements(tensor: Tensor) -> tuple[Placement, ...]:
    """The placement along each dimension of its mesh; ``()`` for a plain tensor."""
    return tuple(cast("DTensor", tensor).placements) if is_sharded(tensor) else ()


def processes(tensor: Tensor) -> tuple[int, ...]:
    """The ranks of ``torch.distributed`` that it lies on, ascending; ``()`` of a plain tensor."""
    if not is_sharded(tensor):
        return ()
    return tuple(sorted(cast("DTensor", tensor).device_mesh.mesh.flatten().tolist()))


def is_copied(tensor: Tensor) -> bool:
    """Whether several processes of its mesh have the same part."""
    if not is_sharded(tensor):
        return False
    mesh = cast("DTensor", tensor).device_mesh
    return any(
        placement.is_replicate() and mesh.size(dim) > 1
        for dim, placement in enumerate(cast("DTensor", tensor).placements)
    )


def described(tensor: Tensor) -> str:
    """The position of the local part in the whole, for agents to compare; empty for a plain tensor."""
    if not is_sharded(tensor):
        return ""
    whole = cast("DTensor", tensor)
    place = whole.device_mesh.get_coordinate() or ()
    spread = ", ".join(
        f"{placement} at {at} of {whole.device_mesh.size(dim)}"
        for dim, (placement, at) in enumerate(zip(whole.placements, place, strict=True))
    )
    return f" of {list(whole.shape)}, {spread}"


def parts_of_state(state: Mapping[Any, Any], params: Sequence[Tensor]) -> dict[Any, Any]:
    """The ``"state"`` of an optimizer's ``state_dict()`` with local parts instead of ``DTensor``.

    Args:
        state: By the number of the parameter.
        params: The parameters of the optimizer, in the order of its groups.

    Raises:
        ValueError: A tensor is sharded differently from its parameter, so it could not be reassembled.
    """
    found: dict[Any, Any] = {}
    for number, kept in state.items():
        found[number] = dict(kept) if isinstance(kept, Mapping) else kept
        for key, value in kept.items() if isinstance(kept, Mapping) else ():
            if not isinstance(value, Tensor) or not is_sharded(value):
                continue
            whole = params[number]
            if value.shape != whole.shape or placements(value) != placements(whole):
                raise ValueError(
                    f"{key!r} of parameter {number} is a DTensor of {list(value.shape)}, {placements(value)}, and the "
                    f"parameter is one of {list(whole.shape)}, {placements(whole)}: the part that lies here cannot be "
                    "saved by itself. Save it with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
                )
            found[number][key] = local(value)
    return found


def spread_as(state: Mapping[Any, Any], params: Sequence[Tensor]) -> dict[Any, Any]:
    """The state from :func:`parts_of_state`, with ``DTensor`` again."""
    found: dict[Any, Any] = {}
    for number, kept in state.items():
        found[number] = dict(kept) if isinstance(kept, Mapping) else kept
        if not isinstance(number, int) or not isinstance(kept, Mapping) or not is_sharded(params[number]):
            continue
        whole = params[number]
        shape = local(whole).shape
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.dim() and not is_sharded(value) and value.shape == shape:
                found[number][key] = like(value.to(whole.device), whole)
    return found


def summed_as(part: Tensor, whole: Tensor) -> Tensor:
    """The sum of all elements of a tensor that is sharded like ``whole``; ``part`` has the local elements, flat. The
    processes of its mesh add up their sums, and each element counts once even if it is replicated.
    """
    total = part.sum()
    if not is_sharded(whole):
        return total
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = cast("DTensor", whole).device_mesh
    spread = [Replicate() if placement.is_replicate() else Partial("sum") for placement in placements(whole)]
    summed: Tensor = DTensor.from_local(total, mesh, spread, run_check=False).full_tensor()
    return summed


def reshard(model: torch.nn.Module) -> None:
    """Restore the sharded parameters of a model that ``fully_shard`` has sharded: a forward pass without a backward
    pass leaves whole parameters in their place, and the next one would read these instead of the parts.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(module, "FSDPModule", ())
    for part in model.modules():
        if isinstance(part, sharded):
            part.reshard()
