"""The messages in transit, and their progress over time: the part of the simulation that uses arrays.

A message is a volume that is sent at its current rate, and arrives after its latency. An overhead counts as volume, so
messages that share a NIC also wait for each other's overheads.

The rates of messages that share resources are max-min fair, which approximates the equilibrium of TCP flows. No
message's rate can grow without lowering one that is not larger. Progressive filling finds them (Bertsekas and Gallager,
Data Networks, section 6.5.2), many bottlenecks in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .messages import Messages
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
        volume: bytes, including its overhead.
        expected: [agents], messages that each agent waits for.
    """

    first: Ints
    destination: Ints
    shared: Ints
    latency: Floats
    volume: Floats
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
            (np.int64, [one.pairs[np.isfinite(one.paths.limit)] for one in sorted_paths.values()]),
            (np.float64, [one.paths.limit[np.isfinite(one.paths.limit)] for one in sorted_paths.values()]),
        )
    )
    links, where = np.unique(pairs, return_index=True)
    exchanges = {key: _routed(network, one, links) for key, one in sorted_paths.items()}
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


def _routed(network: Network, one: _Sorted, links: Ints) -> RoutedMessages:
    paths = one.paths
    # The network's last capacity is the unlimited one, and the links follow it.
    without_limit = len(network.capacity) - 1
    link = np.where(np.isfinite(paths.limit), without_limit + 1 + np.searchsorted(links, one.pairs), without_limit)
    # The overhead in bytes, at the rate of the message when it is alone. On an unlimited path there
    # is no such rate: there only the latency can stand for it.
    free = np.isinf(paths.alone)
    overhead = np.where(free, 0.0, paths.overhead) * np.where(free, 0.0, paths.alone)
    return RoutedMessages(
        first=np.searchsorted(one.source, np.arange(network.size + 1)),
        destination=one.destination,
        shared=np.concatenate([paths.shared, link[:, None]], axis=1),
        latency=paths.latency + free * paths.overhead,
        volume=one.nbytes + overhead,
        expected=np.bincount(one.destination, minlength=network.size),
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
            self._rates = fair_rates(self._shared, self._capacity)
        _, volume, left = self._amounts.T
        needed = left / self._rates
        elapsed = min(due - self.now, float(needed.min()))
        self.now += elapsed
        # What nothing limits is sent at once: its infinite rate times no time is no number.
        at_once = np.isinf(self._rates)
        left -= np.where(at_once, left, np.where(at_once, 0.0, self._rates) * elapsed)
        sent = (left <= _DONE * volume) | (needed <= elapsed * (1 + SAME_MOMENT))
        if not sent.any():
            return []
        numbers, latencies = self._numbers[sent], self._amounts[sent, 0]
        going = ~sent
        self._shared, self._numbers, self._amounts = self._shared[going], self._numbers[going], self._amounts[going]
        self._rates = None
        return [
            (float(latency), numbers[latencies == latency, 0], numbers[latencies == latency, 1])
            for latency in np.unique(latencies)
        ]


_EQUAL = 1e-9
"""Relative difference below which two rates are the same, far above rounding and below anything measurable."""


def fair_rates(shared: Ints, capacity: Floats) -> Floats:
    """Rates of messages that are sent at the same time.

    Args:
        shared: int64 [messages, k], the indices of what each message passes. One may be named twice in a row only if
            its capacity is infinite.
        capacity: float64 [shared things], in bytes a second.

    Returns:
        float64 [messages], bytes a second; infinite where nothing limits.
    """
    rates = np.full(len(shared), np.inf)
    limiting = np.isfinite(capacity)[shared]
    shared = shared[:, limiting.any(axis=0)]
    undecided = np.flatnonzero(limiting.any(axis=1))
    left = capacity.astype(float)
    while len(undecided):
        passes = shared[undecided]
        users = np.bincount(passes.ravel(), minlength=len(left))
        offered = (left / np.maximum(users, 1))[passes]
        best = offered.min(axis=1)
        # If it alone limits all its messages, their rates are exactly its offer.
        held_elsewhere = np.bincount(
            passes.ravel(), weights=(best[:, None] < offered * (1 - _EQUAL)).ravel(), minlength=len(left)
        )
        decided = ((held_elsewhere[passes] == 0) & (offered <= best[:, None] * (1 + _EQUAL))).any(axis=1)
        rates[undecided[decided]] = best[decided]
        left -= np.bincount(
            passes[decided].ravel(), weights=np.repeat(best[decided], passes.shape[1]), minlength=len(left)
        )
        np.maximum(left, 0.0, out=left)
        undecided = undecided[~decided]
    return rates
