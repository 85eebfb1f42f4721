"""What something costs that goes on beside training: in one run, blocks of the same steps with it and without.

The two blocks of a pair follow each other in an order that is drawn, so both have the same machine, and what drifts is
on neither side. Of each pair the ratio is taken, of the time and of the processor time of all agents and their threads
together, which is steadier where others use the machine as well. Shown is the median of the ratios, and between which
two of them the true one lies with a confidence of 95% (of order statistics, whatever the noise is like). In the same
turns there are pairs of equals (A/A): what they differ by is chance.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

import shoal

EQUALS = "A/A"
FEWEST = 8
Beside = Callable[[bool], AbstractContextManager[Callable[[], None]]]
"""Has it go on, or not, for as long as the context lasts; gives what is to end before the clock is stopped."""


@dataclass(frozen=True)
class Block:
    """Seconds of a step: of the clock, and of all agents' processors."""

    clock: float
    processor: float


Pairs = list[tuple[Block, Block]]
"""Without it, and with it."""


def block(work: Callable[[], None], steps: int, beside: AbstractContextManager[Callable[[], None]]) -> Block:
    """So many steps, in turn with the other agents."""
    with beside as finish:
        shoal.barrier()
        clock, processor = time.perf_counter(), time.process_time()
        for _ in range(steps):
            work()
        finish()
        took = torch.tensor([time.perf_counter() - clock, time.process_time() - processor], dtype=torch.float64)
    took = shoal.allreduce(took)
    return Block(took[0].item() / steps, shoal.size() * took[1].item() / steps)


def paired(work: Callable[[], None], steps: int, seconds: float, besides: Mapping[str, Beside]) -> dict[str, Pairs]:
    """Pairs of blocks for so long, of each name by turns, and as many of equals."""
    off = next(iter(besides.values()))
    block(work, steps, off(True))  # and what is slow for the first time
    names = [*besides, EQUALS]
    draw = random.Random(1)  # the same for all agents
    found: dict[str, Pairs] = {name: [] for name in names}
    began, passed = time.monotonic(), 0.0
    while passed < seconds or len(found[EQUALS]) < FEWEST:
        for name in draw.sample(names, len(names)):
            one: dict[bool, Block] = {}
            for second in draw.sample((False, True), 2):
                beside = besides.get(name)
                one[second] = block(work, steps, off(False) if beside is None else beside(second))
            found[name].append((one[False], one[True]))
        passed = shoal.allreduce(torch.tensor(time.monotonic() - began)).item()  # the same for all agents, too
    return found


def median_between(ratios: list[float]) -> tuple[float, float, float]:
    """The median, and an interval that holds that of all such pairs with a confidence of 95% (of order statistics)."""
    ordered, n = sorted(ratios), len(ratios)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)) - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def show(case: str, steps: int, found: Mapping[str, Pairs], times: Mapping[str, int] | None = None) -> None:
    """Two lines for each name: of the time, and of the processor time. What is there several times as often as it would
    be costs the fraction of what is measured; said are both."""
    for name, pairs in found.items():
        for what, of in (("time", lambda one: one.clock), ("processors", lambda one: one.processor)):
            off = statistics.median(of(one) for one, _ in pairs)
            more = [100 * (one - 1) for one in median_between([of(on) / of(off_) for off_, on in pairs])]
            line = f"{case:7} {name:12} {what:11}{1e3 * off:9.3f} ms{_between(more)}"
            often = (times or {}).get(name, 1)
            print(line if often == 1 else f"{line}; once {_between([one / often for one in more])}")
        print(f"{'':7} {len(pairs)} pairs of {steps} steps", flush=True)


def _between(more: Sequence[float]) -> str:
    middle, low, high = more
    return f"{middle:+8.3f}% ({low:+.3f}% to {high:+.3f}%)"
