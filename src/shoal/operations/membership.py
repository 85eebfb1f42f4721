"""The members of the job. Each change has a new epoch, and no code assumes that rank 0 is a member."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

NOT_YET = "it has not come yet"
LEFT = "has left (it called shoal.shutdown(), or its script ended)"
NEEDED = f"it {LEFT}, and is still needed"
"""The cause of a loss if an agent has shut down in order. It is the same on all agents, whichever noticed first."""
UNEVEN = (
    "If it had fewer batches, deal out equally many with shoal.AgentSampler, or put the loop inside `with "
    "optimizer.join():`"
)
"""The usual reason for such a loss, and its remedy."""


@dataclass(frozen=True)
class View:
    """The membership as this agent knows it at one epoch."""

    epoch: int
    alive: tuple[int, ...]
    left: tuple[int, ...]
    """The agents that have sent a shutdown message."""
    died: dict[int, str]
    """The agents lost without a shutdown message, each with the cause; also agents that have not joined yet."""
    out_of_reach: tuple[int, ...] = ()
    """The lost agents whose end is not certain: they may still run in another partition."""

    def others(self, rank: int) -> list[int]:
        """The members but this one."""
        return [other for other in self.alive if other != rank]


class Plan(NamedTuple):
    """The ranks that an operation excludes, on which all members have agreed."""

    gone: tuple[int, ...] = ()
    """The excluded ranks, ascending."""
    entered: int = 0
    """The number of agents admitted since the job began, as replacements of lost agents or for the first time."""

    @property
    def attempt(self) -> int:
        """The number of losses so far; it grows with every loss."""
        return len(self.gone) + self.entered


WHOLE = Plan()
"""The plan that excludes no rank."""


class Departure(NamedTuple):
    """An agent that was lost or has shut down."""

    rank: int
    cause: str
    died: bool
    told_by: int
    """The agent that noticed the departure."""
    certain: bool = False
    """Whether its process has ended, or it ended a connection itself; otherwise the network may be the cause."""
    because: int = -1
    """For a shutdown: the agent that it missed in a one-sided call, which is no loss for others; -1 if none."""
    silent: bool = False
    """Whether it has not answered for too long, and may still run."""


class Membership:
    """One agent's knowledge of the membership. The engine changes it under its lock; any thread may read it."""

    def __init__(self, size: int) -> None:
        self.view = View(0, tuple(range(size)), (), {})
        self._watchers: list[Callable[[View], None]] = []

    def watch(self, watcher: Callable[[View], None]) -> None:
        """Call ``watcher`` with the new view after every change. It must be quick and must not communicate."""
        self._watchers.append(watcher)

    def remove(self, rank: int, cause: str, died: bool, out_of_reach: bool = False) -> bool:
        """Remove an agent. An agent that is only ``out_of_reach`` may still run. False if it was removed already."""
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
        """Add an admitted agent, which replaces a lost one or joins for the first time."""
        old = self.view
        alive = tuple(sorted({*old.alive, rank}))
        left = tuple(other for other in old.left if other != rank)
        died = {other: cause for other, cause in old.died.items() if other != rank}
        beyond = tuple(other for other in old.out_of_reach if other != rank)
        self._set(View(old.epoch + 1, alive, left, died, beyond))

    def begin_without(self, causes: dict[int, str]) -> None:
        """Remove agents that are not members and certainly run nowhere else. ``causes`` has the reason for each."""
        old = self.view
        alive = tuple(rank for rank in old.alive if rank not in causes)
        self._set(View(old.epoch + 1, alive, old.left, {**old.died, **causes}, old.out_of_reach))

    def stand_alone(self, rank: int) -> None:
        """Make this agent the only member, while it waits to rejoin."""
        self._set(View(self.view.epoch + 1, (rank,), (), {}))

    def _set(self, view: View) -> None:
        self.view = view
        for watcher in self._watchers:
            watcher(view)

    def describe(self, rank: int) -> str:
        """The state of an agent, for an error message."""
        if self.view.died.get(rank) == NOT_YET:
            return f"rank {rank} has not come yet"
        if rank in self.view.died:
            return f"rank {rank} was lost ({self.view.died[rank]})"
        if rank in self.view.left:
            return f"rank {rank} {LEFT}"
        if rank not in self.view.alive:
            return f"rank {rank} is not there"
        return f"rank {rank} is there"
