"""The present agents and their backend, and the synchronization of models, optimizers and objects over all agents.

``start_timeline`` and ``stop_timeline`` write a trace of each agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...observability import timeline
from ...ops import objects, safe_serialization
from ...ops.arguments import Internal
from ...ops.collective import gather_by_rank
from ...ops.objects import Parameters
from ...runtime import bootstrap
from ...runtime.agent import current
from .process_sets import ProcessSet, add_process_set, global_process_set, group_of
from .uneven_inputs import attach

T = TypeVar("T")


def init(comm: None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Become an agent, as :func:`shoal.init` does.

    Args:
        comm: All agents; there is no other.
        process_sets: The initial process sets. Others may be added, with ``"dynamic"`` or without.
    """
    if comm is not None:
        raise ValueError("init: there is no communicator but that of all agents; leave comm out, and see process_sets")
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f"init: process_sets={process_sets!r}; it is a list of process sets, or 'dynamic'")
    bootstrap.init()
    attach()
    for process_set in () if isinstance(process_sets, str) else process_sets or ():
        add_process_set(process_set)


def cross_size() -> int:
    """How many machines have an agent of this one's :func:`shoal.local_rank`."""
    return len(_alike())


def cross_rank() -> int:
    """The place of this agent's machine among those."""
    return _alike().index(current("cross_rank").machine_rank)


def _alike() -> list[int]:
    agent = current("cross_rank")
    place = agent.local_ranks.index(agent.rank)
    return [machine for machine, size in enumerate(agent.machines.sizes) if size > place]


def mpi_threads_supported() -> bool:
    """There is no MPI."""
    return False


def mpi_enabled() -> bool:
    """There is no MPI."""
    return False


def mpi_built() -> bool:
    """There is no MPI."""
    return False


def gloo_enabled() -> bool:
    """Whether this agent's tensors are moved by Gloo (``SHOAL_TRANSPORT=process-group``)."""
    return current("gloo_enabled").engine.backend is not None


def gloo_built() -> bool:
    """Whether they could be."""
    return dist.is_available() and dist.is_gloo_available()


def nccl_built() -> int:
    """There is no NCCL: tensors are sent from and to the processor's memory."""
    return 0


def ddl_built() -> bool:
    """There is no DDL."""
    return False


def ccl_built() -> bool:
    """There is no oneCCL."""
    return False


def cuda_built() -> bool:
    """False: no part of Shoal is built for CUDA."""
    return False


def rocm_built() -> bool:
    """False: no part of Shoal is built for ROCm."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to write this agent's trace to a file: rank 0 to ``file_path``, rank r to ``name.rank<r>.json`` beside it.

    Args:
        file_path: ``name.json``; the folder must exist.
        mark_cycles: Ignored: there are no cycles.

    Raises:
        ValueError: A trace is being written already.
    """
    agent, path = current("start_timeline"), Path(file_path)
    if agent.rank:
        path = path.with_name(f"{path.stem}.rank{agent.rank}{path.suffix}")
    timeline.start(agent, path)


def stop_timeline() -> None:
    """End the trace; the file is complete then."""
    timeline.detach(current("stop_timeline"))


def broadcast_parameters(params: Parameters, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give every agent the values of ``root_rank``, in place: of a ``state_dict()``, or of named parameters."""
    objects.broadcast_parameters(params, root_rank, group=group_of("broadcast_parameters", process_set))


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give every agent the optimizer's state and options of ``root_rank``. No step is taken for it; ``model`` is not
    needed."""
    objects.broadcast_optimizer_state(optimizer, root_rank)


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The object of ``root_rank`` on every agent: plain data and tensors, as for :func:`shoal.broadcast_object`."""
    return objects.broadcast_object(obj, root_rank, name, group=group_of("broadcast_object", process_set))


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """The objects of all agents, by rank: of the same kinds as those of :func:`broadcast_object`.

    Raises:
        TypeError: A part of the object is not plain data; nothing is sent.
    """
    group = group_of("allgather_object", process_set)
    try:
        written = safe_serialization.write(obj)
    except (TypeError, ValueError) as error:
        raise type(error)(f"allgather_object sends plain data and tensors, and {error}") from None
    found = gather_by_rank(written, Internal(f"horovod.allgather_object {name or ''}"), group=group)
    return [safe_serialization.read(found[rank]) for rank in sorted(found)]
