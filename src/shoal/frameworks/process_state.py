"""Accelerate on agents, which Transformers uses as well: the state of a process, and its collective functions.

Both read their rank from Accelerate's ``PartialState``, one for each process. By default it reads a launcher's
variables and opens a process group, which is not needed here: models are not wrapped, and agents communicate by Shoal.
So the state is made earlier, with this agent's rank and without a process group.

The collective functions of ``accelerate.utils`` (``gather``, ``gather_object``, ``reduce``, ``broadcast``,
``broadcast_object_list``, ``pad_across_processes``, ``synchronize_rng_states``) read the kind of process from this
state, and with several processes they call ``torch.distributed``, for which agents have no process group. So the two
modules that define them are patched: if this process is an agent, they find Shoal under the name ``torch.distributed``.
That also applies to functions that a script has imported before; ``torch`` is unchanged for all other modules.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import data_loader
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import operations, random

from ..ops import safe_serialization
from ..ops.arguments import Internal, as_bits
from ..ops.collective import allreduce, barrier, broadcast, gather_by_rank
from ..ops.objects import broadcast_object
from ..runtime.agent import current
from ..runtime.bootstrap import init
from ..runtime.queries import is_initialized, local_rank
from . import check_agent

_ASKED = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""The variables by which Accelerate finds out whether it is one of several."""
_FRAMEWORKS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}


class Decentralized(str, enum.Enum):
    """The value of Accelerate's ``distributed_type``: unknown to Accelerate, so that it neither wraps nor reduces
    anything.
    """

    SHOAL = "SHOAL"


def process_state(cpu: bool = False) -> PartialState:
    """Accelerate's state of this process, as an agent of Shoal; the process becomes one if it is none yet.

    Args:
        cpu: Train on the CPU, even if there is an accelerator.

    Raises:
        ValueError: Accelerate has opened a process group already, or a requested feature is impossible with a separate
            model for each agent.
    """
    for variable, what in _FRAMEWORKS.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise ValueError(
                f"{variable}={os.environ[variable]}: {what} shares one model between processes, and Shoal's agents "
                "have a model each. Leave it out"
            )
    there = PartialState._shared_state
    if there and there["distributed_type"] not in (DistributedType.NO, Decentralized.SHOAL):
        raise ValueError(
            f"Accelerate has already opened a process group ({there['distributed_type'].value}), for an Accelerator or "
            "TrainingArguments of its own. Make Shoal's in their place: shoal.frameworks.accelerate.ShoalAccelerator, "
            "or shoal.frameworks.transformers.ShoalTrainingArguments"
        )
    if not is_initialized():
        init()
    agent = current("shoal.frameworks")
    check_agent(agent, "Accelerate and Transformers")
    cpu = cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes")
    if not there or there["distributed_type"] is not Decentralized.SHOAL or there["num_processes"] != agent.size:
        AcceleratorState._reset_state(reset_partial_state=True)
        _meet_through_shoal()
        with _asked_nobody():
            PartialState(cpu=cpu)
        there.update(
            distributed_type=Decentralized.SHOAL,
            num_processes=agent.size,
            process_index=agent.rank,
            local_process_index=local_rank(),
            wait_for_everyone=wait_for_everyone,
        )
        if there["device"].type == "cuda":
            there["device"] = torch.device("cuda", local_rank() % torch.cuda.device_count())
            torch.cuda.set_device(there["device"])
    return PartialState()


def wait_for_everyone() -> None:
    """All agents meet here."""
    barrier(Internal("frameworks.wait_for_everyone"))


@contextlib.contextmanager
def _asked_nobody() -> Iterator[None]:
    """Without the launcher's variables, which Shoal has read."""
    kept = {name: os.environ.pop(name) for name in _ASKED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


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
        outputs[:] = [part.view(tensor.dtype) for part in found.values()]

    @staticmethod
    def all_gather_object(outputs: list[Any], value: Any) -> None:
        found = gather_by_rank(safe_serialization.write(value), Internal("frameworks.all_gather_object"))
        outputs[:] = [safe_serialization.read(part) for part in found.values()]

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

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @property
    def distributed(self) -> Any:
        is_agent = PartialState._shared_state["distributed_type"] is Decentralized.SHOAL
        return _OverAgents() if is_agent else torch.distributed


def _meet_through_shoal() -> None:
    """Patch Accelerate's functions for agents; later calls do nothing."""
    if isinstance(operations.torch, _Torch):
        return
    kind = Decentralized.SHOAL
    operations.TORCH_DISTRIBUTED_OPERATION_TYPES = [*operations.TORCH_DISTRIBUTED_OPERATION_TYPES, kind]
    random.CUDA_DISTRIBUTED_TYPES = [*random.CUDA_DISTRIBUTED_TYPES, kind]
    operations.torch = random.torch = _Torch()
    _refuse_dispatching()


def _refuse_dispatching() -> None:
    """ValueError for a loader that would send all samples from rank 0, where it is made and not in its first batch."""
    make = data_loader.DataLoaderDispatcher.__init__

    @functools.wraps(make)
    def refuse(self: Any, *args: Any, **options: Any) -> None:
        if PartialState._shared_state.get("distributed_type") is Decentralized.SHOAL:
            raise ValueError(NO_DISPATCH)
        make(self, *args, **options)

    data_loader.DataLoaderDispatcher.__init__ = refuse
