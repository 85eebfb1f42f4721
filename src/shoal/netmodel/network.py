"""A network of agents on machines: latency, bandwidth, and the resources that messages share.

An agent has a port, which all its messages pass; a machine has a NIC, which all messages of its agents to other
machines pass. Both carry both directions at once, each at a full rate of its own. A message inside a machine passes two
ports, one between machines two ports and two NICs; messages through the same port or NIC in the same direction share
its rate. This is the alpha-beta model in the form of LogGP (Alexandrov et al. 1995): a message of M bytes alone takes
``overhead + M / bandwidth + latency``; d messages of one NIC take ``d (overhead + M / bandwidth) + latency``, because
overheads and bytes take turns, but latencies overlap.

Quantities are parsed and formatted here too, as people write them on a command line: ``5ms`` or ``1gbit``. Ambiguous
units are refused. A rate is in bits or in bytes a second, and its unit states which; prefixes are powers of 1000, and
prefixes with an i, as in ``MiB``, of 1024. The defaults of the options of training are here because the command line
reads them without the torch that :class:`.Training` needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..topology._validate import as_int

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
        TypeError: a number of agents that is not whole.
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
            if as_int(getattr(self, name), name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}. Pass a number of agents, at least 1.")
        for kind, given, count in (("NIC", self.nics, self.machines), ("port", self.ports, self.size)):
            beyond = next((index for index in given if not 0 <= index < count), None)
            if beyond is not None:
                raise ValueError(f"{kind} {beyond} is named, but they count from 0 to {count - 1}.")
        no_link = next((ends for ends in self.links if len(ends) != 2 or ends[0] == ends[1]), None)
        if no_link is not None:
            raise ValueError(f"link {no_link} is named, but a link joins two agents: (source, destination).")
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
        found = _Links.of(len(source), Link(), {})
        found.put(leaves, self.flow)
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

    def put(self, index: int | NDArray[np.bool_], link: Link) -> None:
        """Set one link, or those of a mask."""
        for column, value in zip(self, (link.latency, link.bandwidth, link.overhead, link.inward), strict=True):
            column[index] = value


_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*([a-zA-Zµμ/]*)\s*")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_RATES: Mapping[str, float] = {
    **{f"{prefix}{bit}": many / 8 for prefix, many in _PREFIXES.items() for bit in ("bit", "bit/s", "bps")},
    **{f"{prefix}b/s": float(many) for prefix, many in {**_PREFIXES, **_BINARY}.items()},
}


def parse_seconds(text: str) -> float:
    """Seconds in a duration such as ``5ms``, ``50us``, ``0.2s``; zero needs no unit."""
    return _parse(text, _SECONDS, "a duration", "ns, us, ms, s or min, as in 5ms", allow_zero=True)


def parse_rate(text: str) -> float:
    """Bytes a second in a rate such as ``1gbit``, ``25Gbit/s``, ``400Mbps`` (bits) or ``23GB/s`` (bytes)."""
    accepted = "bit, kbit, mbit, gbit or tbit (bits a second), or B/s, kB/s, MB/s, GB/s (bytes a second), as in 1gbit"
    if re.search(r"(b/[sS]|B[pP][sS])\s*$", text):
        raise ValueError(f"{text!r} is not a bandwidth: it may be in bits or in bytes. Write one of {accepted}.")
    return _parse(text, _RATES, "a bandwidth", accepted)


def format_seconds(seconds: float) -> str:
    """Three figures and a unit: ``1.23 ms``."""
    if not math.isfinite(seconds):
        return "never"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if _rounded(seconds / size) >= 1:
            return f"{_figures(seconds / size)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.3g} ns"


def format_rate(bytes_per_second: float) -> str:
    """In bits, as networks are sold: ``1 Gbit/s``."""
    if not math.isfinite(bytes_per_second):
        return "no limit"
    bits = 8 * bytes_per_second
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if _rounded(bits / size) >= 1:
            return f"{_figures(bits / size)} {unit}"
    return f"{bits:.3g} bit/s"


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _figures(value: float) -> str:
    return f"{value:,.0f}" if _rounded(value) >= 1000 else f"{value:.3g}"


def _parse(text: str, units: Mapping[str, float], what: str, accepted: str, *, allow_zero: bool = False) -> float:
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not {what}. Write a number and a unit: {accepted}.")
    number, unit = float(found[1] + (found[2] or "")), found[3].lower()
    if allow_zero and number == 0.0 and not unit:
        return 0.0
    if unit not in units:
        problem = f"{found[3]!r} is no unit of it" if unit else "it has no unit"
        raise ValueError(f"{text!r} is not {what}: {problem}. Write one of {accepted}.")
    value = number * units[unit]
    if not math.isfinite(value) or (value == 0.0 and not allow_zero):
        raise ValueError(f"{text!r} is not {what}: it must be {'finite' if allow_zero else 'above zero and finite'}.")
    return value


DIFFERENCE = 0.01
"""The difference of agents' gradients at the begin of training on shuffled data, whose batches still differ."""
ACCURACY = 0.1
"""The share of the mean gradient's length that is left at the end of training."""
COMPRESSION = "0.5 (half of the bytes), topk:0.01, randomk:0.01, qsgd:127 (levels), sign or uint8"
"""How compression is written."""
