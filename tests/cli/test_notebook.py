"""``shoal notebook``: cells on agents that are processes, cells that raise, and nothing left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from shoal.cli import main, notebook
from support.limits import scaled

pytest.importorskip("ipyparallel")
zmq = pytest.importorskip("zmq")

pytestmark = pytest.mark.timeout(240)
CELLS = Path(__file__).parents[1] / "support" / "notebook_cells.py"
SIZE = 3
START = "import shoal, torch, os\nshoal.shutdown()\nshoal.init()\n"
AVERAGE = "print('mean', shoal.neighbor_allreduce(torch.tensor([float(shoal.rank())])).item())\n"


@dataclass(frozen=True)
class Cell:
    """What one printed, and how it ended.

    Attributes:
        message: the output of all engines.
        error: what a user reads where it failed.
        raised: the error of each engine that failed.
        seconds: its duration.
    """

    message: str
    error: str
    raised: list[str]
    seconds: float

    def by_rank(self) -> dict[int, str]:
        """What each engine printed."""
        results = re.findall(r"\[stdout:(\d+)\] ?\n?(.*?)(?=\n\[stdout|\Z)", self.message, re.DOTALL)
        return {int(rank): text.strip() for rank, text in results}


@dataclass(frozen=True)
class Notebook:
    """A job in an IPython directory of its own.

    Attributes:
        home: the directory.
    """

    home: Path

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "IPYTHONDIR": str(self.home), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shoal", "notebook", "start", *arguments]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=scaled(200))

    def run_command(self, *arguments: str) -> tuple[int, str, str]:
        """The exit status, stdout and stderr of a command that starts nothing, run in this process."""
        with (
            mock.patch.dict(os.environ, self.environ),
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            status = main(["notebook", *arguments])
        return status, out.getvalue(), err.getvalue()

    def cells(self, *cells: str) -> list[Cell]:
        """Run them one after the other, each on all engines.

        ``%%px`` alone waits a second for the engines' output. Until it is to show progress it waits for all of it.
        """
        given = json.dumps([f"%%px --progress-after 60\n{cell}" for cell in cells])
        command = [sys.executable, str(CELLS), "shoal"]
        done = subprocess.run(
            command, env=self.environ, input=given, capture_output=True, text=True, timeout=scaled(200)
        )
        assert done.returncode == 0, done.stderr
        return [Cell(**json.loads(line)) for line in done.stdout.splitlines()]

    def processes(self) -> list[int]:
        """Those that were started with this directory in their environment."""
        wanted, result = f"IPYTHONDIR={self.home}".encode(), []
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and path.name != str(os.getpid()):
                try:
                    if wanted in (path / "environ").read_bytes().split(b"\0"):
                        result.append(int(path.name))
                except OSError:
                    continue
        return result

    def owner(self) -> int:
        """The process behind the job."""
        return int((self.home / "profile_shoal" / "pid" / "shoal-notebook").read_text())


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    one = Notebook(tmp_path_factory.mktemp("ipython"))
    done = one.start("-n", str(SIZE))
    try:
        assert done.returncode == 0, done.stderr
        assert f"{SIZE} agents are there" in done.stdout
        yield one
    finally:
        one.run_command("stop")


def test_engines_are_agents_by_rank(job: Notebook) -> None:
    where = "print(shoal.rank(), shoal.size(), os.environ['RANK'], os.environ['LOCAL_WORLD_SIZE'])"
    (cell,) = job.cells(START + where)
    assert cell.error == ""
    assert cell.by_rank() == {rank: f"{rank} {SIZE} {rank} {SIZE}" for rank in range(SIZE)}


def test_a_cell_averages_over_the_agents(job: Notebook) -> None:
    cells = job.cells(START, AVERAGE, "x = float(shoal.rank() ** 2)", "print(shoal.allreduce(torch.tensor(x)).item())")
    assert [cell.error for cell in cells] == [""] * 4
    assert cells[1].by_rank() == dict.fromkeys(range(SIZE), "mean 1.0")
    assert [float(text) for text in cells[3].by_rank().values()] == pytest.approx([5 / 3] * SIZE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wait", [AVERAGE, "shoal.allreduce(torch.ones(300_000))", "shoal.barrier()"], ids=["small", "large", "barrier"]
)
def test_an_exception_in_one_engines_cell_ends_the_others_soon(job: Notebook, wait: str) -> None:
    first, broken, again = job.cells(
        START + AVERAGE, f"if shoal.rank() == 1: raise ValueError('no ' 'luck')\n{wait}", START + AVERAGE
    )
    assert first.error == ""
    # Every wait would end after a minute; this one ends on request.
    assert broken.seconds < scaled(30)
    assert broken.error == f"{SIZE} errors"
    failed = [text for text in broken.raised if "its cell raised ValueError: no luck" in text]
    assert len(failed) == SIZE - 1
    assert all(text.startswith("PeerLost") for text in failed)
    assert again.error == ""
    assert again.by_rank() == dict.fromkeys(range(SIZE), "mean 1.0")


def test_an_exception_in_every_engine_is_handled(job: Notebook) -> None:
    _, slip, unreadable, after = job.cells(START + AVERAGE, "shoal.rank() / 0", "1 +", AVERAGE)
    assert slip.error == f"{SIZE} errors"
    assert [text.partition(":")[0] for text in unreadable.raised] == ["SyntaxError"] * SIZE
    assert after.error == ""
    assert after.by_rank() == dict.fromkeys(range(SIZE), "mean 1.0")


def test_an_exception_in_an_engine_that_no_other_needs_has_no_effect(job: Notebook) -> None:
    _, slip, after = job.cells(START + AVERAGE, "if shoal.rank() == 2: undefined", AVERAGE)
    assert [text.partition(":")[0] for text in slip.raised] == ["NameError"]
    assert after.error == ""
    assert after.by_rank() == dict.fromkeys(range(SIZE), "mean 1.0")


def test_a_client_of_the_ports_without_the_key_receives_nothing(job: Notebook) -> None:
    """Other users of this machine can connect. Cell output is only for users who can read the profile."""
    files = list((job.home / "profile_shoal" / "security").glob("ipcontroller*-client.json"))
    (connection,) = [json.loads(path.read_text()) for path in files]
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.linger = 0
        listener.subscribe(b"")
        listener.connect(f"{connection['interface']}:{connection['iopub']}")
        time.sleep(0.5)
        (cell,) = job.cells("print('a word ' 'for me alone')")
        assert cell.message.count("a word for me alone") == SIZE
        assert not listener.poll(500)


def test_the_controllers_ports_are_none_that_linux_gives_to_other_processes(job: Notebook) -> None:
    security = job.home / "profile_shoal" / "security"
    ports: set[int] = set()
    for name in ("ipcontroller-client.json", "ipcontroller-engine.json"):
        for value in json.loads((security / name).read_text()).values():
            ports |= {port for port in (value if isinstance(value, list) else [value]) if isinstance(port, int)}
    assert len(ports) >= 12
    assert all(20000 <= port <= 29999 for port in ports)


def test_a_second_job_of_a_profile_is_refused(job: Notebook) -> None:
    status, _, err = job.run_command("start", "-n", "1")
    assert status == 1
    assert "`shoal notebook stop` ends them" in err
    assert job.run_command("status")[1] == f"agents are running, started by process {job.owner()}\n"


def test_a_killed_job_leaves_nothing(job: Notebook) -> None:
    os.kill(job.owner(), signal.SIGKILL)
    _until(lambda: not job.processes(), "all of it to end")
    assert job.run_command("status")[1] == "no agents are running\n"


@pytest.mark.slow
def test_it_restarts_after_that_and_stop_ends_busy_engines(job: Notebook) -> None:
    job.run_command("stop")  # where the test before did not run
    again = job.start("-n", "1")
    assert again.returncode == 0, again.stderr
    mark = job.home / "busy"
    cell = f"%%px\nimport shoal, subprocess\nshoal.init()\nopen({str(mark)!r}, 'w').close()\n"
    command = [sys.executable, str(CELLS), "shoal"]
    with subprocess.Popen(command, env=job.environ, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as busy:
        assert busy.stdin is not None
        busy.stdin.write(json.dumps([cell + "subprocess.Popen(['sleep', '1000'])\nwhile True: pass"]).encode())
        busy.stdin.close()
        _until(mark.exists, "the engine to be busy")
        done = job.run_command("stop")
        busy.kill()
    assert done[:2] == (0, "stopped\n"), done[2]
    assert job.processes() == []
    assert job.run_command("status")[0] == 1


def test_engines_that_do_not_start_are_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    one = Notebook(tmp_path)
    done = one.start("-n", "1", "--wait", "0.2")
    assert done.returncode == 1
    assert re.search("did not start in time|came in time", done.stderr)
    assert one.processes() == []


@pytest.mark.slow
def test_a_killed_controller_ends_the_engines(tmp_path: Path) -> None:
    one = Notebook(tmp_path)
    done = one.start("-n", "1")
    assert done.returncode == 0, done.stderr
    # Its first process; the monitor of the heartbeats is a child of it.
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in one.processes()}
    controller = min(pid for pid, command in commands.items() if b"controller" in command)
    os.kill(controller, signal.SIGKILL)
    _until(lambda: not one.processes(), "all of it to end")
    log = (tmp_path / "profile_shoal" / "log" / "shoal-notebook.log").read_text()
    assert "the controller has ended (code -9): no cell can reach the engines" in log


def test_zero_agents_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["notebook", "start", "-n", "0"]) == 2
    assert "at least one agent must run" in capsys.readouterr().err


@pytest.mark.parametrize("profile", ["../other", "a/b", "..", ""])
def test_a_path_as_a_profile_is_refused(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["notebook", "start", "-n", "1", "--profile", profile]) == 2
    assert "a profile is a name, not a path" in capsys.readouterr().err


def test_looking_for_agents_creates_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for command, code in (("status", 1), ("stop", 0)):
        assert main(["notebook", command, "--profile", "shaol"]) == code
        assert capsys.readouterr().out == "no agents are running: there is no profile 'shaol'\n"
    assert not list(tmp_path.glob("profile_*"))


def test_without_ipyparallel_the_error_names_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notebook.importlib.util, "find_spec", lambda name: None)
    assert main(["notebook", "status"]) == 2
    assert "pip install 'shoal[notebook]'" in capsys.readouterr().err


def _until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s for {what}")
        time.sleep(0.02)
