"""One script under every launcher: torchrun, ``shoal run``, mpirun, and none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.limits import scaled
from support.world import plain_environment

SCRIPT = """
import json, sys
from pathlib import Path
import torch, shoal
shoal.init()
total = shoal.allreduce(torch.full((100_000,), float(shoal.rank())), average=False)
mean = shoal.neighbor_allreduce(torch.tensor([float(shoal.rank())]))
found = [shoal.rank(), shoal.size(), shoal.local_size(), total[-1].item(), mean.item()]
Path(sys.argv[1], f"{shoal.rank()}.json").write_text(json.dumps(found))
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SHOAL_RUN = [sys.executable, "-m", "shoal", "run"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")


@pytest.mark.transport("shared_memory")
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param([*TORCHRUN, "--nproc-per-node", "2"], id="torchrun"),
        # The main job runs under it always: tests/examples/test_train_digits.py.
        pytest.param([*SHOAL_RUN, "-n", "2"], id="shoal-run", marks=pytest.mark.soak),
        pytest.param([*MPIRUN, "-n", "2", sys.executable], id="mpirun", marks=needs_mpirun),
    ],
)
def test_a_script_finds_its_agents_under(launcher: list[str], tmp_path: Path) -> None:
    assert run(launcher, tmp_path) == [[0, 2, 2, 1.0, 0.5], [1, 2, 2, 1.0, 0.5]]


def test_a_script_without_a_launcher_is_a_single_agent(tmp_path: Path) -> None:
    assert run([sys.executable], tmp_path) == [[0, 1, 1, 0.0, 0.0]]


def run(launcher: list[str], folder: Path) -> list[list[float]]:
    """Each agent's result, by rank; the job must succeed and print nothing itself."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    seconds = scaled(40)
    environment = plain_environment() | {"SHOAL_TIMEOUT": f"{seconds}", "OMP_NUM_THREADS": "1"}
    command = [*launcher, script, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds + scaled(15))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
    files = sorted(folder.glob("*.json"))
    return [json.loads(file.read_text()) for file in files]
