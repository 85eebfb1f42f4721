"""Simulates the steps of training on a network: the time at which each agent ends each step.

An agent computes, sends its messages, and continues when the messages for it have arrived. It waits for its own
neighbours only, so agents drift apart, and a straggler's delay spreads as far as the graph carries it. Events are
processed one at a time, the messages between them as arrays: agents that are alike are processed together.

A message is a volume that is sent at its current rate, and arrives after its latency. An overhead counts as volume, of
each resource what it carries in that time, so messages that share a NIC also wait for each other's overheads. Between
two events every message in transit, of any round, has the rate of max-min fairness, which approximates the equilibrium
of TCP flows: no message's rate can grow without lowering one that is not larger. Progressive filling finds the rates
(Bertsekas and Gallager, Data Networks, section 6.5.2), many bottlenecks in one pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .messages import Messages, Step
from .network import Floats, Ints, Network, Paths

SAME_MOMENT = 1e-12
"""Relative difference below which two times are one."""
_DONE = 1e-9
"""Share of a message below which the remainder is rounding."""


class RoutedMessages(NamedTuple):
    """The messages of one exchange with their network parameters, ordered by source.

    Each array is [messages] but for the first and the last.

    Attributes:
        first: [agents + 1], the index of each agent's first message.
        destination: of each message.
        shared: [messages, 5], the resources that it shares, as indices of a capacity.
        latency: seconds.
        volume: bytes, including its overhead at the rate of the message when it is alone.
        shares: [messages, 5], bytes of a resource that a byte of the volume takes; None if 1 everywhere. An overhead
            takes a faster resource as long, and so more of its bytes.
        expected: [agents], messages that each agent waits for.
    """

    first: Ints
    destination: Ints
    shared: Ints
    latency: Floats
    volume: Floats
    shares: Floats | None
    expected: Ints


def prepare(network: Network, all_messages: Sequence[Messages]) -> tuple[list[RoutedMessages], Floats]:
    """The exchanges, and the capacities of all resources that their messages share: first the network's, then single
    links.

    Exchanges with the identical messages object are the same object.

    Raises:
        ValueError: a message names an agent beyond the network.
    """
    distinct = {id(messages): messages for messages in all_messages}
    sorted_paths = {key: _Sorted.of(network, messages) for key, messages in distinct.items()}
    pairs, limits = (
        np.concatenate([np.empty(0, kind), *columns])
        for kind, columns in (
            (np.int64, [sent.pairs[np.isfinite(sent.paths.limit)] for sent in sorted_paths.values()]),
            (np.float64, [sent.paths.limit[np.isfinite(sent.paths.limit)] for sent in sorted_paths.values()]),
        )
    )
    links, where = np.unique(pairs, return_index=True)
    exchanges = {key: _routed(network, sent, links) for key, sent in sorted_paths.items()}
    return [exchanges[id(messages)] for messages in all_messages], np.concatenate([network.capacity, limits[where]])


class _Sorted(NamedTuple):
    source: Ints
    destination: Ints
    nbytes: Floats
    pairs: Ints
    paths: Paths

    @classmethod
    def of(cls, network: Network, messages: Messages) -> _Sorted:
        if len(messages) and max(messages.source.max(), messages.destination.max()) >= network.size:
            raise ValueError(f"a message names an agent beyond the {network.size} of the network.")
        order = np.argsort(messages.source, kind="stable")
        source, destination = messages.source[order], messages.destination[order]
        pairs = source * network.size + destination
        return cls(source, destination, messages.nbytes[order], pairs, network.paths(source, destination))


def _routed(network: Network, messages: _Sorted, links: Ints) -> RoutedMessages:
    paths = messages.paths
    # The network's last capacity is the unlimited one, and the links follow it.
    without_limit = len(network.capacity) - 1
    link = np.where(np.isfinite(paths.limit), without_limit + 1 + np.searchsorted(links, messages.pairs), without_limit)
    # The overhead in bytes, at the rate of the message when it is alone. On an unlimited path there
    # is no such rate: there only the latency can stand for it.
    free = np.isinf(paths.alone)
    seconds = np.where(free, 0.0, paths.overhead)
    volume = messages.nbytes + seconds * np.where(free, 0.0, paths.alone)
    shares = None
    if seconds.any():
        rates = np.concatenate([network.capacity[paths.shared], paths.limit[:, None]], axis=1)
        takes = messages.nbytes[:, None] + seconds[:, None] * np.where(np.isinf(rates), 0.0, rates)
        counts = np.isfinite(rates) & (volume[:, None] > 0)
        shares = np.divide(takes, volume[:, None], out=np.ones_like(rates), where=counts)
    return RoutedMessages(
        first=np.searchsorted(messages.source, np.arange(network.size + 1)),
        destination=messages.destination,
        shared=np.concatenate([paths.shared, link[:, None]], axis=1),
        latency=paths.latency + free * paths.overhead,
        volume=volume,
        shares=shares,
        expected=np.bincount(messages.destination, minlength=network.size),
    )


class Flows:
    """The messages in transit at one moment.

    Args:
        capacity: of all shared resources, in bytes a second.

    Attributes:
        now: the moment, in seconds.
    """

    def __init__(self, capacity: Floats) -> None:
        self.now = 0.0
        self._capacity = capacity
        self._shared: Ints = np.empty((0, 5), np.int64)
        self._numbers: Ints = np.empty((0, 2), np.int64)
        """Number of the exchange, and destination, of each message."""
        self._amounts: Floats = np.empty((0, 3))
        """Latency, volume, and the remaining volume."""
        self._shares: Floats | None = None
        self._rates: Floats | None = None

    def __len__(self) -> int:
        return len(self._shared)

    def add(self, number: int, exchange: RoutedMessages, senders: Ints) -> None:
        """Begin to send the messages of some agents in exchange `number`."""
        begin, end = exchange.first[senders], exchange.first[senders + 1]
        counts = end - begin
        total = int(counts.sum())
        if not total:
            return
        chosen = np.arange(total) + np.repeat(begin - np.cumsum(counts) + counts, counts)
        volume = exchange.volume[chosen]
        numbers = np.stack([np.full(total, number), exchange.destination[chosen]], axis=1)
        amounts = np.stack([exchange.latency[chosen], volume, volume], axis=1)
        if self._shares is not None or exchange.shares is not None:
            held = np.ones(self._shared.shape) if self._shares is None else self._shares
            new = np.ones((total, held.shape[1])) if exchange.shares is None else exchange.shares[chosen]
            self._shares = np.concatenate([held, new])
        self._shared = np.concatenate([self._shared, exchange.shared[chosen]])
        self._numbers = np.concatenate([self._numbers, numbers])
        self._amounts = np.concatenate([self._amounts, amounts])
        self._rates = None

    def advance(self, due: float) -> list[tuple[float, Ints, Ints]]:
        """Move to `due`, or to when the first message has been sent if that is sooner.

        Returns:
            The messages that have been sent: latency, exchanges, destinations.
        """
        if not len(self):
            self.now = due
            return []
        if self._rates is None:
            self._rates = fair_rates(self._shared, self._capacity, self._shares)
        _, volume, remaining = self._amounts.T
        with np.errstate(over="ignore"):  # refused below
            needed = remaining / self._rates
        elapsed = min(due - self.now, float(needed.min()))
        self.now += elapsed
        if not np.isfinite(self.now):
            raise ValueError("the messages take longer than a number can be. Pass a higher bandwidth.")
        # What nothing limits is sent at once: its infinite rate times no time is no number.
        at_once = np.isinf(self._rates)
        remaining -= np.where(at_once, remaining, np.where(at_once, 0.0, self._rates) * elapsed)
        sent = (remaining <= _DONE * volume) | (needed <= elapsed * (1 + SAME_MOMENT))
        if not sent.any():
            return []
        numbers, latencies = self._numbers[sent], self._amounts[sent, 0]
        going = ~sent
        self._shared, self._numbers, self._amounts = self._shared[going], self._numbers[going], self._amounts[going]
        self._shares = None if self._shares is None else self._shares[going]
        self._rates = None
        return [
            (float(latency), numbers[latencies == latency, 0], numbers[latencies == latency, 1])
            for latency in np.unique(latencies)
        ]


_EQUAL = 1e-9
"""Relative difference below which two rates are the same, far above rounding and below anything measurable."""


def fair_rates(shared: Ints, capacity: Floats, shares: Floats | None = None) -> Floats:
    """Rates of messages that are sent at the same time.

    Args:
        shared: int64 [messages, k], the indices of what each message passes. One may be named twice in a row only if
            its capacity is infinite.
        capacity: float64 [shared things], in bytes a second.
        shares: float64 [messages, k], how much of each thing a message takes for each byte of its rate, 1 or more; 1 if
            not given.

    Returns:
        float64 [messages], bytes a second; infinite where nothing limits.
    """
    rates = np.full(len(shared), np.inf)
    limiting = np.isfinite(capacity)[shared]
    columns = limiting.any(axis=0)
    shared, shares = shared[:, columns], None if shares is None else shares[:, columns]
    undecided = np.flatnonzero(limiting.any(axis=1))
    remaining = capacity.astype(float)
    while len(undecided):
        passes = shared[undecided]
        taken = None if shares is None else shares[undecided]
        users = np.bincount(passes.ravel(), None if taken is None else taken.ravel(), len(remaining))
        offered = (remaining / np.maximum(users, 1))[passes]
        best = offered.min(axis=1)
        # If it alone limits all its messages, their rates are exactly its offer.
        held_elsewhere = np.bincount(
            passes.ravel(), weights=(best[:, None] < offered * (1 - _EQUAL)).ravel(), minlength=len(remaining)
        )
        decided = ((held_elsewhere[passes] == 0) & (offered <= best[:, None] * (1 + _EQUAL))).any(axis=1)
        rates[undecided[decided]] = best[decided]
        used = np.repeat(best[decided], passes.shape[1])
        if taken is not None:
            used *= taken[decided].ravel()
        remaining -= np.bincount(passes[decided].ravel(), weights=used, minlength=len(remaining))
        np.maximum(remaining, 0.0, out=remaining)
        undecided = undecided[~decided]
    return rates


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
        ValueError: a rank is beyond the network, a time is negative or overflows, or `lag` or `overlap` is invalid.
    """
    plan = list(steps)
    if not lag >= 0:  # also if it is not a number
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

    def _note(self, when: float, kind: str, numbers: Ints, agents: Ints) -> None:
        self._entries += 1
        heapq.heappush(self._calendar, (when, self._entries, kind, numbers, agents))

    def _take_due(self) -> None:
        end = self._flows.now + SAME_MOMENT * self._flows.now
        while self._calendar and self._calendar[0][0] <= end:
            _, _, kind, numbers, agents = heapq.heappop(self._calendar)
            if kind == "arrived":
                self._arrive(numbers, agents)
                continue
            count = self._computed if kind == "computed" else self._ready
            for agent in agents.tolist():
                count[agent] += 1
                if kind == "computed":
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
