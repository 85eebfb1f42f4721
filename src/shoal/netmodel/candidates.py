"""All methods of averaging on a network: the topologies of the catalog, of agents and of machines, and the
all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..topology.families.catalog import CATALOG, Topology
from ..topology.families.ceca import Ceca, CecaPairs
from ..topology.families.compose import AllReduce, Kronecker
from ..topology.schedule import Schedule
from .messages import (
    ALLREDUCE,
    NEIGHBOR,
    ModelOperation,
    Step,
    direct_allreduce,
    hierarchical_allreduce,
    operations_of,
    parameter_server,
    ring_allreduce,
    rounds_of,
    tree_allreduce,
)

MOST_EDGES = 1_000_000
"""Of one round; above this a topology is passed over."""

_CHUNKS = 8
# These two take the mean of all in one round, for which one would use one of the all-reduces.
_AS_ALLREDUCE = ("all-reduce", "fully-connected")


@dataclass(frozen=True)
class Averaging:
    """One way to average: a topology, or an all-reduce.

    Attributes:
        name: of the topology, or of the all-reduce.
        schedule: its rounds; None for an all-reduce, which is done after one.
        operations: ``operations(nbytes, rounds)``, how its first rounds are run on a tensor of so many bytes.
        messages: the same as messages to neighbours, in which compressed tensors are sent; None for an all-reduce.
        second_buffer: it is CECA with its second buffer, which averages and which no training has.
    """

    name: str
    schedule: Schedule | None
    operations: Callable[[float, int], list[ModelOperation]]
    messages: Callable[[float, int], list[ModelOperation]] | None = None
    second_buffer: bool = False


def averagings(size: int, agents_per_machine: int) -> tuple[list[Averaging], dict[str, str]]:
    """The averaging methods for this number of agents, and ``{name: reason}`` for the unavailable ones."""
    passed_over: dict[str, str] = {}
    found = [_by_allreduce(name, step_of) for name, step_of in _allreduces(size, agents_per_machine)]
    for name, schedule in _schedules(size, agents_per_machine, passed_over):
        found.append(_by_rounds(name, schedule, agents_per_machine))
        if isinstance(schedule, (Ceca, CecaPairs)) and schedule.needs_second_buffer:
            found.append(replace(found[-1], name=f"{name} with its second buffer", second_buffer=True))
    return found, passed_over


def _by_allreduce(name: str, step_of: Callable[[float], Step]) -> Averaging:
    return Averaging(name, None, lambda nbytes, rounds: [ModelOperation(ALLREDUCE, step_of(nbytes))] * rounds)


def _by_rounds(name: str, schedule: Schedule, local: int) -> Averaging:
    def operations(nbytes: float, rounds: int) -> list[ModelOperation]:
        return operations_of(schedule, range(rounds), nbytes, local)

    def messages(nbytes: float, rounds: int) -> list[ModelOperation]:
        return [ModelOperation(NEIGHBOR, step) for step in rounds_of(schedule, nbytes, rounds)]

    return Averaging(name, schedule, operations, messages)


def _allreduces(size: int, local: int) -> Iterator[tuple[str, Callable[[float], Step]]]:
    yield "all-reduce (ring)", lambda nbytes: ring_allreduce(size, nbytes)
    yield "all-reduce (two trees)", lambda nbytes: tree_allreduce(size, nbytes, _CHUNKS)
    yield "all-reduce (parameter server)", lambda nbytes: parameter_server(size, nbytes)
    if size**2 <= MOST_EDGES:
        yield "all-reduce (direct, as shoal.allreduce)", lambda nbytes: direct_allreduce(size, nbytes)
    if _machines_are_full(size, local):
        machines = size // local
        yield "all-reduce (ring of machines)", lambda nbytes: hierarchical_allreduce(machines, local, nbytes)


def _schedules(size: int, local: int, passed_over: dict[str, str]) -> Iterator[tuple[str, Schedule]]:
    for topology in CATALOG.values():
        if topology.name in _AS_ALLREDUCE:
            continue
        # A topology that groups agents by machines gets no machines of one agent.
        options: dict[str, float] = {"agents_per_machine": local} if topology.agents_per_machine and local > 1 else {}
        schedule = _schedule_of(topology.name, topology, size, options, passed_over)
        if schedule is not None:
            yield topology.name, schedule
        if topology.agents_per_machine or not _machines_are_full(size, local):
            continue
        name = f"{topology.name} of machines"
        between = _schedule_of(name, topology, size // local, {}, passed_over)
        if between is not None and len(between.edges(0).weight) * local**2 <= MOST_EDGES:
            yield name, Kronecker(between, AllReduce(local))


def _machines_are_full(size: int, local: int) -> bool:
    return 1 < local < size and size % local == 0


def _schedule_of(
    name: str, topology: Topology, size: int, options: dict[str, float], passed_over: dict[str, str]
) -> Schedule | None:
    try:
        schedule = topology.schedule(size, **options)
        edges = len(schedule.edges(0).weight)
    except ValueError as error:
        passed_over[name] = str(error)
        return None
    if edges > MOST_EDGES:
        passed_over[name] = f"{edges:,} messages in a round are too many to time here; the limit is {MOST_EDGES:,}"
        return None
    return schedule
