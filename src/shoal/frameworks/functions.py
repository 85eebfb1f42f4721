"""The functions of ``accelerate.utils`` in which all processes meet (``gather``, ``gather_object``, ``reduce``,
``broadcast``, ``broadcast_object_list``, ``pad_across_processes``, ``synchronize_rng_states``), over agents.

They ask Accelerate's state which kind of process they are in, and where that is one of several they call
``torch.distributed``, for which agents have no process group. So the two modules that have them are told of agents, and
find Shoal under the name ``torch.distributed`` where this process is one. That holds for functions that a script has
imported before, too; nobody else's ``torch`` is another.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import torch
from accelerate import data_loader
from accelerate.state import PartialState
from accelerate.utils import operations, random

from ..ops import safe_serialization
from ..ops.arguments import Internal
from ..ops.collective import allreduce, broadcast, gather_by_rank
from ..ops.objects import broadcast_object
from .bit_casting import as_bits

NO_DISPATCH = (
    "dispatch_batches=True sends all samples from rank 0 over a process group, and there is none. Leave it out: each "
    "agent then takes its own part of the dataset"
)


class _OverAgents:
    """What the functions call of ``torch.distributed``, as it has it: results go into what is given. All else is
    torch's own, which says that it has no process group."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @staticmethod
    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        found = gather_by_rank(as_bits(tensor.detach()), Internal("frameworks.all_gather"))
        outputs[:] = [one.view(tensor.dtype) for one in found.values()]

    @staticmethod
    def all_gather_object(outputs: list[Any], value: Any) -> None:
        found = gather_by_rank(safe_serialization.write(value), Internal("frameworks.all_gather_object"))
        outputs[:] = [safe_serialization.read(one) for one in found.values()]

    @staticmethod
    @torch.no_grad()
    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        how = "max" if op == torch.distributed.ReduceOp.MAX else "sum"
        tensor.copy_(allreduce(tensor, op=how, name=Internal("frameworks.all_reduce")))

    @staticmethod
    @torch.no_grad()
    def broadcast(tensor: torch.Tensor, src: int) -> None:
        tensor.copy_(broadcast(as_bits(tensor), src, Internal("frameworks.broadcast")).view(tensor.dtype))

    @staticmethod
    def broadcast_object_list(values: list[Any], src: int) -> None:
        values[:] = broadcast_object(list(values), src, Internal("frameworks.broadcast_objects"))


class _Torch:
    """``torch``, whose ``distributed`` is Shoal in a process that is an agent."""

    def __init__(self, agents: enum.Enum) -> None:
        self._agents = agents

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @property
    def distributed(self) -> Any:
        return _OverAgents() if PartialState._shared_state["distributed_type"] is self._agents else torch.distributed


def meet_through_shoal(agents: enum.Enum) -> None:
    """Have the functions know agents; once is enough.

    Args:
        agents: What Accelerate's state calls them.
    """
    if isinstance(operations.torch, _Torch):
        return
    operations.TORCH_DISTRIBUTED_OPERATION_TYPES = [*operations.TORCH_DISTRIBUTED_OPERATION_TYPES, agents]
    random.CUDA_DISTRIBUTED_TYPES = [*random.CUDA_DISTRIBUTED_TYPES, agents]
    operations.torch = random.torch = _Torch(agents)
    _refuse_dispatching(agents)


def _refuse_dispatching(agents: enum.Enum) -> None:
    """ValueError for a loader that would send all samples from rank 0, where it is made and not in its first batch."""
    make = data_loader.DataLoaderDispatcher.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **options: Any) -> None:
        if PartialState._shared_state.get("distributed_type") is agents:
            raise ValueError(NO_DISPATCH)
        make(self, *args, **options)

    data_loader.DataLoaderDispatcher.__init__ = made
