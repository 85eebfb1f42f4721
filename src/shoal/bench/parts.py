"""What an agent of ``shoal bench`` measures: averages and windows against Gloo, and the memory use of averaging.

Every timed case works on float32 of the same size and writes to existing memory (``out=``; ``all_reduce`` works in
place). The results are checked. ``python -m shoal.bench.parts PART...`` is what every agent of a job runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import networkx as nx
import torch
import torch.distributed as dist

import shoal
from shoal.runtime.agent import current

from .measurement import Case, Figures, Reporter, compare

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
    """Many small tensors at once: each an operation of its own, or all in one."""
    count, elements = 100, 1024
    mine = [torch.full((elements,), float(shoal.rank() + k)) for k in range(count)]
    zeros = [torch.zeros(elements) for _ in range(count)]
    outs = [torch.empty(elements) for _ in range(count)]
    joined = torch.zeros(count * elements)
    pieces = list(torch.split(joined, elements))
    warnings.filterwarnings("ignore", ".*all_reduce_coalesced", FutureWarning)

    def ring() -> None:
        handles = [shoal.nonblocking.neighbor_allreduce(x, out=out) for x, out in zip(mine, outs, strict=True)]
        for handle in handles:
            handle.wait()

    def ring_grouped() -> None:
        shoal.grouped_neighbor_allreduce(mine, out=outs)

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
    averages: dict[str, Case] = {"ring": ring, "ring, grouped": ring_grouped}
    seconds = compare(reporter, f"{count} operations of 4 KB", {**averages, **gloo}, repetitions)
    for reduce in gloo.values():
        torch._foreach_copy_(zeros, [torch.ones(elements)] * count)
        reduce()
        _expect(torch.cat(zeros), float(shoal.size()))
    for average in averages.values():
        torch._foreach_zero_(outs)
        average()
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


SCALING_REPETITIONS = 10
"""As many as the paper takes the mean of."""


def scaling(reporter: Reporter, quick: bool) -> list[Figures]:
    """Seconds of one call at two sizes, for the growth with the number of agents: the BlueFog paper's figure 11.

    The paper (arXiv:2111.04287) compares all_reduce with two calls in which each agent sends one tensor and receives
    one, so that the bytes match: a ring in one direction, and the dynamic inner-outer exponential-2 graph. On one
    machine, which this measures, the latter never leaves the machine.
    """
    shoal.set_topology(shoal.topology.RingGraph(shoal.size(), connect_style=2))
    return [_scaling_at(reporter, nbytes) for nbytes in ((MB // 100, MB // 10) if quick else (MB, 10 * MB))]


def _scaling_at(reporter: Reporter, nbytes: int) -> Figures:
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
    title = f"{size} agents, {nbytes / MB:g} MB"
    return Figures("scaling", nbytes, size, compare(reporter, title, cases, SCALING_REPETITIONS))


WINDOW_CALLS = 200
"""Calls that are timed together at 4 B."""
BUSY_SECONDS = 6.0
PAUSE = 0.003
"""Between two puts to an agent that computes, on average; not a multiple of anything that it does."""


def windows(reporter: Reporter, quick: bool) -> list[Figures]:
    """Put to all neighbours, then update, on a ring, at 4 B, 16 MB and 100 MB.

    No agent waits for another: an agent writes into its neighbours' slots and averages its own slots.
    """
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    sizes = (4, MB // 4, MB) if quick else (4, 16 * MB, 100 * MB)
    return [_windows_at(reporter, nbytes, nbytes == sizes[-1], quick) for nbytes in sizes]


def latency(reporter: Reporter, quick: bool) -> list[Figures]:
    """How long a put of 4 B to another machine takes whose main thread computes: in torch, and in pure Python."""
    shoal.set_topology(shoal.topology.RingGraph(2))
    x = torch.zeros(1)
    shoal.bluefog.win_create(x, "latency")
    seconds = {}
    for number, (computing, compute) in enumerate({"torch": _torch_operations, "Python": _pure_python}.items()):
        reporter.progress("puts to an agent that computes", number, 2)
        dist.barrier()
        end = time.monotonic() + (1.0 if quick else BUSY_SECONDS)
        if shoal.rank() == 0:
            seconds[computing] = _latencies(x, end - 0.5)
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


def _windows_at(reporter: Reporter, nbytes: int, with_copies: bool, quick: bool) -> Figures:
    x = shoal.windows.empty(nbytes // 4)  # a window in place
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
    calls = (20 if quick else WINDOW_CALLS) if nbytes < MB // 4 else 1
    repetitions = 3 if quick else 25 if calls > 1 else 15
    seconds = compare(reporter, f"windows of {nbytes / MB:g} MB", cases, repetitions, calls)
    _check_windows(x)
    shoal.barrier()
    shoal.bluefog.win_free("bench")
    return Figures("windows", nbytes, shoal.size(), seconds)


def _check_windows(x: torch.Tensor) -> None:
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


MIB = 1 << 20
SETTLING_ROUNDS = 500
"""Rounds after which memory that is used again has reached its size."""


def memory(reporter: Reporter, quick: bool) -> list[Figures]:
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
    handles = [shoal.nonblocking.neighbor_allreduce(tensor, out=out) for out in outs]
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

    def run(count: int, title: str) -> None:
        for done in range(count):
            if done % 100 == 0:
                reporter.progress(title, done, count)
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


def wire(reporter: Reporter, quick: bool) -> list[Figures]:
    """An agent's part: average with the other one, and with Gloo exchange the same bytes, received first."""
    nbytes = MIB if quick else 25 * MIB
    peer = 1 - shoal.rank()
    x = torch.full((nbytes // 4,), float(shoal.rank()))
    received, out = torch.full_like(x, 0.0), torch.full_like(x, 0.0)

    def exchange() -> None:
        works = dist.irecv(received, peer), dist.isend(x, peer)
        for work in works:
            work.wait()  # type: ignore[union-attr]

    def exchange_and_average() -> None:
        exchange()
        torch.mul(x, 0.5, out=out)
        out.add_(received, alpha=0.5)

    cases = {
        "average": lambda: shoal.neighbor_allreduce(x, out=out),
        "gloo": exchange,
        "gloo and average": exchange_and_average,
    }
    seconds = compare(reporter, f"{nbytes // MIB} MiB over the wire", cases, 3 if quick else 11)
    if not torch.equal(shoal.neighbor_allreduce(x), torch.full_like(x, 0.5)):
        raise AssertionError(f"rank {shoal.rank()} averaged to something else than 0.5")
    return [Figures("wire", nbytes, shoal.size(), seconds)]


PARTS = {
    "large": large,
    "small": small,
    "windows": windows,
    "latency": latency,
    "memory": memory,
    "scaling": scaling,
    "wire": wire,
}


def main() -> None:
    """Run the measurements, beside a process group of Gloo, and report to the process that started the job."""
    parser = argparse.ArgumentParser(prog="python -m shoal.bench.parts", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions")
    args = parser.parse_args()
    reporter = Reporter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shoal.init()
    found = [figures for part in args.parts for figures in PARTS[part](reporter, args.quick)]
    reporter.send({"figures": [asdict(figures) for figures in found]})
    shoal.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
