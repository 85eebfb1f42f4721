"""Intervals, claims, verdicts, and the page of ``reproduce``."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "reproduce"))

from _common import Claim, Interval, Report, arguments, below, exceeds, verdict, within  # noqa: E402

YES, NO = Claim("it is so (figure 1)", "1 ± 0.1", True), Claim("it is cheap (table 2)", "9 ± 0.1", False)


def test_an_interval_is_students() -> None:
    one = Interval.of([1.0, 2.0, 3.0])
    assert one.mean == 2 and one.reach == pytest.approx(4.3026527 / math.sqrt(3))
    assert Interval.of([5.0]).reach == math.inf
    with pytest.raises(ValueError, match="at least one seed"):
        Interval.of([])


def test_a_difference_within_the_seeds_variation_is_reported() -> None:
    clear, noisy = [3.0, 3.1, 2.9], [0.0, 3.0, 6.0]
    assert exceeds("higher", clear, [1.0, 1.1, 0.9]).holds
    assert not exceeds("higher", [1.0, 1.1, 0.9], clear).holds
    assert not exceeds("higher", noisy, [1.0, 1.0, 1.0]).holds
    assert not exceeds("higher", [3.0], [1.0]).holds, "one seed separates nothing"
    assert within("equal", clear, clear, by=0.1).holds
    assert not within("equal", noisy, [3.0, 3.0, 3.0], by=0.1).holds


def test_errors_below_a_limit() -> None:
    assert below("exact", [1e-12, 1e-13, 1e-14], 1e-9).holds
    assert not below("exact", [1e-12, 1e-3], 1e-9).holds
    assert not below("exact", [1e-9], 1e-9).holds


def test_the_verdict_names_the_claims_that_fail() -> None:
    assert verdict([YES]) == "agrees: the claim holds"
    assert verdict([YES, YES]) == "agrees: all 2 claims hold"
    assert verdict([YES, NO]) == "differs in 1 of 2 claims: it is cheap (table 2)"
    with pytest.raises(ValueError, match="no claims"):
        verdict([])


def test_the_page_gets_the_row_and_the_section() -> None:
    args = arguments("", seeds=5).parse_args([])
    report = Report("reproduce/some.py", "Some experiment", args)
    assert args.seeds == 5
    report.table("Errors", ["way", "error"], [["DGD", Interval(1.0, 0.5)]])
    report.claim([YES, NO])
    page = "| x | `python reproduce/some.py` | | | |\n\n## Some experiment\n\n<!-- some -->\n<!-- end -->\n"
    once = report.updated(page, "2 s")
    assert "| [Some experiment](#some-experiment) | `python reproduce/some.py` | 2 s | differs in 1 of 2" in once
    assert "| DGD | 1 ± 0.5 |" in once and once.count("<!-- some -->") == 1
    assert report.updated(once, "2 s") == once
    with pytest.raises(RuntimeError, match="0 rows"):
        report.updated("", "2 s")


def test_the_page_has_no_results_of_quick_runs() -> None:
    with pytest.raises(SystemExit, match="whole runs"):
        Report("some.py", "Some", arguments("", seeds=5).parse_args(["--page", "--quick"]))


def test_every_experiment_has_a_row_a_section_and_a_test() -> None:
    page = (ROOT / "reproduce" / "README.md").read_text()
    for script in sorted((ROOT / "reproduce").glob("[!_]*.py")):
        assert page.count(f"`python reproduce/{script.name}`") == 1, script.name
        assert re.search(rf"<!-- {script.stem} -->\n\n.+?<!-- end -->", page, re.DOTALL), script.name
        assert (ROOT / "tests" / "reproduce" / f"test_{script.stem}.py").exists(), script.name
