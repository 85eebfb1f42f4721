"""Asynchronous gossip: each agent wakes up by a Poisson clock of its own, in continuous virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..algorithms.runs.conditions import Conditions


class PoissonGossip(Conditions):
    """Randomized gossip (Boyd, Ghosh, Prabhakar, Shah 2006, doi:10.1109/TIT.2006.874516, section II).

    An agent's clock ticks at the times of a Poisson process. The agent then chooses a neighbour at random, and only
    these two take a step. A step of the run is one such event. Pass the object twice: ``run(...,
    topology=gossip, conditions=gossip)``. As a topology it gives the link of an event, with the weights 1/2 and 1/2.
    As conditions it stops all other agents.

    Args:
        graph: An undirected graph of agents 0 to n - 1; its weights do not count.
        events: How many events are drawn; the run takes at most so many steps.
        rates: The events that an agent starts in a unit of time, above 0: one number, or ``[n]``.
        loss: The probability that the two agents do not reach each other. They still take their own steps.
        noise: The standard deviation of the noise on each message.
        seed: Of all draws.

    Attributes:
        times: The time of each event, ascending, float64 ``[events]``.
        pairs: The agent that woke up and the neighbour that it chose, int64 ``[events, 2]``.

    Raises:
        ValueError: The graph is directed, an agent has no neighbour, or a number is out of its range.
    """

    times: NDArray[np.float64]
    pairs: NDArray[np.int64]
    _agents: int

    def __init__(
        self,
        graph: nx.Graph,
        events: int,
        *,
        rates: float | Sequence[float] | ArrayLike = 1.0,
        loss: float = 0.0,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(loss=loss, noise=noise, protocol="handshake", seed=seed)
        size = graph.number_of_nodes()
        links = [(a, b) for a, b in graph.edges() if a != b]
        both = {*links, *((b, a) for a, b in links)}
        if graph.is_directed() and len(both) != len(set(links)):
            raise ValueError("the graph has a link in one direction alone, and both agents of an event average")
        here, there = np.array(sorted(both), np.int64).reshape(-1, 2).T
        degrees = np.bincount(here, minlength=size)
        if not degrees.all():
            raise ValueError(f"agent {int(degrees.argmin())} has no neighbour to wake up with")
        each = np.asarray(rates, float)
        if each.shape not in ((), (size,)) or not ((each > 0) & np.isfinite(each)).all():
            raise ValueError(f"rates={rates!r}: pass numbers above 0: one, or one for each of {size} agents")
        each = np.broadcast_to(each, (size,))
        draw = np.random.default_rng(seed)
        # The union of Poisson processes is one of the summed rate, whose events belong to agents by their rates.
        times = draw.exponential(1 / each.sum(), events).cumsum()
        woken = draw.choice(size, events, p=each / each.sum())
        first = degrees.cumsum() - degrees
        chosen = there[first[woken] + (draw.random(events) * degrees[woken]).astype(np.int64)]
        # Conditions are frozen: an assignment would look like a change.
        self.__dict__.update(times=times, pairs=np.stack([woken, chosen], 1), _agents=size)

    def __call__(self, round: int, x: Any, state: Any) -> NDArray[np.int64]:
        """The link of an event, a :data:`~shoal.sim.stacked.StateTopology`."""
        self._check(round)
        return self.pairs[round : round + 1]

    def active(self, tick: int, size: int) -> NDArray[np.bool_]:
        """The two agents of an event, bool ``[size]``."""
        self._check(tick)
        found = np.zeros(size, np.bool_)
        found[self.pairs[tick]] = True
        return found

    def check_size(self, size: int) -> None:
        if size != self._agents:
            raise ValueError(f"the graph has {self._agents} agents, and the fleet {size}")

    def _check(self, event: int) -> None:
        if event >= len(self.times):
            raise ValueError(f"event {event} of {len(self.times)}: draw as many events as the run has steps")
