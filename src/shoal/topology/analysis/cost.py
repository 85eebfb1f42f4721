"""The costs of a round: messages, handshakes and bytes, and seconds under the alpha-beta model.

A round of ``neighbor_allreduce`` puts one message on every edge. A NIC sends and receives at the same time, but one
message after the other, so that an agent, or a machine of several agents on one NIC, with d messages to send or to
receive is done after ``d (latency + bytes / bandwidth)`` seconds. The round lasts as long as for the busiest agent.
Messages inside a machine do not pass the NIC and cost nothing here. `shoal.netmodel` knows links that differ, and
operations that move fewer bytes than one message on every edge, such as an all-reduce.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import inf, isfinite

import numpy as np

from .._validate import check_size
from ..schedule import AnyTopology, Ranks, distinct
from .span import RoundMap, Span


@dataclass(frozen=True)
class Traffic:
    """Messages of a round. All are means over the rounds of a period, or a sample, except those named `most_`.

    A message is what one agent sends to one other in a round; an agent does not send to itself. A message that counts
    nothing, on an edge of weight zero, is sent like any other.

    Attributes:
        messages: of all agents.
        handshakes: pairs of agents with a message between them, either way or both.
        bytes: of all agents, sent.
        busiest_messages: of the busiest agent: those sent or those received, whichever are more.
        busiest_handshakes: agents that the agent with most partners talks with.
        busiest_bytes: `busiest_messages` times the bytes of one.
        nic_messages: off-machine messages of the busiest machine's NIC: sent or received, whichever are more.
        most_messages: `busiest_messages` of the busiest round: the degree.
        most_senders_on_a_nic: how many agents of one machine send to other machines in the same round, at most.
            Above one, they wait for each other at the NIC.
    """

    messages: float
    handshakes: float
    bytes: float
    busiest_messages: float
    busiest_handshakes: float
    busiest_bytes: float
    nic_messages: float
    most_messages: int
    most_senders_on_a_nic: int


def traffic(topology: AnyTopology, *, nbytes: float, agents_per_machine: int = 1) -> Traffic:
    """The traffic of a round on the network.

    Args:
        topology: a graph, a mixing matrix, or a schedule.
        nbytes: bytes of one message.
        agents_per_machine: ranks 0 to m - 1 sit on the first machine, and so on.

    Raises:
        ValueError: machines that the agents do not fill, a size that is not one, or a round of too many edges.
    """
    return traffic_of(Span(topology), nbytes, agents_per_machine)


def traffic_of(span: Span, nbytes: float, agents_per_machine: int = 1) -> Traffic:
    """:func:`traffic` for the rounds of a span."""
    check_network(nbytes=nbytes)
    local = check_machines(span.size, agents_per_machine)
    counts = np.array([astuple(_count(round, local)) for round in span], dtype=np.float64)
    messages, handshakes, busiest, partners, nic, senders = counts.T
    return Traffic(
        messages=float(messages.mean()),
        handshakes=float(handshakes.mean()),
        bytes=float(messages.mean() * nbytes),
        busiest_messages=float(busiest.mean()),
        busiest_handshakes=float(partners.mean()),
        busiest_bytes=float(busiest.mean() * nbytes),
        nic_messages=float(nic.mean()),
        most_messages=int(busiest.max()),
        most_senders_on_a_nic=int(senders.max()),
    )


def round_seconds(
    topology: AnyTopology, *, nbytes: float, latency: float, bandwidth: float, agents_per_machine: int = 1
) -> float:
    """Seconds of a round, on average: the messages at the busiest NIC, each ``latency + nbytes / bandwidth``.

    Args:
        topology: a graph, a mixing matrix, or a schedule.
        nbytes: bytes of one message.
        latency: seconds, at least 0.
        bandwidth: bytes per second of a NIC, each way, above 0.
        agents_per_machine: how many agents share a NIC.

    Raises:
        ValueError: as :func:`traffic`, or a network that is not one.
    """
    return seconds_of(
        traffic(topology, nbytes=nbytes, agents_per_machine=agents_per_machine), nbytes, latency, bandwidth
    )


def seconds_of(found: Traffic, nbytes: float, latency: float, bandwidth: float) -> float:
    """:func:`round_seconds` for traffic that was counted."""
    return found.nic_messages * alpha_beta(1, nbytes, latency, bandwidth)


def alpha_beta(handshakes: float, nbytes: float, latency: float, bandwidth: float) -> float:
    """``handshakes * latency + nbytes / bandwidth``, seconds, for `nbytes` in all.

    The model of the Ring-Star paper (section 2.2, whose beta is seconds per byte, though its text says bandwidth).

    Raises:
        ValueError: a number that is negative or not finite, or no bandwidth.
    """
    if not (isfinite(handshakes) and handshakes >= 0):
        raise ValueError(f"handshakes is {handshakes}. Pass a number of them, at least 0.")
    check_network(nbytes=nbytes, latency=latency, bandwidth=bandwidth)
    return handshakes * latency + nbytes / bandwidth


def relative_gain(other: float, this: float) -> float:
    """`other` over `this`, for costs and ages, of which less is better: above one, this one is better.

    The ratio of the Ring-Star paper (section 2.4, footnote 2). Infinite if only `this` costs nothing, 1.0 if neither
    costs anything or both never end.

    Raises:
        ValueError: a number that is negative or not a number.
    """
    if not (other >= 0 and this >= 0):
        raise ValueError(f"the costs are {other} and {this}. Pass two numbers of at least 0.")
    if other == this:
        return 1.0
    return other / this if this > 0 else inf


def check_network(*, nbytes: float = 0.0, latency: float = 0.0, bandwidth: float = 1.0) -> None:
    """Raise unless these are a network and a message."""
    for name, value, unit in (("nbytes", nbytes, "bytes"), ("latency", latency, "seconds")):
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}. Pass {unit}, at least 0.")
    if not (isfinite(bandwidth) and bandwidth > 0):
        raise ValueError(f"bandwidth is {bandwidth}. Pass bytes per second, above 0.")


def check_machines(size: int, agents_per_machine: int) -> int:
    """The number of agents on each machine, if they fill the machines."""
    local = check_size(agents_per_machine, "agents_per_machine")
    if size % local:
        raise ValueError(
            f"{size} agents do not fill machines of {local}. Pass a divisor of {size}, or 1 if each has its own NIC."
        )
    return local


@dataclass(frozen=True)
class _Counts:
    messages: int
    handshakes: int
    busiest: int
    partners: int
    nic: int
    senders: int


def _count(round: RoundMap, local: int) -> _Counts:
    others = round.edges.source != round.edges.destination
    source, destination = round.edges.source[others], round.edges.destination[others]
    if not len(source):
        return _Counts(0, 0, 0, 0, 0, 0)
    lower, upper = _pairs(source, destination, round.size)
    away = source // local != destination // local
    nic = max(_most(source[away] // local), _most(destination[away] // local))
    goes_out = np.zeros(round.size, dtype=np.int64)
    goes_out[source[away]] = 1
    return _Counts(
        messages=len(source),
        handshakes=len(lower),
        busiest=max(_most(source), _most(destination)),
        partners=_most(np.concatenate([lower, upper])),
        nic=nic,
        senders=int(goes_out.reshape(-1, local).sum(axis=1).max()),
    )


def _pairs(source: Ranks, destination: Ranks, size: int) -> tuple[Ranks, Ranks]:
    """The two agents of each pair that exchanges, once."""
    keys = distinct(np.minimum(source, destination) * size + np.maximum(source, destination))
    return keys // size, keys % size


def _most(ranks: Ranks) -> int:
    """How often the most frequent one is named."""
    return int(np.bincount(ranks).max()) if len(ranks) else 0
