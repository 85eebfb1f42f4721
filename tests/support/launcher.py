"""The command line of ``shoal run``, for tests that start real jobs."""

from __future__ import annotations

import sys
from pathlib import Path

import shoal

# Of the package that the tests have imported, wherever another one is installed.
LAUNCHER = f"""
import sys
sys.path.insert(0, {str(Path(shoal.__path__[0]).parent)!r})
from shoal.cli import main
sys.exit(main(["run", *sys.argv[1:]]))
"""
RUN = [sys.executable, "-W", "error", "-c", LAUNCHER]
