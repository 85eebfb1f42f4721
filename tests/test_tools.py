"""What `make coverage` prints, what `make versions` installs, what `tools/mutate.py` changes, and sizes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # a dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def test_lines_are_summed_by_folder_and_modules_with_few_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "coverage.json"
    report.write_text(
        """{"files": {
            "src/shoal/execution/matching.py": {"summary": {"num_statements": 100, "covered_lines": 95}},
            "/shoal/src/shoal/execution/parts/one.py": {"summary": {"num_statements": 100, "covered_lines": 45}},
            "src/shoal/clock.py": {"summary": {"num_statements": 8, "covered_lines": 8}},
            "src/shoal/empty/__init__.py": {"summary": {"num_statements": 0, "covered_lines": 0}}
        }}"""
    )
    tool("covered").main([str(report)])
    first, second = capsys.readouterr().out.split("\n\n")
    assert [line.split() for line in first.splitlines()] == [
        ["lines", "not", "run", "run"],
        ["shoal", "8", "0", "100%"],
        ["shoal/execution", "200", "60", "70%"],
        ["together", "208", "60", "71%"],
    ]
    assert "less than 80%" in second
    assert [line.split() for line in second.splitlines()[2:]] == [["shoal/execution/parts/one.py", "100", "55", "45%"]]


def test_the_oldest_versions_are_those_of_the_package_metadata() -> None:
    versions = tool("versions")
    project = (ROOT / "pyproject.toml").read_text()
    bounds = versions.lower_bounds(project)
    assert {"torch", "numpy", "networkx", "rich"} <= bounds.keys()
    torch, *others = versions.pinned("", True, project)
    assert torch == f"torch=={bounds['torch']}" and f"numpy=={bounds['numpy']}" in others
    assert versions.pinned("2.9.1", False, project) == ["torch==2.9.1"]
    assert versions.pinned("", False, project) == ["torch"]


def test_a_dependency_without_a_lower_bound_is_reported() -> None:
    with pytest.raises(AssertionError, match="no lower bound"):
        tool("versions").lower_bounds('dependencies = [\n  "torch>=2.6",\n  "numpy",\n]\n')


def test_the_core_tests_exist() -> None:
    assert [name for name in tool("versions").CORE if not (ROOT / name).exists()] == []


def test_mutations_exclude_logged_texts_and_type_checks() -> None:
    source = b"if TYPE_CHECKING:\n    import a\nlog.warning('%s', 1)\nprint(b, 1 < c)\nraise ValueError(f'{d + 1}')\n"
    result = tool("mutate").mutations(Path("one.py"), source)
    assert [(one.line, one.kind) for one in result] == [
        (4, "statement deleted"),
        (4, "argument swapped"),
        (4, "comparison swapped"),
        (4, "constant off by one"),
        (5, "statement deleted"),
    ]
    assert result[2].of(source) == source.replace(b"1 < c", b"(1 <= c)")


@pytest.mark.parametrize(
    ("module", "test"),
    [
        ("execution/matching.py", "execution/test_matching.py"),
        ("observability/status_publisher.py", "observability/watch/test_status_publisher.py"),  # of another folder
        ("execution/publishing.py", "ops/test_compression.py"),  # by modules.txt
        ("rendezvous/peer_directory.py", "security/test_rejoin.py"),  # imports it
    ],
)
def test_a_mutation_is_tried_with_the_tests_of_its_module_first(
    module: str, test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert tool("mutate").tests_of(Path("src/shoal", module), anywhere=False)[0] == f"tests/{test}"


MOST = {
    "modules": 301,
    "files in the largest folder": 21,
    "lines of the longest module": 500,
    "parameters of the largest internal constructor": 6,
    "uses of engine.<part>.<member> outside of the engine": 0,
    "names of shoal": 50,
}
"""Lower a limit when a change has made its number smaller; never raise one."""


def test_the_package_stays_within_its_size_limits() -> None:
    result = tool("measure_paths").sizes()
    assert {what: result[what] for what in MOST if result[what].number > MOST[what]} == {}
