"""The main operations, each as a function that an agent calls: the same in a process and in a thread of a fleet."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import networkx as nx
import torch

import shoal
from shoal.compression import QSGD, TopK
from support.reference import bits
from support.samples import BLOCK_BYTES, INLINE_BYTES, WEIGHABLE, random_digraph, sample

SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (3, 0),
    (5, 7),
    (INLINE_BYTES // 4,),
    (INLINE_BYTES // 4 + 1,),
    (BLOCK_BYTES // 4 + 1,),
    (3, BLOCK_BYTES // 4 + 5),
)
"""Scalars, nothing, both sides of the inline limit, and more than a block and a chunk, for numbers of four bytes."""
Exchange = Callable[[torch.Tensor], torch.Tensor]
Bits = list[tuple[str, tuple[int, ...], bytes]]
"""The dtype and shape of each result, and a hash of its bytes: the bytes themselves would be over a gigabyte."""


def weighted_digraph(size: int) -> nx.DiGraph:
    """Every edge with a weight of its own, some negative, and not symmetric."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    for source, destinations in enumerate(random_digraph(size, seed=size, density=0.7)):
        graph.add_edge(source, source, weight=0.3 + 0.1 * source)
        graph.add_weighted_edges_from((source, destination, w) for destination, w in destinations.items())
    return graph


def _sends() -> list[dict[int, float]]:
    return random_digraph(shoal.size(), seed=3, density=0.6)


def _receives(rank: int) -> dict[int, float]:
    return {source: 0.25 - 0.5 * source for source, to in enumerate(_sends()) if rank in to}


def static_uniform(tensor: torch.Tensor) -> torch.Tensor:
    shoal.set_topology()
    return shoal.neighbor_allreduce(tensor)


def static_weighted(tensor: torch.Tensor) -> torch.Tensor:
    shoal.set_topology(weighted_digraph(shoal.size()), is_weighted=True)
    return shoal.neighbor_allreduce(tensor)


def push(tensor: torch.Tensor) -> torch.Tensor:
    return shoal.neighbor_allreduce(tensor, self_weight=0.7, dst_weights=_sends()[shoal.rank()])


def pull(tensor: torch.Tensor) -> torch.Tensor:
    return shoal.neighbor_allreduce(tensor, self_weight=-0.2, src_weights=_receives(shoal.rank()))


def push_pull(tensor: torch.Tensor) -> torch.Tensor:
    rank = shoal.rank()
    return shoal.neighbor_allreduce(
        tensor, self_weight=1.1, src_weights=_receives(rank), dst_weights=_sends()[rank], name="push-pull"
    )


def compressed(tensor: torch.Tensor) -> torch.Tensor:
    """Averages with a compressor that draws, and with one whose messages have any length.

    The draws depend on the name and on how often it has been used, so this exchange has its own names.
    """
    shoal.set_topology(weighted_digraph(shoal.size()), is_weighted=True)
    tensor = tensor.real if tensor.is_complex() else tensor
    both = [
        shoal.neighbor_allreduce(tensor, compression=one, name=f"compressed by {one}") for one in (QSGD(7), TopK(0.1))
    ]
    drawn = shoal.neighbor_allreduce(
        tensor, 0.5, _receives(shoal.rank()), compression=QSGD(7), name="compressed, from some"
    )
    return torch.stack([*both, drawn])


def gossip(tensor: torch.Tensor) -> torch.Tensor:
    rank, even = shoal.rank(), shoal.size() // 2 * 2
    return shoal.pair_gossip(tensor, rank ^ 1) if rank < even else tensor


def neighbor_allgather(tensor: torch.Tensor) -> torch.Tensor:
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    return shoal.neighbor_allgather(tensor.reshape(-1)[: tensor.numel() - shoal.rank()])


def allgather(tensor: torch.Tensor) -> torch.Tensor:
    return shoal.allgather(tensor.reshape(-1)[: tensor.numel() - shoal.rank()])


def allreduce_average(tensor: torch.Tensor) -> torch.Tensor:
    return shoal.allreduce(tensor)


def allreduce_product(tensor: torch.Tensor) -> torch.Tensor:
    return shoal.allreduce(tensor, op="product")


def allreduce_sum_in_place(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.clone()
    shoal.bluefog.allreduce_(own, average=False)
    return own


def broadcast(tensor: torch.Tensor) -> torch.Tensor:
    return shoal.broadcast(tensor, shoal.size() - 1)


def broadcast_object(tensor: torch.Tensor) -> torch.Tensor:
    plain = {"rank": shoal.rank(), "numbers": tensor}
    received = shoal.broadcast_object(plain, root_rank=1)
    assert received["rank"] == 1
    return torch.as_tensor(received["numbers"])


def hierarchical(tensor: torch.Tensor) -> torch.Tensor:
    shoal.bluefog.set_machine_topology(shoal.topology.RingGraph(shoal.bluefog.machine_size()))
    return shoal.bluefog.hierarchical_neighbor_allreduce(tensor)


def hierarchical_dynamic(tensor: torch.Tensor) -> torch.Tensor:
    own, count = shoal.bluefog.machine_rank(), shoal.bluefog.machine_size()
    if count == 1:
        return shoal.bluefog.hierarchical_neighbor_allreduce(tensor, 0.4, {}, {})
    return shoal.bluefog.hierarchical_neighbor_allreduce(
        tensor, 0.4, {(own - 1) % count: 0.9}, {(own + 1) % count: -0.3}
    )


def in_flight_together(tensor: torch.Tensor) -> torch.Tensor:
    """Four operations, begun in an order that differs between the agents."""
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    started = {}
    for turn in range(4):
        k = (turn + shoal.rank()) % 4
        started[k] = shoal.nonblocking.neighbor_allreduce(tensor * (k + 1), name=f"bucket {k}")
    return torch.stack([started[k].wait() for k in range(4)])


EXCHANGES: tuple[Exchange, ...] = (
    static_uniform,
    static_weighted,
    push,
    pull,
    push_pull,
    compressed,
    gossip,
    neighbor_allgather,
    allgather,
    allreduce_average,
    allreduce_product,
    allreduce_sum_in_place,
    broadcast,
    broadcast_object,
    hierarchical,
    hierarchical_dynamic,
    in_flight_together,
)


def bits_of(exchange: Exchange) -> Bits:
    """The hashed results of an operation on this agent for each shape, and in each dtype for one shape."""
    inputs = [sample(shoal.rank(), shape, seed=len(shape)) for shape in SHAPES]
    inputs += [sample(shoal.rank(), (9, 1000), dtype) for dtype in WEIGHABLE]
    outputs = [exchange(one) for one in inputs]
    return [(str(one.dtype), tuple(one.shape), hashlib.sha256(bits(one).numpy().tobytes()).digest()) for one in outputs]


def times_of_a_barrier(late: int) -> tuple[float, float]:
    """When this agent came to the barrier and when it went on; agent ``late`` comes after the others."""
    if shoal.rank() == late:
        time.sleep(0.05)
    arrived = time.monotonic()
    shoal.barrier()
    return arrived, time.monotonic()
