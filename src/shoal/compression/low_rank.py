"""Low-rank messages: neighbours compress the difference of their models, which no compressor of one vector can."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LowRank:
    """``compression=LowRank(rank)`` of an optimizer: PowerGossip (:class:`shoal.algorithms.PowerGossip`).

    Of a parameter with m rows and n columns an agent sends each neighbour ``rank (m + n)`` numbers in a step. Vectors
    are sent whole, and so are matrices for which that is shorter.

    Args:
        rank: The number of vectors that neighbours compare a matrix with.
        iterations: Power iterations in a step; with 0.5 the messages are of m and of n vectors in turn.

    Raises:
        ValueError: The rank is below 1.
    """

    rank: int = 1
    iterations: float = 1

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: pass 1 or more")
