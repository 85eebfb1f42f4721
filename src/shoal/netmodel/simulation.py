"""Simulates the steps of training on a network: the time at which each agent ends each step.

An agent computes, sends its messages, and continues when the messages for it have arrived. It waits for its own
neighbours only, so agents drift apart, and a straggler's delay spreads as far as the graph carries it. Between two
events every message in transit, of any round, has the rate of max-min fairness. Events are processed one at a time, the
messages between them as arrays: agents that are alike are processed together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .flow_rates import SAME_MOMENT, Flows, prepare
from .messages import Step
from .network import Floats, Ints, Network


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each agent did what, in seconds since all began.

    Attributes:
        started: float64 [steps, agents], when it began to compute.
        computed: when it had computed.
        ended: when it had computed and all messages of the step had come.
    """

    started: Floats
    computed: Floats
    ended: Floats

    @property
    def seconds(self) -> float:
        """Seconds until the last agent has ended the last step."""
        return float(self.ended[-1].max()) if len(self.ended) else 0.0

    def seconds_per_step(self, skip: int = 0) -> float:
        """The mean over the steps after the first `skip`, in which agents may not have waited for each other yet."""
        steps = len(self.ended)
        if not 0 <= skip < steps:
            raise ValueError(f"{skip} steps are to be left out of {steps}. Leave at least one.")
        begin = float(self.ended[skip - 1].max()) if skip else 0.0
        return (self.seconds - begin) / (steps - skip)


def simulate(
    network: Network, steps: Iterable[Step], compute: ArrayLike = 0.0, *, lag: int = 0, overlap: float = 0.0
) -> Timeline:
    """When each agent would end each of some steps of training on a network.

    Args:
        network: what messages pass.
        steps: the exchanges of each step, in order.
        compute: seconds, broadcast to [steps, agents]. One number for all, or a row of one for each agent, or all.
        lag: how many steps an agent may compute beyond the last one whose messages have come. With 0 it waits for the
            messages of a step before it begins the next; with 1 the messages are in transit while the next step is
            computed, which therefore uses averages or gradients that are one step old ("gradient lag").
        overlap: the share of its computation, at the end, during which an agent already sends, as back-propagation
            does with the layers that are done. A step ends no sooner than its computation.

    Raises:
        ValueError: a rank is beyond the network, a time is negative, or `lag` or `overlap` is invalid.
    """
    plan = list(steps)
    if lag < 0:
        raise ValueError(f"lag is {lag}. Pass a number of steps, zero or more.")
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap is {overlap}. Pass a share of the computation, 0 to 1.")
    seconds = np.broadcast_to(np.asarray(compute, float), (len(plan), network.size))
    if not (np.isfinite(seconds).all() and (seconds >= 0).all()):
        raise ValueError("compute has a time that is negative or not finite. Pass seconds.")
    return _SimulatedRun(network, plan, seconds, lag, overlap).play()


class _SimulatedRun:
    def __init__(self, network: Network, plan: list[Step], compute: Floats, lag: int, overlap: float) -> None:
        self._network, self._compute, self._lag, self._overlap = network, compute, lag, overlap
        size, count = network.size, len(plan)
        self._exchanges, capacity = prepare(network, [messages for step in plan for messages in step])
        self._first = np.cumsum([0, *(len(step) for step in plan)]).tolist()
        """Of each step, the number of its first exchange."""
        self._times = Timeline(*(np.zeros((count, size)) for _ in range(3)))
        self._missing: dict[int, Ints] = {}
        # Of each agent: steps begun, computed, free to be sent, and ended; and its exchange, None between steps.
        self._begun, self._computed, self._ready, self._ended = ([0] * size for _ in range(4))
        self._exchange: list[int | None] = [None] * size
        self._calendar: list[tuple[float, int, str, Ints, Ints]] = []
        self._entries = 0
        self._to_look_at: list[int] = list(range(size))
        self._to_send: dict[int, list[int]] = {}
        self._flows = Flows(capacity)

    def play(self) -> Timeline:
        while True:
            self._look()
            if not self._calendar and not self._flows:
                return self._times
            due = self._calendar[0][0] if self._calendar else np.inf
            landed = self._flows.advance(due)
            for latency, exchanges, destinations in landed:
                self._note(self._flows.now + latency, "arrived", exchanges, destinations)
            self._take_due()

    def _note(self, when: float, what: str, numbers: Ints, agents: Ints) -> None:
        self._entries += 1
        heapq.heappush(self._calendar, (when, self._entries, what, numbers, agents))

    def _take_due(self) -> None:
        end = self._flows.now + SAME_MOMENT * self._flows.now
        while self._calendar and self._calendar[0][0] <= end:
            _, _, what, numbers, agents = heapq.heappop(self._calendar)
            if what == "arrived":
                self._arrive(numbers, agents)
                continue
            count = self._computed if what == "computed" else self._ready
            for agent in agents.tolist():
                count[agent] += 1
                if what == "computed":
                    self._times.computed[count[agent] - 1, agent] = self._flows.now
            self._to_look_at += agents.tolist()

    def _arrive(self, exchanges: Ints, agents: Ints) -> None:
        for number in np.unique(exchanges).tolist():
            here = agents[exchanges == number]
            missing = self._missing_of(number)
            missing -= np.bincount(here, minlength=self._network.size)
            self._to_look_at += np.unique(here[missing[here] == 0]).tolist()

    def _missing_of(self, number: int) -> Ints:
        if number not in self._missing:
            self._missing[number] = self._exchanges[number].expected.copy()
        return self._missing[number]

    def _look(self) -> None:
        """Let every agent for which something has changed go as far as it can at this moment."""
        began: dict[float, list[int]] = {}
        while self._to_look_at:
            agent = self._to_look_at.pop()
            while self._go_on(agent):
                pass
            if self._may_begin(agent):
                step = self._begun[agent]
                self._begun[agent] += 1
                self._times.started[step, agent] = self._flows.now
                began.setdefault(float(self._compute[step, agent]), []).append(agent)
        for seconds, agents in began.items():
            them = np.array(agents)
            self._note(self._flows.now + seconds * (1 - self._overlap), "ready", them, them)
            self._note(self._flows.now + seconds, "computed", them, them)
        for number, senders in self._to_send.items():
            self._flows.add(number, self._exchanges[number], np.array(sorted(senders)))
        self._to_send.clear()

    def _may_begin(self, agent: int) -> bool:
        step = self._begun[agent]
        if step == len(self._compute) or self._computed[agent] < step:
            return False
        return self._ended[agent] >= step - self._lag

    def _go_on(self, agent: int) -> bool:
        """Take one agent one exchange further; False if it has to wait."""
        step, number = self._ended[agent], self._exchange[agent]
        if number is None:
            if self._ready[agent] <= step:
                return False
            self._enter(agent, self._first[step])
            return True
        if number < self._first[step + 1]:
            if self._missing_of(number)[agent]:
                return False
            self._enter(agent, number + 1)
            return True
        if self._computed[agent] <= step:
            return False
        self._times.ended[step, agent] = self._flows.now
        self._ended[agent] += 1
        self._exchange[agent] = None
        return True

    def _enter(self, agent: int, number: int) -> None:
        self._exchange[agent] = number
        if number < self._first[self._ended[agent] + 1]:
            self._to_send.setdefault(number, []).append(agent)
