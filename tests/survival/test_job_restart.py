"""All agents of a job are gone, and it begins again from the files of its checkpoints; the launcher's part of it is in
``tests/cli/test_job_restart.py``."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.fault_tolerance.launcher_notes import is_marked
from support.checkpoints import same
from support.job_restart import EVERY, SAVING, STEPS, main
from support.launcher import RUN
from support.survivors import CONTINUE
from support.world import World

SIZE = 2
TIMEOUT = 120
ENVIRONMENT = {name: text for name, text in os.environ.items() if not name.startswith(("SHOAL_", "OMP_"))} | {
    "PYTHONPATH": os.pathsep.join(
        (str(Path(__file__).parents[1]), str(Path(shoal.__file__).parents[1]), os.environ["PYTHONPATH"])
    )
}
COMMAND = [*RUN, "-n", str(SIZE), "--on-failure", "restart"]


def begin(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT)


def deaths(seed: int) -> tuple[int, int]:
    """The step before which all are killed, and the one after which all are killed in the next save."""
    chance = random.Random(seed)
    first = chance.randint(EVERY, STEPS - 2 * EVERY - 1)
    return first, chance.randint(first // EVERY * EVERY, STEPS - 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.soak) for k in range(1, 8))])
def test_a_restarted_job_converges_like_one_without_failures(seed: int, tmp_path: Path) -> None:
    first, second = deaths(seed)
    done = begin("-m", "support.job_restart", tmp_path, first, f"{SAVING}{second}")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"restarting the job.*\((\d) of 3\)", done.stderr) == ["1", "2"], done.stderr
    with World(SIZE, environment={"TORCHELASTIC_RESTART_COUNT": "9"}) as world:
        world.results(main, tmp_path / "undisturbed")
    for rank in range(SIZE):
        files = [folder / f"ended.{rank}.pt" for folder in (tmp_path, tmp_path / "undisturbed")]
        ended, undisturbed = (torch.load(file, weights_only=True) for file in files)
        assert ended["attempt"] == 2
        assert ended["began"] == [second // EVERY * EVERY], "it goes on from the last one that was complete"
        assert undisturbed["began"] == [0] and same(ended["state"], undisturbed["state"]), f"rank {rank} differs"


LAST_ONE = """
import os, signal, sys, time
from pathlib import Path
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
incarnation, here = int(os.environ.get("SHOAL_INCARNATION", 0)), Path(__file__).parent
(here / f"up.{attempt}.{rank}.{incarnation}").touch()
if attempt:
    sys.exit()
import torch, shoal
shoal.init()
if not incarnation:
    (here / f"pid.{rank}").write_text(str(os.getpid()))
    shoal.barrier()
    while rank == 0 and not (here / "outside").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
(here / "outside").touch()
while Path("/proc", (here / "pid.0").read_text()).exists():
    time.sleep(0.01)
time.sleep(1.0)  # as if it read its data: meanwhile rank 0 would be started again, to come back to this one
shoal.Checkpoint(model=torch.nn.Linear(1, 1)).load(None)
"""


@pytest.mark.slow
def test_an_agent_waiting_to_rejoin_when_the_last_member_dies_does_not_count_as_a_survivor(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LAST_ONE)
    done = begin(tmp_path / "train.py")
    assert done.returncode == 0, done.stderr
    assert "all of them have ended: none can admit it" in done.stderr
    assert done.stderr.count("all agents failed; restarting the job (1 of 3)") == 1, done.stderr
    result = sorted(path.name.removeprefix("up.") for path in tmp_path.glob("up.*"))
    assert result == ["0.0.0", "0.1.0", "0.1.1", "1.0.0", "1.1.0"], done.stderr


def signs() -> list[bool]:
    """Whether the launcher sees this agent wait: before it has entered, and after."""
    run, result = shoal.Checkpoint(model=torch.nn.Linear(1, 1)), [is_marked(os.getpid())]
    step = run.load(None, missing_ok=True)
    result.append(is_marked(os.getpid()))
    while not step or len(shoal.alive()) < 2:
        step += 1
        run.save(None, step)
    return result


def test_a_rejoined_agent_counts_as_a_survivor() -> None:
    with World(2, environment=CONTINUE, restarts=True) as world:
        world.kill_and_start_again(1)
        assert world.results(signs) == [[False, False], [True, False]]


OLD_SECRET = """
import json, os, sys
from pathlib import Path
here, attempt, rank = Path(__file__).parent, os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
(here / f"part.{attempt}.{rank}").write_text(json.dumps(dict(os.environ)))
(here / f"part.{attempt}.{rank}").rename(here / f"environ.{attempt}.{rank}")
if attempt == "0":
    sys.exit(1)
import time, torch, shoal
shoal.init()
(here / "met").touch()
run = shoal.Checkpoint(model=torch.nn.Linear(1, 1))
step = run.load(None, missing_ok=True)
while not shoal.allreduce(torch.tensor([float((here / "refused").exists())])):
    time.sleep(0.05)
    step += 1
    run.save(None, step)
assert shoal.alive() == (0, 1)
"""


@pytest.mark.soak  # that each has a secret of its own says tests/cli, that others are refused tests/security
def test_an_agent_of_the_previous_attempt_cannot_rejoin(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OLD_SECRET)
    with subprocess.Popen([*COMMAND, str(tmp_path / "train.py")], env=ENVIRONMENT, stderr=subprocess.PIPE) as job:
        while not (tmp_path / "met").exists():
            assert job.poll() is None
        before, now = (json.loads((tmp_path / f"environ.{attempt}.1").read_text()) for attempt in range(2))
        limits = {"SHOAL_INCARNATION": "9", "SHOAL_TIMEOUT": "5"}
        output = [
            subprocess.run(
                [sys.executable, "-c", "import shoal; shoal.init()"], env=environ | limits, capture_output=True
            )
            for environ in (before, now | {"SHOAL_SECRET": before["SHOAL_SECRET"]})
        ]
        (tmp_path / "refused").touch()
        assert job.stderr is not None and job.wait(TIMEOUT) == 0, job.stderr.read()
    assert b"DeadlineExceeded" in output[0].stderr and b"Mismatch" in output[1].stderr, output


def save_after_a_loss(folder: Path) -> None:
    """Of three agents the last is lost, and the others save."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 4.0 * shoal.rank())
    if shoal.rank() == 2:
        os._exit(1)
    shoal.barrier()
    while len(shoal.alive()) > 2:
        shoal.barrier()
    shoal.Checkpoint(model=model).save(folder, 7)


def load_as(folder: Path) -> Any:
    model = torch.nn.Linear(1, 1, bias=False)
    with pytest.warns(UserWarning, match="of 2 agents, since others had been lost.*begun again, with 3") as warned:
        step = shoal.Checkpoint(model=model).load(folder)
    return step, model.weight.item(), len(warned)


def refused(folder: Path) -> str:
    try:
        shoal.Checkpoint(model=torch.nn.Linear(1, 1, bias=False)).load(folder)
    except ValueError as error:
        return str(error)
    return ""


def test_if_the_last_checkpoint_has_fewer_agents_all_start_at_their_mean(tmp_path: Path) -> None:
    """Otherwise no attempt could load it."""
    with World(3, environment=CONTINUE) as world:
        assert [one.error for one in world.run(save_after_a_loss, tmp_path)] == ["", "", "Died"]
    with World(3) as world:  # which was not restarted
        assert all("of 2 agents, and there are 3 now" in one for one in world.results(refused, tmp_path))
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    with World(3, environment=again) as world:
        assert world.results(load_as, tmp_path) == [(7, 2.0, 1)] * 3
    with World(4, environment=again) as world:  # it is of a run of three, and no loss
        assert all("of 2 agents, and there are 4 now" in one for one in world.results(refused, tmp_path))
