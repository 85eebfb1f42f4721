"""The members of the job, as operations read them. Each change has a new epoch; rank 0 need not be a member.

``fault_tolerance/membership_states.py`` makes the changes, by its table of states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Ranks = tuple[int, ...]
"""Ascending, each once."""
NOT_YET = "it has not come yet"
LEFT = "has left (it called shoal.shutdown(), or its script ended)"
NEEDED = f"it {LEFT}, and is still needed"
"""The cause of a loss if an agent has shut down in order. It is the same on all agents, whichever noticed first."""
UNEVEN = (
    "If it had fewer batches, deal out equally many with shoal.data.AgentSampler, or put the loop inside `with "
    "optimizer.join():`"
)
"""The usual reason if a window needs such an agent, and its remedy."""


@dataclass(frozen=True)
class View:
    """The membership as this agent knows it at one epoch. Ranks are in ascending order."""

    epoch: int
    """The number of changes so far; at 0 all ranks are members."""
    alive: tuple[int, ...]
    """The members, also suspects and this agent itself."""
    left: tuple[int, ...] = ()
    """The agents that have sent a shutdown message."""
    died: dict[int, str] = field(default_factory=dict)
    """The agents lost without a shutdown message, each with the cause; also agents that have not joined yet."""
    out_of_reach: tuple[int, ...] = ()
    """The lost agents whose end is not certain: they may still run in another partition."""
    needed: tuple[int, ...] = ()
    """The agents of ``left`` that an operation still needs, which counts as a loss."""
    is_joining: bool = False
    """Whether this agent itself waits to be admitted, without other members."""
    is_cut_off: bool = False
    """Whether this agent itself must not report losses any more: others count it as lost, or it missed messages."""

    def others(self, rank: int) -> list[int]:
        """The members but this one."""
        return [other for other in self.alive if other != rank]


class Plan(NamedTuple):
    """The ranks that an operation excludes, on which all members have agreed."""

    gone: tuple[int, ...] = ()
    """The excluded ranks, ascending."""
    n_admitted: int = 0
    """The number of agents admitted since the job began, as replacements of lost agents or for the first time."""

    @property
    def losses(self) -> int:
        """The number of ranks ever excluded: lost agents, and agents that have not started.

        An admission moves a rank from ``gone`` to ``n_admitted``, so only a loss changes it.
        """
        return len(self.gone) + self.n_admitted


WHOLE = Plan()
"""The plan that excludes no rank."""


class Departure(NamedTuple):
    """An agent that was lost or has shut down."""

    rank: int
    cause: str
    died: bool
    reported_by: int
    """The agent that noticed the departure."""
    certain: bool = False
    """Whether its process has ended, or it ended a connection itself; otherwise the network may be the cause."""
    because: int = -1
    """For a shutdown: the agent that it missed in a one-sided call, which is no loss for others; -1 if none."""
    silent: bool = False
    """Whether it has not answered for too long, and may still run."""


def needed_departure(rank: int, reported_by: int) -> Departure:
    """The loss of an agent that has shut down in order and is still needed."""
    return Departure(rank, NEEDED, died=True, reported_by=reported_by, certain=True)


class Membership:
    """One agent's knowledge of the membership. It changes under the engine's lock; any thread may read it."""

    def __init__(self, size: int) -> None:
        self.view = View(0, tuple(range(size)))

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
