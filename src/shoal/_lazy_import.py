"""Names of a package that are imported on first use, by PEP 562.

The first use imports a normal module of the package that has all of these names; there are no placeholder objects. So
an error in that module is raised unchanged at the first use, and at each later use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def names_of(
    package: dict[str, Any], module: str, others: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package.

    Its modules are imported separately, on first use; the first use of another name imports all of them into the
    package.

    Args:
        package: The ``globals()`` of the package.
        module: The module with the names. Modules whose names begin with an underscore are not imported.
        others: More of its packages, in which the error for an unknown name looks.
    """
    name_of_package = package["__name__"]

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
            raise AttributeError(f"module {name_of_package!r} has no attribute {name!r}{found_elsewhere(name)}")
        if name == "__all__":  # without it a star import takes only what is imported by then
            find_all()
            return public_names(package)
        raise AttributeError(f"module {name_of_package!r} has no attribute {name!r}")

    def found_elsewhere(name: str) -> str:
        """The end of an error: which packages of this one have the name, or a name that is alike."""
        public = vars(import_module(f"{name_of_package}.{module}")).values()
        packages = [one for one in public if isinstance(one, ModuleType)]
        packages += [import_module(f"{name_of_package}.{other}") for other in others]
        places = [one.__name__ for one in packages if name in getattr(one, "__all__", dir(one))]
        if places:
            return "; there is " + ", ".join(f"{place}.{name}" for place in places)
        by_letters = {known.lower(): known for known in package if known[0] != "_"}
        close = get_close_matches(name.lower(), by_letters, 1, 0.88)
        return f". Did you mean {by_letters[close[0]]}?" if close else ""

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
