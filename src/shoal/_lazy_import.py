"""Names of a package that are imported on first use, by PEP 562.

The first use imports a normal module of the package that has all of these names; there are no placeholder objects. So
an error in that module is raised unchanged at the first use, and at each later use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def names_of(
    package: dict[str, Any], module: str, moved: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package.

    Its modules are imported separately, on first use; the first use of another name imports all of them into the
    package.

    Args:
        package: The ``globals()`` of the package.
        module: The module with the names. Modules whose names begin with an underscore are not imported.
        moved: Names that are in another package now, separated by spaces, by that package. They cause a warning.
    """
    name_of_package = package["__name__"]
    places = {name: place for place, names in (moved or {}).items() for name in names.split()}

    def find_all() -> None:
        for name, value in vars(import_module(f"{name_of_package}.{module}")).items():
            if not name.startswith("_"):
                package.setdefault(name, value)  # a name that other code has replaced stays

    def find(name: str) -> object:
        if not name.startswith("_"):
            # Before the names: modules import each other from their package, also while these are being imported.
            if find_spec(f"{name_of_package}.{name}") is not None:
                return import_module(f"{name_of_package}.{name}")
            find_all()
            if name in package:
                return package[name]
            if name in places:
                place = f"{name_of_package}.{places[name]}"
                warnings.warn(f"{name_of_package}.{name} is now {place}.{name}", DeprecationWarning, stacklevel=2)
                return getattr(import_module(place), name)
        raise AttributeError(f"module {name_of_package!r} has no attribute {name!r}")

    def names() -> list[str]:
        find_all()
        return sorted(package)

    return find, names


def public_names(package: dict[str, Any]) -> list[str]:
    """The ``__all__`` of a package whose ``__init__`` imports its public names one by one: so they stand there once.

    Args:
        package: The ``globals()`` of the package, after its imports. Its modules are not among the names.
    """
    return sorted(name for name, value in package.items() if name[0] != "_" and not isinstance(value, ModuleType))
