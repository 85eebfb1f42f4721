"""What groups of large tensors take after single calls: 160 all-reduces of ResNet-50's gradients, 102 MB.

    shoal run --no-prefix -n 8 benchmarks/grouped.py

All by themselves, then all in one group, then in two, then in one again, each several times in a row: the first call of
each size has memory that nobody has used yet, and what was kept for the sizes before gives way after two seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

import shoal
from coordination import resnet_50


def ways(tensors: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    def alone() -> None:
        handles = [shoal.nonblocking.allreduce(one, name=f"gradient {k}") for k, one in enumerate(tensors)]
        for handle in handles:
            handle.wait()

    def in_groups(count: int) -> None:
        groups = [tensors[k::count] for k in range(count)]
        handles = [shoal.nonblocking.grouped_allreduce(one, name=f"{count}.{k}") for k, one in enumerate(groups)]
        for handle in handles:
            handle.wait()

    return {
        "by themselves": alone,
        "in one group": lambda: in_groups(1),
        "in two groups": lambda: in_groups(2),
        "in one group again": lambda: in_groups(1),
    }


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of the slowest agent."""
    shoal.barrier()
    began = time.perf_counter()
    call()
    return 1e3 * shoal.allreduce(torch.tensor([time.perf_counter() - began]), op="max").item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=6)
    repetitions = parser.parse_args().repetitions
    shoal.init()
    for way, call in ways([torch.ones(numel) for numel in resnet_50()]).items():
        first, *others = [timed(call) for _ in range(1 + repetitions)]
        if not shoal.rank():
            shown = ", ".join(f"{one:.0f}" for one in others)
            print(f"{way}: {median(others):.0f} ms, the first {first:.0f} ({shown})", flush=True)


if __name__ == "__main__":
    main()
