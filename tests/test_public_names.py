"""Nothing public is lost or added unseen: ``public_names.txt`` lists every public name of every public package.

A name that a release has had stays, or the changelog says what became of it.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

import shoal

NAMES = Path(__file__).with_name("public_names.txt").read_text().split()
PACKAGES = sorted({name.rpartition(".")[0] for name in NAMES})
ROOT = Path(shoal.__file__).parent
INTERNAL = {
    *(
        "_public",
        "_version",
        "__main__",
        "arithmetic",
        "bench",
        "cli",
        "clock",
        "config",
        "coordination",
        "device",
        "dtensors",
    ),
    *(
        "engine",
        "errors",
        "fault_tolerance",
        "_signals",
        "kernels",
        "_lazy_import",
        "execution",
        "ops",
        "progress_bar",
    ),
    *("rendezvous", "runtime", "transport"),
}
"""Whose names are public only where ``shoal`` or another public package has them."""
NEEDS = {"shoal.frameworks.transformers", "shoal.frameworks.accelerate", "shoal.frameworks.lightning"}
"""Need a framework that may not be here; their ``__all__`` is read."""


def public(package: str) -> set[str]:
    """``__all__``, and for ``shoal`` itself what is no module beside it; without an ``__all__`` what is no module."""
    if package in NEEDS:
        return written_all(package)
    module = importlib.import_module(package)
    results = {name for name in dir(module) if name[0] != "_" and not isinstance(getattr(module, name), ModuleType)}
    if package == "shoal":
        return results | set(module.__all__)
    return set(getattr(module, "__all__", results))


def written_all(package: str) -> set[str]:
    path = ROOT.parent.joinpath(*package.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{package} has no __all__")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_list_has_every_public_name_and_no_other(package: str) -> None:
    listed = {name.rpartition(".")[2] for name in NAMES if name.rpartition(".")[0] == package}
    defined = public(package)
    assert not listed - defined, "listed, and not there"
    assert not defined - listed, "there, and not listed"


def test_the_list_is_sorted_and_names_nothing_twice() -> None:
    assert sorted(set(NAMES)) == NAMES


def test_every_package_is_listed_or_internal() -> None:
    defined = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or [*path.glob("*.py")]} - {"__init__"}
    listed = {package.split(".")[1] for package in PACKAGES if "." in package}
    assert listed | INTERNAL == defined
    assert not listed & INTERNAL


@pytest.mark.parametrize("folder", ["compat", "frameworks"])
def test_every_module_with_an_all_is_listed(folder: str) -> None:
    """Each is imported by its own name."""
    result = set()
    for path in (ROOT / folder).rglob("*.py"):
        if "\n__all__ = " in path.read_text():
            parts = path.relative_to(ROOT.parent).with_suffix("").parts
            result.add(".".join(parts).removesuffix(".__init__"))
    assert result <= set(PACKAGES)
    assert result


@pytest.mark.parametrize("package", [package for package in PACKAGES if package not in NEEDS])
def test_listed_names_of_a_package_exist(package: str) -> None:
    module = importlib.import_module(package)
    names = list(getattr(module, "__all__", ()))
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", ["shoal.netmodel", "shoal.observability"])
def test_a_star_import_gives_the_names_that_are_imported_on_first_use(package: str) -> None:
    names: dict[str, object] = {}
    exec(f"from {package} import *", names)
    assert {"__builtins__", *importlib.import_module(package).__all__} == set(names)
    assert len(names) > 5
