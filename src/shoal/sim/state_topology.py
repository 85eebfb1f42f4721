"""Topologies that depend on the agents' values: a school of fish, links that form on events, learned graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ..algorithms.needs import STATIC, Need, check, without
from ..topology._edges import metropolis_hastings
from ..topology.schedule import AnyTopology, Edges, Schedule, as_schedule

StateTopology = Callable[[int, torch.Tensor, Any], Any]
"""Takes the round, the agents' x ``[n, d]`` and the algorithm's state; returns the links of the round.

They are pairs of agents, integers ``[m, 2]``, or a bool matrix ``[n, n]``; links have both directions and
Metropolis-Hastings weights. Or they are a graph with its weights, or W, float ``[n, n]``, which are used as they are.
The state is that before the step; it is None when :meth:`~shoal.algorithms.Algorithm.init` exchanges something.
"""


class StateSchedule(Schedule):
    """The rounds of a run whose links depend on its values.

    Args:
        size: Number of agents.
        links: Returns the links of a round.

    Attributes:
        x, state: The values at the beginning of the step, which the run sets.
    """

    period = None

    def __init__(self, size: int, links: StateTopology) -> None:
        self.size, self._links = size, links
        self.x: torch.Tensor | None = None
        self.state: Any = None

    def edges(self, round: int) -> Edges:
        """The round with the present values.

        Raises:
            ValueError: The function returned links of other agents, or of a wrong shape.
        """
        if self.x is None:
            raise ValueError("the links of a round depend on the values of a run, and there is none")
        return edges_of(self._links(round, self.x, self.state), self.size)

    def mixing(self, round: int, rank: int) -> Any:
        raise ValueError("one agent alone cannot know links that depend on the values of all agents")

    def describe(self) -> str:
        return f"links of {self.size} agents that depend on their values"


def edges_of(links: torch.Tensor | AnyTopology, size: int) -> Edges:
    """The edges of a round from the result of a :data:`StateTopology`.

    Raises:
        ValueError: They are not links of ``size`` agents.
    """
    given = links.detach().cpu().numpy() if isinstance(links, torch.Tensor) else links
    if isinstance(given, (list, tuple, np.ndarray)):
        pairs = np.asarray(given) if len(given) else np.empty((0, 2), np.int64)
        if pairs.dtype.kind == "b":
            if pairs.shape != (size, size):
                raise ValueError(f"a bool matrix of shape {list(pairs.shape)} for {size} agents: pass [{size}, {size}]")
            return metropolis_hastings(size, *pairs.nonzero())
        if pairs.dtype.kind in "iu":
            if pairs.ndim != 2 or pairs.shape[1] != 2 or (len(pairs) and not 0 <= pairs.min() <= pairs.max() < size):
                raise ValueError(
                    f"links of shape {list(pairs.shape)} for {size} agents: pass pairs of ranks, integers [m, 2] from "
                    f"0 to {size - 1}; W, [n, n], must be float"
                )
            return metropolis_hastings(size, pairs[:, 0], pairs[:, 1])
        given = pairs
    schedule = as_schedule(given)
    if schedule.size != size:
        raise ValueError(f"links of {schedule.size} agents, and there are {size}")
    return schedule.edges(0)


def allow_any_links(what: str, needs: Iterable[Need], size: int, unchecked: str | Iterable[str] = ()) -> None:
    """Refuse an algorithm whose W must not change. Other needs concern graphs that are not known before the run.

    Raises:
        ValueError: The algorithm needs a static topology.
    """
    static = [need for need in without(unchecked, what, needs) if need is STATIC]
    check(what, static, StateSchedule(size, lambda round, x, state: []))
