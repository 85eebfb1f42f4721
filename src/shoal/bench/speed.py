"""Neighbour averaging against ``torch.distributed`` over Gloo, from four bytes to a hundred megabytes. An agent's part.

Every case works on float32 of the same size and writes to existing memory (``out=``; ``all_reduce`` works in place).
The averages are checked.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

import shoal

from .figures import Figures
from .meter import Case, Reporter, compare

MB = 1_000_000


def large(reporter: Reporter, quick: bool) -> list[Figures]:
    """Tensors so large that memory is the limit: ring and all_reduce at both sizes, every case at the larger one."""
    sizes = (MB // 4, MB) if quick else (16 * MB, 100 * MB)
    repetitions = 3 if quick else 15
    found = []
    for nbytes in sizes:
        tensors = _Tensors(nbytes // 4)
        cases: dict[str, Case] = {
            "all_reduce": tensors.all_reduce,
            "ring": tensors.ring,
            "fresh": tensors.ring_to_fresh_memory,
        }
        if nbytes == sizes[-1]:
            cases |= {"one-peer": tensors.one_peer, "copies": tensors.copy_three_times}
        seconds = compare(reporter, f"{nbytes / MB:g} MB", cases, repetitions)
        tensors.check()
        found.append(Figures("large", nbytes, shoal.size(), seconds))
    return found


def small(reporter: Reporter, quick: bool) -> list[Figures]:
    """Calls whose time is not that of their bytes: 4 B one after another, and (beyond a pair) 100 of 4 KB at once."""
    tensors = _Tensors(1)
    cases = {"all_reduce": tensors.all_reduce, "ring": tensors.ring, "one-peer": tensors.one_peer}
    calls, repetitions = (20, 3) if quick else (200, 25)
    found = [Figures("small", 4, shoal.size(), compare(reporter, "4 B", cases, repetitions, calls))]
    tensors.check()
    if shoal.size() > 2:
        found.append(_many(reporter, repetitions))
    return found


def _many(reporter: Reporter, repetitions: int) -> Figures:
    """Many small tensors at once: each an operation of its own, or (Gloo) all in one."""
    count, elements = 100, 1024
    mine = [torch.full((elements,), float(shoal.rank() + k)) for k in range(count)]
    zeros = [torch.zeros(elements) for _ in range(count)]
    outs = [torch.empty(elements) for _ in range(count)]
    joined = torch.zeros(count * elements)
    pieces = list(torch.split(joined, elements))
    warnings.filterwarnings("ignore", ".*all_reduce_coalesced", FutureWarning)

    def ring() -> None:
        handles = [shoal.neighbor_allreduce_nonblocking(x, out=out) for x, out in zip(mine, outs, strict=True)]
        for handle in handles:
            handle.wait()

    def all_reduce_async() -> None:
        works = [dist.all_reduce(x, async_op=True) for x in zeros]
        for work in works:
            work.wait()

    def all_reduce_in_turn() -> None:
        for x in zeros:
            dist.all_reduce(x)

    def all_reduce_coalesced() -> None:
        dist.all_reduce_coalesced(zeros)

    def all_reduce_joined() -> None:
        torch.cat(zeros, out=joined)
        dist.all_reduce(joined)
        torch._foreach_copy_(zeros, pieces)

    gloo: dict[str, Case] = {
        "all_reduce, async": all_reduce_async,
        "all_reduce, in turn": all_reduce_in_turn,
        "all_reduce_coalesced": all_reduce_coalesced,
        "all_reduce, joined": all_reduce_joined,
    }
    seconds = compare(reporter, f"{count} operations of 4 KB", {"ring": ring, **gloo}, repetitions)
    for reduce in gloo.values():
        torch._foreach_copy_(zeros, [torch.ones(elements)] * count)
        reduce()
        _expect(torch.cat(zeros), float(shoal.size()))
    for k, out in enumerate(outs):
        _expect(out, _mean_around() + k)
    return Figures("many", 4 * elements, shoal.size(), seconds)


class _Tensors:
    """One agent's tensors of one size, and the methods to reduce or average them with other agents' tensors."""

    def __init__(self, elements: int) -> None:
        shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
        self._x = torch.full((elements,), float(shoal.rank()))
        # Sums of zero stay finite, however often they are taken in place. zeros() would leave the pages untouched.
        self._reduced = torch.full((elements,), 0.0)
        self._out = torch.full((elements,), 0.0)
        self._fresh = self._out
        self._rounds = shoal.topology.GetDynamicOnePeerSendRecvRanks(
            shoal.topology.ExponentialTwoGraph(shoal.size()), shoal.rank()
        )

    def all_reduce(self) -> None:
        dist.all_reduce(self._reduced)

    def ring(self) -> None:
        shoal.neighbor_allreduce(self._x, out=self._out)

    def ring_to_fresh_memory(self) -> None:
        # As in ``x = neighbor_allreduce(x)``: the last result is still there while the next one is made.
        self._fresh = shoal.neighbor_allreduce(self._x)

    def one_peer(self) -> int:
        """Average with one agent, a different one each time; returns its rank."""
        destinations, [source] = next(self._rounds)
        shoal.neighbor_allreduce(self._x, 0.5, {source: 0.5}, destinations, out=self._out)
        return source

    def copy_three_times(self) -> None:
        for _ in range(3):
            self._out.copy_(self._x)

    def check(self) -> None:
        self.ring()
        _expect(self._out, _mean_around())
        self.ring_to_fresh_memory()
        _expect(self._fresh, _mean_around())
        source = self.one_peer()
        _expect(self._out, (shoal.rank() + source) / 2)


def _mean_around() -> float:
    """The mean of the ranks around this agent, on the ring."""
    around = {shoal.rank(), *shoal.in_neighbor_ranks()}
    return sum(around) / len(around)


def _expect(found: torch.Tensor, value: float) -> None:
    if not torch.allclose(found, torch.tensor(value)):
        raise AssertionError(f"rank {shoal.rank()} averaged to {found[:4].tolist()}..., and {value} is right")
