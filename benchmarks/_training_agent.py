"""What an agent of ``training.py`` measures: one function a part. All agents call it, and rank 0 tells the figures.

A part is called with what it is given on the command line, and returns figures whose kind is the name of the part, so
that what is printed, drawn and judged needs nothing else.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist

import shoal
from _models import Batch, Work, mlp, mlp_of, nbytes_of, resnet20, vgg16
from _ways import (
    CALLS_TIMED,
    LIMIT,
    LOCAL,
    ONE_PEER,
    OVERLAP,
    DataParallel,
    Peer,
    Trainer,
    alone,
    alone_and_averaged,
    check_agreement,
    data_parallels,
    decent_dps,
    decentralized,
    synchronous,
)
from shoal.bench.measurement import Case, Figures, Reporter, compare
from shoal.runtime.agent import current

MB = 1 << 20
HALF = 0.5
BATCHES = (8, 16, 32, 64, 128)
ROWS_BETWEEN_HOSTS = 1024
"""At which computing takes about as long as an exchange at 500 Mbit/s, whatever the size of the model."""
AnyPeer = TypeVar("AnyPeer", bound=Peer)
FEW = 2
"""Repetitions where something is only chosen."""


def train_mlp(reporter: Reporter, quick: bool) -> list[Figures]:
    """The 50-million-parameter MLP, at the batch where DDP communicates for about half of its step."""
    work = mlp(2, 64) if quick else mlp()
    shares = communication_shares(reporter, work, BATCHES[:2] if quick else BATCHES)
    batch = int(nearest_to_half(shares))
    topologies = [ONE_PEER, *(["ring"] if shoal.size() > 2 else [])]
    caps = (1,) if quick else (10, 25, 100, 500)
    found = against_ddp(reporter, "mlp", work, batch, topologies, caps, 2 if quick else 7, CALLS_TIMED)
    return [*found, Figures("mlp: shares", found[0].nbytes, shoal.size(), shares)]


def train_resnet20(reporter: Reporter, quick: bool) -> list[Figures]:
    """ResNet-20, a megabyte of parameters: nearly all of a step is computing."""
    batch, caps = (2, (1,)) if quick else (32, (0.25, 1, 25))
    return against_ddp(reporter, "resnet20", resnet20(), batch, [ONE_PEER], caps, 2 if quick else 7, 1 if quick else 3)


def train_vgg16(reporter: Reporter, quick: bool) -> list[Figures]:
    """VGG-16 for CIFAR between hosts, with a batch so small that the wire is the bottleneck."""
    caps, repetitions = ((1,), 2) if quick else ((5, 25, 100), 5)
    return against_ddp(
        reporter, "hosts", vgg16(16 if quick else 1), 4, [ONE_PEER], caps, repetitions, 1, variants=False
    )


def train_gradients(reporter: Reporter, quick: bool, kind: str, batch: str, *ways: str) -> list[Figures]:
    """Averaged gradients, as DDP takes them: the same algorithm, so that nothing but how they travel differs.

    Args:
        kind: ``machine`` or ``hosts``, and the model.
    """
    if kind.endswith("MLP"):
        work = mlp(2, 64) if quick else mlp_of(102_000_000)
    else:
        work = vgg16(16 if quick else 1)
    caps: Sequence[float] = (1,) if quick else (5, 25, 100)
    repetitions = 2 if quick else 5
    return against_ddp(
        reporter, f"gradients {kind}", work, int(batch), [], caps, repetitions, 1, variants=False, ways=ways
    )


def against_ddp(
    reporter: Reporter,
    kind: str,
    work: Work,
    batch_size: int,
    topologies: Sequence[str],
    bucket_mbs: Sequence[float],
    repetitions: int,
    calls: int,
    variants: bool = True,
    ways: Sequence[str] = (),
) -> list[Figures]:
    """A step alone, the two best of DDP's settings, and Shoal's ways: in turn, on the same batch and first weights.

    Args:
        topologies: With whom those ways average that average with neighbours.
        ways: Those that average with all agents.
    """
    batch = work.batch(batch_size, shoal.rank())
    settings, others = data_parallels(bucket_mbs, variants), decent_dps(bucket_mbs) if topologies else []
    tried = try_out(reporter, work, batch, [*settings, *others])
    trainers = {LOCAL: alone(work.make())}
    peers = [*fastest(others, tried)[:1], *fastest(settings, tried)][:2]  # a third would not fit into the memory
    trainers |= {one.name: one(work.make()) for one in peers}
    cases: dict[str, Case] = {name: partial(trainer.step, batch) for name, trainer in trainers.items()}
    if kind == "mlp" and not others:  # with a peer more it would not fit into the memory
        trainers[LIMIT] = trainer = alone_and_averaged(work.make())
        cases[LIMIT] = partial(trainer.step, batch)
    for way in ways:
        trainers[way] = trainer = decentralized(way, work.make())
        cases[way] = partial(trainer.step, batch)
    for way in synchronous() if topologies else ():
        trainers[way] = trainer = decentralized(way, work.make())
        cases |= {f"{way}, {topology}": partial(trainer.step, batch, topology) for topology in topologies}
    nbytes = nbytes_of(trainers[LOCAL].model)
    seconds = compare(reporter, f"{work.name}, batch {batch_size}", cases, repetitions, calls)
    check_agreement(trainers)
    return [
        Figures(kind, nbytes, shoal.size(), seconds),
        Figures(f"{kind}: batch", nbytes, shoal.size(), {"images or rows of each agent": [float(batch_size)]}),
        Figures(f"{kind}: DDP's settings", nbytes, shoal.size(), tried),
    ]


def communication_shares(reporter: Reporter, work: Work, batch_sizes: Sequence[int]) -> dict[str, list[float]]:
    """By batch size, the part of DDP's step that a step alone does not take."""
    trainers = {LOCAL: alone(work.make()), "DDP": DataParallel()(work.make())}
    shares = {}
    for size in batch_sizes:
        batch = work.batch(size, shoal.rank())
        cases: dict[str, Case] = {name: partial(trainer.step, batch) for name, trainer in trainers.items()}
        seconds = compare(reporter, f"{work.name}, batch {size}, looking for the half", cases, 5)
        shares[str(size)] = [1 - median(seconds[LOCAL]) / median(seconds["DDP"])]
    return shares


def nearest_to_half(shares: dict[str, list[float]]) -> str:
    """The batch size at which DDP's communication is nearest to half of its step."""
    return min(shares, key=lambda size: abs(median(shares[size]) - HALF))


def try_out(
    reporter: Reporter, work: Work, batch: Batch, settings: Sequence[Peer], **sgd: float
) -> dict[str, list[float]]:
    """A few steps with each of a peer's settings, one after another: all at once may not fit."""
    tried: dict[str, list[float]] = {}
    for one in settings:
        trainer = one(work.make(), **sgd)
        tried |= compare(reporter, f"{work.name}, {one.name}", {one.name: partial(trainer.step, batch)}, FEW)
        trainer.close()
        del trainer
        gc.collect()
    return tried


def fastest(settings: Sequence[AnyPeer], seconds: dict[str, list[float]]) -> list[AnyPeer]:
    """The settings, the fastest first."""
    return sorted(settings, key=lambda one: median(seconds[one.name]))


def train_alone(reporter: Reporter, quick: bool) -> list[Figures]:
    """What a wrapper costs in a world of one: the same model, the same parameters, with it and without it in turn."""
    repetitions = 3 if quick else 75
    works = [(mlp(2, 64), 4), (resnet20(), 2)] if quick else [(mlp(), 32), (resnet20(), 32)]
    found = []
    for work, size in works:
        batch = work.batch(size, shoal.rank())
        for way in synchronous():
            trainer = decentralized(way, work.make())
            plain = _unwrapped(trainer, work, shares=way != OVERLAP)
            cases: dict[str, Case] = {
                way: partial(trainer.step, batch),
                f"{way}: unwrapped": partial(plain.step, batch),
            }
            seconds = compare(reporter, f"{work.name}, {way} in a world of one", cases, repetitions)
            found.append(Figures(f"alone: {work.name}", nbytes_of(trainer.model), shoal.size(), seconds))
            trainer.close()
    return found


def _unwrapped(trainer: Trainer, work: Work, shares: bool) -> Trainer:
    """What the trainer would be without Shoal.

    Args:
        shares: It has the same parameters, so that where they lie makes no difference, and only the wrapper does. (Not
            where the wrapper has hooks on them, which would then run for both.)
    """
    if not shares:
        return alone(work.make())
    twin = work.make()
    twin.load_state_dict(trainer.model.state_dict(keep_vars=True), assign=True)
    assert isinstance(trainer.optimizer, shoal.DecentralizedOptimizer)
    return Trainer(twin, trainer.optimizer.optimizer)


def volumes(reporter: Reporter, quick: bool, megabytes: str, *ways: str, kind: str, rows: int) -> list[Figures]:
    """How much of the exchange shows: steps and exchanges alone, of an MLP of so many megabytes.

    SGD here has no momentum: a copy more of 574 MB for each way would not fit into the memory of a small machine.
    """
    work = mlp_of(int(float(megabytes) * 1_000_000))
    batch = work.batch(4 if quick else rows, shoal.rank())
    sparing = {"momentum": 0.0}
    settings = data_parallels((25,) if quick else (5, 25, 100), variants=False)
    ddp = fastest(settings, try_out(reporter, work, batch, settings, **sparing))[0]
    trainers = {
        LOCAL: alone(work.make(), **sparing),
        ddp.name: ddp(work.make(), **sparing),
        **{way: decentralized(way, work.make(), **sparing) for way in ways},
    }
    nbytes = nbytes_of(trainers[LOCAL].model)
    cases: dict[str, Case] = {
        name: partial(trainer.step, batch, ONE_PEER if name in ways else "") for name, trainer in trainers.items()
    }
    cases |= {f"{ddp.name}: exchange": gloo_exchange(nbytes, ddp.bucket_mb)}
    cases |= {f"{way}: exchange": partial(trainers[way].exchange, ONE_PEER) for way in ways}
    repetitions = 2 if quick else 5 if nbytes > 200 * MB else 7
    seconds = compare(reporter, f"{megabytes} MB: {', '.join(ways)}", cases, repetitions)
    check_agreement(trainers)
    return [Figures(f"{kind}: {megabytes} MB", nbytes, shoal.size(), seconds)]


def gloo_exchange(nbytes: int, bucket_mb: float) -> Case:
    """What DDP's communication is without the rest of a step: all-reduces of its buckets, all begun at once."""
    buckets = torch.split(torch.zeros(nbytes // 4), int(bucket_mb * MB) // 4)

    def exchange() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()

    return exchange


def memory(reporter: Reporter, quick: bool, way: str) -> list[Figures]:
    """Bytes that an agent holds after a few steps, gradients and the state of SGD with momentum with them.

    Memory that several agents have mapped counts in equal parts (the kernel's Pss), so that the sum over the agents is
    what they take together. One way in a process: what an earlier one leaves behind would hide what the next one takes.
    """
    work = mlp(2, 64) if quick else mlp(12, 1024)
    shoal.set_topology(shoal.topology.ExponentialTwoGraph(shoal.size()))
    batch = work.batch(4, shoal.rank())
    if way == "DDP":
        trainer = DataParallel()(work.make())
    else:
        trainer = alone(work.make()) if way == LOCAL else decentralized(way, work.make())
    steps = 4
    for number in range(steps):
        reporter.progress(f"memory, {way}", number, steps)
        trainer.step(batch, ONE_PEER if way in synchronous() else "", keep_gradients=number == steps - 1)
    held = {way: [_mean(_proportional_bytes())], f"{way}: arena": [_mean(current("memory").engine.arena.nbytes)]}
    nbytes = nbytes_of(trainer.model)
    dist.barrier()
    trainer.close()
    return [Figures("memory", nbytes, shoal.size(), held)]


def _proportional_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    held = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    dist.barrier()
    return held * 1024


def _mean(amount: int) -> float:
    total = torch.tensor([amount], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


PARTS: dict[str, Callable[..., list[Figures]]] = {
    "mlp": train_mlp,
    "resnet20": train_resnet20,
    "alone": train_alone,
    "volumes": partial(volumes, kind="volumes", rows=32),
    "volumes-hosts": partial(volumes, kind="volumes over hosts", rows=ROWS_BETWEEN_HOSTS),
    "hosts": train_vgg16,
    "gradients": train_gradients,
    "memory": memory,
}
