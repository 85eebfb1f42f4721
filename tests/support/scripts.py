"""Users' scripts, run in agents that are processes, without importing torch again for each."""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

from .world import World


def printed_by(script: str, *arguments: str) -> str:
    """The output of a script in this process, which is one of its agents."""
    sys.argv = [script, *arguments]
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(script, run_name="__main__")
    return output.getvalue()


def in_processes(size: int, script: Path, *arguments: str) -> list[str]:
    """What each agent prints, by rank, where each is a process of its own with a launcher's variables."""
    world = World(size, init=False, timeout=60.0, environment={"COLUMNS": "100"})
    try:
        return [str(one) for one in world.results(printed_by, str(script), *arguments, patience=120.0)]
    finally:
        world.destroy()  # the script has shut its agents down; what it imports keeps is not ours to judge
