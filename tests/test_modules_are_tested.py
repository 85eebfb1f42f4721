"""Where the tests of each module are: a file of its name, a test that imports it, or a line of ``modules.txt``."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import shoal

PACKAGE, TESTS = Path(shoal.__file__).parent, Path(__file__).parent
TABLE = TESTS / "modules.txt"
MODULES = {
    path.relative_to(PACKAGE).as_posix()
    for path in PACKAGE.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
}


def table() -> dict[str, str]:
    lines = TABLE.read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines if not line.startswith("#"))


@cache
def imported() -> set[str]:
    """The modules that test files import by their own names, as paths in the package."""
    result: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                result |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                result |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("shoal.").replace(".", "/") + ".py" for name in result if name.startswith("shoal.")}


def by_name() -> set[str]:
    return {module for module in MODULES if (TESTS / module).with_name(f"test_{Path(module).name}").exists()}


def test_every_module_has_its_test_by_name_import_or_table() -> None:
    untested = MODULES - by_name() - imported() - set(table())
    assert not untested, f"no test file is known: add one, or a line in {TABLE.name}"


def test_the_table_has_only_needed_rows() -> None:
    assert not set(table()) - (MODULES - by_name() - imported())
    assert not {test for test in table().values() if not (TESTS / test).exists()}
