"""Parameters whose memory other tensors use, too: they must stay in place when buckets are made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from ..dtensors import is_sharded

Param = torch.nn.Parameter


def sharing(models: Sequence[torch.nn.Module], params: Iterable[Param]) -> list[list[Param]]:
    """The parameters that share memory with another parameter or a buffer of the models, or with another process.

    Views that a program holds elsewhere are not found.

    Args:
        models: Their parameters and buffers are compared.
        params: The parameters to be checked, in the models' order.

    Returns:
        Lists of parameters that overlap each other or the same buffer; one in shared memory (``share_memory()``) is a
        list by itself. Each list is in the models' order.
    """
    by_storage: defaultdict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)
    for one in {one: None for model in models for one in (*model.parameters(), *model.buffers())}:
        if not is_sharded(one) and one.layout is torch.strided and not one.is_meta and one.numel():
            by_storage[one.device, one.untyped_storage().data_ptr()].append(one)
    number_of: dict[torch.Tensor, int] = {}
    for tensors in by_storage.values():
        for group in _overlapping(tensors) if len(tensors) > 1 else ():
            number_of.update(dict.fromkeys(group, len(number_of)))
    found: defaultdict[int, list[Param]] = defaultdict(list)
    alone: list[list[Param]] = []
    for param in params:
        if param in number_of:
            found[number_of[param]].append(param)
        elif param.is_cpu and not is_sharded(param) and param.is_shared():  # type: ignore[no-untyped-call]
            alone.append([param])  # on other devices all are shared
    return [*found.values(), *alone]


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors of one storage that overlap another one, in groups."""
    groups: list[list[torch.Tensor]] = []
    end = 0
    for begin, stop, one in sorted(((*_span(one), one) for one in tensors), key=lambda item: item[:2]):
        if groups and begin < end:
            groups[-1].append(one)
        else:
            groups.append([one])
        end = max(end, stop)
    return [group for group in groups if len(group) > 1]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    begin = int(tensor.storage_offset())
    last = begin + sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.element_size(), (last + 1) * tensor.element_size()
