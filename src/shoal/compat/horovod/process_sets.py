"""Process sets: subsets of the agents, on which all have agreed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ...engine.engine import Engine
from ...errors import Mismatch
from ...ops.arguments import Group, Internal
from ...ops.collective import gather_by_rank
from ...runtime.agent import current
from ...topology._validate import as_int

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
    for rank, theirs in gather_by_rank(torch.tensor(ranks), Internal(f"horovod.{called}")).items():
        if tuple(theirs.tolist()) != ranks:
            raise Mismatch(
                f"{called}: rank {here} names the ranks {list(ranks)}, and rank {rank} {theirs.tolist()}; all agents, "
                "members or not, call it with the same",
                (here, rank),
            )
