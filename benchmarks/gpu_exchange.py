"""Agents that share a CUDA device: what an exchange takes beside its kernel, a training step beside the model alone.

    SHOAL_DEVICE_MEMORY=1 shoal run --no-prefix -n 2 benchmarks/gpu_exchange.py --only exchange
    SHOAL_DEVICE_MEMORY=1 shoal run --no-prefix -n 2 benchmarks/gpu_exchange.py --only resnet50 gpt
    shoal run --no-prefix -n 2 benchmarks/gpu_exchange.py          # the same, by way of the CPU

An exchange is a blocking `neighbor_allreduce` with one neighbour, timed by the host, of the slowest agent. Beside it:
the same sum by one agent while the others wait (the kernel), and how long it takes from one agent's empty kernel to
another's (the switch: processes take turns on a device). Meant is at most 2.3 times the kernel plus the switch at
256 MB.

A step of a model: by each agent alone while the others wait, times the agents, is what a device shared by all can do at
best. Beside it all agents' steps at once, without averaging, with Shoal's (adapt then combine), and DDP's over Gloo, as
NCCL takes no two processes on one device.

Without a CUDA device it runs on the CPU, with --quick in seconds: to see that it runs. It was written without one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import shoal
from _large_models import MODELS, Loss
from shoal.kernels.sums import weighted_sum
from shoal.topology import OnePeerExponential

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
Step = Callable[[], object]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(step: Step, rounds: int, together: bool = True) -> float:
    """The median of what it takes, of the slowest agent; by one agent after the other if not ``together``."""
    found = []
    for number in range(rounds + 2):
        mine = 0.0
        for turn in range(1 if together else shoal.size()):
            synchronize()
            shoal.barrier()
            if together or turn == shoal.rank():
                began = time.perf_counter()
                step()
                synchronize()
                mine = time.perf_counter() - began
        if number >= 2:
            found.append(float(shoal.allgather(torch.tensor([mine], dtype=torch.float64)).max()))
    return statistics.median(found)


def exchange(rounds: int, quick: bool) -> None:
    rank, size = shoal.rank(), shoal.size()
    source, destination = (rank - 1) % size, (rank + 1) % size
    tiny = torch.zeros(1, device=DEVICE)

    def in_turns() -> None:
        for turn in range(size):
            if turn == rank:
                tiny.add_(1)
                synchronize()
            shoal.barrier()

    barriers = seconds(lambda: [shoal.barrier() for _ in range(size)], rounds)
    switch = max(0.0, seconds(in_turns, rounds) - barriers) / size
    if not rank:
        print(f"a switch between processes: {1e6 * switch:.0f} us")
        print("      bytes   exchange     kernel   exchange / (kernel + switch)")
    for nbytes in SIZES[: 3 if quick else None]:
        own, other, out = (torch.randn(nbytes // 4, device=DEVICE) for _ in range(3))

        def average(own: torch.Tensor = own, out: torch.Tensor = out) -> None:
            shoal.neighbor_allreduce(own, 0.5, {source: 0.5}, [destination], out=out, enable_topo_check=False)

        def kernel(own: torch.Tensor = own, other: torch.Tensor = other, out: torch.Tensor = out) -> None:
            weighted_sum(out, own, 0.5, [other], [0.5])

        whole, alone = seconds(average, rounds), seconds(kernel, rounds, together=False)
        if not rank:
            print(f"{nbytes:11,} {1e6 * whole:8,.0f} us {1e6 * alone:7,.0f} us   {whole / (alone + switch):.2f}")


def step_of(loss: Loss, optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def training(name: str, rounds: int, quick: bool) -> None:
    model, loss = MODELS[name](DEVICE, quick)
    parameters = sum(param.numel() for param in model.parameters())

    def sgd(one: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(one.parameters(), lr=1e-4, momentum=0.9)

    plain = step_of(loss, sgd(model))
    alone, at_once = seconds(plain, rounds, together=False), seconds(plain, rounds)
    ours = shoal.DecentralizedOptimizer(sgd(model), model, topology=OnePeerExponential(shoal.size()))
    averaged = seconds(step_of(loss, ours), rounds)
    ours.close()
    shoal.broadcast_parameters(model.state_dict(), root_rank=0)
    with tempfile.NamedTemporaryFile() as file:
        where = shoal.broadcast_object(file.name + ".store", 0)
        distributed.init_process_group("gloo", f"file://{where}", rank=shoal.rank(), world_size=shoal.size())
        wrapped = DistributedDataParallel(_Whole(model, loss))
        ddp = seconds(step_of(wrapped, sgd(wrapped)), rounds)
        distributed.destroy_process_group()
    if not shoal.rank():
        best = shoal.size() * alone
        print(f"{name}, {parameters / 1e6:.1f} million parameters, {shoal.size()} agents on {DEVICE}")
        print(f"  one agent alone, times the agents   {1e3 * best:8.1f} ms")
        for what, took in (("all at once, without averaging", at_once), ("Shoal", averaged), ("DDP over Gloo", ddp)):
            print(f"  {what:35} {1e3 * took:8.1f} ms   {took / best:.2f}")


class _Whole(torch.nn.Module):
    """A model whose forward pass is its loss."""

    def __init__(self, model: torch.nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self) -> torch.Tensor:
        return self._loss()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["exchange", *MODELS], default=["exchange", *MODELS])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    args = parser.parse_args()
    shoal.init()
    for one in args.only:
        if one == "exchange":
            exchange(args.rounds, args.quick)
        else:
            training(one, args.rounds, args.quick)
    shoal.shutdown()


if __name__ == "__main__":
    main()
