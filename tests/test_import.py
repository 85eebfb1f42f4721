"""What ``import shoal`` costs: every agent, and every command of the command line, pays for it."""

from __future__ import annotations

import subprocess
import sys


def test_importing_shoal_imports_no_compiler_of_torch_and_no_notebook() -> None:
    unwanted = ("torch._dynamo", "sympy", "IPython")
    command = f"import shoal, sys; print([name for name in {unwanted} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
