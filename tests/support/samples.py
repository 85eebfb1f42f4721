"""Tensors and graphs to try things on: every dtype, and sizes on both sides of every threshold of the transports."""

from __future__ import annotations

import random
from functools import lru_cache

import networkx as nx
import torch

import shoal
from shoal.arithmetic import BLOCK_BYTES as BLOCK_BYTES
from shoal.execution.publishing import PUBLISH_BYTES

WEIGHABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ALL_DTYPES = (*WEIGHABLE, *INTEGERS, torch.bool)

INLINE_BYTES = PUBLISH_BYTES
"""Up to here a tensor travels inside its message; above, in shared memory or as a stream."""


def shapes(dtype: torch.dtype) -> list[tuple[int, ...]]:
    """0-dimensional, empty, one element, around the inline limit, one block, and several blocks and a rest."""
    inline, block = INLINE_BYTES // dtype.itemsize, BLOCK_BYTES // dtype.itemsize
    return [(), (0,), (3, 0, 2), (1,), (5, 7), (inline - 1,), (inline,), (inline + 1,), (block,), (3 * block + 5,)]


def sample(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor that differs for each rank and seed, and is the same in every process."""
    return _sample(rank, shape, dtype, seed).clone()


@lru_cache(maxsize=512)
def _sample(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * seed + 7919 * rank + 13)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def samples(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """One for each agent."""
    return [sample(rank, shape, dtype, seed) for rank in range(size)]


def bluefog_graphs(size: int) -> dict[str, nx.DiGraph]:
    """Every graph that BlueFog has a constructor for."""
    return {
        "exponential two": shoal.topology.ExponentialTwoGraph(size),
        "exponential, base 3": shoal.topology.ExponentialGraph(size, base=3),
        "symmetric exponential": shoal.topology.SymmetricExponentialGraph(size),
        "ring": shoal.topology.RingGraph(size),
        "ring to the left": shoal.topology.RingGraph(size, connect_style=1),
        "ring to the right": shoal.topology.RingGraph(size, connect_style=2),
        "star": shoal.topology.StarGraph(size),
        "star around the last": shoal.topology.StarGraph(size, center_rank=size - 1),
        "grid": shoal.topology.MeshGrid2DGraph(size),
        "fully connected": shoal.topology.FullyConnectedGraph(size),
    }


def random_digraph(size: int, seed: int, density: float = 0.4) -> list[dict[int, float]]:
    """A random directed graph, as {destination: weight} for each agent. Weights are negative and above one too."""
    chance = random.Random(seed)
    return [
        {other: chance.uniform(-2.0, 2.0) for other in range(size) if other != rank and chance.random() < density}
        for rank in range(size)
    ]
