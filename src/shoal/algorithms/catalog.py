"""All algorithms, each with an example that works: what the tests run, and what the page of algorithms lists.

An entry is all that a new algorithm needs beside its own file: from it come the test that a stacked fleet, threads and
processes agree, that a run can be resumed, that the needs are checked, that it finds the optimum if it says so, and its
row in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx

from ..topology.families.circulant import ring
from ..topology.schedule import Schedule
from .algorithm import Algorithm
from .gradient_descent import GradientDescent
from .tracking import GradientTracking

CATALOG: dict[str, Entry] = {}


@dataclass(frozen=True)
class Entry:
    """An algorithm in the catalog.

    Attributes:
        name: What people call it.
        example: With numbers that work on the problem of the tests: least squares of 16 different agents, d = 10, each
            with a Lipschitz constant of about 4.
        topology: A mixing that it works on, for any (even) number of agents.
        messages: Tensors of x's size that an agent sends a neighbour in a step; a fraction if they are compressed.
        use: When to use it, in one sentence.
        exact: It converges to the optimum of the sum; else near it.
        steps: Steps after which the example is within 1e-8 of it, if it is exact.
        compressed: It quantises or chooses, or else a last bit grows: its runs are compared exactly, for a few steps on
            numbers that are exact in binary.
    """

    name: str
    example: Callable[[], Algorithm]
    topology: Callable[[int], nx.Graph | Schedule]
    messages: float
    use: str
    exact: bool = False
    steps: int = 0
    compressed: bool = False


def register(entry: Entry) -> None:
    """Add an algorithm.

    Raises:
        ValueError: There is one of that name, or it is exact and does not say after how many steps.
    """
    if entry.name in CATALOG:
        raise ValueError(f"there is an algorithm {entry.name!r} already; choose another name")
    if entry.exact and entry.steps < 1:
        raise ValueError(f"{entry.name!r} is exact: say after how many steps its example is within 1e-8 of the optimum")
    CATALOG[entry.name] = entry


register(
    Entry(
        "D-PSGD, adapt then combine",
        lambda: GradientDescent(0.05),
        ring,
        1,
        "The default for training: cheapest, and good enough where the agents' data are alike.",
    )
)
register(
    Entry(
        "D-PSGD, adapt with combine",
        lambda: GradientDescent(0.05, atc=False),
        ring,
        1,
        "As above, with the exchange hidden behind the gradient.",
    )
)
register(
    Entry(
        "gradient tracking (ATC)",
        lambda: GradientTracking(0.1),
        ring,
        2,
        "Data that differ between agents, on any doubly stochastic mixing, also one that changes.",
        exact=True,
        steps=3000,
    )
)
register(
    Entry(
        "gradient tracking (semi-ATC, DSGT)",
        lambda: GradientTracking(0.1, semi=True),
        ring,
        2,
        "As above, with half of the exchange hidden behind the gradient.",
        exact=True,
        steps=3000,
    )
)
register(
    Entry(
        "DIGing",
        lambda: GradientTracking(0.1, atc=False),
        ring,
        2,
        "As above, with the exchange hidden behind the gradient.",
        exact=True,
        steps=3000,
    )
)
