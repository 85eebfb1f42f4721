"""The page of names that ``shoal.sim`` begins with is what the package exports."""

from __future__ import annotations

import re
from types import ModuleType

from shoal import sim


def test_its_docstring_names_what_it_exports_and_nothing_else() -> None:
    assert sim.__doc__ is not None
    named = re.findall(r":(?:class|func):`(\w+)`", sim.__doc__)
    exported = {name for name, one in vars(sim).items() if name[0] != "_" and not isinstance(one, ModuleType)}
    assert sorted(named) == sorted(exported)
