"""Compile the kernels for CPUs into the wheel, or into the source tree of an editable installation.

Without a C++ compiler the wheel has none, works everywhere, and computes the same by torch. ``SHOAL_BUILD_NATIVE=1``
makes that an error, as for the wheels of a release; ``SHOAL_BUILD_NATIVE=0`` compiles nothing.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/shoal/kernels/native")


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("SHOAL_BUILD_NATIVE", "")
        build = _build_module(Path(self.root) / FOLDER / "build.py")
        library = FOLDER / build.LIBRARY
        if wanted == "0":
            (Path(self.root) / library).unlink(missing_ok=True)
            return
        try:
            build.compile_kernels()
        except build.CannotCompile as reason:
            if wanted == "1":
                raise
            self.app.display_warning(f"Shoal's compiled kernels are left out, torch computes instead: {reason}")
            return
        # The library is called through ctypes: it is of one platform, and of no version of Python.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(str(library))


def _build_module(path: Path) -> ModuleType:
    """The module that compiles, without importing the package, which needs torch."""
    spec = importlib.util.spec_from_file_location("shoal_native_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
