"""Which cases of a test function run: each value, each pair of values, or all (``support/case_selection.py``)."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from support.case_selection import cover

SIZES = {"transport": 3, "size": 4, "dtype": 2}
CASES = [list(zip(SIZES, one, strict=True)) for one in product(*map(range, SIZES.values()))]
TESTS = """
import pytest
ONE, TWO = pytest.mark.parametrize("a", "xyz"), pytest.mark.parametrize("b", [0.5, 1.5])
@ONE
@TWO
def test_values(a, b): pass
@pytest.mark.every_pair
@pytest.mark.parametrize("c", [True, False])
@ONE
@TWO
def test_pairs(a, b, c): pass
@pytest.mark.every_case
@ONE
@TWO
def test_cases(a, b): pass
def test_alone(): pass
"""


@pytest.mark.parametrize(("length", "fewest"), [(1, 4), (2, 12), (3, 24)])
def test_all_combinations_of_values_are_there_and_few_cases(length: int, fewest: int) -> None:
    found = cover(CASES, length, list(range(len(CASES))))

    def combined(cases: list[int]) -> set[object]:
        return {one for case in cases for one in combinations(sorted(CASES[case]), length)}

    assert combined(found) == combined(list(range(len(CASES))))
    assert fewest <= len(found) <= 1.5 * fewest and len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [((), 3 + 6 + 6 + 1), (("--cases=pairs",), 6 + 6 + 6 + 1), (("--cases=all",), 6 + 12 + 6 + 1)],
)
def test_functions_run_as_many_cases_as_is_asked_for(
    pytester: pytest.Pytester, arguments: tuple[str, ...], passed: int
) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest("-p", "support.case_selection", "-p", "no:cacheprovider", *arguments)
    result.assert_outcomes(passed=passed, deselected=6 + 12 + 6 + 1 - passed)


def test_a_case_that_is_named_runs(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile(TESTS)
    for b in ("0.5", "1.5"):
        for a in "xyz":
            pytester.runpytest("-p", "support.case_selection", f"{path}::test_values[{b}-{a}]").assert_outcomes(
                passed=1
            )
