"""The objects that Shoal's dotted names resolve to."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

import shoal
from support.limits import scaled

PACKAGES = ["shoal", *(result.name for result in pkgutil.walk_packages(shoal.__path__, "shoal.") if result.ispkg)]


@pytest.mark.parametrize("name", PACKAGES)
def test_no_attribute_of_a_package_has_the_name_of_its_module(name: str) -> None:
    """``import shoal.x.y as m`` would give that attribute instead of the module."""
    try:
        package = import_module(name)
    except ModuleNotFoundError as error:
        assert not str(error.name).startswith("shoal"), error
        pytest.skip(f"{name} is for {error.name}")
    modules = {result.name: f"{name}.{result.name}" for result in pkgutil.iter_modules(package.__path__)}
    assert modules
    resolved = {module: getattr(package, module) for module in modules if hasattr(package, module)}
    shadowed = [one for one, result in resolved.items() if getattr(result, "__name__", "") != modules[one]]
    assert not shadowed, f"rename the modules {shadowed} of {name}, or what {name} calls so"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("transformers", "transformers", "transformers"),
        ("accelerate", "accelerate", "transformers"),
        ("lightning", "lightning", "lightning"),
    ],
)
def test_a_missing_framework_is_named_with_its_extra(module: str, package: str, extra: str) -> None:
    hidden = f"import sys; sys.modules[{package!r}] = None; import shoal.frameworks.{module}"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 1
    assert f"pip install 'shoal[{extra}]'" in done.stderr.splitlines()[-1], done.stderr
