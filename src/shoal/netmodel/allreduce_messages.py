"""Averages over all agents, as sequences of exchanges, so that they can be compared with topologies.

Every function gives the :data:`~shoal.netmodel.messages.Step` of one all-reduce of `nbytes` among `size` agents.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .messages import Messages, Step
from .network import Ints


def ring_allreduce(size: int, nbytes: float) -> Step:
    """Along a ring in rank order, first summing, then handing round: 2 (n - 1) exchanges of a share of 1 / n.

    Patarasuk and Yuan 2009, as in Horovod and NCCL; 2 (n - 1) / n of the bytes leave each agent.
    """
    return ring_allreduce_among(np.arange(size)[:, None], nbytes)


def ring_allreduce_among(groups: Ints, nbytes: float) -> Step:
    """A ring all-reduce along each column of `groups`, int64 [agents of a group, groups], all at the same time."""
    length = len(groups)
    if length < 2:
        return []
    hop = Messages.of(groups.ravel(), np.roll(groups, -1, axis=0).ravel(), nbytes / length)
    return [hop] * (2 * (length - 1))


def direct_allreduce(size: int, nbytes: float) -> Step:
    """Everybody sends each its share, sums its own, and sends that to all: as :func:`shoal.allreduce` does."""
    return [_all_pairs(np.arange(size)[:, None], nbytes / size)] * 2 if size > 1 else []


def parameter_server(size: int, nbytes: float, server: int = 0) -> Step:
    """All send to one, which sends the result back to all (Li et al. 2014)."""
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
            its counterparts on other machines, as in :func:`shoal.hierarchical_neighbor_allreduce`.
    """
    inside = _all_pairs(np.arange(machines * agents_per_machine).reshape(machines, -1).T, nbytes / agents_per_machine)
    around = [inside] if agents_per_machine > 1 else []
    known: dict[int, Messages] = {}
    return [*around, *(known.setdefault(id(one), _shares(one, agents_per_machine)) for one in between), *around]


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
