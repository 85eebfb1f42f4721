"""A network of agents on machines: latency, bandwidth, and the resources that messages share.

An agent has a port, which all its messages pass; a machine has a NIC, which all messages of its agents to other
machines pass. Both carry both directions at once, each at a full rate of its own. A message inside a machine passes two
ports, one between machines two ports and two NICs; messages through the same port or NIC in the same direction share
its rate. This is the alpha-beta model in the form of LogGP (Alexandrov et al. 1995): a message of M bytes alone takes
``overhead + M / bandwidth + latency``; d messages of one NIC take ``d (overhead + M / bandwidth) + latency``, because
overheads and bytes take turns, but latencies overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Link:
    """The parameters of a port, a NIC or a single link.

    Attributes:
        latency: seconds in transit; any number of messages are in transit at once.
        bandwidth: bytes a second in each direction; ``math.inf`` for an unlimited one.
        overhead: seconds for which a message occupies the NIC in addition to its bytes, so messages take turns.
        download: bytes a second for receiving, on a NIC or a port that receives faster or slower than it sends;
            `bandwidth` is then for sending. None if both are the same.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    overhead: float = 0.0
    download: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency", "overhead"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}. Pass seconds, zero or more.")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth is {self.bandwidth}. Pass bytes a second, above zero (1 Gbit/s is 1.25e8).")
        if self.download is not None and not self.download > 0:
            raise ValueError(f"download is {self.download}. Pass bytes a second, above zero, or None for `bandwidth`.")

    @property
    def inward(self) -> float:
        """Bytes a second for receiving."""
        return self.bandwidth if self.download is None else self.download

    def seconds(self, nbytes: float, messages: int = 1) -> float:
        """Seconds until messages that begin together, from one such link to another, have arrived."""
        return messages * (self.overhead + nbytes / min(self.bandwidth, self.inward)) + self.latency


class Paths(NamedTuple):
    """The paths of messages, each array [messages].

    Attributes:
        shared: int64 [messages, 4], which of :attr:`Network.capacity` it shares: port and NIC on the way out, port and
            NIC on the way in. A message inside a machine has an unlimited resource instead of the NICs.
        limit: bytes a second of the link from its source to its destination, which it shares with other rounds only.
        latency, overhead: seconds, the largest along the path.
        alone: bytes a second when nothing else is sent.
    """

    shared: Ints
    limit: Floats
    latency: Floats
    overhead: Floats
    alone: Floats


@dataclass(frozen=True)
class Network:
    """Agents on machines, and the links between them.

    Latency and overhead of a message are the largest along its path, its rate is its share of the path's resources.

    Attributes:
        size: number of agents n; ranks fill machine after machine.
        between: a machine's NIC.
        agents_per_machine: how many agents share a NIC; the last machine may have fewer.
        inside: an agent's port. By default it is unlimited.
        nics: ``{machine: Link}`` for NICs that differ from `between`.
        ports: ``{agent: Link}`` for ports that differ from `inside`.
        flow: the limit of a pair of agents on different machines in one direction, even on idle NICs: that of a TCP
            connection. By default there is none.
        links: ``{(source, destination): Link}`` for single links, of one direction, instead of `flow`.

    Raises:
        ValueError: an invalid number, a NIC, port or link without an agent, or a `download` of a link of one direction.
    """

    size: int
    between: Link
    agents_per_machine: int = 1
    inside: Link = field(default_factory=Link)
    nics: Mapping[int, Link] = field(default_factory=dict)
    ports: Mapping[int, Link] = field(default_factory=dict)
    flow: Link = field(default_factory=Link)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("size", "agents_per_machine"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}. Pass a number of agents, at least 1.")
        for kind, given, count in (("NIC", self.nics, self.machines), ("port", self.ports, self.size)):
            beyond = next((index for index in given if not 0 <= index < count), None)
            if beyond is not None:
                raise ValueError(f"{kind} {beyond} is named, but they count from 0 to {count - 1}.")
        beyond_link = next((ends for ends in self.links if not all(0 <= end < self.size for end in ends)), None)
        if beyond_link is not None:
            raise ValueError(f"link {beyond_link} is named, but agents count from 0 to {self.size - 1}.")
        if any(link.download is not None for link in (self.flow, *self.links.values())):
            raise ValueError("a flow, or a single link, has one direction and so no download. Pass its bandwidth.")

    @property
    def machines(self) -> int:
        return -(-self.size // self.agents_per_machine)

    def machine_of(self, agents: Ints) -> Ints:
        """The machines that these agents are on."""
        return agents // self.agents_per_machine

    @cached_property
    def capacity(self) -> Floats:
        """Bytes a second of all shared resources: ports out, ports in, NICs out, NICs in, and an unlimited one."""
        ports, nics = self._ports, self._nics
        return np.concatenate([ports.bandwidth, ports.inward, nics.bandwidth, nics.inward, [math.inf]])

    def paths(self, source: Ints, destination: Ints) -> Paths:
        """The paths of messages from each `source` to the `destination` at the same index; both int64 [messages]."""
        out, into = self.machine_of(source), self.machine_of(destination)
        unlimited = 2 * (self.size + self.machines)
        leaves = out != into
        nics = 2 * self.size + out, 2 * self.size + self.machines + into
        shared = np.stack(
            [source, self.size + destination, *(np.where(leaves, nic, unlimited) for nic in nics)], axis=1
        )
        own = self._own(source, destination, leaves)
        latency, overhead = (
            np.max([ports[source], ports[destination], leaves * nics[out], leaves * nics[into], of_link], axis=0)
            for ports, nics, of_link in (
                (self._ports.latency, self._nics.latency, own.latency),
                (self._ports.overhead, self._nics.overhead, own.overhead),
            )
        )
        alone = np.minimum(self.capacity[shared].min(axis=1), own.bandwidth)
        return Paths(shared, own.bandwidth, latency, overhead, alone)

    @cached_property
    def _ports(self) -> _Links:
        return _Links.of(self.size, self.inside, self.ports)

    @cached_property
    def _nics(self) -> _Links:
        return _Links.of(self.machines, self.between, self.nics)

    def _own(self, source: Ints, destination: Ints, leaves: NDArray[np.bool_]) -> _Links:
        """The parameters of each message's own link, which it shares with no other."""
        flow, none = self.flow, Link()
        found = _Links(
            np.where(leaves, flow.latency, none.latency),
            np.where(leaves, flow.bandwidth, none.bandwidth),
            np.where(leaves, flow.overhead, none.overhead),
            np.where(leaves, flow.inward, none.inward),
        )
        if not self.links:
            return found
        special = {ends[0] * self.size + ends[1]: link for ends, link in self.links.items()}
        asked = source * self.size + destination
        for index in np.flatnonzero(np.isin(asked, list(special))).tolist():
            found.put(index, special[int(asked[index])])
        return found


class _Links(NamedTuple):
    """Many links, an array of each attribute."""

    latency: Floats
    bandwidth: Floats
    overhead: Floats
    inward: Floats

    @classmethod
    def of(cls, count: int, usual: Link, others: Mapping[int, Link]) -> _Links:
        links = cls(
            *(np.full(count, value) for value in (usual.latency, usual.bandwidth, usual.overhead, usual.inward))
        )
        for index, link in others.items():
            links.put(index, link)
        return links

    def put(self, index: int, link: Link) -> None:
        for column, value in zip(self, (link.latency, link.bandwidth, link.overhead, link.inward), strict=True):
            column[index] = value
