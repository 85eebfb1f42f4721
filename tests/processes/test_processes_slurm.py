"""Under a real Slurm, where it is installed: agents that srun starts on two nodes, and launchers of a batch script."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launcher import LAUNCHER
from support.slurm import Slurm, slurm_cluster

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch, shoal
shoal.init()
total = shoal.allreduce(torch.full((100_000,), float(shoal.rank())), average=False)
found = [os.uname().nodename, shoal.size(), shoal.bluefog.machine_rank(), shoal.local_rank(), total[-1].item()]
Path(sys.argv[1], f"{shoal.rank()}.json").write_text(json.dumps(found))
shoal.shutdown()
"""
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "machines.md"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as result:
        yield result


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def found_in(folder: Path) -> list[object]:
    """What each agent found, by rank."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def test_tasks_started_by_srun_on_two_nodes_are_the_agents(slurm: Slurm, script: Path) -> None:
    tasks = ("srun", "-N", "2", "-n", "4", "--label", "--kill-on-bad-exit=1")
    done = slurm.run(*tasks, sys.executable, str(script), str(script.parent), SHOAL_TIMEOUT="60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found_in(script.parent) == [[f"node{rank // 2}", 4, rank // 2, rank % 2, 6.0] for rank in range(4)]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which ``shoal run`` is the launcher of this checkout."""
    launcher, command = tmp_path / "launcher.py", tmp_path / "bin" / "shoal"
    command.parent.mkdir()
    launcher.write_text(LAUNCHER)
    command.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} {launcher} "$@"\n')
    command.chmod(0o755)
    return f"{command.parent}:{os.environ['PATH']}"


def await_text(file: Path, text: str, seconds: float = 50.0) -> str:
    """The content of a file, once it has some."""
    limit = time.monotonic() + seconds
    while text not in (content := file.read_text() if file.exists() else ""):
        assert time.monotonic() < limit, f"{text!r} is not in {file.name}:\n{content}"
        time.sleep(0.05)
    return content


def test_a_batch_script_starts_a_launcher_on_each_node_as_documented(slurm: Slurm, script: Path, path: str) -> None:
    """The page's own lines, with one agent instead of four. The batch script itself is no agent."""
    block = re.search(r"```\n(export HEAD=.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    lines = block[1].replace("-n 4", "-n 1").replace("train.py", f"{script} {script.parent}")
    batch, log = script.parent / "job.sh", script.parent / "job.log"
    batch.write_text(f"#!/bin/bash\n#SBATCH --nodes 2 --output {log}\n{lines}\necho it ended with $?.\n")
    done = slurm.run("sbatch", str(batch), PATH=path, SHOAL_SECRET="of this job", SHOAL_TIMEOUT="40")
    assert done.returncode == 0, done.stdout + done.stderr
    output = await_text(log, "it ended with ")
    assert output.endswith("it ended with 0.\n")
    assert found_in(script.parent) == [[f"node{rank}", 2, rank, 0, 1.0] for rank in range(2)]


def test_a_cancelled_job_leaves_no_agent(slurm: Slurm, tmp_path: Path, path: str) -> None:
    """scancel's SIGTERM reaches agents through their launcher, and they may save their work."""
    script, started, left = (tmp_path / name for name in ("wait.py", "there", "left"))
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "def leave(*_): pathlib.Path(sys.argv[2]).write_text('saved'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()} is here')\n"
        "time.sleep(100)\n"
    )
    batch, log = tmp_path / "job.sh", tmp_path / "job.log"
    batch.write_text(f"#!/bin/bash\n#SBATCH --output {log}\nsrun -n 1 shoal run -n 1 {script} {started} {left}\n")
    done = slurm.run("sbatch", "--parsable", str(batch), PATH=path)
    assert done.returncode == 0, done.stderr
    agent = int(await_text(started, "is here").split()[0])
    assert slurm.run("scancel", done.stdout.strip()).returncode == 0
    await_text(left, "saved")
    limit = time.monotonic() + 20.0
    while Path(f"/proc/{agent}").exists():
        assert time.monotonic() < limit, "the agent of a job that was cancelled is there still"
        time.sleep(0.05)
