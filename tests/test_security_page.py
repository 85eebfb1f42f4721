"""docs/security.md names the test of each promise, and the tests are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| ([^|]*) \| ([^|]*) \|$", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE)


def test_every_guarantee_names_tests_that_exist() -> None:
    promises = [(promise, tests) for promise, tests in ROWS if promise not in ("guarantee", "---")]
    assert len(promises) > 10
    for promise, tests in promises:
        names = re.findall(r"`([^`]+)`", tests)
        assert names, promise
        assert all((ROOT / "tests" / name).is_file() for name in names), (promise, names)
