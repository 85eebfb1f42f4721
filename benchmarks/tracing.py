"""What tracing costs: the same steps, and the same small calls, with SHOAL_TIMELINE's file being written and without.

    shoal run --no-prefix -n 4 benchmarks/tracing.py
    shoal run --no-prefix -n 4 benchmarks/tracing.py --only calls --seconds 20

Blocks of a quarter of a second take turns, without a trace and with one, so that both have the same machine; that all
of it is written counts as well. Of each pair of blocks the ratio is taken, of the time and of the processor time of
all agents and their threads together, which is steadier where the machine has fewer cores than agents. Printed are the
medians, and between which two values the median lies with a confidence of 95%.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal import topology
from shoal.monitor.timeline import Timeline
from shoal.world.agent import current

CALLS = 100
BLOCK_SECONDS = 0.25


@dataclass(frozen=True)
class Block:
    """Seconds for one repetition: of the clock, and of all agents' processors."""

    clock: float
    processor: float


def mlp(width: int, depth: int, batch: int) -> Callable[[], None]:
    """A training step of an MLP: forward, backward, local step, average with a neighbour."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    one_peer = topology.OnePeerExponential(shoal.size())
    optimizer = shoal.DistributedAdaptThenCombineOptimizer(inner, model, topology=one_peer)
    x, y = torch.randn(batch, width), torch.randint(0, 10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def small_calls() -> None:
    """A hundred nonblocking calls of 4 KB, all in flight before the first is waited for."""
    handles = [shoal.neighbor_allreduce_nonblocking(torch.ones(1024)) for _ in range(CALLS)]
    for handle in handles:
        handle.wait()


CASES: dict[str, Callable[[], Callable[[], None]]] = {
    "small": lambda: mlp(256, 3, 64),
    "middle": lambda: mlp(1024, 4, 64),
    "large": lambda: mlp(2048, 6, 32),
    "calls": lambda: small_calls,
}


def block(work: Callable[[], None], repetitions: int, traced: Path | None) -> Block:
    """So many repetitions in step with the other agents."""
    timeline = None if traced is None else Timeline(current(), traced)
    shoal.barrier()
    clock, processor = time.perf_counter(), time.process_time()
    for _ in range(repetitions):
        work()
    if timeline is not None:
        timeline.flush()
    took = torch.tensor([time.perf_counter() - clock, time.process_time() - processor], dtype=torch.float64)
    if timeline is not None:
        timeline.close()
    took = shoal.allreduce(took)
    return Block(took[0].item() / repetitions, shoal.size() * took[1].item() / repetitions)


def median_between(ratios: list[float]) -> tuple[float, float, float]:
    """The median, and an interval that holds that of all such pairs with a confidence of 95% (of order statistics)."""
    ordered, n = sorted(ratios), len(ratios)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)) - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def show(name: str, pairs: list[tuple[Block, Block]], repetitions: int, size: int) -> None:
    """One line for each of the two times."""
    for what, of in (("time", lambda one: one.clock), ("processors", lambda one: one.processor)):
        off = statistics.median(of(one) for one, _ in pairs)
        middle, low, high = (100 * (one - 1) for one in median_between([of(on) / of(off) for off, on in pairs]))
        print(f"{name:7} {what:11}{1e3 * off:9.3f} ms{middle:+8.2f}%   ({low:+.2f}% to {high:+.2f}%)", flush=True)
    print(f"{'':7} {size / repetitions:.0f} bytes of a trace each; {len(pairs)} pairs of {repetitions}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="what tracing costs")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=40.0, help="for each case")
    parser.add_argument("--block", type=float, default=BLOCK_SECONDS, help="seconds of a block")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shoal.init()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{shoal.rank()}.json")
        for name in arguments.only:
            work = CASES[name]()
            for _ in range(5):
                work()
            once = block(work, 10, None).clock
            repetitions = max(1, round(arguments.block / once))
            block(work, repetitions, path)
            pairs: list[tuple[Block, Block]] = []
            for number in range(max(6, round(arguments.seconds / (2 * repetitions * once)))):
                order = [None, path] if number % 2 else [path, None]
                found = {traced: block(work, repetitions, traced) for traced in order}
                pairs.append((found[None], found[path]))
            if shoal.rank() == 0:
                show(name, pairs, repetitions, path.stat().st_size)
    shoal.shutdown()


if __name__ == "__main__":
    main()
