"""``shoal run --on-failure restart``: when a job whose agents have all failed restarts, and when it does not.

Most of these agents do not import Shoal, as these tests concern the launcher. The last tests train.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import agent_processes
from shoal.cli.agent_processes import AgentProcesses, FailureHandling, JobExit
from shoal.cli.launcher_signals import Signals
from shoal.rendezvous.elastic_join import claim
from support.launcher import RUN

from .test_run import TIMEOUT, descendants, is_running, shoal_run, wait_until

RESTART = ("--on-failure", "restart")
PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
incarnation = int(os.environ.get("SHOAL_INCARNATION", 0))
here = Path(__file__).parent
def mark(name, text=""):
    (here / f"part.{name}.{attempt}.{rank}.{incarnation}").write_text(text or str(os.getpid()))
    (here / f"part.{name}.{attempt}.{rank}.{incarnation}").rename(here / f"{name}.{attempt}.{rank}.{incarnation}")
def wait_for(name, *ranks):
    while not all(list(here.glob(f"{name}.{attempt}.{one}.*")) for one in ranks):
        time.sleep(0.01)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
mark("up", json.dumps(dict(os.environ)))
"""
Job = subprocess.Popen[str]


class Jobs:
    """Runs of scripts in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "script.py"
        self._started: list[Job] = []

    def run(self, body: str, *arguments: object, **options: Any) -> tuple[int, str, str]:
        self.script.write_text(PRELUDE + body)
        return shoal_run(*RESTART, *arguments, self.script, **options)

    def begin(self, body: str, *arguments: object, **options: Any) -> Job:
        self.script.write_text(PRELUDE + body)
        command = [*RUN, *RESTART, *map(str, arguments), str(self.script)]
        self._started.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **options)
        )
        return self._started[-1]

    def marks(self, name: str) -> dict[tuple[int, int, int], str]:
        """The marks that agents have written, by attempt, rank and incarnation."""
        result = {}
        for path in self.folder.glob(f"{name}.*"):
            attempt, rank, incarnation = map(int, path.name.split(".")[1:])
            result[attempt, rank, incarnation] = path.read_text()
        return result

    def attempts(self) -> set[int]:
        return {attempt for attempt, _, _ in self.marks("up")}

    def end(self) -> None:
        for job in self._started:
            job.kill()
            job.communicate()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    made.end()


def test_after_the_failure_of_all_agents_the_job_restarts_without_earlier_state(jobs: Jobs) -> None:
    body = """
wait_for("up", 0, 1, 2)
if rank == 0 and not incarnation:
    mark("read", repr(os.read(0, 1)))
    print("in the midst of a line", end="", flush=True)
wait_for("read", 0)
if attempt < 2:
    die()
print("finished")
"""
    status, out, err = jobs.run(body, "-n", 3, input="abc")
    assert status == 0
    first = {
        (attempt, rank): json.loads(text) for (attempt, rank, again), text in jobs.marks("up").items() if not again
    }
    assert sorted(first) == [(attempt, rank) for attempt in range(3) for rank in range(3)]
    for name in ("SHOAL_SECRET", "TORCHELASTIC_RUN_ID", "MASTER_PORT"):
        # The system may choose a free port twice.
        assert name == "MASTER_PORT" or len({environ[name] for environ in first.values()}) == 3, name
        assert all(first[attempt, 0][name] == first[attempt, 2][name] for attempt in range(3)), name
    assert {environ["TORCHELASTIC_MAX_RESTARTS"] for environ in first.values()} == {"3"}
    assert not [environ for environ in first.values() if "SHOAL_INCARNATION" in environ]
    assert jobs.marks("read") == {(0, 0, 0): "b'a'", (1, 0, 0): "b'b'", (2, 0, 0): "b'c'"}
    assert re.findall("all agents failed; restarting the job.*", err) == [
        "all agents failed; restarting the job (1 of 3)",
        "all agents failed; restarting the job in 1 s (2 of 3)",
    ]
    assert "agents finished; lost" not in err  # not of a run after which there is another
    lines = out.splitlines()
    assert lines.count("[0] in the midst of a line") == 2 and "[0] in the midst of a linefinished" in lines
    assert "[1] finished" in lines and "[2] finished" in lines


@pytest.mark.parametrize(("restarts", "status"), [(0, 5), (1, 6)])
def test_a_job_that_fails_each_time_ends_with_the_status_of_the_last(jobs: Jobs, restarts: int, status: int) -> None:
    result, _, err = jobs.run("sys.exit(5 + attempt)", "-n", 2, "--max-restarts", restarts)
    assert result == status
    assert jobs.attempts() == set(range(restarts + 1))
    assert err.count("restarting the job") == restarts and err.count("0 of 2 agents finished; lost: rank 0") == 1


def test_a_single_agent_restarts(jobs: Jobs) -> None:
    assert jobs.run("attempt or sys.exit(1)", "-n", 1)[0] == 0
    assert sorted(jobs.marks("up")) == [(0, 0, 0), (1, 0, 0)]


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_in_the_second_attempt_ends_it_and_nothing_is_left(jobs: Jobs, signum: signal.Signals) -> None:
    job = jobs.begin("wait_for('up', 0, 1)\nattempt or die()\nmark('waits')\ntime.sleep(60)", "-n", 2)
    wait_until(lambda: len(jobs.marks("waits")) == 2)
    everyone = descendants(job.pid)
    assert everyone >= {int(pid) for pid in jobs.marks("waits").values()}
    job.send_signal(signum)
    _, err = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 128 + signum, err
    assert jobs.attempts() == {0, 1} and not any(map(is_running, everyone)), err


def test_a_second_ctrl_c_in_the_second_attempt_kills_at_once(jobs: Jobs) -> None:
    body = "attempt or die()\nsignal.signal(signal.SIGINT, lambda *_: mark('got'))\nmark('waits')\nwait_for('never', 0)"
    job = jobs.begin(body, "-n", 1, "--grace", 30)
    wait_until(lambda: bool(jobs.marks("waits")))
    job.send_signal(signal.SIGINT)
    wait_until(lambda: bool(jobs.marks("got")))
    time.sleep(2 * agent_processes.SAME_INTERRUPT_SECONDS)
    job.send_signal(signal.SIGINT)
    assert job.wait(30) == 130


@pytest.mark.parametrize(
    "signum", [*(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGHUP)), signal.SIGTERM]
)
def test_a_signal_between_two_attempts_starts_none(jobs: Jobs, signum: signal.Signals) -> None:
    job = jobs.begin("wait_for('up', 0, 1)\ndie()", "-n", 2)
    assert job.stderr is not None
    output = []
    for line in job.stderr:
        output.append(line)
        if "restarting the job in 1 s (2 of 3)" in line:
            break
    assert not descendants(job.pid)  # the store of the run before is gone, too
    job.send_signal(signum)
    _, err = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 128 + signum, (output, err)
    assert f"{signum.name}: the job is not restarted" in err and jobs.attempts() == {0, 1}


def test_after_one_agent_has_finished_the_job_does_not_restart(jobs: Jobs) -> None:
    body = """
if rank:
    wait_for("finished", 0)
    time.sleep(0.3)
    die()
mark("finished")
"""
    status, _, err = jobs.run(body, "-n", 3)
    assert status == 0 and "1 of 3 agents finished" in err
    assert sorted(jobs.marks("up")) == [(0, 0, 0), (0, 1, 0), (0, 2, 0)], "nor is any agent started again"


def test_an_agent_that_failed_just_before_another_finished_is_not_restarted(jobs: Jobs) -> None:
    body = """
if rank == 1:
    mark("dies")
    die()
wait_for("dies", 1)
while Path("/proc", (here / "dies.0.1.0").read_text()).exists():
    time.sleep(0.01)  # the launcher has yet to notice it
if rank == 0:
    os._exit(0)  # at once: the launcher waits half a second
time.sleep(1.5)
"""
    status, _, err = jobs.run(body, "-n", 3)
    assert status == 0 and "rank 1 is not started again: another agent has finished meanwhile" in err
    assert sorted(jobs.marks("up")) == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]


def run_job(folder: Path, *bodies: str) -> tuple[JobExit, int]:
    """How a run ends in which each agent has a script of its own, and how many were started in all."""
    begin = f"import os, signal, sys, time; open({str(folder)!r} + f'/{{os.getpid()}}', 'x').close(); "
    failures = FailureHandling(survive=True, grace=5.0, restarts=3)
    with Signals() as signals, AgentProcesses(None, signals, failures) as agents:
        for rank, body in enumerate(bodies):
            agents.start(rank, [sys.executable, "-c", begin + body], os.environ, keeps_stdin=False)
        return agents.supervise(), len(list(folder.iterdir()))


def test_agents_that_end_one_after_another_are_not_restarted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(agent_processes, "SETTLE_SECONDS", 30.0)
    ending, started = run_job(tmp_path, "sys.exit(4)", "time.sleep(0.2); sys.exit(5)", "time.sleep(0.4); sys.exit(6)")
    assert (ending.status, ending.all_gone, started) == (4, True, 3)


def test_after_ctrl_c_nothing_is_restarted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(agent_processes, "SETTLE_SECONDS", 1.0)
    interrupts = f"""
while not [pid for pid in os.listdir({str(tmp_path)!r}) if not os.path.exists('/proc/' + pid)]: time.sleep(0.01)
signal.signal(signal.SIGINT, lambda *_: None)
os.kill(os.getppid(), signal.SIGINT)
end = time.monotonic() + 2.0
while time.monotonic() < end: time.sleep(0.1)
"""
    ending, started = run_job(tmp_path, "1" + interrupts, "sys.exit(4)")
    assert (ending.status, ending.all_gone, started) == (130, False, 2)


@pytest.mark.parametrize("signum", [signal.SIGUSR1, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_agents_killed_by_a_forwarded_signal_are_not_restarted(jobs: Jobs, signum: signal.Signals) -> None:
    job = jobs.begin("mark('waits')\ntime.sleep(60)", "-n", 2)
    wait_until(lambda: len(jobs.marks("waits")) == 2)
    job.send_signal(signum)
    _, err = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 128 + signum, err
    assert jobs.attempts() == {0} and "restarting the job" not in err


def test_an_agent_without_restarts_left_does_not_restart_the_job_while_others_run(jobs: Jobs) -> None:
    """The job restarts once the last agent has failed too. Then each agent has its full number of restarts again."""
    body = """
if rank == 1 and not (attempt and incarnation):
    mark("dies")
    die()
if rank == 1:
    sys.exit()
while not attempt and not list(here.glob("dies.0.1.1")):
    time.sleep(0.01)
if not attempt:
    time.sleep(1.0)
    sys.exit(3)
while not list(here.glob("up.1.1.1")):
    time.sleep(0.01)
"""
    status, _, err = jobs.run(body, "-n", 2, "--max-restarts", 1)
    assert status == 0
    assert sorted(jobs.marks("up")) == [(0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 1, 0), (1, 1, 1)]
    assert err.index("rank 0 (pid") < err.index("all agents failed; restarting the job (1 of 1)")


def test_with_several_machines_the_job_does_not_restart(jobs: Jobs) -> None:
    """A launcher cannot know whether agents run on the other machines."""
    where = ("--nnodes", 2, "--node-rank", 1, "--rendezvous", "127.0.0.1:1", "--max-restarts", 1)
    status, _, err = jobs.run("die()", "-n", 2, *where, environ={"SHOAL_SECRET": "given"})
    assert status == 128 + signal.SIGKILL and "restarting the job" not in err
    assert sorted(jobs.marks("up")) == [(0, 2, 0), (0, 2, 1), (0, 3, 0), (0, 3, 1)]
    assert {json.loads(text)["TORCHELASTIC_MAX_RESTARTS"] for text in jobs.marks("up").values()} == {"0"}


@pytest.mark.soak  # the decision is that of the test after it
def test_a_job_that_no_agent_has_joined_restarts_and_admits_agents_then(jobs: Jobs) -> None:
    """Agents can join the restarted job."""
    job = jobs.begin("attempt or die()\nwait_for('up', 0, 1, 2)", "-n", 2, "--max-agents", 4)
    assert job.stderr is not None
    output = []
    for line in job.stderr:
        output += re.findall(r"2 more may join, .* --join (127.0.0.1:\d+)", line)
        if len(output) == 2:
            break
    assert len(output) == 2 and output[0] != output[1]
    assert shoal_run("--join", output[1], "-n", 1, jobs.script)[0] == 0
    assert job.wait(TIMEOUT) == 0
    first = {key for key in jobs.marks("up") if not key[2]}
    assert first == {(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)} and (1, 2, 1) in jobs.marks("up")


def test_a_job_that_agents_have_joined_continues_with_them(jobs: Jobs) -> None:
    job = jobs.begin("wait_for('claimed', 0)\ndie()", "-n", 1, "--max-agents", 2, "--max-restarts", 1)
    wait_until(lambda: bool(jobs.marks("up")))
    [output] = map(json.loads, jobs.marks("up").values())
    secret = {"SHOAL_SECRET": output["SHOAL_SECRET"]}
    invitation, _, first = claim("127.0.0.1", int(output["MASTER_PORT"]), 1, secret, time.monotonic() + 30.0)
    assert (first, invitation.attempt) == (1, 0)
    (jobs.folder / "claimed.0.0.0").touch()
    _, err = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 128 + signal.SIGKILL, err
    assert sorted(jobs.marks("up")) == [(0, 0, 0), (0, 0, 1)] and "restarting the job" not in err
