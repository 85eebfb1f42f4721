"""Compressed messages: what an exchange of a model takes over a slow wire, and within a machine, where it does not pay.

    sudo python benchmarks/compression.py                     # four hosts at 100 Mbit/s and 1 Gbit/s, three minutes
    python benchmarks/compression.py --only machine           # four agents that share memory

Each agent has as many numbers as VGG-16 for CIFAR-10 has parameters, and averages with one peer of a hypercube, another
one in each round, as BAGUA's decentralized SGD does with shift_one. Beside it Gloo's ``all_reduce``, which is what
DistributedDataParallel does, and the same in bfloat16, as its compression hook does. Only exchanges are timed, no
training: how far they hide behind a backward pass is another question.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import shoal
from _machines import obstacle, run_on_machines
from shoal.bench.measurement import Figures, Reporter, compare, run_job
from shoal.compression import QSGD, Cast, Compressor, MinMaxUInt8, Sign, TopK

NUMEL = 15_245_130
RATES = {"100 Mbit/s": 100e6 / 8, "1 Gbit/s": 1e9 / 8}
REPETITIONS = 3
AGENTS = 4
GLOO, GLOO_16 = "Gloo all_reduce", "Gloo all_reduce, bfloat16"
WAYS: dict[str, Compressor | None] = {
    "Shoal, one peer": None,
    "Shoal, bfloat16": Cast(torch.bfloat16),
    "Shoal, 8 bits (MinMaxUInt8)": MinMaxUInt8(),
    "Shoal, 4 bits (QSGD)": QSGD(7, chunk=64),
    "Shoal, 1 bit (Sign)": Sign(),
    "Shoal, top 1%": TopK(0.01),
}


def with_a_peer(compressor: Compressor | None) -> Callable[[], None]:
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(shoal.rank()))
    out, rounds = torch.empty_like(x), [0]

    def average() -> None:
        peer = shoal.rank() ^ (1 << rounds[0] % (shoal.size() - 1).bit_length())
        rounds[0] += 1
        shoal.neighbor_allreduce(
            x, 0.5, {peer: 0.5}, {peer: 1.0}, enable_topo_check=False, compression=compressor, out=out
        )

    return average


def with_gloo(dtype: torch.dtype) -> Callable[[], None]:
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(shoal.rank()))

    def average() -> None:
        if dtype is torch.float32:
            dist.all_reduce(x)
            x.div_(shoal.size())
        else:
            short = x.to(dtype).div_(shoal.size())
            dist.all_reduce(short)
            x.copy_(short)

    return average


def agent() -> None:
    reporter = Reporter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shoal.init()
    acts = {GLOO: with_gloo(torch.float32), GLOO_16: with_gloo(torch.bfloat16)}
    acts |= {name: with_a_peer(compressor) for name, compressor in WAYS.items()}
    seconds = compare(reporter, "exchanges", acts, REPETITIONS)
    reporter.send({"figures": [asdict(Figures("exchange", 4 * NUMEL, shoal.size(), seconds))]})
    shoal.shutdown()
    dist.destroy_process_group()


def table(title: str, one: Figures) -> Table:
    shown = Table("way", "seconds", "faster than Gloo", "than Gloo in bfloat16", "than Shoal uncompressed", title=title)
    medians = {name: statistics.median(values) for name, values in one.values.items()}
    for name, seconds in medians.items():
        ratios = (medians[other] / seconds for other in (GLOO, GLOO_16, "Shoal, one peer"))
        shown.add_row(name, f"{seconds:.3f}", *(f"{ratio:.2f}" for ratio in ratios))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*RATES, "machine"], nargs="+", default=[*RATES, "machine"])
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        agent()
        return
    console = Console()
    console.print(f"load average {os.getloadavg()[0]:.2f}")

    def progress(doing: str, done: int, total: int) -> None:
        print(f"{doing}: {done} of {total}", file=sys.stderr)

    script = [__file__, "--agent"]
    for where in args.only:
        if where in RATES:
            if obstacle():
                console.print(f"{where}: left out, {obstacle()}")
                continue
            found = run_on_machines(AGENTS, RATES[where], 1, script, progress, large_packets=True)
            console.print(table(f"four hosts, {where}", found[0]))
            continue
        launch = [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(AGENTS), *script]
        for locally in ("0", "1"):
            found = run_job([launch], {"SHOAL_COMPRESS_LOCALLY": locally}, progress)
            console.print(table(f"one machine, SHOAL_COMPRESS_LOCALLY={locally}", found[0]))


if __name__ == "__main__":
    main()
