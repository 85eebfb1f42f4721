"""The command line of ``shoal run``, for tests that start real jobs."""

from __future__ import annotations

import sys

import shoal

# The launcher without the package around it, whose import of torch would be most of such tests' time; the first test of
# ``tests/cli/test_run.py`` runs the command itself.
LAUNCHER = f"""
import sys, types
sys.modules["shoal"] = package = types.ModuleType("shoal")
package.__path__ = {list(shoal.__path__)}
from shoal.cli import main
sys.exit(main(["run", *sys.argv[1:]]))
"""
RUN = [sys.executable, "-W", "error", "-c", LAUNCHER]
