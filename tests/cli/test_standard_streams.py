"""Commands whose standard streams are closed, on a full disk, or read no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.launcher import LAUNCHER

TIMEOUT = 60
SCRIPT = "import time\nfor _ in range(5): print('hello', flush=True); time.sleep(0.02)\n"
FULL = "No space left on device"


def shoal(arguments: str, redirection: str, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command of ``shoal``, with a shell's redirection."""
    program = LAUNCHER.replace('["run", *sys.argv[1:]]', "sys.argv[1:]")
    shell = ["sh", "-c", f'"$0" -c "$1" {arguments} {redirection}', sys.executable, program]
    clean = {name: text for name, text in os.environ.items() if name not in ("PYTHONUNBUFFERED", "OMP_NUM_THREADS")}
    done = subprocess.run(shell, env={**clean, **(environ or {})}, capture_output=True, text=True, timeout=TIMEOUT)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "hello.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("options", ["-n 2", "-n 1", "-n 2 --no-prefix"])
@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_agents_run_with_closed_streams(script: Path, options: str, redirection: str) -> None:
    status, out, err = shoal(f"run {options} {script}", redirection)
    assert status == 0, err
    assert out.count("hello") == (0 if ">&-" in redirection.replace("2>&-", "") else 5 * int(options[3]))
    assert "Traceback" not in err


@pytest.mark.parametrize("options", ["-n 2", "-n 1", "-n 2 --no-prefix"])
def test_agents_whose_output_cannot_be_written_fail_as_a_program_does(script: Path, options: str) -> None:
    status, _, err = shoal(f"run {options} {script}", ">/dev/full")
    assert status == 1
    assert FULL in err


def test_a_run_whose_last_output_cannot_be_written_has_failed(script: Path) -> None:
    """Its agent does not notice, because it prints no more."""
    script.write_text("import os\nif os.environ['RANK'] == '0': print('hello')")
    status, _, err = shoal(f"run -n 2 {script}", ">/dev/full")
    assert status == 1
    assert f"shoal run: cannot write the output of the agents: {FULL}\n" in err
    assert "Traceback" not in err


def test_a_run_continues_without_its_messages(script: Path) -> None:
    status, out, _ = shoal(f"run -n 2 {script}", "2>/dev/full")
    assert (status, out.count("hello")) == (0, 10)


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", ["--version", "--help", "run --help", "topology list"])
def test_a_command_whose_output_cannot_be_written_reports_it(command: str, buffered: bool) -> None:
    environ = {} if buffered else {"PYTHONUNBUFFERED": "1"}
    status, _, err = shoal(command, ">/dev/full", environ)
    assert status == 1
    name = "shoal" if command.startswith("-") else f"shoal {command.split()[0]}"
    assert err == f"{name}: error: cannot write the output: {FULL}\n"


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", ["--version", "topology list"])
def test_a_command_whose_reader_has_exited_ends_silently(command: str, buffered: bool, tmp_path: Path) -> None:
    environ = {} if buffered else {"PYTHONUNBUFFERED": "1"}
    # The reader has gone before the command begins.
    pipeline = f'3>&1 >/dev/null; (sleep 0.3; "$0" -c "$1" {command}; echo $? > {tmp_path}/status) | true'
    _, _, err = shoal("--version", pipeline, environ)
    assert ((tmp_path / "status").read_text(), err) == ("1\n", "")


@pytest.mark.parametrize("command", ["--version", "topology list"])
def test_a_command_runs_with_closed_streams(command: str) -> None:
    assert shoal(command, ">&-") == (0, "", "")
    assert shoal(command, ">&- 2>&-") == (0, "", "")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", ">&-", ">/dev/full"])
def test_a_refusal_has_its_exit_status_also_if_its_message_cannot_be_written(redirection: str, tmp_path: Path) -> None:
    assert shoal(f"run -n 0 {tmp_path}/none.py", redirection)[0] == 2
    assert shoal(f"report {tmp_path}", redirection)[0] == 2
