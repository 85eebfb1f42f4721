"""What a process group is to move: the tensors of one stage of an operation on this agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

Transfers = list[tuple[int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Collective:
    """What all members of a group do at once, in the place of sends that each edge would have to agree on.

    Attributes:
        kind: ``"allreduce"`` or ``"broadcast"``, which engines have; or ``"gather"``: each gets what all have, by sends
            and receives.
        data: Flat; its result takes its place.
        members: Who does it, ascending.
        into: Of a gather: where the data of each of the others goes.
        how: Of an all-reduce: ``"sum"``, ``"product"``, ``"min"`` or ``"max"``.
        root: Of a broadcast.
    """

    kind: str
    data: torch.Tensor
    members: tuple[int, ...]
    how: str = ""
    root: int = -1
    into: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def nbytes(self, rank: int) -> int:
        """What an agent sends at least: of an all-reduce by a reduce-scatter and an all-gather, of a broadcast along a
        tree."""
        others = len(self.members) - 1
        if self.kind == "allreduce":
            return 2 * self.data.nbytes * others // len(self.members)
        return self.data.nbytes * others if self.kind == "gather" or rank == self.root else 0

    def goes_with(self, other: Collective) -> bool:
        """Both may be one, with their data one behind the other, and the result is the same.

        What travels together depends on time; how an engine sums a number may depend on its place.
        """
        exact = self.kind == "broadcast" or self.how in ("min", "max") or not self.data.is_floating_point()
        alike = (self.kind, self.how, self.root, self.data.dtype)
        return exact and alike == (other.kind, other.how, other.root, other.data.dtype)


@dataclass(eq=False, slots=True)
class CollectivePlan:
    """What one agent sends and receives at once.

    Attributes:
        members: Who takes part, ascending.
        sends, receives: ``[(rank, flat tensor)]``, at most one for each rank. What is sent must not change, and what is
            received belongs to nobody else, until it is over.
        collective: In their place.
    """

    members: tuple[int, ...]
    sends: Transfers
    receives: Transfers
    collective: Collective | None = None

    @property
    def others(self) -> set[int]:
        """Whom it goes to and comes from."""
        if self.collective is not None:
            return set(self.members)
        return {rank for rank, _ in self.sends} | {rank for rank, _ in self.receives}


Step = CollectivePlan | None
"""Of the one order: None stands for what this agent has no part in."""


def runs(steps: Sequence[tuple[bool, Step]]) -> list[list[CollectivePlan]]:
    """What may be moved together: sends and receives that follow each other, and collectives that go with each other.

    Where this agent has no part in something, that ends a run as it does on those that have: what goes together must be
    the same on both sides of an edge.

    Args:
        steps: Each with whether it is a collective.
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
    one, other = before[1], step[1]
    if one is None or other is None or one.collective is None or other.collective is None:
        return False
    return one.members == other.members and one.collective.goes_with(other.collective)
