"""One-sided windows against ``torch.distributed`` over Gloo: put to all neighbours, then update. An agent's part.

No agent waits for another: an agent writes into its neighbours' slots and averages its own slots.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import shoal

from .figures import Figures
from .meter import Case, Reporter, compare

MB = 1_000_000
CALLS = 200
"""Calls that are timed together at 4 B."""
BUSY_SECONDS = 6.0
PAUSE = 0.003
"""Between two puts to an agent that computes, on average; not a multiple of anything that it does."""


def measure(reporter: Reporter, quick: bool) -> list[Figures]:
    """Put and update on a ring, at 4 B, 16 MB and 100 MB."""
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    sizes = (4, MB // 4, MB) if quick else (4, 16 * MB, 100 * MB)
    return [_at(reporter, nbytes, nbytes == sizes[-1], quick) for nbytes in sizes]


def over_wire(reporter: Reporter, quick: bool) -> list[Figures]:
    """How long a put of 4 B to another machine takes whose main thread computes: in torch, and in pure Python."""
    shoal.set_topology(shoal.topology.RingGraph(2))
    x = torch.zeros(1)
    shoal.bluefog.win_create(x, "latency")
    seconds = {}
    for number, (what, compute) in enumerate({"torch": _torch_operations, "Python": _pure_python}.items()):
        reporter.progress("puts to an agent that computes", number, 2)
        dist.barrier()
        end = time.monotonic() + (1.0 if quick else BUSY_SECONDS)
        if shoal.rank() == 0:
            seconds[what] = _latencies(x, end - 0.5)
        else:
            while time.monotonic() < end:
                compute()
        dist.barrier()
    shoal.barrier()
    shoal.bluefog.win_free("latency")
    return [Figures("latency", 4, 2, seconds)]


def _latencies(x: torch.Tensor, end: float) -> list[float]:
    time.sleep(0.2)  # until the other one is busy
    found = []
    while time.monotonic() < end:
        start = time.perf_counter()
        shoal.bluefog.win_put(x, "latency")
        found.append(time.perf_counter() - start)
        time.sleep(PAUSE * float(torch.rand(1)) * 2)
    return found


def _torch_operations() -> None:
    a = torch.rand(600, 600)
    for _ in range(5):
        a = torch.tanh(a @ a)


def _pure_python() -> None:
    total = 0
    for number in range(100_000):
        total += number * number


def _at(reporter: Reporter, nbytes: int, with_copies: bool, quick: bool) -> Figures:
    x = shoal.empty(nbytes // 4)  # a window in place
    x.fill_(float(shoal.rank()))
    reduced, out = torch.full_like(x, 0.0), torch.full_like(x, 0.0)
    shoal.bluefog.win_create(x, "bench")

    def put_and_update() -> None:
        shoal.bluefog.win_put(x, "bench")
        shoal.bluefog.win_update("bench")

    def copy_four_times() -> None:
        for _ in range(4):
            out.copy_(x)

    cases: dict[str, Case] = {"all_reduce": lambda: dist.all_reduce(reduced), "window": put_and_update}
    if with_copies:
        cases["copies"] = copy_four_times
    calls = (20 if quick else CALLS) if nbytes < MB // 4 else 1
    repetitions = 3 if quick else 25 if calls > 1 else 15
    seconds = compare(reporter, f"windows of {nbytes / MB:g} MB", cases, repetitions, calls)
    _check(x)
    shoal.barrier()
    shoal.bluefog.win_free("bench")
    return Figures("windows", nbytes, shoal.size(), seconds)


def _check(x: torch.Tensor) -> None:
    """One more round, in step, is the average over the ring."""
    around = [shoal.rank(), *shoal.in_neighbor_ranks()]
    dist.barrier()
    x.fill_(float(shoal.rank()))
    shoal.barrier()
    shoal.bluefog.win_put(x, "bench")
    shoal.barrier()
    shoal.bluefog.win_update("bench")
    if not torch.allclose(x[:1000], torch.tensor(sum(around) / len(around))):
        raise AssertionError(f"rank {shoal.rank()} averaged to {x[:4].tolist()}..., and {sum(around)} / 3 is right")
