"""Intervals, claims, verdicts, and the page of ``reproduce``."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "reproduce"))

from _common import (  # noqa: E402
    LIST,
    Claim,
    Interval,
    Report,
    arguments,
    below,
    every,
    exceeds,
    page_of,
    verdict,
    within,
)

YES, NO = Claim("it is so (figure 1)", "1 ± 0.1", True), Claim("it is cheap (table 2)", "9 ± 0.1", False)
OPEN = Claim("it is fast (table 3)", "1 ± 9", None)


def test_an_interval_is_students() -> None:
    one = Interval.of([1.0, 2.0, 3.0])
    assert one.mean == 2 and one.reach == pytest.approx(4.3026527 / math.sqrt(3))
    assert Interval.of([5.0]).reach == math.inf
    with pytest.raises(ValueError, match="at least one seed"):
        Interval.of([])


def test_a_difference_within_the_seeds_variation_is_not_separated() -> None:
    clear, noisy = [3.0, 3.1, 2.9], [0.0, 3.0, 6.0]
    assert exceeds("higher", clear, [1.0, 1.1, 0.9]).holds is True
    assert exceeds("higher", [1.0, 1.1, 0.9], clear).holds is False
    assert exceeds("higher", clear, clear).holds is False
    assert exceeds("higher", noisy, [1.0, 1.0, 1.0]).holds is None
    assert exceeds("higher", [3.0], [1.0]).holds is None, "one seed separates nothing"
    assert within("equal", clear, clear, by=0.1).holds is True
    assert within("equal", noisy, [3.0, 3.0, 3.0], by=0.1).holds is None
    assert within("equal", [3.0, 3.1, 2.9], [1.0, 1.1, 0.9], by=0.1).holds is False


def test_an_interval_lies_between_two_values() -> None:
    interval = Interval(1.0, 0.5)
    assert interval.between(0.4) and interval.between(most=1.6) and interval.between(0.4, 1.6)
    assert interval.between(0.6) is interval.between(most=1.4) is interval.between(0.6, 1.4) is None
    assert interval.between(1.5) is interval.between(most=0.5) is False
    assert Interval(1.0, math.inf).between(0.0) is None


def test_a_statement_with_a_part_that_differs_differs() -> None:
    assert every([True, True]) is True
    assert every([True, None]) is None
    assert every([None, False, True]) is False


def test_errors_below_a_limit() -> None:
    assert below("exact", [1e-12, 1e-13, 1e-14], 1e-9).holds
    assert not below("exact", [1e-12, 1e-3], 1e-9).holds
    assert not below("exact", [1e-9], 1e-9).holds


def test_the_verdict_names_the_claims_that_fail() -> None:
    assert verdict([YES]) == "agrees: the claim holds"
    assert verdict([YES, YES]) == "agrees: all 2 claims hold"
    assert verdict([YES, NO]) == "differs in 1 of 2 claims: it is cheap (table 2)"
    assert verdict([NO, OPEN, YES]) == (
        "differs in 1 of 3 claims: it is cheap (table 2). not separated in 1 of 3 claims: it is fast (table 3)"
    )
    with pytest.raises(ValueError, match="no claims"):
        verdict([])


def report_of(*claims: Claim) -> Report:
    report = Report("reproduce/some.py", "Some experiment", arguments("", seeds=5).parse_args([]))
    report.claim(claims)
    return report


def row(part: str, verdict: str = "", taken: str = "") -> str:
    return f"| {part} | `python reproduce/some.py` | {taken} | [figure](some.md) | {verdict} |"


def test_a_papers_page_gets_the_results() -> None:
    report = report_of(YES, NO)
    assert report.args.seeds == 5
    report.table("Errors", ["way", "error"], [["DGD", Interval(1.0, 0.5)]])
    once = report.detailed("## Some\n\n<!-- some -->\n<!-- end -->\n\n## Other\n")
    assert "| DGD | 1 ± 0.5 |" in once
    assert "| it is cheap (table 2) | 9 ± 0.1 | differs |" in once
    assert once.count("<!-- some -->") == 1 and once.endswith("<!-- end -->\n\n## Other\n")
    assert report.detailed(once) == once
    with pytest.raises(RuntimeError, match="0 pages"):
        page_of("some")


def test_a_single_row_gets_the_verdict_of_all_claims() -> None:
    other = "| Figure 1 | `python reproduce/other.py` | 1 s | [figure](some.md) | agrees |"
    page = f"{row('Figure 9: all')}\n{other}\n"
    for claims, words in (
        ((YES, NO), "differs in 1 of 2"),
        ((YES, NO, OPEN), "differs in 1 of 3, not separated in 1"),
        ((YES, OPEN), "not separated in 1 of 2"),
        ((OPEN, OPEN), "not separated"),
        ((YES, YES), "agrees"),
    ):
        expected = row("Figure 9: all", words, "2 s")
        assert report_of(*claims).listed(page, "2 s") == f"{expected}\n{other}\n"


def test_each_of_several_rows_gets_the_verdict_of_its_claims() -> None:
    third = Claim("it grows (table 22)", "3", True)
    report = report_of(YES, NO, third)
    rows = ["Figure 1: size", "Table 2: cost", "Table 22: growth"]
    found = report.listed("\n".join(map(row, rows)), "2 s").split("\n")
    verdicts = ["agrees", "differs", "agrees"]
    assert found == [row(part, words, "2 s") for part, words in zip(rows, verdicts, strict=True)]
    with pytest.raises(RuntimeError, match="for: it grows"):
        report.listed("\n".join(map(row, rows[:2])), "2 s")
    with pytest.raises(RuntimeError, match="about the row 'Figure 3: more'"):
        report.listed("\n".join(map(row, [*rows, "Figure 3: more"])), "2 s")
    with pytest.raises(RuntimeError, match="no row with"):
        report.listed("", "2 s")


def test_the_page_has_no_results_of_quick_runs() -> None:
    with pytest.raises(SystemExit, match="whole runs"):
        Report("some.py", "Some", arguments("", seeds=5).parse_args(["--page", "--quick"]))


def test_every_experiment_has_rows_a_section_and_a_test() -> None:
    listed = LIST.read_text().split("\n")
    for script in sorted((ROOT / "reproduce").glob("[!_]*.py")):
        page = page_of(script.stem)
        assert re.search(rf"<!-- {script.stem} -->\n\n.+?<!-- end -->", page.read_text(), re.DOTALL), script.name
        rows = [line for line in listed if f"| `python reproduce/{script.name}` |" in line]
        assert rows and all(f"]({page.name}#" in line for line in rows), script.name
        assert (ROOT / "tests" / "reproduce" / f"test_{script.stem}.py").exists(), script.name


def test_every_row_of_the_list_has_a_command_a_time_a_result_and_a_verdict() -> None:
    rows = [line for line in LIST.read_text().split("\n") if "`python " in line]
    assert len(rows) >= 28
    for line in rows:
        part, command, taken, result, words = (cell.strip() for cell in line.strip("|").split("|"))
        assert part and re.fullmatch(r"`python (reproduce|benchmarks)/\w+\.py[^`]*`", command), line
        assert re.search(r"\d+ (s|min)|not recorded", taken), line
        assert result.startswith("[") and words, line
