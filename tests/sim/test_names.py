"""The names with which ``shoal.sim`` and ``shoal.netmodel`` begin are what the packages export."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

from shoal import netmodel, sim


@pytest.mark.parametrize("package", [sim, netmodel], ids=lambda package: package.__name__)
def test_the_docstring_names_exactly_the_exports(package: ModuleType) -> None:
    assert package.__doc__ is not None
    named = re.findall(r":(?:class|func):`(\w+)`", package.__doc__)
    names = {name: getattr(package, name) for name in dir(package) if name[0] != "_"}
    exported = {name for name, one in names.items() if not isinstance(one, ModuleType)}
    assert sorted(named) == sorted(exported)


def test_the_network_model_does_not_import_stacked_fleets() -> None:
    modules = list(Path(netmodel.__file__).parent.glob("*.py"))
    imported = [node for module in modules for node in ast.walk(ast.parse(module.read_text()))]
    froms = [node for node in imported if isinstance(node, ast.ImportFrom)]
    assert len(froms) > len(modules)
    assert not [ast.unparse(node) for node in froms if "sim" in (node.module or "").split(".")]
