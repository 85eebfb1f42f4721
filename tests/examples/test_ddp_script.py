"""``examples/ddp_script``: a DistributedDataParallel script and the same with Shoal, which survives a killed agent."""

from __future__ import annotations

import difflib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.status import ask, find
from support.launcher import RUN
from support.limits import scaled
from support.namespaces import network_namespaces

FOLDER = Path(__file__).parents[2] / "examples" / "ddp_script"
BEFORE, AFTER = FOLDER / "before.py", FOLDER / "after.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
ENVIRONMENT = {name: text for name, text in os.environ.items() if not name.startswith(("SHOAL_", "OMP_"))} | {
    "OMP_NUM_THREADS": "1"
}
SECONDS = 240
WRAPPER = """
import json, runpy, sys, types

class SummaryWriter:  # in the place of TensorBoard's, which may not be installed
    def __init__(self, folder):
        self._file = open(folder / "scalars.jsonl", "a")
    def add_scalar(self, name, number, step):
        print(json.dumps([name, float(number), step]), file=self._file, flush=True)

module = types.ModuleType("torch.utils.tensorboard")
module.SummaryWriter = SummaryWriter
sys.modules[module.__name__] = module
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
Job = subprocess.Popen[str]


@pytest.fixture
def wrapper(tmp_path: Path) -> Path:
    path = tmp_path / "wrapper.py"
    path.write_text(WRAPPER)
    return path


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(*command: object, **environment: str) -> Job:
        pipe = subprocess.PIPE
        environ = ENVIRONMENT | environment
        jobs.append(subprocess.Popen([*map(str, command)], env=environ, stdout=pipe, stderr=pipe, text=True))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.send_signal(signal.SIGTERM)
        try:
            job.communicate(timeout=scaled(20))
        except subprocess.TimeoutExpired:
            job.kill()
            job.communicate()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def agents(wrapper: Path) -> dict[int, int]:
    """The pid of each rank's process that runs the script; its data loader's workers are younger."""
    result: dict[int, int] = {}
    for entry in sorted(
        (entry for entry in Path("/proc").iterdir() if entry.name.isdigit()), key=lambda e: int(e.name)
    ):
        try:
            argv = (entry / "cmdline").read_bytes().split(b"\0")
            environ = dict(part.partition("=")[::2] for part in (entry / "environ").read_text().split("\0"))
        except OSError:
            continue
        if str(wrapper).encode() in argv and "LOCAL_RANK" in environ:
            result.setdefault(int(environ["RANK"]), int(entry.name))
    return result


def status(pid: int) -> dict[str, Any]:
    """The status of the agent of a process; empty while it does not answer."""
    answers = [agent for process in ask({pid: find().get(pid, [])}) for agent in process.agents]
    return answers[0] if answers else {}


def ended(job: Job) -> list[str]:
    """How each agent ended: the last line that it printed."""
    output, errors = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, errors
    return re.findall(r"ended after step \d+, best validation loss [\d.]+", output)


def scalars(folder: Path, name: str) -> dict[int, float]:
    rows = map(json.loads, (folder / "scalars.jsonl").read_text().splitlines())
    return {step: number for what, number, step in rows if what == name}


def test_at_most_20_lines_change() -> None:
    before, after = (path.read_text().split('"""', 2)[2].splitlines() for path in (BEFORE, AFTER))
    changes = [line[0] for line in difflib.ndiff(before, after)]
    assert changes.count("-") <= 20 and changes.count("+") <= 20, changes
    text = AFTER.read_text()
    named = ("num_workers", "AdamW", "CosineAnnealingLR", "clip_grad_norm_", "bfloat16", "patience", "SummaryWriter")
    assert all(word in text for word in (*named, "shoal.consensus", "shoal.save", "shoal.Checkpoint", "metrics"))
    assert "torch.distributed" not in text


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_before_and_after_learn_equally(tmp_path: Path, wrapper: Path, start: Callable[..., Job]) -> None:
    result = {}
    for script in (BEFORE, AFTER):
        folder = tmp_path / script.stem
        job = start(*TORCHRUN, "--standalone", wrapper, script, folder, "--epochs", 6)
        lines = ended(job)
        assert len(lines) == 2 and len(set(lines)) == 1, lines
        result[script.stem] = float(lines[0].split()[-1]), lines[0].split()[3]
        best = torch.load(folder / "best.pt")
        assert set(best) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    (before, steps), (after, same_steps) = result["before"], result["after"]
    assert steps == same_steps and abs(before - after) < 0.35 * before, result
    assert {10, 20} <= scalars(tmp_path / "after", "loss/mean").keys()


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
def test_a_killed_agent_rejoins_and_the_run_is_resumed(
    tmp_path: Path, wrapper: Path, start: Callable[..., Job]
) -> None:
    folder, options = tmp_path / "out", ["-n", "2", "--no-prefix", "--on-failure", "restart"]
    job = start(*RUN, *options, wrapper, AFTER, folder, "--epochs", 100_000, "--patience", 100_000)
    until(lambda: len(list(folder.glob("0*/manifest.json"))) > 1)
    first = agents(wrapper)
    os.kill(first[1], signal.SIGKILL)
    until(lambda: agents(wrapper).get(1, first[1]) != first[1])
    # A process whose interpreter is about to start has no command line for a moment.
    until(lambda: status(agents(wrapper).get(1, 0)).get("stepped_ago") is not None)  # it has been admitted, and trains
    until(lambda: status(first[0]).get("lost") == [])
    assert agents(wrapper)[0] == first[0]
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=SECONDS)
    manifests = sorted(folder.glob("0*/manifest.json"))
    last = json.loads(manifests[-1].read_text())["step"]
    again = start(*RUN, *options, wrapper, AFTER, folder, "--epochs", last + 3, "--patience", 100_000)
    lines = ended(again)
    assert len(lines) == 2 and len(set(lines)) == 1, lines
    assert int(lines[0].split()[3].rstrip(",")) % (last + 3) == 0, "each epoch has equally many steps"


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_torchrun_restarts_it_from_its_checkpoint(tmp_path: Path, wrapper: Path, start: Callable[..., Job]) -> None:
    folder = tmp_path / "out"
    options = ["--standalone", "--max-restarts", "2", wrapper, AFTER, folder]
    job = start(*TORCHRUN, *options, "--epochs", 12, "--patience", 12)
    until(lambda: len(list(folder.glob("0*/manifest.json"))) > 1)
    os.kill(agents(wrapper)[1], signal.SIGKILL)
    lines = ended(job)
    assert len(lines) == 2 and len(set(lines)) == 1, lines
    epochs = [json.loads(row)[2] for row in (folder / "scalars.jsonl").read_text().splitlines() if "validation" in row]
    assert epochs[-1] == 11 and epochs.count(0) == 1, "it was resumed, and not begun again"


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_on_two_machines(tmp_path: Path, wrapper: Path, start: Callable[..., Job]) -> None:
    folder = tmp_path / "out"
    with network_namespaces(2) as machines:
        address = f"{machines[0].address}:29411"
        jobs = []
        for number, machine in enumerate(machines):
            options = ["-n", "1", "--nnodes", "2", "--node-rank", number, "--rendezvous", address, "--no-prefix"]
            command = [*RUN, *options, wrapper, AFTER, folder, "--epochs", 3]
            jobs.append(start("ip", "netns", "exec", machine.name, *command, SHOAL_SECRET="of the test"))
        lines = [line for job in jobs for line in ended(job)]
    assert len(lines) == 2 and len(set(lines)) == 1, lines
