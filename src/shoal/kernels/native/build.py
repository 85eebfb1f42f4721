"""Compile the kernels: at installation (``hatch_build.py``), or by ``python -m shoal.kernels.native.build``."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("sums.cpp", "codecs.cpp", "sparse.cpp")
LIBRARY = "_native.so"
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra"),
    # Only explicit operations are fused, for the same bits. Ignoring rounding modes and exception flags allows vectors.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
]
_OF_MACHINE = {"x86_64": ["-mavx2", "-mfma", "-mf16c"], "aarch64": []}


class CannotCompile(Exception):
    """The kernels cannot be compiled: no compiler, a failed one, or a machine that the kernels do not support."""


def compile_kernels(into: Path = HERE) -> Path:
    """Compile the kernels into a shared library in ``into``, and return its path.

    The compiler is that of ``CXX``, else ``c++``, ``g++`` or ``clang++``.

    Raises:
        CannotCompile: The kernels cannot be compiled; the message has the reason.
    """
    machine = platform.machine()
    if machine not in _OF_MACHINE or not sys.platform.startswith("linux"):
        raise CannotCompile(f"the kernels are for Linux on {' and '.join(_OF_MACHINE)}, and this is {machine}")
    compiler = _compiler()
    library = into / LIBRARY
    with tempfile.TemporaryDirectory(dir=into) as folder:
        built = Path(folder) / LIBRARY
        sources = [str(HERE / source) for source in SOURCES]
        command = [*compiler, *FLAGS, *_OF_MACHINE[machine], *sources, "-o", str(built)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        except subprocess.CalledProcessError as error:
            raise CannotCompile(f"{' '.join(command)} failed:\n{error.stderr}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotCompile(f"{compiler[0]} did not run: {error}") from error
        # Replaced, not overwritten: processes that have loaded the old library keep it.
        built.replace(library)
    return library


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise CannotCompile(f"there is no C++ compiler {given[0]}" if given else "there is no C++ compiler: install g++")


if __name__ == "__main__":
    try:
        print(compile_kernels())
    except CannotCompile as error:
        raise SystemExit(str(error)) from error
