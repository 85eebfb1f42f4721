"""The present agents, process sets of them, and the synchronization of models, optimizers and objects over them.

A process set is a subset of the agents, on which all have agreed. ``start_timeline`` and ``stop_timeline`` write a
trace of each agent.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...engine.engine import Engine
from ...errors import Mismatch
from ...observability import timeline
from ...ops import objects, safe_serialization
from ...ops.arguments import Group, Internal
from ...ops.collective import gather_by_rank
from ...ops.objects import Parameters
from ...runtime import bootstrap
from ...runtime.agent import current
from ...topology._validate import as_int
from .uneven_inputs import attach

Ranks = tuple[int, ...]


class ProcessSet:
    """A subset of the agents, to be given as ``process_set=`` after :func:`add_process_set` or ``init`` has registered
    it.

    Args:
        ranks: The ranks of the agents; in any order, each once.

    Attributes:
        process_set_id: Its number; None while it is not registered.
    """

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
            raise TypeError(f"ProcessSet: a list of ranks is wanted, not {ranks!r}")
        found = tuple(sorted(as_int(rank, "ProcessSet") for rank in ranks))
        if not found or len(set(found)) != len(found):
            raise ValueError(f"ProcessSet: {list(found)}: name one rank at least, and each once")
        self._ranks = found

    @property
    def ranks(self) -> list[int]:
        """The ranks of the agents, ascending."""
        return list(self._ranks)

    @property
    def group(self) -> Group | None:
        """As Shoal's operations have it."""
        return self._ranks

    def size(self) -> int:
        """How many agents."""
        return len(self.ranks)

    def included(self) -> bool:
        """Whether this agent is one of them."""
        return current("ProcessSet.included()").rank in self.ranks

    def rank(self) -> int:
        """This agent's index in the set; -1 if it is no member."""
        here = current("ProcessSet.rank()").rank
        return self.ranks.index(here) if here in self.ranks else -1

    def __repr__(self) -> str:
        return f"ProcessSet({self.process_set_id}: ranks {self.ranks})"


class _Global(ProcessSet):
    """All agents."""

    process_set_id = 0

    def __init__(self) -> None: ...

    @property
    def ranks(self) -> list[int]:
        return list(range(current("global_process_set").size))

    @property
    def group(self) -> Group | None:
        return None

    def __repr__(self) -> str:
        return "ProcessSet(0: all ranks)"


global_process_set = _Global()
_sets: weakref.WeakKeyDictionary[Engine, dict[int, Ranks]] = weakref.WeakKeyDictionary()
"""The sets in use of each agent, by their numbers."""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set. All agents call it, members or not, with the same ranks.

    Raises:
        ValueError: It has an invalid rank, or a set of these ranks exists.
        Mismatch: Agents give different ranks.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    agent, ranks = current("add_process_set"), tuple(added.ranks)
    _agree("add_process_set", ranks)  # first of all, so that errors of the ranks are raised on all agents
    beyond = [rank for rank in ranks if not 0 <= rank < agent.size]
    if beyond:
        raise ValueError(f"add_process_set: there are no ranks {beyond}; there are {agent.size} agents")
    if ranks == tuple(range(agent.size)):
        raise ValueError(f"add_process_set: ranks {list(ranks)} are all agents; take hvd.global_process_set")
    there = _sets.setdefault(agent.engine, {})
    for number, others in there.items():
        if others == ranks:
            raise ValueError(
                f"add_process_set: process set {number} has the ranks {list(ranks)} already; take that one"
            )
    number = 1 + max(there, default=0)
    there[number] = ranks
    added.process_set_id = number
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a set. All agents call it, with the same set.

    Returns:
        Whether it was registered; the set of all agents stays.

    Raises:
        Mismatch: Agents give different sets.
    """
    there = _sets.setdefault(current("remove_process_set").engine, {})
    number = process_set.process_set_id
    if process_set is global_process_set or number is None or there.get(number) != tuple(process_set.ranks):
        return False
    _agree("remove_process_set", there.pop(number))
    process_set.process_set_id = None
    return True


def group_of(called: str, process_set: ProcessSet) -> Group | None:
    """The ``group=`` of a call.

    Raises:
        TypeError: The argument is no process set.
        ValueError: The set is not registered.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"{called}: process_set must be a ProcessSet, not {process_set!r}")
    if isinstance(process_set, _Global):
        return None
    there = _sets.get(current(called).engine, {})
    if tuple(process_set.ranks) not in there.values():
        raise ValueError(f"{called}: {process_set} is not in use; all agents give it to hvd.add_process_set first")
    return process_set.group


def _agree(called: str, ranks: Ranks) -> None:
    here = current(called).rank
    for rank, theirs in gather_by_rank(torch.tensor(ranks, device="cpu"), Internal(f"horovod.{called}")).items():
        if tuple(theirs.tolist()) != ranks:
            raise Mismatch(
                f"{called}: rank {here} names the ranks {list(ranks)}, and rank {rank} {theirs.tolist()}; all agents, "
                "members or not, call it with the same",
                (here, rank),
            )


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
