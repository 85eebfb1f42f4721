"""The messages of exchanges: given explicitly, of a round of a schedule, of an all-reduce, of an operation of Shoal.

The all-reduces are functions, each of which gives the :data:`Step` of an average over all agents, so that it can be
compared with topologies. The operation of Shoal that executes a round has other messages than the edges of the round in
two cases. A round that takes the mean of all is an all-reduce, and a round in which the agents of each machine act as
one is ``hierarchical_neighbor_allreduce``: both need far fewer bytes than ``neighbor_allreduce``, which sends one
tensor on every edge.

:func:`averagings` lists all methods of averaging on a network: the topologies of the catalog, of agents and of
machines, and the all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..topology.families.catalog import CATALOG, Topology
from ..topology.families.compose import AllReduce, Kronecker
from ..topology.families.finite_time import Ceca, CecaPairs
from ..topology.schedule import Edges, Schedule, as_schedule
from .network import Floats, Ints


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages of one exchange: each agent sends all of its own at once, and continues when all for it have
    arrived.

    Attributes:
        source, destination: int64 [messages], agents. No agent sends to itself.
        nbytes: float64 [messages].
    """

    source: Ints
    destination: Ints
    nbytes: Floats

    @classmethod
    def of(cls, source: ArrayLike, destination: ArrayLike, nbytes: ArrayLike) -> Messages:
        """Checked; `nbytes` is broadcast, so that one number serves for all messages.

        Raises:
            ValueError: an agent sends to itself, a size is negative or not finite, or the lengths differ.
        """
        out, into = np.atleast_1d(np.asarray(source, np.int64)), np.atleast_1d(np.asarray(destination, np.int64))
        if out.shape != into.shape or out.ndim != 1:
            raise ValueError(f"{out.shape} sources and {into.shape} destinations. Name both ends of every message.")
        if (out == into).any():
            raise ValueError(f"agent {out[out == into][0]} sends to itself. Leave out what moves nowhere.")
        if len(out) and min(out.min(), into.min()) < 0:
            raise ValueError("a rank is negative. Ranks count from 0.")
        size = np.broadcast_to(np.asarray(nbytes, float), out.shape)
        if not (np.isfinite(size).all() and (size >= 0).all()):
            raise ValueError("a message has a size that is negative or not finite. Pass its bytes.")
        return cls(out, into, size)

    def __len__(self) -> int:
        return len(self.source)


Step = Sequence[Messages]
"""The exchanges that follow one computation: one for a round of averaging, several for an all-reduce."""


def rounds_of(topology: nx.Graph | Schedule, nbytes: float, rounds: int, start: int = 0) -> Iterator[Step]:
    """The rounds of a topology, `nbytes` on every edge. Rounds of one period are the same objects each time."""
    schedule = as_schedule(topology)
    known: dict[int, Step] = {}
    for number in range(start, start + rounds):
        if schedule.period is None:
            yield [messages_of_round(schedule, number, nbytes)]
            continue
        index = schedule.in_period(number)
        if index not in known:
            known[index] = [messages_of_round(schedule, index, nbytes)]
        yield known[index]


def messages_of_round(schedule: Schedule, round: int, nbytes: float) -> Messages:
    """One round of a schedule, `nbytes` on every edge between two agents."""
    edges = schedule.edges(round)
    others = edges.destination != edges.source
    return Messages.of(edges.source[others], edges.destination[others], nbytes)


def ring_allreduce(size: int, nbytes: float) -> Step:
    """Along a ring in rank order, first summing, then handing round: 2 (n - 1) exchanges of a share of 1 / n.

    Patarasuk and Yuan 2009, as in Horovod and NCCL; 2 (n - 1) / n of the bytes leave each agent.
    """
    if size < 2:
        return []
    agents = np.arange(size)
    return [Messages.of(agents, np.roll(agents, -1), nbytes / size)] * (2 * (size - 1))


def direct_allreduce(size: int, nbytes: float) -> Step:
    """Everybody sends each its share, sums its own, and sends that to all: as :func:`shoal.allreduce` does."""
    return [_all_pairs(np.arange(size)[:, None], nbytes / size)] * 2 if size > 1 else []


def parameter_server(size: int, nbytes: float, server: int = 0) -> Step:
    """All send to one, which sends the result back to all (Li et al. 2014)."""
    if not 0 <= server < size:
        raise ValueError(f"server is {server}, but agents count from 0 to {size - 1}.")
    others = np.delete(np.arange(size), server)
    if not len(others):
        return []
    central = np.full_like(others, server)
    return [Messages.of(others, central, nbytes), Messages.of(central, others, nbytes)]


def tree_allreduce(size: int, nbytes: float, chunks: int = 1) -> Step:
    """Up and down two binary trees with half of the bytes each, whose inner nodes are the leaves of the other.

    In chunks that follow each other up the tree and down, each one exchange behind the one before. Sanders, Speck and
    Träff 2009, as in NCCL since 2.4; twice the bytes leave an agent whatever their number.

    Args:
        size, nbytes: as everywhere here.
        chunks: in how many pieces each half is sent. Many keep all levels busy, few mean fewer exchanges.
    """
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}. Pass how many pieces the bytes are sent in, at least 1.")
    if size < 2:
        return []
    child = np.arange(1, size)
    parent = (child - 1) // 2
    # Heap order: level d holds the nodes 2^d - 1 to 2^(d + 1) - 2.
    level = np.floor(np.log2(child + 1)).astype(int)
    depth = int(level[-1])
    step = []
    for hop in range(2 * depth + chunks - 1):
        # Chunk c leaves level d upwards in hop depth - d + c, and reaches it again in hop depth + d - 1 + c.
        rising = _within(hop - (depth - level), chunks)
        falling = _within(hop - (depth + level - 1), chunks)
        out = np.concatenate([child[rising], parent[falling]])
        into = np.concatenate([parent[rising], child[falling]])
        both = np.concatenate([out, size - 1 - out]), np.concatenate([into, size - 1 - into])
        step.append(Messages.of(*both, nbytes / (2 * chunks)))
    return step


def hierarchical(machines: int, agents_per_machine: int, nbytes: float, between: Step) -> Step:
    """First each agent of a machine averages a share, then shares are exchanged between machines, then inside machines.

    Args:
        machines, agents_per_machine: all machines are full.
        nbytes: of one agent's tensor.
        between: exchanges among machines, with the bytes of a whole tensor. Every agent exchanges its own share with
            its counterparts on other machines, as in :func:`shoal.bluefog.hierarchical_neighbor_allreduce`.
    """
    inside = _all_pairs(np.arange(machines * agents_per_machine).reshape(machines, -1).T, nbytes / agents_per_machine)
    around = [inside] if agents_per_machine > 1 else []
    known: dict[int, Messages] = {}
    shares = (known.setdefault(id(whole), _shares(whole, agents_per_machine)) for whole in between)
    return [*around, *shares, *around]


def hierarchical_allreduce(machines: int, agents_per_machine: int, nbytes: float) -> Step:
    """Shares inside the machines, and ring all-reduces of the shares between them."""
    return hierarchical(machines, agents_per_machine, nbytes, ring_allreduce(machines, nbytes))


def _all_pairs(groups: Ints, nbytes: float) -> Messages:
    """Messages from every agent to every other within each column of `groups`."""
    length = len(groups)
    behind = [np.roll(groups, -hop, axis=0).ravel() for hop in range(1, length)]
    into = np.concatenate(behind) if behind else np.empty(0, np.int64)
    return Messages.of(np.tile(groups.ravel(), length - 1), into, nbytes)


def _shares(messages: Messages, agents: int) -> Messages:
    places = np.arange(agents)
    out = (messages.source[:, None] * agents + places).ravel()
    into = (messages.destination[:, None] * agents + places).ravel()
    return Messages.of(out, into, np.repeat(messages.nbytes / agents, agents))


def _within(chunk: Ints, chunks: int) -> NDArray[np.bool_]:
    return (chunk >= 0) & (chunk < chunks)


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
