"""The command line starts without torch, whose import takes longer than most that it does."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import shoal
from shoal.observability.membership_log import CAME, LEFT, MembershipEvent
from support.world import World
from support.written_traces import Written

TIMEOUT = 60
# Replaces torch: an import of it fails, and is logged even where the error is caught.
NO_TORCH = """
import traceback
with open({log!r}, "a") as log:
    log.writelines(traceback.format_stack())
raise ImportError("nobody was to import torch here")
"""


class Shell:
    """Runs ``shoal`` where torch cannot be imported."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "imported"
        self._path = folder / "in front"
        self._path.mkdir()
        (self._path / "torch.py").write_text(NO_TORCH.format(log=str(self._log)))

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        ours = str(Path(shoal.__path__[0]).parent)
        path = os.pathsep.join([str(self._path), ours, os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-m", "shoal", *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def output_of(self, command: subprocess.Popen[str], status: int = 0) -> str:
        """What it printed; it has ended with this status, and imported no torch."""
        output, _ = command.communicate(timeout=TIMEOUT)
        assert not self._log.exists(), self._log.read_text()
        assert command.returncode == status, output
        return output

    def run(self, *arguments: str | Path, status: int = 0) -> str:
        return self.output_of(self.start(*arguments), status)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What two agents have written in a run: traces and records."""
    result = tmp_path / "written"
    result.mkdir()
    for rank in range(2):
        trace = Written(rank)
        trace.step(1, 0.0, 10.0)
        trace.call(10.0, 12.0)
        trace.message("to", 1 - rank, 10.5)
        trace.message("from", 1 - rank, 11.0)
        trace.into(result)
        entries = [MembershipEvent(100.0, rank, 0, CAME, alive=(0, 1)), MembershipEvent(130.0, rank, 0, LEFT)]
        (result / f"agent{rank}.jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in entries))
    return result


def test_torch_imports_are_detected(shell: Shell) -> None:
    command = shell.start("topology", "recommend", "-n", "4")
    with pytest.raises(AssertionError, match="netmodel"):
        shell.output_of(command)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--version"], shoal.__version__),
        *(([name, "--help"], f"usage: shoal {name}") for name in ("run", "report", "watch", "status", "topology")),
        *(([name, "--help"], f"usage: shoal {name}") for name in ("notebook", "certificates")),
        (["topology", "list"], "ring"),
        (["topology", "show", "ring"], "ring"),
        (["topology", "compare", "ring", "torus"], "torus"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_commands_that_do_not_need_torch_start_without_it(shell: Shell, arguments: list[str], expected: str) -> None:
    assert expected in shell.run(*arguments)


def test_the_overview_starts_without_torch(shell: Shell) -> None:
    assert "start the agents" in shell.run("--help")


def test_agents_are_started_without_torch(shell: Shell, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('rank', os.environ['RANK'])\n")
    output = shell.run("run", "-n", "2", script)
    assert "rank 0" in output and "rank 1" in output


def test_agents_are_queried_without_torch(shell: Shell) -> None:
    with World(1) as world:
        assert "one agent" in shell.run("status", str(world.members[0].pid))
        assert json.loads(shell.run("status", "--json", str(world.members[0].pid)))[0]["there"] == 1


def test_a_report_is_written_without_torch(shell: Shell, folder: Path) -> None:
    shell.run("report", folder)


def test_a_finished_run_is_shown_without_torch(shell: Shell, folder: Path) -> None:
    command = shell.start("watch", folder)
    assert command.stdout is not None
    assert select.select([command.stdout], [], [], TIMEOUT)[0]
    command.send_signal(signal.SIGINT)
    assert "watch the run at http://127.0.0.1:" in shell.output_of(command)


def test_certificates_are_created_without_torch(shell: Shell, tmp_path: Path) -> None:
    shell.run("certificates", "make", "--agents", "2", "--folder", tmp_path / "made")
    assert "2 certificates" in shell.run("certificates", "show", "--folder", tmp_path / "made")
