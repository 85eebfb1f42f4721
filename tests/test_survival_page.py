"""The code of the pages about failures runs, and the tests that docs/fault-injection-tests.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parents[1]
PAGES = [(ROOT / "docs" / name).read_text() for name in ("survival.md", "rejoin.md", "byzantine.md")]
TESTS = (ROOT / "docs" / "fault-injection-tests.md").read_text()


def test_the_pages_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ON_LOSS", "continue")  # agents of a fleet have begun when their function is called
    code, may_rejoin, robust, *_ = re.findall(r"```python\n(.*?)```", "\n".join(PAGES), re.DOTALL)

    def run() -> list[int]:
        result: dict[str, object] = {}
        exec(code, result)
        members = result["there"]
        assert isinstance(members, list)
        return members

    assert shoal.Fleet(3).run(run) == [[0, 1, 2]] * 3
    shoal.Fleet(3).run(lambda: exec(may_rejoin, {}))
    exec(robust, {})


def test_the_named_tests_exist() -> None:
    named = re.findall(r"`(test_\w+)`", TESTS)
    assert len(named) > 4
    written = "".join(path.read_text() for path in (ROOT / "tests" / "survival").glob("*.py"))
    assert [name for name in named if f"def {name}(" not in written] == []
    for path in re.findall(r"`(tests/[\w/]+\.py)`", TESTS):
        assert (ROOT / path).exists()
