"""Counts messages and bytes by edge, only while a monitor observes them.

An edge is counted at its source only, because the destination receives the same bytes.
"""

from __future__ import annotations

from collections import Counter

NEIGHBOURS = ("neighbor", "hierarchical", "pair")
"""Prefixes of the names of operations between neighbours."""


class EdgeCounters:
    """The counters of one agent. Used under the engine's lock.

    Attributes:
        counts: Whether messages are counted.
    """

    def __init__(self) -> None:
        self.counts = False
        self._sent: Counter[int] = Counter()
        self._last: tuple[str, int] | None = None
        self._edges: set[int] = set()

    def set_counting(self, counts: bool) -> None:
        """Start or stop counting."""
        self.counts = counts

    def sent(self, op: str, name: str, round_: int, destination: int, nbytes: int) -> None:
        """Count a tensor of ``nbytes`` bytes that an operation has sent."""
        self._sent[destination] += nbytes
        if op.startswith(NEIGHBOURS):
            if self._last != (name, round_):
                self._last = name, round_
                self._edges.clear()
            self._edges.add(destination)

    @property
    def bytes_to(self) -> dict[int, int]:
        """Bytes of tensors sent, by destination."""
        return dict(self._sent)

    @property
    def edges(self) -> list[int]:
        """The destinations of the last exchange between neighbours."""
        return sorted(self._edges)
