"""What kernels take on a CUDA device, as a share of a copy's bandwidth in the same run.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --megabytes 64 --json out/gpu.json

Weighted sums of 1, 2 and 4 neighbours: each available implementation, in turn with a copy inside the device's memory.
A kernel's bandwidth counts what it has to read and write once, so a kernel that does no more than that
and is as fast as the copy has a share of 1; passes over the same numbers by torch's operations have less. Times are the
device's own (events), the median of rounds in which all take turns. Before that each is checked: a result that differs
in a bit from the CPU's is said, and the status is 1.

Without a CUDA device it says so, and its exit status is 0. It was written without one: how long it takes, and what it
shows, has not been seen. Meant are two minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from shoal.kernels import Implementation, implementation_of, why_not_triton
from shoal.kernels.sums import weighted_sum

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHECKED = 100_003
"""Numbers of which each result is compared with the CPU's."""
DEVICE = "cuda"


class Measured(NamedTuple):
    """A kernel with one implementation.

    Attributes:
        passes: What it reads and writes at the least, as a multiple of the numbers' bytes.
    """

    name: str
    implementation: str
    passes: float
    run: Callable[[], object]


def randoms(count: int, n: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    return [torch.randn(n, generator=generator, device=device).to(dtype) for _ in range(count)]


def sums(n: int, name: str, implementations: list[Implementation]) -> list[Measured]:
    found = []
    own, out, *others = randoms(6, n, DTYPES[name], DEVICE)
    for k in (1, 2, 4):
        weights = [1 / (place + k + 2) for place in range(k)]
        for implementation in implementations:

            def run(
                k: int = k, weights: list[float] = weights, implementation: Implementation = implementation
            ) -> None:
                weighted_sum(out, own, 0.3, others[:k], weights, implementation=implementation)

            found.append(Measured(f"weighted sum of {k}, {name}", implementation, k + 2, run))
    return found


def timed(rows: list[Measured], n_bytes: int, rounds: int) -> list[dict[str, object]]:
    """Median milliseconds of each row, in turn with the copy."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    every = [Measured("copy", "torch", 2, lambda: target.copy_(source)), *rows]
    times: list[list[float]] = [[] for _ in every]
    for round_ in range(rounds + 2):
        for row, kept in zip(every, times, strict=True):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            row.run()
            ended.record()
            ended.synchronize()
            if round_ > 1:
                kept.append(began.elapsed_time(ended))
    copying = statistics.median(times[0])
    found: list[dict[str, object]] = []
    for row, kept in zip(every, times, strict=True):
        took = statistics.median(kept)
        share = row.passes * copying / (2 * took)
        found.append(
            {
                "name": row.name,
                "implementation": row.implementation,
                "ms": took,
                "gb_s": row.passes * n_bytes / took / 1e6,
                "share": share,
            }
        )
    return found


def differing(implementations: list[Implementation]) -> list[str]:
    """What has other bits on the device than on the CPU."""
    wrong = []
    for name, dtype in DTYPES.items():
        own, *others = randoms(5, CHECKED, dtype, "cpu")
        for weights in ([0.3, 0.1, 0.2, 0.15, 0.25], [0.2] * 5):
            wanted, found = torch.empty_like(own), torch.empty_like(own, device=DEVICE)
            weighted_sum(wanted, own, weights[0], others, weights[1:])
            for implementation in implementations:
                there = [one.to(DEVICE) for one in others]
                weighted_sum(found, own.to(DEVICE), weights[0], there, weights[1:], implementation=implementation)
                if not torch.equal(found.cpu().view(torch.uint8), wanted.view(torch.uint8)):
                    wrong.append(f"a weighted sum of {name} by {implementation}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--megabytes", type=int, default=256, help="bytes of one tensor, in 2^20 (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="in which all take turns (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was measured")
        return 0
    implementations: list[Implementation] = ["torch"]
    if implementation_of(torch.empty(0, device=DEVICE)) == "triton":
        implementations.append("triton")
    else:
        print(f"Without Triton: {why_not_triton() or 'the device is older than it supports'}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.megabytes} MiB a tensor")
    wrong = differing(implementations)
    for one in wrong:
        print(f"Other bits than on the CPU: {one}")
    n_bytes = arguments.megabytes << 20
    figures = []
    for name, dtype in DTYPES.items():
        figures += timed(sums(n_bytes // dtype.itemsize, name, implementations), n_bytes, arguments.rounds)
        torch.cuda.empty_cache()
    print(f"{'':34} {'by':38} {'ms':>8} {'GB/s':>8} {'of the copy':>12}")
    for row in figures:
        print(f"{row['name']:34} {row['implementation']:38} {row['ms']:8.3f} {row['gb_s']:8.0f} {row['share']:12.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
