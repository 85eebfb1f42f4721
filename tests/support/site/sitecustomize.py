"""What every interpreter does first that a test starts: it imports torch without collecting garbage meanwhile.

Python runs a module of this name when it starts, if it finds one; ``tests/conftest.py`` puts this folder on its path.
An import makes a quarter of a million objects and hardly any garbage, and the collector looks through them again and
again, and twice more when the process ends: a third of the processor's time of a script that does little else, as most
of the tests' do. Afterwards it collects as it always does; after the import of torch itself, the imported modules are
left out of it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

SLOW = ("torch", "torch._dynamo")
"""The packages whose import takes over a second. The first optimizer imports the second one."""


class WithoutCollecting:
    """Finds the slow packages where Python would, and has them imported without the collector."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Where a package is, if it is one of the slow ones."""
        spec = PathFinder.find_spec(name, path, target) if name in SLOW else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            collects = gc.isenabled()
            gc.disable()
            try:
                execute(module)
            finally:
                if collects:
                    gc.enable()
                if name == "torch":
                    # Only at a program's start. The first optimizer imports torch._dynamo in the middle of a run: that
                    # run's objects would be frozen too, and cycles among them would keep memory files open for ever.
                    gc.freeze()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, WithoutCollecting)
