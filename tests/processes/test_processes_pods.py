"""Agents in pods, with the variables that the controllers of Kubernetes and Kubeflow set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import shoal
from support.launcher import RUN
from support.limits import scaled
from support.namespaces import network_namespaces
from support.pods import into_pod, start_pod
from support.world import World

TRAIN = """
import sys, time
from pathlib import Path
import torch, shoal

shoal.init()
model = torch.nn.Linear(1000, 500)
checkpoint = shoal.Checkpoint(model=model)
step = checkpoint.load(None, missing_ok=True)
while True:
    x = shoal.neighbor_allreduce(torch.full((300_000,), float(shoal.rank())))
    there = shoal.allgather(torch.tensor([shoal.rank()])).tolist()
    machine = shoal.bluefog.machine_rank()
    print("step", step, "rank", shoal.rank(), "of", shoal.size(), "machine", machine, "with", there)
    stop = shoal.allreduce(torch.tensor([float(Path(sys.argv[1]).exists())]), average=False)
    if stop.item():
        break
    time.sleep(0.05)
    step += 1
    checkpoint.save(None, step)
print("rank", shoal.rank(), "ends")
shoal.shutdown()
"""


def index_of(rank: int, address: str) -> dict[str, str]:
    """An indexed Job, or a JobSet: the fields that its controller sets, applied to the manifest."""
    return {"JOB_COMPLETION_INDEX": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": address, "MASTER_PORT": "29400"}


def pytorch_job(rank: int, address: str) -> dict[str, str]:
    """Kubeflow's PyTorchJob, with one agent in each pod."""
    master = {"MASTER_ADDR": address, "MASTER_PORT": "23456", "RANK": str(rank), "WORLD_SIZE": "3"}
    pet = {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": "23456", "PET_NODE_RANK": str(rank), "PET_NNODES": "3"}
    return master | pet | {"PET_NPROC_PER_NODE": "1", "PYTHONUNBUFFERED": "0"}


def train_job(rank: int, address: str) -> dict[str, str]:
    """Kubeflow's TrainJob: of torchrun's variables only those of a machine."""
    pet = {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": "29400", "PET_NODE_RANK": str(rank)}
    return pet | {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "JOB_COMPLETION_INDEX": str(rank)}


def meet(variables: Mapping[str, str], late: float) -> tuple[int, int, int, float]:
    """Become an agent with these variables, some time later than told to."""
    os.environ.pop("RANK")
    os.environ.update(variables)
    time.sleep(late)
    shoal.init()
    mean = shoal.allreduce(torch.full((1000,), float(shoal.rank())))[-1].item()
    return shoal.rank(), shoal.size(), shoal.bluefog.machine_rank(), mean


@pytest.mark.transport("network")
@pytest.mark.parametrize("controller", [index_of, pytorch_job])
def test_pods_of_one_agent_that_start_in_any_order_connect(controller: Callable[[int, str], dict[str, str]]) -> None:
    with network_namespaces(3) as machines, World(3, init=False, namespaces=machines) as world:
        late = (1.5, 0.0, 0.7)  # the one where all meet comes last
        pods = [controller(rank, machines[0].address) for rank in range(3)]
        pending = [world.run_on(rank, meet, pods[rank], late[rank]) for rank in range(3)]
        outcomes = [one.outcome() for one in pending]
        assert [outcome.value for outcome in outcomes] == [(rank, 3, rank, 1.0) for rank in range(3)], outcomes


def lines_of(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def await_line(logs: list[Path], awaited: str, after: int = 0, seconds: float = 50.0) -> None:
    """Until the first log has a line that ends so, after so many lines."""
    limit = time.monotonic() + seconds
    while not any(line.endswith(awaited) for line in lines_of(logs[0])[after:]):
        full = "\n".join(f"{log.name}:\n" + "\n".join(lines_of(log)[-25:]) for log in logs)
        assert time.monotonic() < limit, f"nobody has said {awaited!r}\n{full}"
        time.sleep(0.05)


@contextmanager
def ended(pods: dict[int, subprocess.Popen[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        for pod in pods.values():
            pod.kill()
            pod.wait()


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_pods_under_shoal_run_connect_and_a_rescheduled_one_rejoins(tmp_path: Path) -> None:
    """As in ``deploy/kubernetes``, with the variables of a TrainJob: no option gives the pod's index."""
    script, stop = tmp_path / "train.py", tmp_path / "stop"
    script.write_text(TRAIN)
    command = [*RUN, "--on-failure", "restart", str(script), str(stop)]
    with network_namespaces(3) as machines:
        address = machines[0].address
        common = {"SHOAL_SECRET": "of this job", "SHOAL_TIMEOUT": "60", "SHOAL_DROP_AFTER": "4"}
        logs = [tmp_path / "pod0.log", tmp_path / "pod1.log", tmp_path / "pod1 again.log"]
        pods: dict[int, subprocess.Popen[bytes]] = {}

        def start(index: int, machine: int, log: Path) -> None:
            pods[machine] = start_pod(machines[machine], command, common | train_job(index, address), log)

        with ended(pods):
            start(1, 1, logs[1])
            time.sleep(0.5)
            start(0, 0, logs[0])
            await_line(logs, "rank 0 of 4 machine 0 with [0, 1, 2, 3]")
            await_line(logs[1:], "rank 3 of 4 machine 1 with [0, 1, 2, 3]")

            status = [sys.executable, "-m", "shoal", "status"]
            done = subprocess.run(
                into_pod(pods[0], status), capture_output=True, text=True, timeout=scaled(60), check=False
            )
            assert done.returncode == 0 and "2 of 4 agents" in done.stdout, done.stdout + done.stderr

            pods[1].send_signal(signal.SIGKILL)  # the pod, with all its processes
            pods[1].wait()
            await_line(logs, "with [0, 1]")
            known = len(lines_of(logs[0]))
            start(1, 2, logs[2])  # another node: another address
            await_line(logs, "with [0, 1, 2, 3]", after=known)
            await_line(logs[2:], "rank 2 of 4 machine 1 with [0, 1, 2, 3]")
            stop.touch()
            codes = [pods[machine].wait(30) for machine in (0, 2)]
            output = "\n".join(lines_of(logs[0]) + lines_of(logs[2]))
            assert codes == [0, 0], output
            assert sum(line.endswith("ends") for line in output.splitlines()) == 4
