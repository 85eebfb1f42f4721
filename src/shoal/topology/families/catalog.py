"""Every topology by name: its constructor, its guarantees, and its numbers of agents. The command line, the docs and
the property tests read this list, so that a topology that is entered here is drawn, compared, documented and tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature

import networkx as nx

from .._validate import EDGE_LIMIT, check_size
from ..schedule import Schedule, Static
from .compose import AllReduce, Alternating, EveryH, Kronecker, between_machines, inside_machines
from .equitopo import DEquiStatic, ODEquiDyn, OUEquiDyn, UEquiStatic
from .finite_time import BaseGraph, Ceca, CecaPairs, HyperHypercube, SimpleBaseGraph, no_hyper_hypercube
from .graphs import (
    ChainGraph,
    DCliquesGraph,
    ExponentialTwoGraph,
    FullyConnectedGraph,
    MeshGrid2DGraph,
    SmallWorldGraph,
    SpanningTreeGraph,
    StarGraph,
    TreeGraph,
    odd,
)
from .groups import (
    GatewayRingGraph,
    InnerOuterExponential,
    InnerOuterRing,
    RingStar,
    RingStarDelegates,
    RingStarRandom,
    group_size,
)
from .matcha import Matcha, too_many
from .one_peer import (
    OnePeerExponential,
    OnePeerGrid,
    OnePeerHypercube,
    RandomMatchings,
    RingRandom,
    ShiftOne,
    not_a_power_of_two,
)
from .static import Hypercube, Torus, exponential, no_torus, ring, symmetric_exponential

Make = Callable[..., "nx.DiGraph | Schedule"]

# As annotations read in a module that postpones their evaluation, and in one that does not.
_NUMBERS = ("int", "float", "int | None", "float | None", int, float, int | None, float | None)


@dataclass(frozen=True)
class Topology:
    """A family of topologies.

    Attributes:
        name: as it is written on the command line, such as ``one-peer-exponential``.
        make: ``make(size, **options)``, a graph or a schedule. Options are plain numbers with defaults.
        summary: one line on what it is.
        source: the paper, or another source.
        symmetric: every round's W equals its transpose.
        doubly: every round's W has row and column sums of one.
        exact: promises the exact mean after one period (for the sizes that `refuses` lets through).
        refuses: why it cannot be made for this number of agents with its default options; empty if it can.
        agents_per_machine: its `make` takes this option, and the drawing groups agents by it.
    """

    name: str
    make: Make
    summary: str
    source: str
    symmetric: bool = False
    doubly: bool = True
    exact: bool = False
    refuses: Callable[[int], str] = lambda size: ""
    agents_per_machine: bool = False

    @property
    def options(self) -> dict[str, float | None]:
        """The numbers that `make` takes besides the number of agents, with their defaults."""
        _, *parameters = signature(self.make).parameters.values()
        return {option.name: option.default for option in parameters if option.annotation in _NUMBERS}

    def schedule(self, size: int, **options: float) -> Schedule:
        """This topology for `size` agents, as a schedule.

        Raises:
            ValueError: there is none for this number of agents, with the reason.
        """
        reason = self.refuses(check_size(size))
        if reason:
            raise ValueError(f"{self.name} for {size} agents: {reason}")
        topology = self.make(size, **options)
        if isinstance(topology, Schedule):
            return topology
        return Static(topology, name=" ".join([self.name, *(f"{option}={value}" for option, value in options.items())]))


CATALOG: dict[str, Topology] = {}


def register(topology: Topology) -> Topology:
    """Enter a topology."""
    if topology.name in CATALOG:
        raise ValueError(f"a topology named {topology.name!r} is already there")
    CATALOG[topology.name] = topology
    return topology


def find(name: str) -> Topology:
    """The topology of this name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in CATALOG:
        raise ValueError(f"there is no topology {name!r}; there are {', '.join(sorted(CATALOG))}")
    return CATALOG[name]


_BLUEFOG = "BlueFog (Ying et al. 2021, arXiv:2111.04287)"
_LIAN_2017 = "Lian et al. 2017, arXiv:1705.09056"
_EXPONENTIAL = "Ying et al. 2021, arXiv:2110.13363"
_BASE = "Takezawa et al. 2023, arXiv:2305.11420"
_EQUITOPO = "Song et al. 2022, arXiv:2210.07881"
_CECA = "Ding et al. 2023, arXiv:2306.00256"
_RING_STAR = "Jameel et al. 2019, doi 10.1007/978-3-030-43823-4_28"


def too_dense(size: int) -> str:
    """Why a graph with all edges is not made for these agents; empty if it is."""
    if size**2 <= EDGE_LIMIT:
        return ""
    return f"{size**2:,} edges are too dense to analyse, of which the limit is {EDGE_LIMIT:,}. Take fewer agents."


def hierarchical(size: int, agents_per_machine: int | None = None) -> Kronecker:
    """A one-peer exponential graph of machines, and the mean inside each, in every round."""
    local = group_size(size, agents_per_machine)
    return Kronecker(OnePeerExponential(size // local), AllReduce(local))


def machines_by_turns(size: int, agents_per_machine: int | None = None) -> Alternating:
    """Even rounds: the mean inside each machine. Odd rounds: one-peer exponential graphs of equal numbers."""
    local = group_size(size, agents_per_machine)
    machines = size // local
    inside, between = AllReduce(local), OnePeerExponential(machines)
    return Alternating([inside_machines(inside, machines), between_machines(between, local)])


def gossip_pga(size: int, every: int = 8) -> EveryH:
    """A one-peer exponential graph, and the mean of all in every H-th round."""
    return EveryH(OnePeerExponential(size), AllReduce(size), every)


def base(peers: int) -> Callable[[int], BaseGraph]:
    """The constructor of Base-(peers + 1) graphs."""
    return lambda size: BaseGraph(size, peers)


def spanning_tree(size: int) -> nx.DiGraph:
    """The tree of the exponential graph that has its root at agent 0."""
    return SpanningTreeGraph(ExponentialTwoGraph(size))


def matcha(size: int, budget: float = 0.5, seed: int = 0) -> Matcha:
    """MATCHA over a small world of four neighbours."""
    return Matcha(SmallWorldGraph(size), budget, seed)


_STATIC = (
    Topology("ring", ring, "exchange with the agent on each side", _LIAN_2017, symmetric=True),
    Topology(
        "chain", ChainGraph, "a ring that is open at one place", "Vogels et al. 2021, arXiv:2110.04175", symmetric=True
    ),
    Topology(
        "binary-tree",
        TreeGraph,
        "exchange with the parent and two children",
        "Vogels et al. 2021, arXiv:2110.04175",
        symmetric=True,
    ),
    Topology(
        "spanning-tree",
        spanning_tree,
        "the exponential graph's tree from agent 0: at most log2 n links from any agent to it",
        "networkx, breadth first",
        symmetric=True,
    ),
    Topology("star", StarGraph, "one agent in the middle exchanges with all", _BLUEFOG, symmetric=True),
    Topology("grid", MeshGrid2DGraph, "rows and columns with a border", _BLUEFOG, symmetric=True),
    Topology(
        "torus",
        Torus,
        "rows and columns that wrap around",
        "Lian et al. 2018, arXiv:1710.06952",
        symmetric=True,
        refuses=no_torus,
    ),
    Topology(
        "hypercube",
        Hypercube,
        "exchange with all whose rank differs in one bit",
        _EXPONENTIAL,
        symmetric=True,
        refuses=not_a_power_of_two,
    ),
    Topology("exponential", exponential, "send to those 1, 2, 4, 8, ... ranks ahead", _EXPONENTIAL),
    Topology(
        "symmetric-exponential",
        symmetric_exponential,
        "exchange with those 1, 4, 16, ... ranks ahead and behind",
        _BLUEFOG,
        symmetric=True,
    ),
    Topology("d-equi-static", DEquiStatic, "the mean of a few random shifts", _EQUITOPO),
    Topology("u-equi-static", UEquiStatic, "the mean of a few random shifts, both ways", _EQUITOPO, symmetric=True),
    Topology(
        "small-world",
        SmallWorldGraph,
        "a ring of four neighbours, some edges moved to far away",
        "Watts, Strogatz 1998, Nature 393",
        symmetric=True,
    ),
    Topology(
        "d-cliques",
        DCliquesGraph,
        "cliques that have all labels, and a small world of cliques",
        "Bellet et al. 2021, arXiv:2104.07365",
        symmetric=True,
    ),
    Topology(
        "fully-connected",
        FullyConnectedGraph,
        "exchange with everybody",
        _BLUEFOG,
        symmetric=True,
        exact=True,
        refuses=too_dense,
    ),
    Topology("all-reduce", AllReduce, "the mean of all, by an all-reduce", _RING_STAR, symmetric=True, exact=True),
)

_ONE_PEER = (
    Topology(
        "one-peer-exponential",
        OnePeerExponential,
        "to the one 1, 2, 4, ... ahead, round after round; exact for powers of two",
        _EXPONENTIAL,
    ),
    Topology(
        "one-peer-hypercube",
        OnePeerHypercube,
        "in pairs whose ranks differ in one bit, the next in each round",
        _EXPONENTIAL,
        symmetric=True,
        exact=True,
        refuses=not_a_power_of_two,
    ),
    Topology(
        "one-peer-grid", OnePeerGrid, "to one neighbour on a grid after the other, for push-sum", _BLUEFOG, doubly=False
    ),
    Topology(
        "shift-one",
        ShiftOne,
        "two halves in pairs, shifted by one in each round",
        "Gan et al. 2021, BAGUA, arXiv:2107.01499",
        symmetric=True,
        refuses=odd,
    ),
    Topology(
        "random-matchings",
        RandomMatchings,
        "random pairs",
        "Boyd et al. 2006, IEEE Trans. Inf. Theory 52",
        symmetric=True,
    ),
    Topology(
        "ring-random",
        RingRandom,
        "even with odd ranks, a random power of two and one apart",
        "Lian et al. 2018, arXiv:1710.06952",
        symmetric=True,
        refuses=odd,
    ),
    Topology("od-equi-dyn", ODEquiDyn, "to the one a random number of ranks ahead", _EQUITOPO),
    Topology("ou-equi-dyn", OUEquiDyn, "in pairs a random number of ranks apart", _EQUITOPO, symmetric=True),
    Topology("ceca", Ceca, "exact in ceil(log2 n) rounds with a second buffer, any number", _CECA),
    Topology(
        "ceca-pairs", CecaPairs, "CECA in pairs, for an even number of agents", _CECA, symmetric=True, refuses=odd
    ),
)

_FINITE = (
    Topology(
        "hyper-hypercube",
        HyperHypercube,
        "groups of up to 3, along one digit of the rank after the other",
        _BASE,
        symmetric=True,
        exact=True,
        refuses=no_hyper_hypercube,
    ),
    Topology(
        "simple-base-2",
        lambda size: SimpleBaseGraph(size),
        "in pairs, exact for any number: parts of 2**p agents",
        _BASE,
        symmetric=True,
        exact=True,
    ),
    Topology("base-2", base(1), "up to 1 peer a round, exact for any number", _BASE, symmetric=True, exact=True),
    Topology("base-3", base(2), "up to 2 peers a round, exact for any number", _BASE, symmetric=True, exact=True),
    Topology("base-4", base(3), "up to 3 peers a round, exact for any number", _BASE, symmetric=True, exact=True),
    Topology("base-5", base(4), "up to 4 peers a round, exact for any number", _BASE, symmetric=True, exact=True),
    Topology(
        "matcha",
        matcha,
        "the matchings of a small world, each with a probability of its own",
        "Wang et al. 2019, arXiv:1905.09435",
        symmetric=True,
        refuses=too_many,
    ),
)

_MACHINES = (
    Topology(
        "ring-star",
        RingStar,
        "the mean of a group and the two beside it",
        _RING_STAR,
        symmetric=True,
        agents_per_machine=True,
    ),
    Topology(
        "ring-star-delegates",
        RingStarDelegates,
        "the same by one agent of each group, in three rounds",
        _RING_STAR,
        doubly=False,
        agents_per_machine=True,
    ),
    Topology(
        "ring-star-random",
        RingStarRandom,
        "the mean of two groups, paired at random",
        _RING_STAR,
        symmetric=True,
        refuses=odd,
        agents_per_machine=True,
    ),
    Topology(
        "gateway-ring",
        GatewayRingGraph,
        "fully connected groups, and a ring of their first agents",
        _RING_STAR,
        symmetric=True,
        agents_per_machine=True,
    ),
    Topology(
        "inner-outer-ring",
        InnerOuterRing,
        "one agent of each machine to the next machine, the others around inside",
        _BLUEFOG,
        agents_per_machine=True,
    ),
    Topology(
        "inner-outer-exponential",
        InnerOuterExponential,
        "the same with hops of 1, 2, 4, ...",
        _BLUEFOG,
        agents_per_machine=True,
    ),
    Topology(
        "hierarchical",
        hierarchical,
        "machine means, over a one-peer exponential graph of machines",
        _BLUEFOG,
        agents_per_machine=True,
    ),
    Topology(
        "machines-by-turns",
        machines_by_turns,
        "machine means, and one-peer exponential graphs between machines, by turns",
        _BLUEFOG,
        agents_per_machine=True,
    ),
    Topology(
        "gossip-pga",
        gossip_pga,
        "a one-peer exponential graph, and every 8 rounds the mean of all",
        "Chen et al. 2021, arXiv:2105.09080",
        exact=True,
    ),
)

for _topology in (*_STATIC, *_ONE_PEER, *_FINITE, *_MACHINES):
    register(_topology)
