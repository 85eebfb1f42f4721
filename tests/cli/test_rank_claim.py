"""``shoal run --max-agents`` and ``--join``, as a stranger would type them, from several shells."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_run import RUN, shoal_run

pytestmark = pytest.mark.timeout(240)
TIMEOUT = 200
SCRIPT = """
import os, sys, time
import torch
import shoal

shoal.init()
model = torch.nn.Linear(2, 1)
optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
run = shoal.Checkpoint(model=model, optimizer=optimizer)
step = run.load(None, missing_ok=True)
if step and sys.argv[1] == str(shoal.rank()) and os.environ["SHOAL_INCARNATION"] == "1":
    os._exit(7)
limit = time.monotonic() + 180
while len(shoal.allgather(torch.ones(1))) < shoal.size():
    assert time.monotonic() < limit
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
    step += 1
    run.save(None, step)
print("all of", shoal.size(), shoal.alive(), "as", shoal.rank(), os.environ["LOCAL_RANK"])
shoal.shutdown()
"""
Job = subprocess.Popen[str]


class Shells:
    def __init__(self, folder: Path) -> None:
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.jobs: list[Job] = []

    def type(self, *arguments: object, dies: object = "nobody") -> Job:
        command = [*RUN, *map(str, arguments), str(self.script), str(dies)]
        self.jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return self.jobs[-1]

    def begin(self, *arguments: object) -> tuple[Job, str]:
        """A run, and where others join it."""
        job = self.type(*arguments)
        assert job.stderr is not None
        for line in job.stderr:
            if result := re.search(r"shoal run --join (\S+) -n K \S*train.py", line):
                return job, result[1]
        raise AssertionError("it does not say how to join")


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Shells]:
    made = Shells(tmp_path)
    yield made
    for job in made.jobs:
        job.kill()
        job.communicate()


@pytest.mark.slow
def test_agents_join_from_two_shells_and_surplus_ones_are_refused(shells: Shells) -> None:
    job, where = shells.begin("-n", 2, "--max-agents", 4)
    joining = [shells.type("--join", where, "-n", count) for count in (1, 1, 3)]
    _, err = joining.pop().communicate(timeout=TIMEOUT)
    assert re.search(r"3 cannot join: \d ranks are free. It began with 2 of --max-agents 4", err), err
    output = "".join(one.communicate(timeout=TIMEOUT)[0] for one in (job, *joining))
    assert [one.returncode for one in (job, *joining)] == [0, 0, 0]
    assert sorted(re.findall(r"all of 4 \(0, 1, 2, 3\) as (\d) (\d)", output)) == [
        ("0", "0"),
        ("1", "1"),
        ("2", "0"),
        ("3", "0"),
    ]
    late = shells.type("--join", where, "-n", 1)
    _, err = late.communicate(timeout=TIMEOUT)
    assert late.returncode == 1 and "no process answers at" in err and "the run has ended" in err


@pytest.mark.soak
def test_a_failed_joiner_is_restarted_by_its_own_launcher(shells: Shells) -> None:
    job, where = shells.begin("-n", 1, "--max-agents", 3)
    joining = shells.type("--join", where, "-n", 2, "--on-failure", "restart", dies=2)
    out, err = joining.communicate(timeout=TIMEOUT)
    job.communicate(timeout=TIMEOUT)
    assert (job.returncode, joining.returncode) == (0, 0), err
    assert "rank 2 (pid" in err and "starting it again (1 of 3)" in err
    assert "[1] all of 3 (0, 1, 2) as 1 0" in out and "[2] all of 3 (0, 1, 2) as 2 1" in out


def test_a_job_without_spare_ranks_cannot_be_joined(shells: Shells, tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import os, time; print(os.environ['MASTER_PORT'], flush=True); time.sleep(180)")
    waiting = subprocess.Popen([*RUN, "-n", "1", str(tmp_path / "wait.py")], stdout=subprocess.PIPE, text=True)
    shells.jobs.append(waiting)
    assert waiting.stdout is not None
    joining = shells.type("--join", f"127.0.0.1:{waiting.stdout.readline().strip()}", "-n", 1)
    _, err = joining.communicate(timeout=TIMEOUT)
    assert joining.returncode == 1 and "it was started without --max-agents" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-n 2 --max-agents 1", "--max-agents 1: it must be at least 2, the number of agents at the start"),
        ("-n 2 --nnodes 2 --max-agents 3", "--max-agents 3: it must be at least 4"),
        ("-n 2 --max-agents x", "argument --max-agents: invalid int value: 'x'"),
        ("-n 2 --max-agents 4 --on-failure stop", "--max-agents with --on-failure stop"),
        ("-n 2 --max-agents 4 --nnodes 2 --rendezvous h:1", "--max-agents with --nnodes: set SHOAL_SECRET"),
        ("-n 2 --join here", "--join='here' is not host:port"),
        ("-n 2 --join here:", "--join='here:' has no port between 1 and 65535"),
        ("-n 2 --join 127.0.0.1:1 --nnodes 2", "--join with --nnodes"),
        ("-n 2 --join 127.0.0.1:1 --node-rank 1", "--join with --node-rank"),
        ("-n 2 --join 127.0.0.1:1 --rendezvous h:1", "--join with --rendezvous"),
        ("-n 2 --join 127.0.0.1:1 --max-agents 4", "--join with --max-agents"),
        ("-n 2 --join 127.0.0.1:1 --on-failure stop", "--join with --on-failure stop"),
        ("-n 0 --join 127.0.0.1:1", "-n 0: at least one agent"),
    ],
)
def test_invalid_arguments_are_refused(arguments: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    status, _, err = shoal_run(*arguments.split(), tmp_path / "script.py")
    assert status == 2 and message in err, err


def test_the_variables_give_the_number_of_initial_agents(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import os; print(*(os.environ.get(n) for n in ('WORLD_SIZE', 'SHOAL_BEGIN_WITH', 'SHOAL_ON_LOSS')))"
    )
    assert shoal_run("-n", 1, "--max-agents", 3, path)[1] == "3 1 continue\n"
    assert shoal_run("-n", 1, path, environ={"SHOAL_BEGIN_WITH": "1"})[1] == "1 None None\n"
