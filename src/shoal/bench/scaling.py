"""The growth of a call's time with the number of agents: the BlueFog paper's figure 11. An agent's part.

The paper (arXiv:2111.04287) compares all_reduce with two calls in which each agent sends one tensor and receives one,
so that the bytes match: a ring in one direction, and the dynamic inner-outer exponential-2 graph. On one machine, which
this measures, the latter never leaves the machine.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import shoal

from .figures import Figures
from .meter import Reporter, compare

MB = 1_000_000
REPETITIONS = 10
"""As many as the paper takes the mean of."""


def measure(reporter: Reporter, quick: bool) -> list[Figures]:
    """Seconds of one call at two sizes."""
    shoal.set_topology(shoal.topology.RingGraph(shoal.size(), connect_style=2))
    return [_measure(reporter, nbytes) for nbytes in ((MB // 100, MB // 10) if quick else (MB, 10 * MB))]


def _measure(reporter: Reporter, nbytes: int) -> Figures:
    size, rank = shoal.size(), shoal.rank()
    x = torch.full((nbytes // 4,), float(rank))
    reduced, out = torch.full_like(x, 0.0), torch.full_like(x, 0.0)
    rounds = shoal.topology.GetInnerOuterExpo2DynamicSendRecvRanks(size, local_size=size, self_rank=rank)

    def dynamic() -> None:
        destinations, sources = next(rounds)
        shoal.neighbor_allreduce(x, 0.5, dict.fromkeys(sources, 0.5), destinations, out=out)

    cases = {
        "all_reduce": lambda: dist.all_reduce(reduced),
        "ring": lambda: shoal.neighbor_allreduce(x, out=out),
        "dynamic": dynamic,
    }
    what = f"{size} agents, {nbytes / MB:g} MB"
    return Figures("scaling", nbytes, size, compare(reporter, what, cases, REPETITIONS))
