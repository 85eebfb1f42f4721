"""Time-varying one-peer schedules: in each round an agent sends to one neighbour, so a round costs one message.

Each function returns an endless generator for one agent, which yields ``(send_ranks, receive_ranks)``, two lists, round
after round; agents that step their generators together agree on the edges. The names and sequences are those of
BlueFog's ``topology_util``. Arguments are checked when the function is called, not when the generator first runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import networkx as nx

from .._validate import as_digraph, as_int, check_rank, check_size
from ..schedule import Clock, Schedule
from .groups import InnerOuterExponential, InnerOuterRing
from .one_peer import OnePeerExponential

Round = tuple[list[int], list[int]]
"""The destinations and the sources of one agent in one round, each in ascending order of rank."""


def GetDynamicOnePeerSendRecvRanks(topo: nx.DiGraph, self_rank: int) -> Iterator[Round]:
    """In round t each agent sends to its (t mod out-degree)-th out-neighbour, clockwise from itself.

    On an exponential graph this is the one-peer exponential graph, whose rounds average exactly in log2(n) of them when
    n is a power of two (Ying et al. 2021, arXiv:2110.13363). On an irregular graph an agent may receive from several in
    one round, or from none. An agent without out-neighbours sends nothing, and self loops are optional; BlueFog fails
    on both.

    Args:
        topo: the base graph, nodes 0 to n - 1; weights are not used.
        self_rank: whose sends and receives.
    """
    digraph = as_digraph(topo)
    self_rank = check_rank(self_rank, digraph.number_of_nodes(), "self_rank")
    mine = _clockwise(digraph, self_rank)
    senders: list[tuple[int, int, int]] = []
    for source in sorted(set(digraph.predecessors(self_rank)) - {self_rank}):
        theirs = _clockwise(digraph, source)
        senders.append((source, theirs.index(self_rank), len(theirs)))
    return _one_peer(mine, senders)


def GetExp2DynamicSendRecvMachineRanks(
    world_size: int, local_size: int, self_rank: int, local_rank: int
) -> Iterator[Round]:
    """One-peer exponential graph over machines: in round t to the machine ``2**(t mod ceil(log2(machines)))`` ahead.

    Yields machine ranks, for `hierarchical_neighbor_allreduce`; all agents of a machine get the same. With one machine
    both lists are empty (BlueFog refuses it).

    Args:
        world_size: number of agents.
        local_size: number of agents on each machine.
        self_rank: this agent among all.
        local_rank: this agent on its machine, ``self_rank % local_size``.

    Raises:
        ValueError: machines of different sizes, or ranks that do not fit together.
    """
    machines, self_rank = _check_machines(world_size, local_size, self_rank)
    local_rank = check_rank(local_rank, local_size, "local_rank")
    if self_rank % local_size != local_rank:
        raise ValueError(
            f"with {local_size} agents on each machine, rank {self_rank} has local rank {self_rank % local_size}, not "
            f"{local_rank}. Ranks must be numbered machine by machine, and all machines have the same size."
        )
    return _rounds(OnePeerExponential(machines), self_rank // local_size)


def GetInnerOuterRingDynamicSendRecvRanks(world_size: int, local_size: int, self_rank: int) -> Iterator[Round]:
    """Rings inside and between machines; one agent of each machine at a time has the machine's network link to itself.

    In round t the agents with local rank ``t mod local_size`` form a ring from each machine to the next; the other
    agents form a ring inside their machine. With one machine there is no outgoing agent, and with one agent a machine
    there is no ring inside. In the first case BlueFog's outgoing agent sends to itself; it refuses the second.

    Args:
        world_size: number of agents.
        local_size: number of agents on each machine.
        self_rank: this agent among all.

    Raises:
        ValueError: machines of different sizes, or several machines of two agents. There the agent that stays has no
            partner, and the two would never exchange anything.
    """
    self_rank = _check_inner_outer(world_size, local_size, self_rank)
    return _rounds(InnerOuterRing(world_size, local_size), self_rank)


def GetInnerOuterExpo2DynamicSendRecvRanks(world_size: int, local_size: int, self_rank: int) -> Iterator[Round]:
    """As :func:`GetInnerOuterRingDynamicSendRecvRanks`, with one-peer exponential graphs instead of both rings.

    In round t the agents with local rank ``t mod local_size`` send to the machine ``2**(t mod a)`` ahead, the other
    agents of a machine to the agent ``2**(t mod b)`` ahead among themselves, where a and b count the powers of two
    below the number of machines and of these other agents. This is the "inner-outer exponential-2 graph" of the BlueFog
    paper's figure 11.

    Args:
        world_size: number of agents.
        local_size: number of agents on each machine.
        self_rank: this agent among all.

    Raises:
        ValueError: machines of different sizes, or several machines of two agents (see the ring).
    """
    self_rank = _check_inner_outer(world_size, local_size, self_rank)
    return _rounds(InnerOuterExponential(world_size, local_size), self_rank)


def collect_rounds(generators: Sequence[Iterator[Round]], rounds: int) -> list[list[tuple[int, int]]]:
    """The next `rounds` rounds of a whole fleet, each the list of its edges (source, destination) in ascending order.

    Args:
        generators: one for each agent, in rank order, all at the same round; they are advanced.
        rounds: how many.

    Raises:
        ValueError: an agent sends to another that does not expect it, or expects another that does not send.
    """
    collected: list[list[tuple[int, int]]] = []
    for t in range(as_int(rounds, "rounds")):
        sends: set[tuple[int, int]] = set()
        receives: set[tuple[int, int]] = set()
        for rank, generator in enumerate(generators):
            destinations, sources = next(generator)
            sends.update((rank, destination) for destination in destinations)
            receives.update((source, rank) for source in sources)
        if sends != receives:
            source, destination = min(sends ^ receives)
            missing = "receive" if (source, destination) in sends else "send"
            raise ValueError(
                f"in round {t} edge ({source}, {destination}) has no {missing}. "
                "Pass one fresh generator for each agent, in rank order, all made from the same graph."
            )
        collected.append(sorted(sends))
    return collected


def _clockwise(graph: nx.DiGraph, rank: int) -> list[int]:
    size = graph.number_of_nodes()
    return sorted(set(graph.successors(rank)) - {rank}, key=lambda peer: (peer - rank) % size)


def _one_peer(destinations: list[int], senders: list[tuple[int, int, int]]) -> Iterator[Round]:
    """`senders` lists (source, index in its period of the round in which it sends here, its period)."""
    for t in count():
        send = [destinations[t % len(destinations)]] if destinations else []
        yield send, [source for source, index, period in senders if t % period == index]


def _rounds(schedule: Schedule, rank: int) -> Iterator[Round]:
    """One agent's part of a schedule, without the weights."""
    for mixing in Clock(schedule, rank):
        yield list(mixing.destination_ranks), list(mixing.source_ranks)


def _check_machines(world_size: int, local_size: int, self_rank: int) -> tuple[int, int]:
    """The number of machines, and `self_rank` as a checked int."""
    world_size, local_size = check_size(world_size, "world_size"), check_size(local_size, "local_size")
    if world_size % local_size:
        raise ValueError(
            f"{world_size} agents do not fill machines of {local_size}. This schedule needs machines of one size: "
            "start as many agents on each, or use GetDynamicOnePeerSendRecvRanks, which knows no machines."
        )
    return world_size // local_size, check_rank(self_rank, world_size, "self_rank")


def _check_inner_outer(world_size: int, local_size: int, self_rank: int) -> int:
    """`self_rank` as a checked int."""
    machines, self_rank = _check_machines(world_size, local_size, self_rank)
    if machines > 1 and local_size == 2:
        raise ValueError(
            f"with 2 agents on each of {machines} machines, the one that stays while the other sends to another "
            "machine has no neighbour, so the two never average. Use GetDynamicOnePeerSendRecvRanks, or "
            "GetExp2DynamicSendRecvMachineRanks with hierarchical_neighbor_allreduce."
        )
    return self_rank
