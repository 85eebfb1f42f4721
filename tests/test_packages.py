"""What a dotted name of Shoal's leads to."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import pytest

import shoal

PACKAGES = ["shoal", *(found.name for found in pkgutil.walk_packages(shoal.__path__, "shoal.") if found.ispkg)]


@pytest.mark.parametrize("name", PACKAGES)
def test_nothing_in_a_package_has_the_name_of_a_module_of_it(name: str) -> None:
    """``import shoal.x.y as m`` would give that instead of the module."""
    try:
        package = import_module(name)
    except ModuleNotFoundError as error:
        assert not str(error.name).startswith("shoal"), error
        pytest.skip(f"{name} is for {error.name}")
    modules = {found.name: f"{name}.{found.name}" for found in pkgutil.iter_modules(package.__path__)}
    assert modules
    there = {one: getattr(package, one) for one in modules if hasattr(package, one)}
    shadowed = [one for one, found in there.items() if getattr(found, "__name__", "") != modules[one]]
    assert not shadowed, f"rename the modules {shadowed} of {name}, or what {name} calls so"
