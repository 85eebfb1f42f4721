"""Ways to average as the messages they are made of, and what of them passes the busiest node.

An all-reduce is no mixing matrix: its messages are shares of a model, to and from agents or servers, step after step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from shoal.topology.schedule import Ranks, Schedule

Step = tuple[Ranks, Ranks, float]
"""Messages at the same time: sources, destinations, both int64 [messages], and the bytes of each message."""


@dataclass(frozen=True)
class Counted:
    """What passes the busiest node in one averaging, counted message by message.

    Attributes:
        steps: exchanges that wait for each other.
        messages: in each step sent or received by the busiest node, whichever are more; the sum over the steps.
        bytes: the same of bytes.
    """

    steps: int
    messages: int
    bytes: float


def count_messages(steps: Iterable[Step]) -> Counted:
    """Count them."""
    number, messages, total = 0, 0, 0.0
    for source, destination, nbytes in steps:
        busiest = int(max(np.bincount(source).max(), np.bincount(destination).max()))
        number, messages, total = number + 1, messages + busiest, total + busiest * nbytes
    return Counted(number, messages, total)


def neighbor_allreduces(schedule: Schedule, rounds: int, nbytes: float) -> Iterator[Step]:
    """The first rounds of a schedule, a message of `nbytes` on every edge. Rounds without a message are no steps."""
    for round in range(rounds):
        edges = schedule.edges(round)
        others = edges.source != edges.destination
        if others.any():
            yield edges.source[others], edges.destination[others], nbytes


def delegates(between: Schedule, group: int, nbytes: float) -> Iterator[Step]:
    """A round of delegates, the first agents of groups, who collect the models of their group and hand out the result.

    The Ring-Star paper's averaging step (Jameel et al. 2019, section 2.4).

    Args:
        between: a schedule whose agents are the groups; its round 0 is run.
        group: agents in each.
        nbytes: of a model.
    """
    everyone = np.arange(between.size * group)
    delegate = everyone - everyone % group
    members = everyone != delegate
    if group > 1:
        yield everyone[members], delegate[members], nbytes
    for source, destination, size in neighbor_allreduces(between, 1, nbytes):
        yield source * group, destination * group, size
    if group > 1:
        yield delegate[members], everyone[members], nbytes


def ring_allreduce(size: int, nbytes: float) -> Iterator[Step]:
    """2 (n - 1) steps in which everybody passes on a share of 1 / n, sums first (Patarasuk, Yuan 2009)."""
    everyone = np.arange(size)
    return repeat((everyone, (everyone + 1) % size, nbytes / size), 2 * (size - 1))


def parameter_server(size: int, nbytes: float) -> Iterator[Step]:
    """All send to a server, the node after them, and it answers all (Li et al. 2014)."""
    everyone, server = np.arange(size), np.full(size, size)
    yield everyone, server, nbytes
    yield server, everyone, nbytes


def byteps(size: int, nbytes: float) -> Iterator[Step]:
    """All send a share of 1 / n to each of n servers, the nodes after them, which answer all (Jiang et al. 2020)."""
    everyone, servers = np.repeat(np.arange(size), size), np.tile(np.arange(size, 2 * size), size)
    yield everyone, servers, nbytes / size
    yield servers, everyone, nbytes / size
