"""What it costs to start: the command line, and a script that becomes an agent and ends.

    python benchmarks/starting.py
    git worktree add /tmp/before HEAD~1 && python benchmarks/starting.py --beside /tmp/before/src

Each command in a process of its own, in turn, 20 times: the median of the processor's seconds, its own and those of the
processes that it starts, and of the seconds until it ends. With --beside the same of another version of the package, in
the same turns. ``status`` asks two agents that wait; they are started by this version.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import shoal

HERE = Path(shoal.__file__).parent.parent
SHOAL = ["-m", "shoal"]
WAITS = """
import os, pathlib, time, shoal
shoal.init()
pathlib.Path(__file__).with_name(f"pid.{os.getpid()}").touch()
time.sleep(1e6)
"""


def measure(command: list[str], source: Path) -> tuple[float, float]:
    """The processor's seconds of a command and of what it starts, and those until it ends."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs to start.")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--beside", type=Path, help="the folder of another version of the package")
    args = parser.parse_args()
    versions = [HERE] if args.beside is None else [args.beside, HERE]
    found: dict[tuple[str, Path], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        prints, waits, becomes = (Path(folder) / f"{name}.py" for name in ("prints", "waits", "becomes"))
        prints.write_text("print('hello')\n")
        waits.write_text(WAITS)
        becomes.write_text("import shoal; shoal.init(); shoal.shutdown()\n")
        agents = subprocess.Popen([sys.executable, *SHOAL, "run", "-n", "2", str(waits)])
        try:
            while len(pids := [path.suffix[1:] for path in Path(folder).glob("pid.*")]) < 2:
                time.sleep(0.1)
            commands = {
                "shoal run --help": [*SHOAL, "run", "--help"],
                "shoal status": [*SHOAL, "status", *pids],
                "shoal topology show ring": [*SHOAL, "topology", "show", "ring"],
                "shoal run -n 2, a script that prints": [*SHOAL, "run", "-n", "2", str(prints)],
                "a script with shoal.init()": [str(becomes)],
            }
            for turn in range(-1, args.times):  # the first is for the files of bytecode
                for name, command in commands.items():
                    for version in versions if turn % 2 else reversed(versions):
                        one = measure(command, version)
                        if turn >= 0:
                            found[name, version].append(one)
        finally:
            agents.terminate()
            agents.wait()
    for (name, version), each in sorted(found.items(), key=lambda item: item[0][0]):
        processor, until_its_end = (statistics.median(one) for one in zip(*each, strict=True))
        which = f" ({version})" if len(versions) > 1 else ""
        print(f"{name:40} {processor:6.2f} s of the processor, {until_its_end:6.2f} s until it ends{which}")


if __name__ == "__main__":
    main()
