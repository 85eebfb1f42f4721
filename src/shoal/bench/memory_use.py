"""The memory use of averaging, and its growth. An agent's part."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import networkx as nx
import torch
import torch.distributed as dist

import shoal
from shoal.runtime.agent import current

from .meter import Figures, Reporter

MIB = 1 << 20
SETTLING_ROUNDS = 500
"""Rounds after which memory that is used again has reached its size."""


def measure(reporter: Reporter, quick: bool) -> list[Figures]:
    """The memory published for neighbours, and the growth of a process in a long run."""
    size = shoal.size()
    published = [
        # Each of its own size, so that no freed memory of the previous one is reused.
        _published(shoal.topology.RingGraph(size, connect_style=2), 12 * MIB, 1),
        _published(shoal.topology.FullyConnectedGraph(size), 16 * MIB, 1),
        _published(shoal.topology.FullyConnectedGraph(size), 20 * MIB, 3),
    ]
    return [*published, _rounds(reporter, 300 if quick else 10_000)]


def _published(graph: nx.DiGraph, nbytes: int, in_flight: int) -> Figures:
    """Bytes that appear in the arena for ``in_flight`` operations on tensors of ``nbytes``."""
    shoal.set_topology(graph)
    tensor, outs = torch.ones(nbytes // 4), [torch.empty(nbytes // 4) for _ in range(in_flight)]
    arena = current().engine.arena
    before = arena.nbytes
    handles = [shoal.neighbor_allreduce_nonblocking(tensor, out=out) for out in outs]
    for handle in handles:
        handle.wait()
    values = {
        "published": _most(arena.nbytes - before),
        "in flight": [float(in_flight)],
        "neighbours": [float(len(shoal.out_neighbor_ranks()))],
    }
    return Figures("published", nbytes, shoal.size(), values)


def _rounds(reporter: Reporter, rounds: int) -> Figures:
    """Memory of a process before and after many rounds of one call that publishes and another that does not."""
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    large, little = torch.ones(1 << 14), torch.ones(64)
    peers = shoal.topology.GetDynamicOnePeerSendRecvRanks(
        shoal.topology.ExponentialTwoGraph(shoal.size()), shoal.rank()
    )

    def run(count: int, what: str) -> None:
        for done in range(count):
            if done % 100 == 0:
                reporter.progress(what, done, count)
            shoal.neighbor_allreduce(large)
            destinations, sources = next(peers)
            shoal.neighbor_allreduce(little, 0.5, dict.fromkeys(sources, 0.5), destinations, name="little")

    run(SETTLING_ROUNDS, "rounds to settle")
    before = _resident_bytes()
    run(rounds, f"{rounds} rounds")
    after = _resident_bytes()
    values = {"rounds": [float(rounds)], "grown": _most(after - before), "resident": _most(after)}
    return Figures("rounds", large.numel() * 4, shoal.size(), values)


def _resident_bytes() -> int:
    gc.collect()
    dist.barrier()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _most(amount: int) -> list[float]:
    """The largest value of all agents."""
    most = torch.tensor([amount], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return [most.item()]
