"""The operation of Shoal that executes a round of a schedule, and so its actual messages. A round that takes the mean
of all is an all-reduce, and a round in which the agents of each machine act as one is
``hierarchical_neighbor_allreduce``: both need far fewer bytes than ``neighbor_allreduce``, which sends one tensor on
every edge.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..topology.schedule import Edges, Schedule
from .allreduce_messages import hierarchical, ring_allreduce
from .messages import Messages, Step

NEIGHBOR = "neighbor_allreduce"
HIERARCHICAL = "hierarchical_neighbor_allreduce"
ALLREDUCE = "allreduce"
NOTHING = "nothing"

_EQUAL = 1e-12


class ModelOperation(NamedTuple):
    """A round as one of Shoal's operations runs it.

    Attributes:
        name: of the operation.
        step: its exchanges.
    """

    name: str
    step: Step


def operations_of(
    schedule: Schedule, rounds: Iterable[int], nbytes: float, agents_per_machine: int = 1
) -> list[ModelOperation]:
    """The operations of some rounds of a schedule. Rounds of one period are the same objects each time.

    Args:
        schedule: of all agents, numbered machine by machine.
        rounds: their numbers.
        nbytes: of one agent's tensor.
        agents_per_machine: if machines are not all full, none is taken for one.
    """
    known: dict[int, ModelOperation] = {}
    found = []
    for number in rounds:
        index = schedule.in_period(number)
        if index not in known:
            known[index] = _model_operation(schedule.edges(index), schedule.size, nbytes, agents_per_machine)
        found.append(known[index])
    return found


def _model_operation(edges: Edges, size: int, nbytes: float, agents_per_machine: int) -> ModelOperation:
    others = edges.destination != edges.source
    if not others.any():
        return ModelOperation(NOTHING, [])
    if len(edges.weight) == size**2 > 4 and np.ptp(edges.weight) <= _EQUAL:
        return ModelOperation(ALLREDUCE, ring_allreduce(size, nbytes))
    machines = _between_machines(edges, size, agents_per_machine)
    if machines is not None:
        between = [Messages.of(*machines, nbytes)] if len(machines[0]) else []
        return ModelOperation(
            HIERARCHICAL, hierarchical(size // agents_per_machine, agents_per_machine, nbytes, between)
        )
    return ModelOperation(NEIGHBOR, [Messages.of(edges.source[others], edges.destination[others], nbytes)])


def _between_machines(edges: Edges, size: int, local: int) -> tuple[list[int], list[int]] | None:
    """Sources and destinations among machines, if every agent of a machine takes the same of every agent of another."""
    if local == 1 or size % local or len(edges.weight) % local**2:
        return None
    machines = size // local
    pairs, which, counts = np.unique(
        (edges.source // local) * machines + edges.destination // local, return_inverse=True, return_counts=True
    )
    if (counts != local**2).any():
        return None
    total = np.bincount(which, weights=edges.weight)
    if (np.abs(edges.weight - (total / counts)[which]) > _EQUAL).any():
        return None
    source, destination = pairs // machines, pairs % machines
    if len(np.unique(destination[source == destination])) != machines:
        return None
    apart = source != destination
    return source[apart].tolist(), destination[apart].tolist()
