"""Neighbour averaging against ``torch.distributed`` over Gloo, from four bytes to a hundred megabytes. An agent's part.

Every case works on float32 of the same size, writes to memory that is already there (``out=``, as ``all_reduce`` does in
place), and its result is checked: a fast wrong answer would be no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import shoal

from .meter import Case, Reporter, compare

MB = 1_000_000
Group = dict[str, Any]
"""What was measured on tensors of one size: ``kind``, ``nbytes``, ``agents``, and ``seconds`` by case."""


def large(reporter: Reporter, quick: bool) -> list[Group]:
    """Tensors that memory is the limit of: all of the cases at 100 MB, static ring and all_reduce also at 16 MB."""
    sizes = (MB // 4, MB) if quick else (16 * MB, 100 * MB)
    repetitions = 3 if quick else 15
    groups = []
    for nbytes in sizes:
        tensors = _Tensors(nbytes // 4)
        cases = {"gloo": tensors.all_reduce, "ring": tensors.ring, "fresh": tensors.fresh}
        if nbytes == sizes[-1]:
            cases |= {"one-peer": tensors.one_peer, "copies": tensors.copy_three_times}
        seconds = compare(reporter, f"{nbytes / MB:g} MB", cases, repetitions)
        tensors.check()
        groups.append(_group("large", nbytes, seconds))
    return groups


def small(reporter: Reporter, quick: bool) -> list[Group]:
    """Calls whose time is not that of their bytes: 4 B one after another, and (with four agents) 100 of 4 KB at once."""
    tensors = _Tensors(1)
    cases = {"gloo": tensors.all_reduce, "ring": tensors.ring, "one-peer": tensors.one_peer}
    calls, repetitions = (20, 3) if quick else (200, 25)
    groups = [_group("small", 4, compare(reporter, "4 B", cases, repetitions, calls))]
    tensors.check()
    if shoal.size() > 2:
        groups.append(_many(reporter, repetitions))
    return groups


def _many(reporter: Reporter, repetitions: int) -> Group:
    count, elements = 100, 1024
    mine = [torch.full((elements,), float(shoal.rank() + k)) for k in range(count)]
    zeros = [torch.full((elements,), 0.0) for _ in range(count)]
    outs = [torch.empty(elements) for _ in range(count)]

    def ring() -> None:
        handles = [shoal.neighbor_allreduce_nonblocking(x, out=out) for x, out in zip(mine, outs, strict=True)]
        for handle in handles:
            handle.wait()

    def all_reduce() -> None:
        works = [dist.all_reduce(x, async_op=True) for x in zeros]
        for work in works:
            work.wait()

    seconds = compare(reporter, "100 operations of 4 KB", {"gloo": all_reduce, "ring": ring}, repetitions)
    for k, out in enumerate(outs):
        _expect(out, _mean_around() + k)
    return _group("many", 4 * elements, seconds)


class _Tensors:
    """One agent's tensors of one size, and every way to reduce or average them."""

    def __init__(self, elements: int) -> None:
        shoal.set_topology(shoal.RingGraph(shoal.size()))
        rank = shoal.rank()
        self._x = torch.full((elements,), float(rank))
        # Sums of zero stay finite, however often they are taken in place.
        self._reduced = torch.full((elements,), 0.0)
        self._out = torch.full((elements,), 0.0)
        self._kept = torch.empty(0)
        self._rounds = _one_peer_rounds()

    def all_reduce(self) -> None:
        dist.all_reduce(self._reduced)

    def ring(self) -> None:
        shoal.neighbor_allreduce(self._x, out=self._out)

    def fresh(self) -> None:
        # As in ``x = neighbor_allreduce(x)``: the previous result is still there while the next one is made.
        self._kept = shoal.neighbor_allreduce(self._x)

    def one_peer(self) -> None:
        destinations, sources = next(self._rounds)
        shoal.neighbor_allreduce(self._x, 0.5, dict.fromkeys(sources, 0.5), destinations, out=self._out)

    def copy_three_times(self) -> None:
        for _ in range(3):
            self._out.copy_(self._x)

    def check(self) -> None:
        self.ring()
        _expect(self._out, _mean_around())
        if self._kept.numel():
            _expect(self._kept, _mean_around())
        destinations, sources = next(self._rounds)
        shoal.neighbor_allreduce(self._x, 0.5, dict.fromkeys(sources, 0.5), destinations, out=self._out)
        _expect(self._out, (shoal.rank() + sources[0]) / 2)


def _one_peer_rounds() -> Iterator[tuple[list[int], list[int]]]:
    return shoal.GetDynamicOnePeerSendRecvRanks(shoal.ExponentialTwoGraph(shoal.size()), shoal.rank())


def _mean_around() -> float:
    """What the ring's average of the ranks is here."""
    around = {shoal.rank(), *shoal.in_neighbor_ranks()}
    return sum(around) / len(around)


def _expect(found: torch.Tensor, value: float) -> None:
    if not torch.allclose(found, torch.tensor(value)):
        raise AssertionError(f"rank {shoal.rank()} averaged to {found.flatten()[:4].tolist()}, expected {value}")


def _group(kind: str, nbytes: int, seconds: dict[str, list[float]]) -> Group:
    return {"kind": kind, "nbytes": nbytes, "agents": shoal.size(), "seconds": seconds}


Part = Callable[[Reporter, bool], list[Group]]
__all__ = ["MB", "Case", "Group", "Part", "large", "small"]
