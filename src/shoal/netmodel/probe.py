"""Measures a network with its agents: the parameters of a port inside a machine and of a NIC between machines.

Each agent sends to one, two or three others at once, and receives from as many, small tensors and large ones, by
Shoal's own operation; the network model is fitted to the times. Each agent runs ``python -m shoal.netmodel.probe``;
:func:`measure_this_machine` starts some on this machine.

The parameters of a NIC are fitted to the measured times. Messages that begin together on one NIC take ``degree
(overhead + nbytes / bandwidth) + latency``: linear in the three unknowns, so that least squares finds them. Errors
count by their share of the time, or the longest runs alone would decide.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch

import shoal

from ..runtime.queries import is_homogeneous, machine_rank
from .network import Link

SIZES = (1_000, 64_000, 1_000_000, 8_000_000)
"""Bytes of the tensors, smallest first."""
MOST_DEGREE = 3
REPETITIONS = 7
SLOW_SECONDS = 2.0
"""Once a message takes longer than this, no larger one is tried."""
_FEWEST_SIZES = 2
_DEADLINE_SECONDS = 300.0


@dataclass(frozen=True)
class MeasuredNetwork:
    """The measured parameters of the network between agents.

    Attributes:
        agents: the number of agents.
        agents_per_machine: on each machine; 1 if machines differ.
        inside: an agent's port, while all agents use theirs; None if every machine has one agent.
        between: a machine's NIC, while one agent of each machine uses it; None if there is one machine.
    """

    agents: int
    agents_per_machine: int
    inside: Link | None
    between: Link | None


def measure() -> MeasuredNetwork:
    """The part of every agent, after ``shoal.init()``. All must call it; all get the same result.

    Raises:
        ValueError: there is a single agent, or the measured times are implausible.
    """
    size, rank = shoal.size(), shoal.rank()
    if size < 2:
        raise ValueError("a network is measured between agents, and there is one. Start more: shoal run -n 2 ...")
    homogeneous = is_homogeneous()
    local = shoal.local_size() if homogeneous else 1
    machine = rank // local
    inside = _fitted(list(range(machine * local, (machine + 1) * local))) if local > 1 else None
    first = [rank for rank in range(size) if rank % local == 0] if homogeneous else _first_of_each_machine()
    between = _fitted(first) if len(first) > 1 else None
    return MeasuredNetwork(size, local, inside, between)


def measure_difference(gradient: torch.Tensor | torch.nn.Module | Iterable[torch.Tensor]) -> float:
    """How much agents' gradients differ: the ``difference`` of :class:`~shoal.netmodel.Training`, ``--difference``.

    The part of every agent, after ``shoal.init()``. All must call it at the same parameters, as at the start of
    training; all get the same result. The noise of a batch counts as a difference, so take the gradient of a large one.

    Args:
        gradient: This agent's: a tensor, several, or a module after its backward pass, of which a parameter without a
            gradient counts as zero. Equal shapes on all agents, real floating-point numbers.

    Returns:
        The root mean square over agents of ``||g_i - mean||``, over ``||mean||``, taken in float64. Infinite if the
        mean is zero and the gradients are not, and 0 if all are zero.

    Raises:
        ValueError: No gradient is there, or one is None or not finite, on any agent; all agents raise it.
    """
    if isinstance(gradient, torch.nn.Module):
        params = [param for param in gradient.parameters() if param.requires_grad]
        given = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        has_any = any(param.grad is not None for param in params)
    else:
        given = [gradient] if isinstance(gradient, torch.Tensor) else list(gradient)
        has_any = bool(given) and all(tensor is not None for tensor in given)
    rows = [tensor.detach().cpu().double().reshape(-1) for tensor in given if tensor is not None]
    flat = torch.cat(rows or [torch.zeros(0, dtype=torch.float64, device="cpu")])
    usable = float(has_any and bool(flat.isfinite().all()))
    if shoal.allreduce(torch.tensor([usable], device="cpu"), name="measure_difference.usable").item() < 1:
        raise ValueError(
            "the difference of gradients cannot be measured: "
            + ("another agent has" if usable else f"rank {shoal.rank()} has")
            + " no gradient, or one that is not finite. Call it after loss.backward() on every agent"
        )
    mean = shoal.allreduce(flat, name="measure_difference.mean")
    own = torch.stack([(flat - mean).square().sum()])
    apart = shoal.allreduce(own, name="measure_difference.apart").sqrt().item()
    length = mean.norm().item()
    return apart / length if length else (math.inf if apart else 0.0)


def measure_this_machine(agents: int) -> MeasuredNetwork:
    """Measure with so many processes on this machine, started for it.

    Raises:
        RuntimeError: they failed; the message ends with their output.
    """
    command = [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(agents), "-m", "shoal.netmodel.probe"]
    # They must not meet with the agents of a job whose variables are still set.
    others = ("SHOAL_BEGIN_WITH", "SHOAL_INCARNATION", "SHOAL_RECORD", "SHOAL_RENDEZVOUS", "SHOAL_TIMELINE")
    environ = {name: text for name, text in os.environ.items() if name not in others}
    try:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DEADLINE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"measuring with {agents} agents failed (not done after {_DEADLINE_SECONDS} s). Measure with fewer agents"
        ) from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"measuring with {agents} agents failed (status {done.returncode}): {done.stderr.strip()}")
    measured = json.loads(lines[-1])
    for name in ("inside", "between"):
        measured[name] = Link(**measured[name]) if measured[name] else None
    return MeasuredNetwork(**measured)


def _first_of_each_machine() -> list[int]:
    machines = shoal.allgather(torch.tensor([machine_rank()], device="cpu")).tolist()
    return sorted({machine: rank for rank, machine in reversed(list(enumerate(machines)))}.values())


def _fitted(group: Sequence[int]) -> Link:
    """The link among the agents of `group`. Every agent calls it, with the group that it would belong to."""
    observations: list[Observation] = []
    for degree in range(1, min(MOST_DEGREE, len(group) - 1) + 1):
        for count, nbytes in enumerate(SIZES):
            seconds = _timed(group, degree, nbytes)
            observations.append(Observation(degree, nbytes, seconds))
            if seconds > SLOW_SECONDS and count + 1 >= _FEWEST_SIZES:
                break
    return fit_link(observations)


def _timed(group: Sequence[int], degree: int, nbytes: int) -> float:
    """Seconds of one exchange on the slowest agent; the median. The same on all agents."""
    rank = shoal.rank()
    x = torch.zeros(nbytes // 4, device="cpu")
    out = torch.empty_like(x)
    share = 1 / (degree + 1)
    taken = []
    for _ in range(REPETITIONS + 1):
        shoal.barrier()
        start = time.perf_counter()
        if rank in group:
            place = group.index(rank)
            ahead = [group[(place + hop) % len(group)] for hop in range(1, degree + 1)]
            behind = [group[(place - hop) % len(group)] for hop in range(1, degree + 1)]
            shoal.neighbor_allreduce(x, share, dict.fromkeys(behind, share), ahead, enable_topo_check=False, out=out)
        taken.append(time.perf_counter() - start)
    slowest = shoal.allreduce(torch.tensor(taken[1:], dtype=torch.float64, device="cpu"), op="max")
    return float(statistics.median(slowest.tolist()))


def main() -> None:
    """Measure, and print the result on rank 0 as a line of JSON."""
    torch.set_num_threads(1)
    shoal.init()
    found = measure()
    if shoal.rank() == 0:
        print(json.dumps(asdict(found)), flush=True)
    shoal.shutdown()


class Observation(NamedTuple):
    """Every NIC of a network sent and received so many messages of one size at once, and all had come after so long.

    Attributes:
        degree: messages on each NIC, at least 1.
        nbytes: of each message.
        seconds: measured.
    """

    degree: int
    nbytes: float
    seconds: float


def fit_link(observations: Sequence[Observation]) -> Link:
    """The NIC with the best fit to the observations.

    With one degree only, overhead and latency cannot be distinguished, and all of it counts as latency. A negative
    latency or overhead is set to zero.

    Raises:
        ValueError: fewer than two different sizes, times that are not positive, or times that do not grow with the
            bytes, so that there is no bandwidth in them.
    """
    if len({observation.nbytes for observation in observations}) < 2:
        raise ValueError("messages of one size only cannot tell bandwidth from latency. Measure at least two sizes.")
    if any(observation.seconds <= 0 or observation.degree < 1 for observation in observations):
        raise ValueError("an observation has no positive time or no message. Pass what was measured.")
    degree, nbytes, seconds = (np.array(column, float) for column in zip(*observations, strict=True))
    columns = {"bandwidth": degree * nbytes, "latency": np.ones_like(degree)}
    if len(set(degree.tolist())) > 1:
        columns["overhead"] = degree
    best: dict[str, float] = {}
    least = math.inf
    # None may be negative. The best such fit is the plain fit of the nonzero ones, so trying all subsets is exact.
    for count in range(1, len(columns) + 1):
        for names in itertools.combinations(columns, count):
            shares = np.stack([columns[name] / seconds for name in names], axis=1)
            found, *_ = np.linalg.lstsq(shares, np.ones_like(seconds), rcond=None)
            error = float(((shares @ found - 1) ** 2).sum())
            if found.min() >= 0 and error < least:
                best, least = dict(zip(names, found.tolist(), strict=True)), error
    if not best.get("bandwidth"):
        raise ValueError("longer messages did not take longer. Measure larger ones, or on a quieter machine.")
    return Link(best.get("latency", 0.0), 1 / best["bandwidth"], best.get("overhead", 0.0))


if __name__ == "__main__":
    main()
