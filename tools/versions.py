"""The core tests with the Python that runs this, and with a torch or dependencies other than CI's.

    python3.13 tools/versions.py                     # the newest torch that pip finds
    python3.10 tools/versions.py --torch 2.6.0
    python3.10 tools/versions.py --oldest            # each dependency in the oldest version that the package allows
    python3.12 tools/versions.py --index https://download.pytorch.org/whl/cpu      # torch without CUDA's packages
    python3.12 tools/versions.py -- tests/ops -n 2   # other tests, and options of pytest

Each combination has an environment of its own in out/versions. It is made once, and used again. `make versions` calls
this, and .github/workflows/tests.yml for all combinations.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = (
    "tests/test_import.py",
    "tests/test_public_names.py",
    "tests/algorithms/test_run.py",
    "tests/cli/test_launch_environment.py",
    "tests/compression/test_wire_format.py",
    "tests/execution/test_matching.py",
    "tests/faults/test_link_reset.py",
    "tests/ops/test_collectives.py",
    "tests/ops/test_neighbor_allreduce_static.py",
    "tests/ops/test_tensors.py",
    "tests/optim/test_any_algorithm.py",
    "tests/optim/test_checkpoint.py",
    "tests/optim/test_optimizer.py",
    "tests/processes/test_processes_lifecycle.py",
    "tests/topology/test_weights.py",
    "tests/windows/test_window.py",
)
"""Of each room what would show that a version of Python, torch or NumPy does something else."""

TOLD = """
import platform, numpy, torch
print("Python", platform.python_version(), "torch", torch.__version__, "NumPy", numpy.__version__, flush=True)
"""


def lower_bounds(project: str) -> dict[str, str]:
    """The oldest version of each package that the package depends on, from the text of pyproject.toml."""
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert listed is not None, "pyproject.toml has no list of dependencies"
    found = dict(re.findall(r'^\s*"([\w-]+)>=([\w.]+)', listed[1], re.MULTILINE))
    assert len(found) == listed[1].count('",'), f"a dependency of pyproject.toml has no lower bound: {listed[1]}"
    return found


def pinned(torch: str, oldest: bool, project: str) -> list[str]:
    """What pip installs in which version, as it says it: torch first."""
    bounds = lower_bounds(project) if oldest else {}
    version = torch or bounds.get("torch", "")
    others = [f"{name}=={bound}" for name, bound in bounds.items() if name != "torch"]
    return [f"torch=={version}" if version else "torch", *others]


def install(folder: Path, packages: Sequence[str], index: str, pre: bool) -> Path:
    """Make the environment, unless it is there; its Python."""
    python, done = folder / "bin" / "python", folder / ".installed"
    if done.exists() and done.read_text() == "\n".join(packages):
        return python
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch, *others = packages
    # By itself: an index of builds of torch has old versions of other packages, or none.
    options = [*(["--index-url", index] if index else []), *(["--pre"] if pre else [])]
    subprocess.run([*pip, *options, torch], check=True)
    found = "import importlib.metadata as m; print(m.version('torch'))"
    version = subprocess.run([str(python), "-c", found], capture_output=True, text=True, check=True).stdout.strip()
    kept = folder / "constraints.txt"
    kept.write_text("\n".join([f"torch=={version}", *others, ""]))
    subprocess.run([*pip, "--constraint", str(kept), "--editable", f"{ROOT}[test]"], check=True)
    done.write_text("\n".join(packages))
    return python


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="the core tests with this Python, and another torch")
    parser.add_argument("--torch", default="", help="its version, as in 2.6.0; else the newest")
    parser.add_argument("--oldest", action="store_true", help="dependencies in the oldest versions that are allowed")
    parser.add_argument("--index", default="", help="where pip takes torch from, and nothing else")
    parser.add_argument("--pre", action="store_true", help="torch may be a build of the night")
    parser.add_argument("tests", nargs="*", help="tests, and options of pytest, after --; else the core tests")
    args = parser.parse_args(arguments)
    packages = pinned(args.torch, args.oldest, (ROOT / "pyproject.toml").read_text())
    version = packages[0].partition("==")[2] or ("nightly" if args.pre else "newest")
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}-torch{version}" + ("-oldest" if args.oldest else "")
    python = install(ROOT / "out" / "versions" / name, packages, args.index, args.pre)
    subprocess.run([str(python), "-c", TOLD], check=True)
    tests = args.tests or [*CORE, "-n", str(os.cpu_count() or 1)]
    command = [str(python), "-m", "pytest", "-m", "not soak", "-rfE", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
