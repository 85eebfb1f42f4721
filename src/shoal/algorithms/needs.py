"""The conditions of algorithms on the mixing, checked before the first step, with the reason and the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd
from typing import Literal

import networkx as nx
import numpy as np

from ..topology.healing import parts_of
from ..topology.schedule import Edges, Schedule, as_schedule
from .schedule_weights import TOLERANCE, RoundWeights, ScheduleWeights

LOOKED_AT = 64
"""Rounds of a schedule that are checked when its period is longer, or when it has none."""


class Facts:
    """Properties of a topology: of each of its rounds, or of all together.

    Args:
        topology: A graph with its weights, or a schedule.
        dimension: The number of parameters of an agent, if known.
    """

    def __init__(self, topology: nx.Graph | Schedule, dimension: int | None = None) -> None:
        self.dimension = dimension
        self.schedule = as_schedule(topology)
        self.size = self.schedule.size
        period = self.schedule.period
        self.static = period == 1
        self.rounds = ScheduleWeights(self.schedule)
        self.looked_at = min(period or LOOKED_AT, LOOKED_AT)

    def first(self, fails: Callable[[RoundWeights], str]) -> str:
        """The problem of the first round that fails; empty if none does."""
        for number in range(self.looked_at):
            found = fails(self.rounds[number])
            if found:
                return found if self.static else f"{found} in round {number}"
        return ""

    @cached_property
    def doubly_stochastic(self) -> bool:
        """All rows and columns of W sum to 1, in the rounds that are looked at."""
        return not _doubly(self)

    @cached_property
    def smallest_eigenvalue(self) -> float:
        """The smallest eigenvalue of a static symmetric W; a lower bound if it is only known to some error."""
        from ..topology.analysis.spectrum import smallest_eigenvalue

        found = smallest_eigenvalue(self.schedule)
        return found.value - found.error


@dataclass(frozen=True)
class Need:
    """A condition.

    Attributes:
        name: Its name: in the table of the algorithms, and in ``unchecked``.
        problem: Returns the problem of a topology; empty if there is none.
        remedy: The remedy.
        wanted: The need in a sentence; "W to be ..." and the name if not given.
        tolerated: Whether a topology with the problem suits some objectives: :func:`check` then warns.
    """

    name: str
    problem: Callable[[Facts], str]
    remedy: str
    wanted: str = ""
    tolerated: Callable[[Facts], bool] = lambda facts: False

    def explain(self, problem: str, topology: str) -> str:
        """The condition, what is wrong with the topology, and what to do about it."""
        return f"{self.wanted or f'W to be {self.name}'}, and {problem} ({topology}). {self.remedy}"


def _sums(of: str, weights: RoundWeights) -> str:
    if weights.shares is not None:
        sums = np.array([sum(weights.shares.values())])
    else:
        ends = weights.destination if of == "row" else weights.source
        sums = np.bincount(ends, weights=weights.mix, minlength=weights.size)
    worst = int(np.abs(sums - 1).argmax())
    return "" if abs(sums[worst] - 1) < TOLERANCE else f"{of} {worst} of W sums to {sums[worst]:.6g}"


def _rows(facts: Facts) -> str:
    return facts.first(lambda weights: _sums("row", weights))


def _columns(facts: Facts) -> str:
    return facts.first(lambda weights: _sums("column", weights))


def _doubly(facts: Facts) -> str:
    return _rows(facts) or _columns(facts)


def _symmetric(facts: Facts) -> str:
    return facts.first(lambda weights: "" if _is_symmetric(weights) else "W is not symmetric")


def _is_symmetric(weights: RoundWeights) -> bool:
    shares = weights.shares
    if shares is not None:
        return all(abs(share - shares.get(-hop % weights.size, np.inf)) < TOLERANCE for hop, share in shares.items())
    forth = weights.destination * weights.size + weights.source
    back = weights.source * weights.size + weights.destination
    order = np.argsort(back, kind="stable")
    return np.array_equal(forth, back[order]) and bool(np.abs(weights.mix - weights.mix[order]).max() < TOLERANCE)


def _links(facts: Facts) -> str:
    return facts.first(lambda weights: "" if _is_mutual(weights) else "there are one-way edges")


def _is_mutual(weights: RoundWeights) -> bool:
    if weights.shares is not None:
        return all(-hop % weights.size in weights.shares for hop in weights.shares)
    here, there = weights.destination[~weights.own], weights.source[~weights.own]
    return np.array_equal(np.sort(here * weights.size + there), np.sort(there * weights.size + here))


def _static(facts: Facts) -> str:
    period = facts.schedule.period
    return "" if facts.static else f"the topology changes ({'no period' if period is None else f'period {period}'})"


def _tree(facts: Facts) -> str:
    links = facts.rounds[0].messages
    problem = _static(facts) or _links(facts)
    if problem:
        return problem
    return (
        "" if links == 2 * (facts.size - 1) else f"{links // 2} links join {facts.size} agents, and a tree has one less"
    )


Edge = Literal["mix", "pull", "push", "link"]
"""The kind of edge: a weight that is not 0 in W, or in its row- or column-stochastic form; or any link."""


def _connected(facts: Facts, edge: Edge) -> str:
    hops = [_hops(facts.rounds[number], edge) for number in range(facts.looked_at)]
    if all(steps is not None for steps in hops):
        # Hops reach the multiples of the greatest common divisor of the hops and the number of agents.
        parts = gcd(facts.size, *(hop for steps in hops if steps is not None for hop in steps))
    else:
        parts = _parts(facts, edge)
    return "" if parts == 1 else f"its agents fall into {parts} parts that do not all hear of each other"


def _hops(weights: RoundWeights, edge: Edge) -> list[int] | None:
    if edge == "link":
        return None if weights.shares is None else list(weights.shares)
    shares = weights.shares_of(edge)
    return None if shares is None else [hop for hop, share in shares.items() if share]


def _parts(facts: Facts, edge: Edge) -> int:
    def edges(number: int) -> Edges:
        weights = facts.rounds[number]
        used = np.ones(len(weights.source)) if edge == "link" else getattr(weights, edge)
        return Edges(weights.destination, weights.source, used)

    return len(np.unique(parts_of(facts.size, facts.looked_at, edges, range(facts.size))))


@cache
def connected(edge: Edge = "mix") -> Need:
    """Every agent reaches every other over the rounds of a period. A weight of 0 carries nothing.

    Args:
        edge: The weights that the algorithm averages with; "link" if it sends along all edges, whatever their weights.
    """
    remedy = "Add edges until every agent can reach every other."
    if edge != "link":
        remedy = f"{remedy[:-1]} along weights that are not 0."
    return Need("connected", lambda facts: _connected(facts, edge), remedy)


CONNECTED, CONNECTED_LINKS = connected(), connected("link")
ROW_STOCHASTIC = Need("row stochastic", _rows, "Let the weights that each agent gives itself and its sources sum to 1.")
COLUMN_STOCHASTIC = Need("column stochastic", _columns, "Let the shares that each agent gives away and keeps sum to 1.")
DOUBLY_STOCHASTIC = Need(
    "doubly stochastic",
    _doubly,
    "Take Metropolis-Hastings weights on an undirected graph; on a directed one, SGP, PushDIGing or PushPull.",
)
SYMMETRIC = Need(
    "symmetric", _symmetric, "Take an undirected graph with Metropolis-Hastings weights; on others, GradientTracking."
)
STATIC = Need("static", _static, "Take a static graph, or GradientTracking, which allows W to change.")
LINKS = Need("links both ways", _links, "Take an undirected graph.")
TREE = Need("spanning tree", _tree, "Take shoal.topology.SpanningTreeGraph or ChainGraph.")
FIXED_AND_SYMMETRIC = (STATIC, DOUBLY_STOCHASTIC, SYMMETRIC, CONNECTED)


def problems(needs: Iterable[Need], facts: Facts) -> Iterator[tuple[Need, str]]:
    """The conditions that fail, with their problems; none for a single agent."""
    if facts.size > 1:
        for need in needs:
            problem = need.problem(facts)
            if problem:
                yield need, problem


def first_problem(needs: Iterable[Need], facts: Facts) -> tuple[Need, str] | None:
    """The first condition that fails, with its problem, also one that is tolerated; None if all hold."""
    return next(problems(needs, facts), None)


def without(unchecked: str | Iterable[str], what: str, needs: Iterable[Need]) -> list[Need]:
    """The conditions that are left where some are waived by name.

    Raises:
        ValueError: There is none of that name.
    """
    waived = {unchecked} if isinstance(unchecked, str) else set(unchecked)
    wanted = list(needs)
    names = list(dict.fromkeys(need.name for need in wanted))
    for name in sorted(waived.difference(names)):
        raise ValueError(
            f"unchecked={name!r}: {what} has no such condition; its conditions are "
            + (", ".join(map(repr, names)) or "nothing")
        )
    return [need for need in wanted if need.name not in waived]


def check(
    what: str,
    needs: Iterable[Need],
    topology: nx.Graph | Schedule,
    *,
    dimension: int | None = None,
    unchecked: str | Iterable[str] = (),
) -> None:
    """Refuse a topology on which an algorithm cannot converge; warn of one on which it may not.

    Args:
        what: The name of the algorithm, to be shown in the message.
        needs: Its needs, the simplest first: the first that fails is reported.
        topology: A graph with its weights, or a schedule.
        dimension: The number of parameters of an agent; without it compressors are not checked.
        unchecked: The names of conditions to waive: they are sufficient, but not all are necessary.

    Raises:
        ValueError: A condition fails; the error names it and an alternative. Or ``unchecked`` names an unknown
            condition.
    """
    facts = Facts(topology, dimension)
    for need, problem in problems(without(unchecked, what, needs), facts):
        message = (
            f"{what} needs {need.explain(problem, facts.schedule.describe())} "
            f"(unchecked={need.name!r} leaves this condition out, for who knows that it is not needed.)"
        )
        if not need.tolerated(facts):
            raise ValueError(message)
        warnings.warn(message, stacklevel=3)
