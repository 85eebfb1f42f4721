"""A training step of VGG-16 over a slow wire: short messages, beside DistributedDataParallel and its hooks.

    sudo python benchmarks/compressed_steps.py                        # four and eight hosts at 100 Mbit/s, 10 min
    sudo python benchmarks/compressed_steps.py --hosts 4 --rate 1000  # at 1 Gbit/s

Each host is a network namespace with one agent, a model of 15 million parameters and four images a step, so that the
wire is what a step waits for. Shoal's agents average with one peer of a hypercube, another one in each step. One way is
timed after the other, since all models do not fit beside each other: the median of three steps, after three that are
not timed. How accurate such training is another benchmark says: ``compressed_training.py``.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from math import nan
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import shoal
from _machines import obstacle, run_on_machines
from _models import nbytes_of, vgg16
from _ways import LOCAL, DataParallel, Trainer, alone, sgd
from shoal.algorithms import PowerGossip
from shoal.bench.measurement import Figures, Reporter, compare
from shoal.compression import QSGD, Cast, Compressor, MinMaxUInt8, Sign, TopK, Zstd
from shoal.optim.malloc_trimming import keep_freed_memory
from shoal.topology import OnePeerHypercube
from shoal.topology.families.static import ring

BATCH, REPETITIONS = 4, 3
DDP, DDP_16 = "DDP", "DDP, a bfloat16 hook"
PLAIN = "Shoal, whole"


def ddp(model: nn.Module) -> Trainer:
    return DataParallel()(model)


def ddp_16(model: nn.Module) -> Trainer:
    trainer = DataParallel()(model)
    trainer.model.register_comm_hook(None, in_bfloat16)  # type: ignore[operator]
    return trainer


def ddp_power_sgd(model: nn.Module, rank: int) -> Trainer:
    """With one bucket: with several its all-reduces come in another order on each agent, and Gloo aborts."""
    trainer = DataParallel(bucket_mb=1000)(model)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    trainer.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # type: ignore[operator]
    return trainer


def in_bfloat16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What torch's own hook does, which it refuses to do over Gloo."""
    short = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(short, async_op=True).get_future()

    def back(done: Any) -> torch.Tensor:
        return bucket.buffer().copy_(done.value()[0])

    return future.then(back)


in_bfloat16.__annotations__ = {}  # torch does not know them as strings


def one_peer(model: nn.Module, compression: Compressor | None = None, overlap: str | None = None) -> Trainer:
    optimizer = shoal.DecentralizedOptimizer(
        sgd(model), model, topology=OnePeerHypercube(shoal.size()), compression=compression, overlap=overlap
    )
    return Trainer(model, optimizer)


def power_gossip(model: nn.Module, rank: int, iterations: float = 1) -> Trainer:
    """On a ring, as PowerGossip needs a static graph. ``compression=LowRank(rank)`` is this with one iteration."""
    algorithm = PowerGossip(1.0, iterations=iterations, rank=rank)
    optimizer = shoal.DecentralizedOptimizer(sgd(model), model, algorithm, topology=ring(shoal.size()))
    return Trainer(model, optimizer)


def averaged(model: nn.Module, compression: Compressor) -> Trainer:
    return Trainer(
        model, shoal.bluefog.DistributedGradientAllreduceOptimizer(sgd(model), model, compression=compression)
    )


WAYS: dict[str, Callable[[nn.Module], Trainer]] = {
    LOCAL: alone,
    DDP: ddp,
    DDP_16: ddp_16,
    "DDP, PowerSGD of rank 1": partial(ddp_power_sgd, rank=1),
    "DDP, PowerSGD of rank 4": partial(ddp_power_sgd, rank=4),
    PLAIN: one_peer,
    "Shoal, whole, during backward": partial(one_peer, overlap="backward"),
    "Shoal, bfloat16": partial(one_peer, compression=Cast(torch.bfloat16)),
    "Shoal, 8 bits": partial(one_peer, compression=MinMaxUInt8()),
    "Shoal, 8 bits, during backward": partial(one_peer, compression=MinMaxUInt8(), overlap="backward"),
    "Shoal, 8 bits, zstd, during backward": partial(one_peer, compression=Zstd(MinMaxUInt8()), overlap="backward"),
    "Shoal, 4 bits": partial(one_peer, compression=QSGD(7, chunk=64)),
    "Shoal, 1 bit": partial(one_peer, compression=Sign()),
    "Shoal, 1 bit, during backward": partial(one_peer, compression=Sign(), overlap="backward"),
    "Shoal, top 1%": partial(one_peer, compression=TopK(0.01)),
    "Shoal, low rank 1": partial(power_gossip, rank=1),
    "Shoal, low rank 4": partial(power_gossip, rank=4),
    "Shoal, low rank 1, half iterations": partial(power_gossip, rank=1, iterations=0.5),
    "Shoal, low rank 4, half iterations": partial(power_gossip, rank=4, iterations=0.5),
    "Shoal, mean of gradients in 8 bits": partial(averaged, compression=MinMaxUInt8()),
}


def agent(ways: Sequence[str]) -> None:
    """What each host runs."""
    reporter = Reporter()
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    shoal.init()
    work = vgg16()
    batch = work.batch(BATCH, shoal.rank())
    seconds: dict[str, list[float]] = {}
    for name in ways:
        trainer = WAYS[name](work.make())
        trainer.step(batch)
        seconds |= compare(reporter, name, {name: partial(trainer.step, batch)}, REPETITIONS)
        trainer.close()
        nbytes = nbytes_of(trainer.model)
        del trainer
        gc.collect()
    reporter.send({"figures": [asdict(Figures("step", nbytes, shoal.size(), seconds))]})
    shoal.shutdown()
    dist.destroy_process_group()


def table(title: str, one: Figures) -> Table:
    shown = Table("way", "seconds a step", "faster than DDP", "than DDP in bfloat16", "than Shoal, whole", title=title)
    medians = {name: statistics.median(values) for name, values in one.values.items()}
    for name, seconds in medians.items():
        ratios = (medians[other] / seconds if other in medians else nan for other in (DDP, DDP_16, PLAIN))
        shown.add_row(name, f"{seconds:.3f}", *(f"{ratio:.2f}" for ratio in ratios))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8], help="how many, powers of two")
    parser.add_argument("--rate", type=float, nargs="+", default=[100], help="of their NICs, Mbit/s")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="only these")
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        agent(args.ways)
        return
    if obstacle():
        parser.error(obstacle())
    console = Console()
    console.print(f"load average {os.getloadavg()[0]:.2f}")

    def progress(doing: str, done: int, total: int) -> None:
        print(f"{doing}: {done} of {total}", file=sys.stderr)

    for rate in args.rate:
        for hosts in args.hosts:
            script = [__file__, "--agent", "--ways", *args.ways]
            found = run_on_machines(hosts, rate * 1e6 / 8, 1, script, progress, large_packets=True)
            console.print(table(f"{hosts} hosts, {rate:g} Mbit/s", found[0]))


if __name__ == "__main__":
    main()
