"""A pytest plugin that chooses which combinations of parameters run: each value once, each pair of values, or all.

Most tests have several parameters, such as a transport, a number of agents and a dtype. All combinations of them take
many times as long as one case for each value, and find hardly anything else. So ``--cases=each``, the default, keeps
of every test function so many cases that each value of each parameter is in one of them. ``--cases=pairs`` keeps each
pair of values of two parameters. ``@pytest.mark.every_pair`` asks for pairs, ``@pytest.mark.every_case`` for all cases,
where the interaction is what the function tests. A node id on the command line runs as it is.

``--cases=few``, which ``make test`` passes, keeps each value of each parameter but the transport: a function runs over
as many transports as it has cases anyway, which are others for another function. ``.ci/run`` tests each over all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable
from itertools import combinations
from zlib import crc32

import pytest

WAYS = ("few", "each", "pairs", "all")
TRANSPORT = ("transport", "environment", "anywhere")
"""The parameters that say over which transport a case runs, where it has that mark."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", choices=WAYS, default="each", help="combinations of parameters that run (each)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_pair: each pair of values of two parameters is tested")
    config.addinivalue_line("markers", "every_case: all combinations of parameters are tested")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    way = config.getoption("--cases")
    if way == "all" or any("[" in argument for argument in config.args):
        return
    by_function: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_function[item.nodeid.partition("[")[0]].append(item)
    kept: set[pytest.Item] = set()
    for name, cases in by_function.items():
        kept.update(chosen(name, cases, way))
    left_out = [item for item in items if item not in kept]
    if left_out:
        items[:] = [item for item in items if item in kept]
        config.hook.pytest_deselected(items=left_out)


def chosen(name: str, cases: list[pytest.Item], way: str) -> Iterable[pytest.Item]:
    """The cases of one function that run."""
    if cases[0].get_closest_marker("every_case") or not all(hasattr(case, "callspec") for case in cases):
        return cases
    pairs = way == "pairs" or cases[0].get_closest_marker("every_pair")
    # The same object stands for a value in all cases of a function.
    values = [[(name, id(value)) for name, value in case.callspec.params.items()] for case in cases]  # type: ignore[attr-defined]
    over_any = way == "few" and not pairs and all(case.get_closest_marker("transport") for case in cases)
    # Another first case for each function, so that not all of them test their first size over the first transport.
    first = crc32(name.encode()) % len(cases)
    order = [*range(first, len(cases)), *range(first)]
    result = cover([values[index] for index in order], 2 if pairs else 1, order, TRANSPORT if over_any else ())
    return [cases[index] for index in sorted(result)]


def cover(
    values: list[list[tuple[str, int]]], length: int, order: list[int], as_it_comes: Collection[str] = ()
) -> list[int]:
    """Entries of ``order`` whose cases have, together, all combinations of ``length`` values that any case has.

    Greedy: the next case is the first with the most combinations that no chosen case has; ties are broken by the most
    new values of the parameters ``as_it_comes``.

    Args:
        values: The parameters of each case, as names and numbers that stand for their values.
        length: How many parameters' values are combined; all of a case, if it has fewer.
        order: The value returned for each case.
        as_it_comes: Parameters of which not every value is needed.
    """
    needed = [[one for one in case if one[0] not in as_it_comes] for case in values]
    combined: list[set[Hashable]] = [set(combinations(sorted(one), min(length, len(one)))) for one in needed]
    missing = set().union(*combined)
    welcome = [set(case) - set(one) for case, one in zip(values, needed, strict=True)]
    result, met = [], set[tuple[str, int]]()
    while missing:
        best = max(range(len(combined)), key=lambda case: (len(combined[case] & missing), len(welcome[case] - met)))
        missing -= combined[best]
        met |= welcome[best]
        result.append(order[best])
    return result
