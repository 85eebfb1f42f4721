"""Every topology by name: its constructor, its guarantees, and its numbers of agents. The command line, the docs and
the property tests read this list, so that a topology that is entered here is drawn, compared, documented and tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature

import networkx as nx

from ._validate import check_size
from .schedule import Schedule, Static

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
