"""The collective functions of ``accelerate.utils`` (``gather``, ``gather_object``, ``reduce``, ``broadcast``,
``broadcast_object_list``, ``pad_across_processes``, ``synchronize_rng_states``), over agents.

They read the kind of process from Accelerate's state, and with several processes they call ``torch.distributed``, for
which agents have no process group. So the two modules that define them are patched: if this process is an agent, they
find Shoal under the name ``torch.distributed``. That also applies to functions that a script has imported before;
``torch`` is unchanged for all other modules.
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
from ..ops.arguments import Internal, as_bits
from ..ops.collective import allreduce, broadcast, gather_by_rank
from ..ops.objects import broadcast_object

NO_DISPATCH = (
    "dispatch_batches=True sends all samples from rank 0 over a process group, and there is none. Leave it out: each "
    "agent then takes its own part of the dataset"
)


class _OverAgents:
    """The part of ``torch.distributed`` that the functions call, with its interface: results are written to the
    arguments. All other names are torch's own, which raise errors because there is no process group.
    """

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
    """Patch the functions for agents; later calls do nothing.

    Args:
        agents: Their kind in Accelerate's state.
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
