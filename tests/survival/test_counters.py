"""A script's own counters decide which calls it makes: they agree on all agents, also after an agent was restarted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.launcher import RUN

TIMEOUT = 150
ENVIRONMENT = {name: text for name, text in os.environ.items() if not name.startswith(("SHOAL_", "OMP_"))}
SCRIPT = """
import math, os, signal, sys
from pathlib import Path
import torch
import shoal

if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    sys.exit(3)
shoal.init()
model = torch.nn.Linear(4, 1)
optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
died = Path(sys.argv[1])
state = {"step": 0, "best": math.inf, "means": [], "left": 3}
own = {"step": int(died.exists())}  # as many scripts count: from the beginning, in each process
counter = state if sys.argv[2] == "state" else own
parts = {"state": state} if sys.argv[2] == "state" else {}
checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer, **parts)
epoch = checkpoint.load(None, missing_ok=True)
while state["left"]:
    if died.exists() and len(shoal.alive()) == 2:
        state["left"] -= 1
    for _ in range(7):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        optimizer.step()
        counter["step"] += 1
        if counter["step"] % 7 == 5:
            mean = shoal.metrics({"loss": loss})["loss"].mean
            state["best"] = min(state["best"], mean)
            state["means"].append(mean)
        if counter["step"] == 40 and shoal.rank() == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    epoch += 1
    checkpoint.save(None, epoch)
sys.stdout.write(f"ended {state['step']} {state['best']} {state['means']}\\n")
"""


def run(folder: Path, kind: str, restarts: int) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    options = ["-n", "2", "--no-prefix", "--on-failure", "restart", "--max-restarts", str(restarts)]
    command = [*RUN, *options, str(folder / "script.py"), str(folder / "died"), kind]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT)


def test_a_restarted_agent_has_the_others_counters_and_makes_their_calls(tmp_path: Path) -> None:
    done = run(tmp_path, "state", 1)
    assert done.returncode == 0, done.stderr
    first, second = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert first == second and int(first.split()[1]) % 7 == 0, done.stdout


@pytest.mark.slow
def test_a_counter_outside_the_checkpoint_is_explained(tmp_path: Path) -> None:
    done = run(tmp_path, "own", 1)
    assert done.returncode != 0
    assert "equal counters" in done.stderr and "Checkpoint(state=" in done.stderr, done.stderr


EPOCHS = """
import os, signal, sys
from pathlib import Path
import torch
import shoal

shoal.init()
data = torch.utils.data.TensorDataset(torch.ones(35, 4))
sampler = shoal.data.AgentSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=1, sampler=sampler)
model = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = shoal.DecentralizedOptimizer(sgd, model)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000 * len(loader))
died = Path(sys.argv[1])
state = {"left": 3, "steps": []}
checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, state=state)
checkpoint.load(None, missing_ok=True)
while state["left"]:
    if died.exists() and len(shoal.alive()) == 2:
        state["left"] -= 1
    steps = 0
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        schedule.step()
        steps += 1
        if len(state["steps"]) == 2 and steps == 9 and shoal.rank() == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    state["steps"].append(steps)
    checkpoint.save(None, len(state["steps"]))
counted = schedule.last_epoch == sum(state["steps"])
sys.stdout.write(f"ended {set(state['steps'])} {counted} {schedule.get_last_lr()} {sampler.epoch}\\n")
"""


@pytest.mark.slow
def test_epochs_keep_their_length_and_schedules_their_step_after_a_failure_and_a_rejoin(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EPOCHS)
    options = ["-n", "2", "--no-prefix", "--on-failure", "restart"]
    command = [*RUN, *options, str(tmp_path / "script.py"), str(tmp_path / "died")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    first, second = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert first == second and first.startswith("ended {17} True"), done.stdout
