"""Clusters that papers report on, as networks of the model, and what the papers ran on them, as steps of it.

The BlueFog paper's figure 12 (arXiv:2111.04287), Ring-Star's cluster (doi 10.1007/978-3-030-43823-4_28), and Horovod on
all of Summit (Romero et al., NSDI 2022). What a paper does not say is an :class:`Assumption` with its source.
`page` sets the predictions beside what the papers report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.netmodel.messages import (
    Messages,
    Step,
    hierarchical,
    messages_of_round,
    ring_allreduce,
    rounds_of,
    tree_allreduce,
)
from shoal.netmodel.network import Link, Network
from shoal.netmodel.simulation import simulate
from shoal.topology.families.groups import InnerOuterExponential
from shoal.topology.families.one_peer import OnePeerExponential, RingRandom
from shoal.topology.schedule import Schedule

GBIT = 1.25e8
FLOAT = 4


@dataclass(frozen=True)
class Assumption:
    """A number that a paper does not give.

    Attributes:
        what: it is.
        value: with its unit.
        source: where it is from.
    """

    what: str
    value: str
    source: str


@dataclass(frozen=True)
class Workload:
    """A model in training on one GPU.

    Attributes:
        name: of the model.
        parameters: how many.
        compute: seconds of a step on one GPU alone: an assumption.
        source: of `compute`.
    """

    name: str
    parameters: float
    compute: float
    source: str

    @property
    def nbytes(self) -> float:
        return FLOAT * self.parameters


BACKWARD = 2 / 3
"""Share of a step after which back-propagation has begun to hand out gradients: twice the work of the forward pass."""

RESNET_50 = Workload(
    "ResNet-50", 25.6e6, 64 / 367, "batch 64 (BlueFog's README); 367 images/s, V100 16 GB, FP32, NVIDIA's examples"
)
VGG_16 = Workload(
    "VGG-16", 138e6, 64 / (16 / 0.0835), "batch 64 as for ResNet-50; 83.5 ms for 16, V100 on AWS, u39kun's benchmark"
)
BERT_LARGE = Workload(
    "BERT-large", 345e6, 2 / 5.48, "batch 2, all that fits; 5.48 sentences/s, V100 16 GB, FP32, NVIDIA's examples"
)
FIGURE_12 = (RESNET_50, VGG_16, BERT_LARGE)

FIGURE_12_ASSUMPTIONS = (
    Assumption("parameters of ResNet-50", "25.6 million", "torchvision; the paper says around 23 million"),
    *(Assumption(f"{one.name}: a step on one GPU", f"{1e3 * one.compute:.0f} ms", one.source) for one in FIGURE_12),
    Assumption("share of a step that is back-propagation", "2/3", "twice the work of the forward pass"),
    Assumption("NVLink, per GPU and direction", "150 GB/s", "six links of 25 GB/s, NVIDIA's V100 data sheet"),
    Assumption("latency between machines, and inside", "50 us and 10 us", "TCP and NVLink, orders of magnitude"),
    Assumption("one TCP connection, second network only", "10 Gbit/s", "AWS: EC2 instance network bandwidth"),
)


def figure_12_network(size: int, flow: Link | None = None) -> Network:
    """AWS p3.16xlarge: 8 V100 a machine behind NVLink, 25 Gbit/s between machines.

    Args:
        size: number of GPUs.
        flow: what one connection gets at most.
    """
    return Network(
        size, Link(50e-6, 25 * GBIT), min(8, size), Link(10e-6, 150e9), flow=flow if flow is not None else Link()
    )


AWS_FLOW = Link(bandwidth=10 * GBIT)


def _horovod(network: Network, nbytes: float, steps: int) -> list[Step]:
    return [ring_allreduce(network.size, nbytes)] * steps


def _neighbors(network: Network, nbytes: float, steps: int) -> list[Step]:
    return list(rounds_of(InnerOuterExponential(network.size, network.agents_per_machine), nbytes, steps))


def _leaders(network: Network, nbytes: float, steps: int) -> list[Step]:
    """BlueFog's hierarchical form on the one-peer exponential graph of machines."""
    if network.machines == 1:
        return _neighbors(network, nbytes, steps)
    return hierarchical_steps(network, nbytes, steps, OnePeerExponential(network.machines))


def hierarchical_steps(network: Network, nbytes: float, steps: int, between: Schedule) -> list[Step]:
    """Steps in which machines average inside, and their first agents exchange whole tensors.

    Args:
        network: of two machines or more.
        nbytes: of a tensor.
        steps: how many.
        between: which machines exchange.
    """
    local = network.agents_per_machine
    (inside, *_) = hierarchical(network.machines, local, nbytes, [])
    first = np.arange(network.machines) * local
    others = np.setdiff1d(np.arange(network.size), first)
    scatter = Messages.of(others // local * local, others, nbytes / local)
    hops = [messages_of_round(between, index, nbytes) for index in range(between.period or 1)]
    leaving = [Messages.of(hop.source * local, hop.destination * local, nbytes) for hop in hops]
    cycle = [[inside, inside, hop, scatter, inside] for hop in leaving]
    return [cycle[number % len(cycle)] for number in range(steps)]


@dataclass(frozen=True)
class Style:
    """A way to train: its exchanges, and the share of a step in which they run beside the computation."""

    name: str
    steps: Callable[[Network, float, int], list[Step]]
    overlap: float


STYLES = (
    Style("Horovod, ring all-reduce", _horovod, BACKWARD),
    Style("BlueFog ATC", _neighbors, BACKWARD),
    Style("BlueFog AWC", _neighbors, 1.0),
    Style("BlueFog H-ATC", _leaders, BACKWARD),
    Style("BlueFog H-AWC", _leaders, 1.0),
)


def efficiency(network: Network, workload: Workload, style: Style) -> float:
    """Throughput per GPU as a share of that of one GPU alone, after all have settled."""
    # A period of the inner-outer graph for 16 machines of 8 is 8, and the waiting spreads within another. Agents of a
    # ring all-reduce that follow each other through a slow link drift apart for a few steps.
    settle, count = (4, 10) if style.steps is _horovod else (16, 48)
    steps = style.steps(network, workload.nbytes, count)
    timeline = simulate(network, steps, workload.compute, overlap=style.overlap)
    return workload.compute / timeline.seconds_per_step(skip=settle)


@dataclass(frozen=True)
class Figure12:
    """One model at one number of GPUs: the efficiency of each style, by its name."""

    workload: Workload
    size: int
    efficiency: dict[str, float]

    @property
    def speedup(self) -> tuple[float, float]:
        """The slowest and the fastest of BlueFog's styles over Horovod."""
        ours = [value for name, value in self.efficiency.items() if name.startswith("BlueFog")]
        return min(ours) / self.efficiency[STYLES[0].name], max(ours) / self.efficiency[STYLES[0].name]


def figure_12(size: int, flow: Link | None = None) -> list[Figure12]:
    """The three models of figure 12 on so many GPUs."""
    network = figure_12_network(size, flow)
    return [
        Figure12(workload, size, {style.name: efficiency(network, workload, style) for style in STYLES})
        for workload in FIGURE_12
    ]


RING_STAR_MODELS = {"ResNet-20": 1e6, "VGG-16 (CIFAR)": 60e6, "WideResNet-28-10": 146e6}
"""Bytes, the paper's table 2. DenseNet-40-12 has those of ResNet-20."""
RING_STAR_ASSUMPTIONS = (
    Assumption("latency between nodes", "100 us", "TCP inside one zone of a cloud, order of magnitude"),
    Assumption("latency and bandwidth inside a node", "10 us, 12 GB/s", "mpi4py through the host: PCIe 3.0 x16"),
)


def ring_star_network(size: int) -> Network:
    """Google's n1-standard-64: 4 P100 a node, 10 Gbit/s between nodes."""
    return Network(size, Link(100e-6, 10 * GBIT), 4, Link(10e-6, 12e9))


def ring_star_steps(size: int, nbytes: float) -> dict[str, list[Step]]:
    """One averaging step of each of the paper's topologies; several for the random one, which differ."""
    machines, local = size // 4, 4
    first = np.arange(machines) * local
    others = np.setdiff1d(np.arange(size), first)
    up = Messages.of(others, others // local * local, nbytes)
    around = Messages.of(np.tile(first, 2), np.concatenate([np.roll(first, -1), np.roll(first, 1)]), nbytes)
    down = Messages.of(up.destination, up.source, nbytes)
    hops = np.arange(size)
    ring = Messages.of(np.tile(hops, 2), np.concatenate([np.roll(hops, -1), np.roll(hops, 1)]), nbytes)
    return {
        "Allreduce": [ring_allreduce(size, nbytes)],
        "Ring": [[ring]],
        "RingRandom": list(rounds_of(RingRandom(size), nbytes, 16)),
        f"Ring-Star [{machines} x {local}]": [[up, around, down]],
    }


def ring_star_seconds(size: int, nbytes: float) -> dict[str, float]:
    """Of one averaging step, by topology."""
    network = ring_star_network(size)
    return {name: simulate(network, steps).seconds_per_step() for name, steps in ring_star_steps(size, nbytes).items()}


def ring_star_formulas(size: int, nbytes: float) -> dict[str, float]:
    """The paper's table 1 in the same setting: handshakes times alpha, plus two tensors at the NIC's rate."""
    alpha, beta, local = 100e-6, 1 / (10 * GBIT), 4
    handshakes = {"Allreduce": 2 * (size - 1), "Ring": 2, "RingRandom": 2, "Ring-Star": 2 * (local - 1) + 2}
    return {name: count * alpha + 2 * nbytes * beta for name, count in handshakes.items()}


SUMMIT_BYTES = 880e6
SUMMIT_CHUNKS = 64
SUMMIT_ASSUMPTIONS = (
    Assumption("latency inside a node, and between", "5 us and 5 us", "NVLink and EDR InfiniBand, orders of magnitude"),
    Assumption("pieces that half a tensor is cut into for the trees", f"{SUMMIT_CHUNKS}", "some 7 MB each"),
    Assumption("share of a step that is back-propagation", "2/3", "twice the work of the forward pass"),
    Assumption(
        "all exchanges of rings and trees are full and in step", "", "no agent waits for another kind of exchange"
    ),
)


def summit_network(size: int) -> Network:
    """Summit: 6 V100 a node, 50 GB/s inside and 23 GB/s between."""
    return Network(size, Link(5e-6, 23e9), 6, Link(5e-6, 50e9))


def summit_allreduces(size: int, nbytes: float = SUMMIT_BYTES) -> dict[str, float]:
    """Seconds of an all-reduce, of 880 MB unless said, among so many GPUs, six a node, by its kind.

    An exchange of a ring is like the next, and one of its nodes like the others: some exchanges of a few nodes are
    played, and stand for all. So are two exchanges of trees in which all levels are busy.
    """
    nodes = size // 6
    few = 6 * min(nodes, 8)
    around = ring_allreduce(few, nbytes / size * few)[:48]
    ring = simulate(summit_network(few), [[one] for one in around])
    found = {"one ring of all GPUs": 2 * (size - 1) * ring.seconds_per_step(skip=len(around) // 2)}
    if nodes > 1:
        network = summit_network(6)
        inside = simulate(network, [hierarchical(1, 6, nbytes, [])])
        # The shares of the six GPUs of a node go the same ways at the same time: one for the six makes the same load.
        exchanges = tree_allreduce(nodes, nbytes, SUMMIT_CHUNKS)
        trees = simulate(Network(nodes, network.between), [[max(exchanges, key=len)]] * 2)
        found["shares inside nodes, two trees between"] = inside.seconds + len(exchanges) * trees.seconds_per_step()
    return found


def exposed(reduce_seconds: float, compute: float, overlap: float, lag: int = 0) -> float:
    """Efficiency of a step that computes, and all-reduces beside the last share `overlap` of the computation.

    With a lag the all-reduce has all of the next step, too, and only its length counts.
    """
    if lag:
        return compute / max(compute, reduce_seconds)
    return compute / max(compute, compute * (1 - overlap) + reduce_seconds)


def compute_for(reduce_seconds: float, share: float, overlap: float) -> float:
    """How long a step's computation must be, at least, for an efficiency of `share`."""
    return reduce_seconds / (1 / share - (1 - overlap))
