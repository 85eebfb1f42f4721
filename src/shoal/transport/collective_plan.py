"""The transfers of a process group for one stage of an operation on this agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

Transfers = list[tuple[int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Collective:
    """An operation of all members of a group, instead of sends on which each edge would have to agree.

    Attributes:
        kind: ``"allreduce"`` or ``"broadcast"``, which backends have; or ``"gather"``: each gets the data of all, by
            sends and receives.
        data: Flat; the result overwrites it.
        members: The members, ascending.
        into: Of a gather: the destination of each other member's data.
        how: The reduction of an all-reduce: ``"sum"``, ``"product"``, ``"min"`` or ``"max"``.
        root: The root of a broadcast.
    """

    kind: str
    data: torch.Tensor
    members: tuple[int, ...]
    how: str = ""
    root: int = -1
    into: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def nbytes(self, rank: int) -> int:
        """The least number of bytes that an agent sends: of an all-reduce by a reduce-scatter and an all-gather, of a
        broadcast along a tree.
        """
        others = len(self.members) - 1
        if self.kind == "allreduce":
            return 2 * self.data.nbytes * others // len(self.members)
        return self.data.nbytes * others if self.kind == "gather" or rank == self.root else 0

    def goes_with(self, other: Collective) -> bool:
        """Whether both may be fused, with their data concatenated, with the same result.

        Fusion depends on timing, and a backend's sum of a number may depend on the number's position.
        """
        exact = self.kind == "broadcast" or self.how in ("min", "max") or not self.data.is_floating_point()
        alike = (self.kind, self.how, self.root, self.data.dtype)
        return exact and alike == (other.kind, other.how, other.root, other.data.dtype)


@dataclass(eq=False, slots=True)
class CollectivePlan:
    """The sends and receives of one agent that run together.

    Attributes:
        members: The members, ascending.
        sends, receives: ``[(rank, flat tensor)]``, at most one for each rank. Until the end, sent tensors must not
            change, and received ones have no other user.
        collective: The collective that replaces them.
    """

    members: tuple[int, ...]
    sends: Transfers
    receives: Transfers
    collective: Collective | None = None

    @property
    def others(self) -> set[int]:
        """The ranks of its sends and receives."""
        if self.collective is not None:
            return set(self.members)
        return {rank for rank, _ in self.sends} | {rank for rank, _ in self.receives}


Step = CollectivePlan | None
"""A step of the common order: None if this agent has no part in it."""


def runs(steps: Sequence[tuple[bool, Step]]) -> list[list[CollectivePlan]]:
    """Groups of steps that may be moved together: successive sends and receives, and collectives that can be fused.

    A step in which this agent has no part ends a run as it does on its members, because the groups must be the same on
    both sides of an edge.

    Args:
        steps: Each with a flag whether it is a collective.
    """
    found: list[list[CollectivePlan]] = [[]]
    before: tuple[bool, Step] | None = None
    for step in steps:
        if before is not None and not _can_join(before, step):
            found.append([])
        if step[1] is not None:
            found[-1].append(step[1])
        before = step
    return [run for run in found if run]


def _can_join(before: tuple[bool, Step], step: tuple[bool, Step]) -> bool:
    if not before[0] and not step[0]:
        return True
    first, second = before[1], step[1]
    if first is None or second is None or first.collective is None or second.collective is None:
        return False
    return first.members == second.members and first.collective.goes_with(second.collective)
