"""The conditions of an unreliable network: lost, late and noisy messages, absent and slow agents, from one seed.

Every draw is a hash of the seed, the tick and the message. So each agent can compute all draws for itself, and a
simulated fleet and real agents meet the same conditions.

:class:`PoissonGossip` is the case in which all agents but two are absent at a time: asynchronous gossip, in which each
agent wakes up by a Poisson clock of its own, in continuous virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import networkx as nx
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ...compression.random_numbers import drawn
from ..schedule_weights import Ranks

Protocol = Literal["plain", "memory", "handshake"]
PLAIN, MEMORY, HANDSHAKE = "plain", "memory", "handshake"
_APART = 0x5A17_0000_0000
"""Keeps these draws apart from those of algorithms, which count their seeds from 0, too."""
_PARTICIPATION, _LOSS, _DELAY, _NOISE = range(4)
_KINDS = 4
_LEAST = 2.0**-54


@dataclass(frozen=True)
class Conditions:
    """An unreliable network, and agents that are absent or slow.

    A run's step is a *tick* of virtual time. An agent that is not active in a tick computes nothing, sends nothing, and
    keeps its values; what is sent to it waits until its next active tick. With the default values nothing happens.

    Args:
        loss: The probability that a message is lost, from 0, below 1; drawn for every message.
        delay: The ticks until a message arrives: a number, or (least, most), from which every message draws uniformly.
            With 0 it arrives in the tick in which it was sent.
        noise: The standard deviation of the Gaussian noise that every message gets, each number of it by itself.
        participation: The probability that an agent is active in a tick: one number, or one for each agent, ``[n]``.
            Small numbers make agents with independent random clocks.
        speeds: The steps of an agent in a tick, above 0, at most 1: one number, or ``[n]``. An agent of speed 1/4 is
            active in ticks 3, 7, 11, ...
        protocol: The treatment of messages that have not arrived.

            - ``"plain"``: the agents remember nothing. In ``mix`` and ``pull`` the agent's own value replaces a missing
              message, so rows of W still sum to 1. In ``push`` a lost share is gone, so the total shrinks.
            - ``"memory"``: in ``mix`` and ``pull`` the last message of the neighbour replaces a missing one. In
              ``push`` the next message brings what was lost before, as running sums do (Hadjicostis, Vaidya,
              Dominguez-Garcia 2016, doi:10.1109/TAC.2015.2471695), so the total is kept.
            - ``"handshake"``: a link works in both directions or in none, and both ends know. Both agents must be
              active. Each agent keeps the weight of a missing message for itself, so a symmetric W stays symmetric,
              and columns of ``push`` still sum to 1. Delays are not possible.
        seed: Of all draws.

    Raises:
        ValueError: A number is out of its range, or delays have the protocol ``"handshake"``.
    """

    loss: float = 0.0
    delay: int | tuple[int, int] = 0
    noise: float = 0.0
    participation: float | Sequence[float] | ArrayLike = 1.0
    speeds: float | Sequence[float] | ArrayLike = 1.0
    protocol: Protocol = "plain"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss={self.loss}: pass a probability from 0, below 1")
        low, high = self.delays
        if not (int(low) == low and int(high) == high and 0 <= low <= high):
            raise ValueError(f"delay={self.delay}: pass a number of ticks, 0 or more, or (least, most)")
        if not 0 <= self.noise < np.inf:
            raise ValueError(f"noise={self.noise}: pass a standard deviation, 0 or more")
        if self.protocol not in (PLAIN, MEMORY, HANDSHAKE):
            raise ValueError(f"protocol={self.protocol!r}: pass {PLAIN!r}, {MEMORY!r} or {HANDSHAKE!r}")
        if self.protocol == HANDSHAKE and high:
            raise ValueError(f"delay={self.delay} with protocol='handshake', in which both agents wait: leave out one")
        # As plain numbers, by which two conditions can be compared.
        for name in ("participation", "speeds"):
            given = np.asarray(getattr(self, name), float)
            if given.ndim > 1 or not ((given > 0) & (given <= 1)).all():
                raise ValueError(f"{name}={getattr(self, name)}: pass numbers above 0, at most 1: one, or one an agent")
            object.__setattr__(self, name, float(given) if given.ndim == 0 else tuple(given.tolist()))

    @property
    def delays(self) -> tuple[int, int]:
        """The shortest and the longest delay, in ticks."""
        return self.delay if isinstance(self.delay, tuple) else (self.delay, self.delay)

    @property
    def messages_wait(self) -> bool:
        """Whether a message may be used in a later tick than that in which it was sent."""
        idle = self.participation != 1.0 or self.speeds != 1.0
        return self.protocol == MEMORY or self.delays[1] > 0 or (self.protocol == PLAIN and idle)

    def check_size(self, size: int) -> None:
        """Raise ValueError if it has numbers for another number of agents."""
        for name in ("participation", "speeds"):
            given = getattr(self, name)
            if isinstance(given, tuple) and len(given) != size:
                raise ValueError(f"{name} has {len(given)} numbers, and there are {size} agents: pass one for each")

    def active(self, tick: int, size: int) -> NDArray[np.bool_]:
        """The agents that take a step in a tick, bool ``[size]``."""
        speeds, participation = self._per_agent
        # The small number is for products such as 100 * 0.29, which would round down to 28.
        found = np.broadcast_to(np.floor((tick + 1) * speeds + 1e-9) > np.floor(tick * speeds + 1e-9), (size,))
        if self.participation != 1.0:
            found = found & (self._uniform(tick, 0, _PARTICIPATION, np.arange(size)) < participation)
        return found

    def lost(self, tick: int, exchange: int, messages: Ranks) -> NDArray[np.bool_]:
        """Which messages are lost, bool ``[m]``.

        Args:
            tick: In which they are sent.
            exchange: The exchange of that tick, from 0.
            messages: A number for each message, equal on all agents, int64 ``[m]``.
        """
        if not self.loss:
            return np.zeros(len(messages), np.bool_)
        return self._uniform(tick, exchange, _LOSS, messages) < self.loss

    def ticks(self, tick: int, exchange: int, messages: Ranks) -> Ranks:
        """The delays of messages, int64 ``[m]``; arguments as for :meth:`lost`."""
        low, high = self.delays
        if low == high:
            return np.full(len(messages), low, np.int64)
        return low + (self._uniform(tick, exchange, _DELAY, messages) * (high - low + 1)).astype(np.int64)

    def noisy(self, tick: int, exchange: int, messages: Ranks, values: torch.Tensor) -> torch.Tensor:
        """Messages ``[m, d]`` with their noise; the other arguments as for :meth:`lost`."""
        if not self.noise:
            return values
        like = torch.empty(values.shape, dtype=torch.float64, device=values.device)
        even = self._drawn(tick, exchange, _NOISE, messages, like)
        gauss = even.clamp_(min=_LEAST).mul_(2).sub_(1).erfinv_().mul_(2**0.5 * self.noise)
        return values + gauss.to(values.dtype)

    @cached_property
    def _per_agent(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.asarray(self.speeds, float), np.asarray(self.participation, float)

    def _uniform(self, tick: int, exchange: int, kind: int, keys: Ranks) -> NDArray[np.float64]:
        like = torch.empty(len(keys), 1, dtype=torch.float64, device="cpu")
        found: NDArray[np.float64] = self._drawn(tick, exchange, kind, keys, like).view(-1).numpy()
        return found

    def _drawn(self, tick: int, exchange: int, kind: int, keys: Ranks, like: torch.Tensor) -> torch.Tensor:
        rows = torch.from_numpy(keys).to(like.device).unsqueeze(1)
        return drawn(self.seed + _APART, tick, _KINDS * exchange + kind, rows, like).whole()


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
            raise ValueError(f"agent {int(degrees.argmin())} has no neighbour for a pairwise event")
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
