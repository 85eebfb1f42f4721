"""``shoal run`` with real processes: what agents find, how a job ends, and that nothing is left of it."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shoal
from shoal.cli.agent_processes import SAME_INTERRUPT_SECONDS
from support.launcher import LAUNCHER, RUN
from support.limits import scaled

TIMEOUT = 40
Script = Callable[[str], Path]
Job = subprocess.Popen[bytes]

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
here = Path(__file__).parent
def mark(name):
    (here / f"{name}.part{rank}").write_text(str(os.getpid()))
    (here / f"{name}.part{rank}").rename(here / f"{name}.{rank}")
def wait_for(*names):
    while not all((here / name).exists() for name in names):
        time.sleep(0.01)
"""


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + body)
        return path

    return write


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(*arguments: object, **options: object) -> Job:
        command = [*RUN, *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        jobs.append(subprocess.Popen(command, **(pipes | options)))  # type: ignore[call-overload]
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()
        job.communicate()


def shoal_run(*arguments: object, environ: dict[str, str] | None = None, **options: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    command = [*RUN, *map(str, arguments)]
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("SHOAL_", "OMP_"))}
    done = subprocess.run(
        command, env=clean | (environ or {}), capture_output=True, text=True, timeout=TIMEOUT, **options
    )  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def marks(directory: Path, name: str) -> dict[int, int]:
    """The pids that agents have written with ``mark(name)``, by rank."""
    result = directory.glob(f"{name}.[0-9]*")
    return {int(path.suffix[1:]): int(path.read_text()) for path in result}


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


def descendants(pid: int) -> set[int]:
    results = {
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    }
    return results | {below for child in results for below in descendants(child)}


def test_the_command_runs_a_script_in_agents(script: Script) -> None:
    run = [sys.executable, "-m", "shoal", "run", "-n", "2", script("print(os.environ['WORLD_SIZE'])")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 2", "[1] 2"])


def test_agents_find_the_variables_that_torchrun_sets(script: Script, tmp_path: Path) -> None:
    path = script("import json; (here / f'environ.{rank}').write_text(json.dumps(dict(os.environ)))")
    content = lambda: {rank: json.loads((tmp_path / f"environ.{rank}").read_text()) for rank in range(2)}  # noqa: E731
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", path]
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("SHOAL_", "OMP_"))}
    subprocess.run(run, env=clean, capture_output=True, timeout=TIMEOUT, check=True)
    reference = content()
    assert shoal_run("-n", 2, path)[0] == 0
    ours = content()
    assert ours != reference
    # Its error log and its own signals concern torchrun alone; the others differ by job.
    own = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    by_job = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    for rank in (0, 1):
        remote = {name: text for name, text in reference[rank].items() if clean.get(name) != text}
        assert remote.keys() - ours[rank].keys() <= own
        assert remote.keys() >= by_job | {"LOCAL_RANK", "GROUP_RANK", "OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE"}
        same = remote.keys() - own - by_job
        assert {name: ours[rank][name] for name in same} == {name: remote[name] for name in same}
        assert ours[rank]["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.soak  # the variables that it reads are those of torchrun: the test above
def test_init_process_group_works_as_under_torchrun(script: Script) -> None:
    path = script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([1.0 + rank])\n"
        "dist.all_reduce(total)\n"
        "print(total.item(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    status, out, err = shoal_run("-n", 2, path)
    assert (status, sorted(out.splitlines())) == (0, ["[0] 3.0", "[1] 3.0"]), err


def test_two_launchers_make_one_job(script: Script, start: Callable[..., Job]) -> None:
    path = script(
        "from datetime import timedelta\n"
        "import torch.distributed as dist\n"
        "store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)\n"
        "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE TORCHELASTIC_RUN_ID'\n"
        "store.set(str(rank), 'here')\n"
        "store.wait([str(other) for other in range(2)], timedelta(seconds=30))\n"
        "store.add('left', 1)\n"
        "print(*(os.environ[name] for name in names.split()), os.environ.get('SHOAL_SECRET'),\n"
        "    os.environ.get('SHOAL_RENDEZVOUS'))\n"
        "while rank == 0 and store.add('left', 0) < 2: time.sleep(0.01)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common = ("-n", 1, "--nnodes", 2, "--rendezvous", address)
    environ = {name: text for name, text in os.environ.items() if name != "SHOAL_SECRET"}
    second = start(*common, "--node-rank", 1, path, env=environ)
    # Set by accident in one shell, it must not reach the agents: rank 0 would host a store where the launcher does.
    first = start(*common, "--node-rank", 0, path, env=environ | {"SHOAL_RENDEZVOUS": "127.0.0.1:1"})
    outputs = [job.communicate(timeout=TIMEOUT) for job in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert outputs[0][0].decode() == f"0 2 0 1 0 2 {address} None None\n"
    assert outputs[1][0].decode() == f"1 2 0 1 1 2 {address} None None\n"


def test_a_missing_interface_is_named(script: Script) -> None:
    """The launcher prints the listening address if it differs from the host's, here behind a NAT."""
    arguments = ("-n", 1, "--nnodes", 2, "--rendezvous", "192.0.2.1:29400", script("pass"))
    status, _, err = shoal_run(*arguments, environ={"SHOAL_INTERFACE": "nowhere0"})
    assert status == 2
    assert "shoal run: error: SHOAL_INTERFACE='nowhere0' is neither an interface nor an address" in err


def test_a_job_on_one_machine_gets_its_own_secret_unless_one_is_set(script: Script) -> None:
    path = script("print(os.environ['SHOAL_SECRET'])")
    secrets = [shoal_run("-n", 2, path)[1].split()[1::2] for _ in range(2)]
    assert secrets[0][0] == secrets[0][1] != secrets[1][0]
    assert re.fullmatch("[0-9a-f]{64}", secrets[0][0])
    assert shoal_run("-n", 1, path, environ={"SHOAL_SECRET": "given"})[1] == "given\n"


def test_the_first_failure_ends_the_others_and_its_code_is_the_jobs(script: Script, tmp_path: Path) -> None:
    path = script("""
mark("up")
wait_for("up.0", "up.1", "up.2")
if rank == 1:
    print("why it failed", file=sys.stderr)
    sys.exit(7)
time.sleep(60)
""")
    status, _, err = shoal_run("-n", 3, path)
    assert status == 7
    pid = marks(tmp_path, "up")[1]
    assert re.search(
        rf"shoal run: rank 1 \(pid {pid}\) exited with code 7 after [\d.]+ s; ending the rest \(2 agents\)", err
    )
    assert "the last lines of rank 1 on stderr:\n    why it failed\n" in err
    assert "[1] why it failed\n" in err


CULPRIT = """
from shoal.fault_tolerance.launcher_notes import write_note
mark("up")
wait_for("up.0", "up.1", "up.2")
if rank == 1:
    write_note(False)
    mark("note")
    time.sleep(3.0)  # it ends after those that fail because of it, and after the wait for an unknown cause
    sys.exit(9)
wait_for("note.1")
write_note(True)
sys.exit(1)
"""


def test_the_agent_that_failed_is_reported_and_not_those_that_failed_because_of_it(script: Script) -> None:
    status, _, err = shoal_run("-n", 3, script(CULPRIT))
    assert status == 9, err
    assert re.search(r"shoal run: rank 1 \(pid \d+\) exited with code 9 after", err), err
    assert "another agent was lost" not in err


def test_with_on_failure_continue_the_status_is_that_of_the_agent_that_failed_first(script: Script) -> None:
    status, _, err = shoal_run("-n", 3, "--on-failure", "continue", script(CULPRIT))
    assert status == 9, err
    assert "0 of 3 agents finished" in err
    assert err.count("because another agent was lost") == 2 * 2  # when it is seen, and in the summary


def test_a_failure_caused_by_another_machines_agents_is_reported_as_such(script: Script) -> None:
    body = (
        "from shoal.fault_tolerance.launcher_notes import write_note\n"
        "if rank == 1: time.sleep(60)\nwrite_note(True)\nsys.exit(5)"
    )
    status, _, err = shoal_run("-n", 2, script(body))
    assert status == 5, err
    assert re.search(
        r"rank 0 \(pid \d+\) exited with code 5 after [\d.]+ s, because another agent was lost; ending", err
    )


def test_the_agent_that_others_waited_for_is_named(script: Script) -> None:
    body = """
import torch, shoal
shoal.init()
if rank == 1:
    wait_for("over")
mark("ready") if rank else None
shoal.allreduce(torch.ones(1), timeout=0.5)
"""
    status, _, err = shoal_run("-n", 2, script(body))
    assert status == 1, err
    assert re.search(
        r"rank 0 \(pid \d+\) exited with code 1 after [\d.]+ s, because rank 1 did not come in time;", err
    ), err


LOSES_AN_AGENT = """
import torch
import shoal
shoal.init()
for step in range(1000):
    if step == 3 and rank == 1:
        {end}
    shoal.neighbor_allreduce(torch.ones(3))
"""


@pytest.mark.parametrize(
    ("end", "status", "expected_text"),
    [
        pytest.param("sys.exit(9)", 9, "its script ended with SystemExit: 9", marks=pytest.mark.slow),
        pytest.param("raise SystemExit(9)", 9, "its script ended with SystemExit: 9", marks=pytest.mark.slow),
        pytest.param("exit(9)", 9, "its script ended with SystemExit: 9", marks=pytest.mark.slow),
        pytest.param(
            "raise ValueError('no data')", 1, "its script ended with ValueError: no data", marks=pytest.mark.slow
        ),
        pytest.param("os._exit(9)", 9, "", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, ""),
    ],
)
def test_the_agent_that_ended_is_named_by_the_launcher_and_by_the_others(
    script: Script, end: str, status: int, expected_text: str
) -> None:
    code, _, err = shoal_run("-n", 3, script(LOSES_AN_AGENT.format(end=end)))
    assert code == status, err
    assert re.search(r"shoal run: rank 1 \(pid \d+\) (exited|was killed)", err), err
    errors = [line for line in err.splitlines() if line.startswith(("[0]", "[2]")) and "PeerLost:" in line]
    assert all("rank 1" in line and expected_text in line for line in errors), err


def test_agents_are_monitored_while_the_reader_of_their_output_pauses(
    script: Script, start: Callable[..., Job], tmp_path: Path
) -> None:
    """Stdout is read only after the launcher has seen rank 1 fail and has ended rank 0, which keeps printing."""
    path = script("""
mark("up")
wait_for("up.0", "up.1")
if rank == 1:
    while not (here / "full").exists(): time.sleep(0.01)
    sys.exit(7)
for line in range(100_000):
    print("x" * 99, flush=True)
    if line == 1000: (here / "full").touch()
time.sleep(600)
""")
    with (tmp_path / "errors").open("w") as errors:
        job = start("-n", 2, path, stderr=errors)
    wait_until(lambda: len(marks(tmp_path, "up")) == 2, TIMEOUT)
    wait_until(lambda: "rank 1" in (tmp_path / "errors").read_text(), TIMEOUT)
    wait_until(lambda: not any(map(is_running, marks(tmp_path, "up").values())), TIMEOUT)
    out, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 7
    assert out.count(b"[0] " + b"x" * 99 + b"\n") > 1000


def test_a_killed_agent_gives_128_plus_its_signal(script: Script) -> None:
    status, _, err = shoal_run("-n", 2, script("if rank: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"))
    assert status == 128 + signal.SIGKILL
    assert re.search(r"rank 1 \(pid \d+\) was killed by SIGKILL after", err)


def test_an_agent_that_ignores_its_signal_is_killed_after_the_grace_period_with_all_descendants(
    script: Script, tmp_path: Path
) -> None:
    path = script("""
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(here / f"worker.{rank}").write_text(str(worker.pid))
mark("up")
wait_for("up.0", "up.1")
if rank == 0:
    sys.exit(1)
time.sleep(60)
""")
    started = time.monotonic()
    status, _, err = shoal_run("-n", 2, "--grace", 0.3, path)
    assert status == 1
    assert "1 agent still there: sending SIGKILL" in err
    assert time.monotonic() - started < scaled(15)
    left = {**marks(tmp_path, "up"), **{rank + 2: pid for rank, pid in marks(tmp_path, "worker").items()}}
    assert len(left) == 4
    wait_until(lambda: not any(map(is_running, left.values())))


def test_with_on_failure_continue_the_survivors_finish_and_the_failed_are_listed(
    script: Script, tmp_path: Path
) -> None:
    path = script("""
if rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
if rank == 2:
    sys.exit(4)
time.sleep(0.5)
mark("lived on")
""")
    status, _, err = shoal_run("-n", 3, "--on-failure", "continue", path)
    assert (status, list(marks(tmp_path, "lived on"))) == (0, [0])
    assert "letting the rest go on" in err
    summary = err.splitlines()[-1]
    assert re.fullmatch(
        r"shoal run: 1 of 3 agents finished; lost: "
        r"rank 1 \(pid \d+\) was killed by SIGSEGV after .* s; rank 2 \(pid \d+\) exited with code 4 after .* s",
        summary,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_with_on_failure_continue_init_does_not_wait_for_an_ended_agent(script: Script, dies: int) -> None:
    path = script(f"""
import shoal
if rank == {dies}:
    os.kill(os.getpid(), signal.SIGKILL)
shoal.init()
""")
    started = time.monotonic()
    status, _, err = shoal_run("-n", 3, "--on-failure", "continue", path)
    assert status == 128 + signal.SIGKILL
    assert time.monotonic() - started < scaled(30)
    for rank in {0, 1, 2} - {dies}:
        assert f"PeerLost: shoal.init() on rank {rank}: an agent has ended (rank {dies} (pid " in err
    assert err.count("was killed by SIGKILL after") >= 3


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_reader_that_has_paused_does_not_keep_the_launcher(script: Script, tmp_path: Path, signum: int) -> None:
    path = script("print('x' * 100_000, flush=True)\nmark('it has written')")
    with subprocess.Popen([*RUN, "-n", "2", str(path)], stdout=subprocess.PIPE) as job:  # nobody reads
        wait_until(lambda: len(list(marks(tmp_path, "it has written"))) == 2, scaled(30))
        time.sleep(1.0)  # the agents end, and the launcher waits for the reader
        assert job.poll() is None
        job.send_signal(signum)
        assert job.wait(scaled(20)) == 128 + signum
        assert job.stdout is not None
        job.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_init_does_not_wait_for_an_agent_that_has_ended_well(script: Script, policy: str) -> None:
    path = script("""
import shoal
if rank == 1:
    sys.exit(0)
shoal.init()
""")
    started = time.monotonic()
    status, _, err = shoal_run("-n", 3, "--on-failure", policy, path, environ={"SHOAL_TIMEOUT": "120"})
    assert time.monotonic() - started < scaled(60)
    assert "an agent has ended (rank 1 (pid " in err and ") exited with code 0 after" in err
    assert status == (0 if policy == "continue" else 1)


@pytest.mark.parametrize(
    ("first", "executable", "message"),
    [
        ("#!/bin/sh", False, "is not executable: chmod +x"),
        ("true", True, "has no #! line that names its interpreter"),
        ("#!/no/such/interpreter", True, "there is no interpreter of the name in its #! line"),
    ],
)
def test_a_program_that_cannot_be_started_is_refused_with_the_reason(
    tmp_path: Path, first: str, executable: bool, message: str
) -> None:
    program = tmp_path / "program"
    program.write_text(f"{first}\n")
    program.chmod(0o755 if executable else 0o644)
    status, _, err = shoal_run("-n", 2, "--no-python", program)
    assert status != 0 and message in err and "Traceback" not in err


def test_with_on_failure_continue_a_job_that_no_agent_finishes_has_failed(script: Script) -> None:
    path = script("time.sleep(0.5 * (1 - rank)); sys.exit(5 + rank)")
    status, _, err = shoal_run("-n", 2, "--on-failure", "continue", path)
    assert status == 6
    assert "0 of 2 agents finished" in err


def test_killing_the_launcher_leaves_no_orphan(script: Script, start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("-n", 2, script("mark('up'); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"))
    wait_until(lambda: len(marks(tmp_path, "up")) == 2)
    everyone = descendants(job.pid)
    assert everyone > set(marks(tmp_path, "up").values())
    job.kill()
    wait_until(lambda: not any(map(is_running, everyone)))


@pytest.mark.parametrize(
    ("signum", "action", "status"),
    [
        (signal.SIGTERM, "lambda *_: (mark('got'), sys.exit(0))", 0),
        (signal.SIGTERM, "signal.SIG_DFL", 128 + signal.SIGTERM),
        (signal.SIGHUP, "lambda *_: (mark('got'), sys.exit(0))", 0),
        (signal.SIGUSR1, "lambda *_: mark('got')", 0),
        pytest.param(signal.SIGUSR2, "lambda *_: mark('got')", 0, marks=pytest.mark.slow),
    ],
)
def test_signals_are_forwarded_to_all_agents(
    script: Script, start: Callable[..., Job], tmp_path: Path, signum: signal.Signals, action: str, status: int
) -> None:
    job = start(
        "-n",
        2,
        script(f"""
signal.signal({int(signum)}, {action})
mark("up")
wait_for("got.0", "got.1")
"""),
    )
    wait_until(lambda: len(marks(tmp_path, "up")) == 2)
    job.send_signal(signum)
    assert job.wait(TIMEOUT) == status


def test_a_hangup_that_nohup_ignores_stays_ignored(script: Script, start: Callable[..., Job], tmp_path: Path) -> None:
    path = script("mark('up'); wait_for('go')")
    job = start("-n", 2, path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None)
    wait_until(lambda: len(marks(tmp_path, "up")) == 2)
    job.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert job.wait(TIMEOUT) == 0


def on_a_terminal(*arguments: object) -> list[str]:
    """The command line that runs ``shoal run`` as the foreground job of a terminal, whose keys come from stdin."""
    run = [*RUN, *map(str, arguments)]
    code = f"import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn({run!r})))"
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("passed_on", [False, True], ids=["terminal", "wrapper"])
def test_ctrl_c_reaches_each_agent_once_and_gives_130(script: Script, tmp_path: Path, passed_on: bool) -> None:
    path = script("""
interrupts = 0
def count(*_):
    global interrupts
    interrupts += 1
signal.signal(signal.SIGINT, count)
mark("up")
while not interrupts:
    time.sleep(0.01)
time.sleep(0.3)
print("interrupts:", interrupts, flush=True)
sys.exit(9)
""")
    with subprocess.Popen(on_a_terminal("-n", 2, path), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as terminal:
        assert terminal.stdin is not None
        wait_until(lambda: len(marks(tmp_path, "up")) == 2)
        terminal.stdin.write(b"\x03" * (1 + passed_on))  # once more by a wrapper, such as `uv run`
        terminal.stdin.flush()
        assert terminal.stdout is not None
        output = terminal.stdout.read()
        assert terminal.wait(TIMEOUT) == 130
    assert output.count(b"interrupts: 1") == 2


def test_ctrl_c_reaches_the_child_that_an_agent_waits_for(
    script: Script, start: Callable[..., Job], tmp_path: Path
) -> None:
    # As from a terminal: system() itself ignores the signal until its child has ended.
    path = script("""
status = os.system(f"touch {here}/asleep.{rank}; exec sleep 60")
print(os.waitstatus_to_exitcode(status))
""")
    job = start("-n", 2, path)
    wait_until(lambda: len(list(tmp_path.glob("asleep.*"))) == 2)
    job.send_signal(signal.SIGINT)
    out, _ = job.communicate(timeout=scaled(8))
    assert sorted(out.splitlines()) == [b"[0] -2", b"[1] -2"]


def test_a_second_ctrl_c_kills_at_once(script: Script, start: Callable[..., Job], tmp_path: Path) -> None:
    path = script("signal.signal(signal.SIGINT, lambda *_: mark('got')); mark('up'); wait_for('never')")
    job = start("-n", 2, "--grace", 30, path)
    wait_until(lambda: len(marks(tmp_path, "up")) == 2)
    job.send_signal(signal.SIGINT)
    wait_until(lambda: len(marks(tmp_path, "got")) == 2)
    time.sleep(2 * SAME_INTERRUPT_SECONDS)
    job.send_signal(signal.SIGINT)
    assert job.wait(30) == 130
    wait_until(lambda: not any(map(is_running, marks(tmp_path, "up").values())))


def test_after_ctrl_c_the_signals_escalate(script: Script, start: Callable[..., Job], tmp_path: Path) -> None:
    path = script("""
signal.signal(signal.SIGINT, lambda *_: mark("interrupted"))
signal.signal(signal.SIGTERM, lambda *_: mark("terminated"))
mark("up")
wait_for("never")
""")
    job = start("-n", 2, "--grace", 0.3, path)
    wait_until(lambda: len(marks(tmp_path, "up")) == 2)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 130
    assert (len(marks(tmp_path, "interrupted")), len(marks(tmp_path, "terminated"))) == (2, 2)
    assert err.index(b"2 agents still there: sending SIGTERM") < err.index(b"2 agents still there: sending SIGKILL")


def test_agents_stop_and_continue_with_the_launcher(script: Script, start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("-n", 2, script("mark('up'); wait_for('go')"))
    wait_until(lambda: len(marks(tmp_path, "up")) == 2)
    states = lambda: {  # noqa: E731
        Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] for pid in (job.pid, *marks(tmp_path, "up").values())
    }
    job.send_signal(signal.SIGTSTP)
    wait_until(lambda: states() == {"T"})
    job.send_signal(signal.SIGCONT)
    wait_until(lambda: "T" not in states())
    (tmp_path / "go").touch()
    assert job.wait(TIMEOUT) == 0


def test_lines_are_whole_marked_by_rank_and_byte_for_byte(script: Script, start: Callable[..., Job]) -> None:
    path = script("""
for i in range(200):
    for piece in (b"line ", b"%d " % i, bytes(set(range(256)) - {10, 13}), b"\\n"):
        os.write(1, piece)
os.write(2, "não\\n".encode("latin-1"))
os.write(1, b"no newline")
""")
    job = start("-n", 2, path)
    out, err = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 0
    junk = bytes(set(range(256)) - {10, 13})
    for rank in (0, 1):
        own = [line for line in out.split(b"\n") if line.startswith(b"[%d] " % rank)]
        assert own == [b"[%d] line %d %s" % (rank, i, junk) for i in range(200)] + [b"[%d] no newline" % rank]
    assert out.count(b"\n") == 402
    assert b"[0] n\xe3o\n" in err
    assert b"[1] n\xe3o\n" in err


def test_one_agent_has_the_launchers_own_input_and_output(script: Script, start: Callable[..., Job]) -> None:
    job = start("-n", 1, script("sys.stdout.write(input().upper())"), stdin=subprocess.PIPE)
    assert job.communicate(b"as it is\n", timeout=TIMEOUT) == (b"AS IT IS", b"")


def test_without_the_prefix_output_passes_through(script: Script) -> None:
    status, out, _ = shoal_run("-n", 2, "--no-prefix", script("os.write(1, b'as it is|')"))
    assert (status, out) == (0, "as it is|as it is|")


def test_only_rank_0_reads_the_input(script: Script, start: Callable[..., Job]) -> None:
    # Rank 1 tries first, while all of the input is still there.
    path = script("rank or wait_for('read.1'); print(repr(sys.stdin.read())); mark('read')")
    job = start("-n", 2, path, stdin=subprocess.PIPE)
    out, _ = job.communicate(b"for rank 0", timeout=TIMEOUT)
    assert sorted(out.splitlines()) == [b"[0] 'for rank 0'", b"[1] ''"]


def test_a_process_left_by_a_finished_agent_does_not_block_the_job(
    script: Script, start: Callable[..., Job], tmp_path: Path
) -> None:
    path = script("""
import subprocess
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
(here / f"helper.{rank}").write_text(str(helper.pid))
print("done")
""")
    job = start("-n", 2, path)
    try:
        out, _ = job.communicate(timeout=scaled(15))
        assert (job.returncode, sorted(out.splitlines())) == (0, [b"[0] done", b"[1] done"])
        assert all(map(is_running, marks(tmp_path, "helper").values()))
    finally:
        for pid in marks(tmp_path, "helper").values():
            os.kill(pid, signal.SIGKILL)


def test_a_closed_output_pipe_ends_the_job(script: Script, start: Callable[..., Job]) -> None:
    job = start("-n", 2, script("while True: print('y')"))
    assert job.stdout is not None
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(TIMEOUT) == 1


def test_the_scripts_arguments_are_its_own(script: Script, tmp_path: Path) -> None:
    script("print(sys.argv[1:])")
    arguments = ["-n", "9", "--help", "--", "-m", "--on-failure", "x y"]
    assert shoal_run("-n", 1, tmp_path / "script.py", *arguments)[:2] == (0, f"{arguments}\n")
    assert shoal_run("-n", 1, "-m", "script", *arguments, cwd=tmp_path)[:2] == (0, f"{arguments}\n")
    assert shoal_run("-n", 1, "--", tmp_path / "script.py", "-n")[:2] == (0, "['-n']\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-n 0 {script}", "-n 0: at least one agent"),
        ("-n two {script}", "invalid int value: 'two'"),
        ("-n 2", "required: script\n"),
        ("", "required: script\n"),
        ("-np 2 {script}", "-np is an option of mpirun: give -n N"),
        ("-n gpu {script}", "leave -n out for all GPUs"),
        ("--nproc_per_node 2 {script}", "Did you mean --nproc-per-node?"),
        ("--max-restart 2 {script}", "Did you mean --max-restarts?"),
        ("--rdzv_endpoint=a:1 {script}", "Instead of --rdzv_endpoint use --rendezvous HOST:PORT"),
        ("--standalone {script}", "Leave --standalone out"),
        ("-n 2 python {script} --lr 1", "leave 'python' out: shoal run -n 2 {script} --lr 1"),
        ("-n 2 {python} {script}", "leave '{python}' out: shoal run -n 2 {script}"),
        ("-n 2 python3.11 -u -m train", "leave 'python3.11' out: shoal run -n 2 -m train"),
        ("-n 2 ls -l", "shoal run -n 2 --no-python ls -l"),
        ("-n 2 --no-python no-such-program", "--no-python: there is no program 'no-such-program'"),
        ("-n 2 --env LR {script}", "--env LR: give NAME=VALUE"),
        ("-n 2 no/such/file.py", "there is no script 'no/such/file.py'"),
        ("-n 2 --nnodes 2 {script}", "--nnodes needs --rendezvous HOST:PORT"),
        ("-n 2 --nnodes 0 {script}", "--nnodes 0"),
        ("-n 2 --nnodes 2 --node-rank 2 --rendezvous a:1 {script}", "--node-rank 2 must be 0 to 1"),
        ("-n 2 --rendezvous nowhere {script}", "--rendezvous='nowhere' is not host:port"),
        ("-n 2 --on-failure ignore {script}", "invalid choice: 'ignore'"),
        ("-n 2 --grace -1 {script}", "--grace -1.0: seconds"),
        ("-n 2 --rank 3 {script}", "unrecognized arguments: --rank"),
    ],
)
def test_invalid_arguments_are_refused(
    script: Script, capfd: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    from shoal.cli import main

    path = script("raise AssertionError('must not run')")
    try:
        status = main(["run", *arguments.format(script=path, python=sys.executable).split()])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert message.format(script=path, python=sys.executable) in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        ("rnu -n 2 x.py", "Did you mean: shoal run -n 2 x.py"),
        ("train.py --lr 1", "Did you mean: shoal run train.py --lr 1"),
        ("stat", "Did you mean: shoal status"),
        ("frobnicate", "there is no command 'frobnicate'; there are run, bench, "),
    ],
)
def test_an_unknown_command_is_refused_with_a_suggestion(
    capfd: pytest.CaptureFixture[str], arguments: str, suggestion: str
) -> None:
    from shoal.cli import main

    assert main(arguments.split()) == 2
    assert suggestion in capfd.readouterr().err


def test_code_the_standard_input_and_a_program_are_run_as_well(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['RANK'], os.environ['LR'], os.environ['SHOAL_RECORD'])"
    options = ["-n", 1, "--env", "LR=a=b", "--record", tmp_path]
    printed = f"['-x'] 0 a=b {tmp_path}\n"
    assert shoal_run(*options, "-c", code, "-x")[:2] == (0, printed)
    assert shoal_run(*options, "-", "-x", input=code)[:2] == (0, printed)
    assert shoal_run(*options, "--no-python", "sh", "-c", "echo $RANK $LR; exit 7")[:2] == (7, "0 a=b\n")


def test_the_default_number_of_agents_is_that_of_gpus_or_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from shoal.cli import run, run_arguments

    def agents(environ: dict[str, str]) -> int:
        parser = argparse.ArgumentParser()
        run.add_arguments(parser)
        args = parser.parse_args(["script.py"])
        run_arguments.fill_in(args, environ)
        return int(args.agents)

    monkeypatch.setattr(run_arguments, "GPUS", tmp_path)
    assert agents({}) == 1
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / name).mkdir()
    assert agents({}) == 3
    assert agents({"CUDA_VISIBLE_DEVICES": "0,2"}) == 2
    assert agents({"CUDA_VISIBLE_DEVICES": ""}) == 1
    assert agents({"CUDA_VISIBLE_DEVICES": "1,-1,0"}) == 1
    assert agents({"PET_NPROC_PER_NODE": "4"}) == 4


OF_KUBEFLOW = {"PET_NPROC_PER_NODE": "2", "PET_NNODES": "4", "PET_NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ("-n 2", {"JOB_COMPLETION_INDEX": "3"}, (2, 1, 0)),  # of a sweep
        ("-n 2 --nnodes 4", {"JOB_COMPLETION_INDEX": "3"}, (2, 4, 3)),
        (
            "",
            {"PET_NPROC_PER_NODE": "2", "PET_NNODES": "4", "PET_NODE_RANK": "1", "JOB_COMPLETION_INDEX": "3"},
            (2, 4, 1),
        ),
        (
            "-n 1 --nnodes 5 --node-rank 2",
            {"PET_NPROC_PER_NODE": "2", "PET_NNODES": "4", "PET_NODE_RANK": "1"},
            (1, 5, 2),
        ),
        ("-n 2", {"PET_NPROC_PER_NODE": "auto"}, (2, 1, 0)),
        ("", {"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE='auto' is no whole number: give -n, how many agents"),
        ("-n 2", {"PET_NNODES": "1:3"}, "PET_NNODES='1:3' is no whole number: give --nnodes"),
    ],
)
def test_options_not_on_the_command_line_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, arguments: str, environ: dict[str, str], expected: tuple[int, int, int] | str
) -> None:
    from shoal.cli import run, run_arguments

    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    args = parser.parse_args([*arguments.split(), "script.py"])
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            run_arguments.fill_in(args, environ)
        return
    run_arguments.fill_in(args, environ)
    assert (args.agents, args.nnodes, args.node_rank) == expected


def test_the_variables_give_the_address_of_machine_0_with_or_without_brackets() -> None:
    from shoal.cli.run_arguments import rendezvous

    assert rendezvous({"PET_MASTER_ADDR": "fd00::1", "PET_MASTER_PORT": "29400"}) == ("fd00::1", 29400)
    assert rendezvous({"PET_MASTER_ADDR": "train-0.train", "PET_MASTER_PORT": "29400"}) == ("train-0.train", 29400)
    assert rendezvous({"PET_MASTER_ADDR": "train-0.train"}) is None


def test_an_occupied_rendezvous_port_is_an_error(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    from shoal.cli import main

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert main(["run", "-n", "2", "--rendezvous", address, str(script(""))]) == 1
    assert f"cannot listen on {address}: Address already in use" in capfd.readouterr().err


def test_the_overview_lists_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    from shoal.cli import main

    assert main([]) == 2
    assert re.search(r"^ +run +start the agents", capfd.readouterr().out, re.MULTILINE)
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"shoal {shoal.__version__}\n"
    assert main(["swim"]) == 2
    assert "there is no command 'swim'" in capfd.readouterr().err


def test_the_launcher_needs_no_torch() -> None:
    code = LAUNCHER.replace(
        "sys.exit(main", "import atexit; atexit.register(lambda: print('torch' in sys.modules)); (main"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout.split()[:3] == ["usage:", "shoal", "run"]
    assert done.stdout.split()[-1] == "False"
