"""All algorithms by name, each with an example: the source of the algorithms page and of the tests.

A new algorithm needs only its own file and an entry. The entry gives its row in the table and its tests: a stacked
fleet, threads and processes agree, a run can be resumed, the needs are checked, and the algorithm sends as much as the
entry states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .algorithm import Algorithm
from .gradient_descent import DualAveraging, GradientDescent, GradientTracking

CATALOG: dict[str, Entry] = {}


@dataclass(frozen=True)
class Entry:
    """An algorithm in the catalog.

    Attributes:
        name: The common name.
        example: It, with numbers that work on least squares of different agents, each with a Lipschitz constant of 4.
        messages: Tensors of x's size that an agent sends a neighbour in a step of the example; a fraction if they are
            compressed.
        use: When to use it, in one sentence.
        exact: The algorithm converges to the optimum of the sum; else near it.
    """

    name: str
    example: Callable[[], Algorithm]
    messages: float
    use: str
    exact: bool = False


def register(entry: Entry, *more: Entry) -> None:
    """Add algorithms.

    Raises:
        ValueError: There is one of that name.
    """
    for added in (entry, *more):
        if added.name in CATALOG:
            raise ValueError(f"there is an algorithm {added.name!r} already; choose another name")
        CATALOG[added.name] = added


register(
    Entry(
        "D-PSGD, adapt then combine",
        lambda: GradientDescent(0.05),
        1,
        "The default for training: cheapest, and good enough where the agents' data are alike.",
    ),
    Entry(
        "D-PSGD, adapt with combine",
        lambda: GradientDescent(0.05, atc=False),
        1,
        "As above, with the exchange hidden behind the gradient.",
    ),
    Entry(
        "gradient tracking (ATC)",
        lambda: GradientTracking(0.01),
        2,
        "Data that differ between agents. Any doubly stochastic mixing serves, static or changing.",
        exact=True,
    ),
    Entry(
        "gradient tracking (semi-ATC, DSGT)",
        lambda: GradientTracking(0.04, semi=True),
        2,
        "As above, with half of the exchange hidden behind the gradient.",
        exact=True,
    ),
    Entry(
        "DIGing",
        lambda: GradientTracking(0.02, atc=False),
        2,
        "As above, with the exchange hidden behind the gradient.",
        exact=True,
    ),
    Entry(
        "dual averaging",
        lambda: DualAveraging(0.2),
        1,
        "Convex objectives that are not smooth, where a rough answer will do.",
    ),
)
