"""The functions of agents that survive others, and the expected results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import shoal
from shoal import topology_util
from shoal.topology import Static, Without
from support.agent_main import Outcome
from support.fault_points import Point, arm

Vector = NDArray[np.float64]
CONTINUE = {"SHOAL_ON_LOSS": "continue"}


def first_value(rank: int) -> float:
    """Numbers of which no two sums are alike by accident."""
    return float(np.sqrt(2 + 7 * rank))


@dataclass
class RoundLog:
    """The results of an agent, round by round."""

    values: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    gathered: list[tuple[float, ...]] = field(default_factory=list)
    heard: list[float] = field(default_factory=list)
    changes: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    alive: tuple[int, ...] = ()
    slowest: float = 0.0


def average_through(numel: int, rounds: int, victims: dict[int, Point], directed: bool = False) -> RoundLog:
    """Average with the neighbours on a ring, and with all, while the victims end at their given places."""
    rank, size = shoal.rank(), shoal.size()
    graph = topology_util.ExponentialTwoGraph(size) if directed else topology_util.RingGraph(size)
    shoal.set_topology(graph, is_weighted=True)
    log = RoundLog()
    shoal.on_membership_change(lambda change: log.changes.append((change.lost, change.alive)))
    shoal.barrier()
    if rank in victims:
        arm(victims[rank])
    x = torch.full((numel,), first_value(rank), dtype=torch.float64)
    log.values.append(float(x[0]))
    for number in range(rounds):
        x = shoal.neighbor_allreduce(x, name="x")
        assert bool((x == x[0]).all()), "a sum of which only a part holds what was lost"
        log.values.append(float(x[0]))
        log.means.append(float(shoal.allreduce(torch.tensor([float(rank)], dtype=torch.float64))))
        total = shoal.allreduce(torch.full((numel,), 2.0**rank, dtype=torch.float64), average=False)
        assert bool((total == total[0]).all())
        log.sums.append(float(total[0]))
        if number % 3 == 0:
            log.gathered.append(tuple(shoal.allgather(torch.tensor([float(rank)])).tolist()))
        if number % 4 == 0:
            try:
                log.heard.append(float(shoal.broadcast(torch.tensor([float(rank + number)]), 0)))
            except shoal.PeerLost:  # its root is gone, for all of them
                assert 0 in victims
                log.heard.append(-1.0)
        if number % 5 == 0:
            shoal.barrier()
    log.alive = shoal.alive()
    return log


def burst_through(numel: int, rounds: int, victims: dict[int, Point]) -> list[list[float]]:
    """Many averages in flight under names of their own; the first number of each, by round."""
    rank = shoal.rank()
    shoal.set_topology(topology_util.RingGraph(shoal.size()), is_weighted=True)
    shoal.barrier()
    if rank in victims:
        arm(victims[rank])
    xs = [torch.full((numel,), first_value(rank) + k, dtype=torch.float64) for k in range(8)]
    seen = [[float(x[0]) for x in xs]]
    for _ in range(rounds):
        handles = [shoal.nonblocking.neighbor_allreduce(x, name=f"x{k}") for k, x in enumerate(xs)]
        xs = [handle.wait() for handle in handles]
        assert all(bool((x == x[0]).all()) for x in xs)
        seen.append([float(x[0]) for x in xs])
    shoal.barrier()
    return seen


def sums_through(rounds: int, victims: dict[int, Point]) -> list[list[float]]:
    """Bursts of small all-reduces and push-pull averages; the sums of each round."""
    rank, size = shoal.rank(), shoal.size()
    shoal.barrier()
    if rank in victims:
        arm(victims[rank])
    ring = {(rank + hop) % size: 0.25 for hop in (1, -1)}
    own = torch.tensor([2.0**rank], dtype=torch.float64)
    seen = []
    for _ in range(rounds):
        sums = [shoal.nonblocking.allreduce(own, average=False, name=f"sum {k}") for k in range(8)]
        means = [shoal.nonblocking.neighbor_allreduce(own, 0.5, ring, list(ring), name=f"mean {k}") for k in range(8)]
        seen.append([float(handle.wait()) for handle in sums])
        for handle in means:  # what who is gone has not sent weighs in the own
            assert float(handle.wait()) <= max(2.0**one for one in (rank, *ring))
    shoal.barrier()
    return seen


def survivors(outcomes: list[Outcome], victims: set[int]) -> dict[int, Any]:
    """The results of the survivors, which must all succeed; the victims have been killed."""
    for rank in victims:
        assert (outcomes[rank].error, outcomes[rank].message) == ("Died", "exit code -9")
    left = [outcome for outcome in outcomes if outcome.rank not in victims]
    failed = [f"rank {one.rank}: {one.error}: {one.message}\n{one.trace}" for one in left if one.error]
    assert not failed, "\n".join(failed)
    return {one.rank: one.value for one in left}


def check_all_equal(logs: dict[int, RoundLog], size: int) -> None:
    """Operations of all gave the same results on all: over all agents, and from some round over the survivors."""
    first, *others = logs.values()
    for other in others:
        assert other.means == first.means
        assert other.sums == first.sums
        assert other.gathered == first.gathered
        assert other.heard == first.heard
        assert other.alive == first.alive
    left = sorted(logs)
    assert first.alive == tuple(left)
    chain = [tuple(range(size)), *(alive for _, alive in first.changes)]
    at = 0
    for mean in first.means:  # of all, then of all but one, ...
        at = next(k for k in range(at, len(chain)) if mean == sum(chain[k]) / len(chain[k]))
    assert first.means[-1] == sum(left) / len(left), "the loss came after the last round"
    assert first.sums[-1] == sum(2.0**rank for rank in left)
    assert first.gathered[-1] == tuple(float(rank) for rank in left)
    for log in logs.values():
        assert sorted(rank for failed, _ in log.changes for rank in failed) == [r for r in range(size) if r not in left]
        assert log.changes[-1][1] == tuple(left)


def check_averages(values: dict[int, list[float]], size: int, victim: int, directed: bool = False) -> int:
    """Each average is that of the topology, with or without the victim's tensor, and later of the survivors.

    Returns:
        The number of rounds in which plans differed between agents.
    """
    graph = topology_util.ExponentialTwoGraph(size) if directed else topology_util.RingGraph(size)
    full, healed = Static(graph).matrix(0), Without(graph, [victim]).matrix(0)
    states = []
    rounds = len(next(iter(values.values())))
    offset = next(iter(values.values()))[0] - first_value(min(values))
    now = np.array([first_value(rank) for rank in range(size)]) + offset
    mixed = 0
    for k in range(rounds):
        for rank, one in values.items():
            now[rank] = one[k]
        if k + 1 == rounds:
            break
        kinds = {rank: _kinds(rank, one[k + 1], now, full, healed, victim) for rank, one in values.items()}
        assert all(kinds.values()), f"round {k}: {kinds}: nobody could compute that"
        states.append(kinds)
        now[victim] = full[victim] @ now
    healed_from = next(k for k in range(len(states)) if all("healed" in value for value in states[k].values()))
    assert all("healed" in one for kinds in states[healed_from:] for one in kinds.values())
    for kinds in states[:healed_from]:
        assert not any(one == {"healed"} for one in kinds.values()), "some had a new plan, and others not"
        mixed += not all("whole" in one for one in kinds.values())
    return mixed


def _kinds(
    rank: int,
    found: float,
    now: NDArray[np.float64],
    whole: NDArray[np.float64],
    healed: NDArray[np.float64],
    gone: int,
) -> set[str]:
    """Which of the averages that there may be this is."""
    own = whole[rank].copy()
    own[rank] += own[gone]
    own[gone] = 0.0
    could = {"whole": whole[rank] @ now, "without": own @ now, "healed": healed[rank] @ now}
    return {kind for kind, value in could.items() if abs(value - found) < 1e-9}
