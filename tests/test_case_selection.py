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
def test_all_combinations_of_values_are_covered_by_few_cases(length: int, fewest: int) -> None:
    result = cover(CASES, length, list(range(len(CASES))))

    def combined(cases: list[int]) -> set[object]:
        return {one for case in cases for one in combinations(sorted(CASES[case]), length)}

    assert combined(result) == combined(list(range(len(CASES))))
    assert fewest <= len(result) <= 1.5 * fewest and len(set(result)) == len(result)


def test_a_parameter_that_need_not_be_covered_adds_no_case() -> None:
    results = [dict(CASES[case]) for case in cover(CASES, 1, list(range(len(CASES))), ("transport",))]
    assert sorted(case["size"] for case in results) == list(range(4)) and {case["dtype"] for case in results} == {0, 1}
    assert {case["transport"] for case in results} == {0, 1, 2}


OVER = """
import pytest
over = pytest.mark.parametrize("transport", [pytest.param(one, marks=pytest.mark.transport(one)) for one in "xyz"])
TWO = pytest.mark.parametrize("b", [0.5, 1.5])
@over
def test_one(transport): pass
@over
@TWO
def test_two(transport, b): pass
@pytest.mark.every_pair
@over
@TWO
def test_six(transport, b): pass
@pytest.mark.parametrize("transport", "xyz")
def test_names_of_transports(transport): pass
"""


@pytest.mark.parametrize(("way", "passed"), [("few", 1 + 2 + 6 + 3), ("each", 3 + 3 + 6 + 3)])
def test_few_cases_are_as_many_as_there_are_values_besides_the_transport(
    pytester: pytest.Pytester, way: str, passed: int
) -> None:
    pytester.makepyfile(OVER)
    pytester.makeini("[pytest]\nmarkers =\n    transport(name): over it")
    result = pytester.runpytest("-p", "support.case_selection", "-p", "no:cacheprovider", f"--cases={way}")
    result.assert_outcomes(passed=passed, deselected=3 + 6 + 6 + 3 - passed)


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [((), 3 + 6 + 6 + 1), (("--cases=pairs",), 6 + 6 + 6 + 1), (("--cases=all",), 6 + 12 + 6 + 1)],
)
def test_functions_run_the_requested_number_of_cases(
    pytester: pytest.Pytester, arguments: tuple[str, ...], passed: int
) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest("-p", "support.case_selection", "-p", "no:cacheprovider", *arguments)
    result.assert_outcomes(passed=passed, deselected=6 + 12 + 6 + 1 - passed)


def test_a_named_case_runs(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile(TESTS)
    for b in ("0.5", "1.5"):
        for a in "xyz":
            pytester.runpytest("-p", "support.case_selection", f"{path}::test_values[{b}-{a}]").assert_outcomes(
                passed=1
            )
