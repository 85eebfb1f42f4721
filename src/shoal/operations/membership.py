"""The members of the job. The epoch changes with every change, and no code assumes that rank 0 is a member."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

NOT_YET = "it has not come yet"
LEFT = "has left (it called shoal.shutdown(), or its script ended)"
NEEDED = f"it {LEFT}, and is still needed"
"""The cause of a loss where an agent left in good order. All agents give the same one, whoever noticed first."""


@dataclass(frozen=True)
class View:
    """The members as this agent knows them at one epoch."""

    epoch: int
    alive: tuple[int, ...]
    left: tuple[int, ...]
    """Agents that said goodbye."""
    died: dict[int, str]
    """Agents that were lost without a word, each with how it showed; and those that have not come yet."""
    out_of_reach: tuple[int, ...] = ()
    """Those of them of which nobody knows that they have ended: they may go on elsewhere."""


class Plan(NamedTuple):
    """The ranks that an operation excludes, as all members have agreed."""

    gone: tuple[int, ...] = ()
    """The ranks that it is done without, ascending."""
    entered: int = 0
    """How many agents have entered since the run began, in the place of those that were lost or for the first time."""

    @property
    def attempt(self) -> int:
        """The number of losses so far, which grows with every loss."""
        return len(self.gone) + self.entered


WHOLE = Plan()
"""With all."""


class Departure(NamedTuple):
    """An agent that was lost or has shut down."""

    rank: int
    cause: str
    died: bool
    told_by: int
    """The agent that noticed."""
    certain: bool = False
    """Its process has ended, or it ended a connection itself; else the network between the two may be the cause."""
    because: int = -1
    """Where it left in good order: the agent that it had missed in a one-sided call, which is no loss to others."""
    silent: bool = False
    """It has not answered for too long, and may still be there."""


class Membership:
    """One agent's knowledge of the others. The engine changes it under its lock; any thread may read it."""

    def __init__(self, size: int) -> None:
        self.view = View(0, tuple(range(size)), (), {})
        self._watchers: list[Callable[[View], None]] = []

    def watch(self, watcher: Callable[[View], None]) -> None:
        """Call ``watcher`` with the new view after every change. It must be quick and must not communicate."""
        self._watchers.append(watcher)

    def remove(self, rank: int, cause: str, died: bool, out_of_reach: bool = False) -> bool:
        """Remove an agent, which may still run if it is only ``out_of_reach``; False if it was removed already."""
        old = self.view
        if rank not in old.alive:
            return False
        alive = tuple(other for other in old.alive if other != rank)
        if died:
            beyond = (*old.out_of_reach, rank) if out_of_reach else old.out_of_reach
            self._set(View(old.epoch + 1, alive, old.left, {**old.died, rank: cause}, beyond))
        else:
            self._set(View(old.epoch + 1, alive, (*old.left, rank), old.died, old.out_of_reach))
        return True

    def add(self, rank: int) -> None:
        """An agent has entered, in place of a lost one or for the first time."""
        old = self.view
        alive = tuple(sorted({*old.alive, rank}))
        left = tuple(other for other in old.left if other != rank)
        died = {other: cause for other, cause in old.died.items() if other != rank}
        beyond = tuple(other for other in old.out_of_reach if other != rank)
        self._set(View(old.epoch + 1, alive, left, died, beyond))

    def begin_without(self, causes: dict[int, str]) -> None:
        """These agents are not members and certainly run nowhere else; each with the reason."""
        old = self.view
        alive = tuple(rank for rank in old.alive if rank not in causes)
        self._set(View(old.epoch + 1, alive, old.left, {**old.died, **causes}, old.out_of_reach))

    def stand_alone(self, rank: int) -> None:
        """This agent waits to rejoin and has no other members yet."""
        self._set(View(self.view.epoch + 1, (rank,), (), {}))

    def _set(self, view: View) -> None:
        self.view = view
        for watcher in self._watchers:
            watcher(view)

    def describe(self, rank: int) -> str:
        """The fate of an agent, for an error message."""
        if self.view.died.get(rank) == NOT_YET:
            return f"rank {rank} has not come yet"
        if rank in self.view.died:
            return f"rank {rank} was lost ({self.view.died[rank]})"
        if rank in self.view.left:
            return f"rank {rank} {LEFT}"
        if rank not in self.view.alive:
            return f"rank {rank} is not there"
        return f"rank {rank} is there"
