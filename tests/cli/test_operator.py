"""An operator's day: check the machine, start a job, look at it, see an agent killed and restarted, end the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.launcher import RUN
from support.leftovers import wait_until

SHOAL = [sys.executable, "-m", "shoal"]
ENVIRONMENT = {name: text for name, text in os.environ.items() if not name.startswith(("SHOAL_", "OMP_"))}
SCRIPT = """
import sys
from pathlib import Path
import torch
import shoal

shoal.init()
model = torch.nn.Linear(4, 1)
optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
state = {"over": False}
checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer, state=state)
epoch = checkpoint.load(None, missing_ok=True)
while not state["over"]:
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).square().sum().backward()
        optimizer.step()
    enough = torch.tensor([float(Path(sys.argv[1]).exists() and len(shoal.alive()) == 3)])
    state["over"] = bool(shoal.allreduce(enough, average=False))
    epoch += 1
    checkpoint.save(None, epoch)
sys.stdout.write(f"rank {shoal.rank()} ended with {len(shoal.alive())} agents\\n")
"""


def agents_of(job: str) -> dict[int, dict[str, Any]]:
    """The agents of a job by rank, each with its process's ``pid``, as ``shoal status`` prints them."""
    done = subprocess.run([*SHOAL, "status", "--json", "--job", job], env=ENVIRONMENT, capture_output=True, text=True)
    return {one["rank"]: one | {"pid": of["pid"]} for of in json.loads(done.stdout or "[]") for one in of["agents"]}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_operator_sees_a_job_through_the_loss_and_restart_of_an_agent(tmp_path: Path) -> None:
    doctor = subprocess.run([*SHOAL, "doctor"], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert doctor.returncode in (0, 3), doctor.stdout + doctor.stderr  # 3: the machine is too busy to be judged

    script, enough, job = tmp_path / "operated.py", tmp_path / "enough", "operated.py"
    script.write_text(SCRIPT)
    options = ["-n", "3", "--on-failure", "restart", "--max-restarts", "1", "--record", str(tmp_path / "record")]
    launcher = subprocess.Popen(
        [*RUN, *options, str(script), str(enough)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait_until(lambda: sorted(agents_of(job)) == [0, 1, 2], 60.0), agents_of(job)
        before = agents_of(job)
        os.kill(before[1]["pid"], signal.SIGKILL)

        def is_back() -> bool:
            now = agents_of(job)
            return sorted(now) == [0, 1, 2] and now[1]["pid"] != before[1]["pid"]

        assert wait_until(is_back, 60.0), agents_of(job)
        after = agents_of(job)
        assert [after[rank]["pid"] for rank in (0, 2)] == [before[rank]["pid"] for rank in (0, 2)]
        enough.touch()
        out, report = launcher.communicate(timeout=90)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 0, report
    assert sorted(line.partition("] ")[2] for line in out.splitlines() if "ended with" in line) == [
        f"rank {rank} ended with 3 agents" for rank in range(3)
    ]
    assert "was killed by SIGKILL" in report, report
    assert len(list((tmp_path / "record").iterdir())) >= 3
    assert agents_of(job) == {}
