"""Runs in every interpreter that a test starts: makes the imports of torch and of its compiler cheaper.

Python runs a module of this name when it starts, if one is found; ``tests/conftest.py`` puts this folder on its path.

- Torch is imported without collecting garbage. The import makes a quarter of a million objects and hardly any garbage.
  The collector would scan them repeatedly, which takes a third of a short script's processor time.
- Torch's compiler is imported by programs that compile, and not when any program makes its first optimizer. It takes
  as long as the import of torch itself.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


class CompilerOnDemand(ModuleType):
    """Stands for ``torch._dynamo`` until something other than the two functions that optimizers call is used.

    Both have an effect only while the compiler traces, which it does only once it is imported.
    """

    @staticmethod
    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        return function

    @staticmethod
    def graph_break(*_: object) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name in ("__spec__", "__file__", "__wrapped__"):  # asked for by importlib and inspect, of any module
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        return getattr(import_module(COMPILER), name)


class WithoutCollecting:
    """Finds torch where Python would, and has it imported without the collector."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of torch; None for any other module."""
        spec = PathFinder.find_spec(name, path, target) if name == "torch" else None
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
                gc.freeze()
            if COMPILER not in sys.modules:
                sys.modules[COMPILER] = module._dynamo = CompilerOnDemand(COMPILER)  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, WithoutCollecting)
