"""Agents on a Ray cluster of two nodes, and in the workers of Ray's own trainer."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import shoal
import shoal.ray
from support.limits import scaled

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]  # what Ray warns of is not ours
PAGE = Path(__file__).parents[2] / "docs" / "ray.md"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    result = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        result.add_node(num_cpus=2)
        ray.init(address=result.address, log_to_driver=True, logging_level="error")
        result.wait_for_nodes()
        yield result
    finally:
        ray.shutdown()
        result.shutdown()


def have_exited(pids: list[int], seconds: float = 15.0) -> bool:
    """No such process is there any more, within so long."""
    limit = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() >= limit:
            return False
        time.sleep(0.05)
    return True


def test_four_agents_on_two_nodes_are_two_machines_of_two_and_return_by_rank(
    cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def average(plus: float, *, times: int) -> tuple[Any, ...]:
        x = torch.full((300_000,), shoal.rank() + plus)
        for _ in range(times):
            x = shoal.allreduce(x)
        print(f"the mean is {x[-1].item()}", flush=True)
        node = ray.get_runtime_context().get_node_id()
        return (
            shoal.rank(),
            shoal.size(),
            shoal.bluefog.machine_rank(),
            shoal.local_rank(),
            node,
            x[-1].item(),
            os.getpid(),
        )

    result = shoal.ray.train(average, 10.0, agents=4, times=2)
    assert [one[:4] for one in result] == [(rank, 4, rank // 2, rank % 2) for rank in range(4)]
    nodes = [one[4] for one in result]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert [one[5] for one in result] == [11.5] * 4
    assert have_exited([one[6] for one in result])
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())
    output, limit = "", time.monotonic() + 20.0
    while not re.search(r"\(rank \d .*the mean is 11.5", output):  # Ray brings it by way of files
        assert time.monotonic() < limit, output
        time.sleep(0.1)
        output += "".join(capfd.readouterr())


def test_an_agent_that_is_killed_is_named_and_all_others_end_in_time(cluster: Any, tmp_path: Path) -> None:
    def run(folder: str) -> None:
        Path(folder, str(shoal.rank())).write_text(str(os.getpid()))
        for step in range(10_000):
            shoal.neighbor_allreduce(torch.ones(10))
            if step == 5 and shoal.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    started = time.monotonic()
    with pytest.raises(
        shoal.ray.AgentFailed, match=r"rank 1's process died \(.*\); ranks \[0, 2\] ended with it"
    ) as info:
        shoal.ray.train(run, str(tmp_path), agents=3)
    assert time.monotonic() - started < scaled(120)
    assert info.value.ranks == (1,)
    assert isinstance(info.value.__cause__, ray.exceptions.RayActorError)
    assert have_exited([int(file.read_text()) for file in tmp_path.iterdir()])


def test_an_agents_exception_is_the_cause_and_an_unresponsive_agent_is_killed(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.ray, "GRACE_SECONDS", 1.0)

    def run(folder: str) -> None:
        Path(folder, str(shoal.rank())).write_text(str(os.getpid()))
        if shoal.rank() == 0:
            time.sleep(1000)
        raise KeyError("no such layer")

    message = r"rank 1 failed with KeyError: 'no such layer'; ranks \[0\] had not noticed after 1 s and were killed"
    with pytest.raises(shoal.ray.AgentFailed, match=message) as info:
        shoal.ray.train(run, str(tmp_path), agents=2)
    assert isinstance(info.value.__cause__, KeyError)
    assert have_exited([int(file.read_text()) for file in tmp_path.iterdir()])


def test_an_exception_that_cannot_be_serialized_is_described(cluster: Any) -> None:
    class OddError(Exception):
        def __init__(self, layer: str, number: int) -> None:
            super().__init__(f"no such layer: {layer}{number}")

    def run() -> None:
        if shoal.rank() == 1:
            raise OddError("conv", 7)
        shoal.allreduce(torch.ones(1))

    message = r"rank 1 failed with OddError: no such layer: conv7; ranks \[0\] ended with it"
    with pytest.raises(shoal.ray.AgentFailed, match=message) as info:
        shoal.ray.train(run, agents=2)
    assert "Traceback" in str(info.value.__cause__) and "in run" in str(info.value.__cause__)


def test_with_on_loss_continue_the_others_continue_and_the_log_names_the_failed_agent(
    cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> tuple[int, ...]:
        for step in range(300):
            shoal.allreduce(torch.ones(10))
            if step == 5 and shoal.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return shoal.alive()

    assert shoal.ray.train(run, agents=3, on_loss="continue") == [(0, 2), None, (0, 2)]
    assert "the others went on without rank 1: rank 1's process died" in caplog.text


def test_the_example_of_the_page_learns(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example is not None
    monkeypatch.setattr(ray, "init", lambda: None)  # the tests' cluster is there
    variables: dict[str, Any] = {"__name__": "example"}
    exec(example[1], variables)
    accuracies = variables["accuracies"]
    assert len(accuracies) == 4 and len(set(accuracies)) == 1
    assert accuracies[0] > 0.9


def test_unavailable_resources_are_named(cluster: Any) -> None:
    with pytest.raises(shoal.DeadlineExceeded, match=r"no room for 3 agents of \{'CPU': 2\} each within 1 s.*'CPU': 4"):
        shoal.ray.train(print, agents=3, resources_per_agent={"CPU": 2}, timeout=1.0)
    assert ray.available_resources()["CPU"] == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"agents": 0}, "agents=0"),
        ({"agents": 2, "resources_per_agent": {"CPU": -1}}, "a positive amount of each resource"),
        ({"agents": 2, "resources_per_agent": {}}, "a positive amount"),
        ({"agents": 2, "resources_per_agent": {"CPU": "1"}}, "a positive amount"),
        ({"agents": 2, "resources_per_agent": 1}, "a positive amount"),
        ({"agents": 2, "timeout": 0.0}, "timeout=0.0"),
        ({"agents": 2, "timeout": "5"}, "timeout='5'"),
        ({"agents": 2, "on_loss": "ignore"}, "on_loss='ignore'"),
    ],
)
def test_invalid_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shoal.ray.train(print, **wrong)


def test_in_the_workers_of_rays_own_trainer_init_finds_the_process_group(cluster: Any, tmp_path: Path) -> None:
    torch_trainer = pytest.importorskip("ray.train.torch")
    from ray.train import RunConfig, ScalingConfig

    def loop(config: dict[str, str]) -> None:
        shoal.init()
        mean = shoal.neighbor_allreduce(torch.tensor([float(shoal.rank())])).item()
        assert shoal.rank() == torch.distributed.get_rank()
        Path(config["folder"], str(shoal.rank())).write_text(f"{shoal.size()} {mean}")
        shoal.shutdown()

    trainer = torch_trainer.TorchTrainer(
        loop,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=str(tmp_path / "runs"), name="shoal"),
    )
    trainer.fit()
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2 0.5", "2 0.5"]
