"""Decentralized SGD as one of the drawn programs, and the expected results of its steps, computed with NumPy.

The gradient of an agent at a step is drawn with the program and is the same at every point, so that a step is linear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import networkx as nx
import numpy as np
import torch

import shoal
from shoal.algorithms import GradientDescent
from shoal.topology import OnePeerExponential, Schedule, Static, Without

Array = Any
RATE = 0.5
STEPS = 3
"""Steps of an optimizer that is one call of a program."""


@dataclass(frozen=True)
class Style:
    """How an optimizer steps, and over what."""

    adapts_first: bool
    one_peer: bool

    def __str__(self) -> str:
        how = "adapt, then combine" if self.adapts_first else "adapt with combine"
        return f"{how}, on the {'one-peer exponential' if self.one_peer else 'static'} topology"

    def matrix(self, graph: nx.DiGraph, number: int, gone: Collection[int] = ()) -> Array:
        """The weights of a round, without agents that are gone."""
        return _matrix(self, graph, number, tuple(gone))


STYLES = tuple(Style(adapts_first, one_peer) for adapts_first in (True, False) for one_peer in (False, True))


@lru_cache(maxsize=4096)
def _matrix(style: Style, graph: nx.DiGraph, number: int, gone: tuple[int, ...]) -> Array:
    full: Schedule = OnePeerExponential(len(graph)) if style.one_peer else Static(graph, weighted=False)
    return (Without(full, gone) if gone else full).matrix(number)


class Point(torch.nn.Module):
    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(x.clone())

    def forward(self) -> torch.Tensor:
        return self.x.sum()


def optimizer_of(style: Style, model: Point, name: str) -> shoal.DecentralizedOptimizer:
    return shoal.DecentralizedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE),
        model,
        GradientDescent(1.0, atc=style.adapts_first),
        topology=OnePeerExponential(shoal.size()) if style.one_peer else "static",
        name=name,
    )


def take_step(
    optimizer: shoal.DecentralizedOptimizer, model: Point, gradient: Array, meanwhile: Callable[[], object]
) -> None:
    """A step with a given gradient, and something that the script does between the forward pass and the step."""
    model()
    meanwhile()
    model.x.grad = torch.from_numpy(gradient)
    optimizer.step()


def row_applied(style: Style, row: Array, rank: int, x: Array, gradients: Array) -> Array:
    """The result of a step on an agent that averages with these weights; ``x`` and ``gradients`` are of all agents."""
    if style.adapts_first:
        return row @ (x - RATE * gradients)
    return row @ x - RATE * gradients[rank]


def after(style: Style, graph: nx.DiGraph, x: Array, gradients: list[Array]) -> Array:
    """The parameters of all agents after some steps, as rows."""
    for number, g in enumerate(gradients):
        matrix = style.matrix(graph, number)
        x = np.stack([row_applied(style, matrix[rank], rank, x, g) for rank in range(len(x))])
    return x
