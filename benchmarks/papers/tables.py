"""The tables of costs that papers of the field print, as functions: their formulas to the letter, and what one counts.

The Ring-Star paper's Table 1 (Jameel et al. 2019), the BlueFog paper's table I (Ying et al. 2021), and BAGUA's table of
the busiest node. Beside each formula stands what passes the busiest node when the messages are written down one by one
(`protocols`); notes say where the two differ, and where a paper contradicts itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.topology._validate import check_size
from shoal.topology.analysis.age import average_age
from shoal.topology.analysis.cost import alpha_beta, check_network
from shoal.topology.families.compose import AllReduce
from shoal.topology.families.graphs import odd
from shoal.topology.families.groups import RingStar, RingStarRandom, group_size
from shoal.topology.families.one_peer import OnePeerExponential, RingRandom
from shoal.topology.families.static import Circulant, ring
from shoal.topology.schedule import Schedule

from .protocols import (
    Counted,
    byteps,
    count_messages,
    delegates,
    neighbor_allreduces,
    parameter_server,
    ring_allreduce,
)


@dataclass(frozen=True)
class RingStarRow:
    """A row of the Ring-Star paper's Table 1: V workers, groups of L, G = V / L of them, K bytes.

    Attributes:
        topology: as printed.
        averaging: "dense" or "sparse", as printed.
        formula: the communication cost, as printed.
        handshakes: its number of latencies.
        bytes: its number of bytes.
        seconds: its value on the given network.
        age: the order of the average age, as printed.
        counted: messages at the busiest worker in one averaging; None where the topology cannot be made.
        counted_age: the average age, in averagings; None where the topology cannot be made.
        note: where the paper contradicts itself or the count; empty if nowhere.
    """

    topology: str
    averaging: str
    formula: str
    handshakes: int
    bytes: float
    seconds: float
    age: str
    counted: Counted | None
    counted_age: float | None
    note: str


@dataclass(frozen=True)
class PrimitiveRow:
    """A row of the BlueFog paper's table I: n nodes, M bytes, bandwidth B, latency L.

    Attributes:
        primitive: as printed.
        formula: the communication cost, as printed.
        seconds: its value on the given network.
        averaging: "global" or "partial", as printed.
        needs: "a central node", "extra nodes" or empty, as printed.
        counted: messages at the busiest node.
        note: where formula and count differ; empty if nowhere.
    """

    primitive: str
    formula: str
    seconds: float
    averaging: str
    needs: str
    counted: Counted
    note: str


@dataclass(frozen=True)
class BusiestRow:
    """A row of BAGUA's table of the busiest node.

    Attributes:
        pattern: of communication.
        latency: complexity, as printed.
        bandwidth: complexity, as printed.
        counted: messages at the busiest node.
        note: where the two differ, or what was not printed; empty if nothing.
    """

    pattern: str
    latency: str
    bandwidth: str
    counted: Counted
    note: str


def ring_star_table(
    workers: int, group: int, *, nbytes: float, latency: float, bandwidth: float
) -> tuple[RingStarRow, ...]:
    """The Ring-Star paper's Table 1, and a fifth row for the Ring-Star over RingRandom of its footnote 1.

    doi 10.1007/978-3-030-43823-4_28, sections 2.2 to 2.4. The ages of random topologies are means over a sample, and
    both need an even number, of workers or of groups.

    Args:
        workers: V.
        group: L, a divisor of V.
        nbytes: K, bytes of the model.
        latency: alpha, seconds.
        bandwidth: bytes per second, one over beta.

    Raises:
        ValueError: groups that the workers do not fill, or a network that is not one.
    """
    workers = check_size(workers, "workers")
    group = group_size(workers, group)
    groups = workers // group
    check_network(nbytes=nbytes, latency=latency, bandwidth=bandwidth)

    def row(
        topology: str, handshakes: int, age: str, counted: Counted | None, averaged: Schedule | None, note: str
    ) -> RingStarRow:
        return RingStarRow(
            topology=topology,
            averaging="dense" if topology == "Allreduce" else "sparse",
            formula=_RING_STAR_FORMULAS[topology],
            handshakes=handshakes,
            bytes=2 * nbytes,
            seconds=alpha_beta(handshakes, 2 * nbytes, latency, bandwidth),
            age=age,
            counted=counted,
            counted_age=None if averaged is None else average_age(averaged).mean,
            note=note,
        )

    random = None if odd(workers) else RingRandom(workers)
    random_groups = None if odd(groups) else RingRandom(groups)
    of_allreduce, of_ring_star = 2 * (workers - 1), 2 * (group - 1) + 2
    return (
        row(
            "Allreduce",
            of_allreduce,
            "O(1)",
            count_messages(ring_allreduce(workers, nbytes)),
            AllReduce(workers),
            f"The table has 2(V - 1) = {of_allreduce} handshakes, the text of section 2.3 V - 1 = {workers - 1}. "
            "A ring all-reduce has 2(V - 1) messages, of K / V bytes each.",
        ),
        row("Ring", 2, "O(V)", _counted(ring(workers), nbytes), ring(workers), ""),
        row(
            "RingRandom",
            2,
            "O(log(V))",
            None if random is None else _counted(random, nbytes),
            random,
            "A worker averages with one other at a time (section 2.3): 1 handshake, K bytes each way.",
        ),
        row(
            "Ring-Star (proposed)",
            of_ring_star,
            "O(G)",
            count_messages(delegates(ring(groups), group, nbytes)),
            RingStar(workers, group),
            f"At L = V it is 2 V = {2 * workers}, but {of_allreduce} for the all-reduce that it then is (section 2.4): "
            "a single delegate has no neighbours. 2 K leaves out the models that a delegate collects and hands out.",
        ),
        row(
            "Ring-Star over RingRandom",
            of_ring_star,
            "O(log(G))",
            None if random_groups is None else count_messages(delegates(random_groups, group, nbytes)),
            None if random_groups is None else RingStarRandom(workers, group),
            "Delegates that average in pairs have 1 handshake between groups, not 2.",
        ),
    )


_RING_STAR_FORMULAS = {
    "Allreduce": "2(V - 1) alpha + 2 K beta",
    "Ring": "2 alpha + 2 K beta",
    "RingRandom": "2 alpha + 2 K beta",
    "Ring-Star (proposed)": "(2(L - 1) + 2) alpha + 2 K beta",
    "Ring-Star over RingRandom": "(2(L - 1) + 2) alpha + 2 K beta",
}


def bluefog_table(agents: int, *, nbytes: float, latency: float, bandwidth: float) -> tuple[PrimitiveRow, ...]:
    """The BlueFog paper's table I: what a parameter server, a ring all-reduce, BytePS and partial averaging cost.

    Ying et al. 2021, arXiv:2111.04287. Partial averaging is counted on the one-peer exponential graph.

    Args:
        agents: n, without the servers.
        nbytes: M, bytes of a message.
        latency: L, seconds.
        bandwidth: B, bytes per second.

    Raises:
        ValueError: no agents, or a network that is not one.
    """
    n = check_size(agents, "agents")

    def cost(models: int, latencies: int) -> float:
        return alpha_beta(latencies, models * nbytes, latency, bandwidth)

    return (
        PrimitiveRow(
            "Parameter Server",
            "n M / B + n L",
            cost(n, n),
            "global",
            "a central node",
            count_messages(parameter_server(n, nbytes)),
            "The server hears all, and then answers all; the formula counts one way.",
        ),
        PrimitiveRow(
            "Ring-Allreduce",
            "2 M / B + 2 n L",
            cost(2, 2 * n),
            "global",
            "",
            count_messages(ring_allreduce(n, nbytes)),
            "There are 2 (n - 1) steps of M / n bytes; the formula has n for n - 1.",
        ),
        PrimitiveRow(
            "Byte-PS",
            "M / B + n L",
            cost(1, n),
            "global",
            "extra nodes",
            count_messages(byteps(n, nbytes)),
            "A node sends n shares, and then hears n; the formula counts one way.",
        ),
        PrimitiveRow(
            "BlueFog, partial averaging",
            "M / B + L",
            cost(1, 1),
            "partial",
            "",
            _counted(OnePeerExponential(n), nbytes),
            "",
        ),
    )


def busiest_node_table(agents: int, degree: int, *, nbytes: float) -> tuple[BusiestRow, ...]:
    """BAGUA's table of latency and bandwidth at the busiest node, and BytePS beside it.

    From BAGUA's tutorial: its page on decentralized SGD has the rows with one peer or none, and the one on low
    precision says O(k) of k peers.

    Args:
        agents: n, without the servers.
        degree: d, peers that each agent of the last row sends to, below n.
        nbytes: bytes of a model.

    Raises:
        ValueError: no agents, as many peers as there are agents, or bytes that are none.
    """
    n = check_size(agents, "agents")
    degree = check_size(degree, "degree")
    if degree >= n:
        raise ValueError(f"an agent among {n} has at most {n - 1} peers, not {degree}. Pass a smaller degree.")
    check_network(nbytes=nbytes)
    waiting = f"{n} messages that come at the same time count as one, though d of them count as d in the last row."
    return (
        BusiestRow("Parameter Server", "O(1)", "O(n)", count_messages(parameter_server(n, nbytes)), waiting),
        BusiestRow("Allreduce (Ring)", "O(n)", "O(1)", count_messages(ring_allreduce(n, nbytes)), ""),
        BusiestRow(
            "BytePS",
            "O(1)",
            "O(1)",
            count_messages(byteps(n, nbytes)),
            "Not in BAGUA's table; derived as its parameter server is. The BlueFog paper has a latency of n.",
        ),
        BusiestRow("Decentralized, 1 peer", "O(1)", "O(1)", _counted(OnePeerExponential(n), nbytes), ""),
        BusiestRow("Decentralized, d peers", "O(d)", "O(d)", _counted(Circulant(n, range(1, degree + 1)), nbytes), ""),
    )


def _counted(schedule: Schedule, nbytes: float) -> Counted:
    return count_messages(neighbor_allreduces(schedule, 1, nbytes))
