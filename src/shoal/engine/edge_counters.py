"""Which edges an agent sends on, and how much: for whoever looks on. Nothing is counted while nobody does.

An edge is counted where it begins. What comes in on it is what its other end has sent, so once is enough.
"""

from __future__ import annotations

from collections import Counter

NEIGHBOURS = ("neighbor", "hierarchical", "pair")
"""What the operations between neighbours begin with."""


class EdgeCounters:
    """That of one agent. Used under the engine's lock.

    Attributes:
        counts: Somebody looks on.
    """

    def __init__(self) -> None:
        self.counts = False
        self._sent: Counter[int] = Counter()
        self._last: tuple[str, int] | None = None
        self._edges: set[int] = set()

    def count_from_now_on(self, counts: bool) -> None:
        """Begin, or stop."""
        self.counts = counts

    def sent(self, op: str, name: str, round_: int, destination: int, nbytes: int) -> None:
        """An operation has sent a tensor of so many bytes."""
        self._sent[destination] += nbytes
        if op.startswith(NEIGHBOURS):
            if self._last != (name, round_):
                self._last = name, round_
                self._edges.clear()
            self._edges.add(destination)

    @property
    def bytes_to(self) -> dict[int, int]:
        """Bytes of tensors that were sent, by destination."""
        return dict(self._sent)

    @property
    def edges(self) -> list[int]:
        """To whom the last exchange between neighbours has sent."""
        return sorted(self._edges)
