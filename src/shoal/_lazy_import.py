"""Names of a package that are imported when one of them is asked for, as PEP 562 has it.

What is imported then is a module of the package that has all of its names and is like any other; nothing is put in the
place of what is not there yet. So an error in it is raised as it is by whoever asks first, and by who asks next.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def names_of(package: dict[str, Any], module: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """What a package is to have as ``__getattr__`` and ``__dir__``.

    Its modules are imported one by one, as they are asked for; the first of its other names brings all of them, and
    from then on they are in the package as if they had been from the beginning.

    Args:
        package: The ``globals()`` of the package.
        module: Which of its modules has the names. Those of modules that begin with an underscore are not asked for.
    """
    name_of_package = package["__name__"]

    def find_all() -> None:
        for name, value in vars(import_module(f"{name_of_package}.{module}")).items():
            if not name.startswith("_"):
                package.setdefault(name, value)  # what somebody has put in the place of a name stays

    def find(name: str) -> object:
        if not name.startswith("_"):
            # Before the names: modules import each other from their package, also while these are being imported.
            if find_spec(f"{name_of_package}.{name}") is not None:
                return import_module(f"{name_of_package}.{name}")
            find_all()
            if name in package:
                return package[name]
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
    return sorted(name for name, one in package.items() if name[0] != "_" and not isinstance(one, ModuleType))
