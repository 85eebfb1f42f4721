"""Accelerate with agents of Shoal: prepare(), gathering, saving and resuming, and launching."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("accelerate", reason="pip install 'shoal[transformers]'")

import shoal
from shoal.frameworks.accelerate import ShoalAccelerator
from support import accelerate_agents as agents
from support import accelerate_scripts
from support.launcher import RUN
from support.limits import scaled
from support.world import World, plain_environment

SIZE = 4
EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_prepare_wraps_optimizers_and_no_model_and_distributes_all_examples(world: World) -> None:
    result = world.results(agents.prepare, patience=120.0)
    assert [one["place"] for one in result] == [(rank, SIZE, rank) for rank in range(SIZE)]
    assert [one["main"] for one in result] == [True, False, False, False]
    assert {(one["model"], one["optimizer"], one["group"]) for one in result} == {
        ("Sequential", "DecentralizedOptimizer", False)
    }
    for one in result:
        assert all(np.array_equal(*both) for both in zip(one["first"], result[0]["first"], strict=True))
    for epoch in range(2):
        seen = [number for one in result for number in one["seen"][epoch]]
        assert set(seen) == set(range(agents.EXAMPLES))
        assert len(seen) == 40  # 38 in batches of 2 for 4 agents: the first two make up the last round
    assert result[0]["seen"][0] != result[0]["seen"][1]
    weighted = [number for one in result for number in one["weighted"]]
    assert len(weighted) == len(set(weighted)) == 36
    # Five batches of an epoch, two in a step, the last by itself.
    assert [one["rounds"] for one in result] == [6] * SIZE


def test_gathered_values_are_of_all_agents_without_duplicates(world: World) -> None:
    result = world.results(agents.gather, patience=60.0)
    for rank, one in enumerate(result):
        assert one["numbers"] == list(range(agents.EXAMPLES))
        assert one["stream"] == list(range(agents.EXAMPLES))
        assert one["full rounds"] == list(range(32))
        assert one["objects"] == [f"a{number}" for number in range(agents.EXAMPLES)]
        assert one["nested"] == (
            "{'bool': tensor([False,  True, False, False]), 'nan': [tensor([nan, nan, nan, nan])]}"
        )
        assert one["reduced"] == [6.0, 1.5, 3.0]
        assert one["padded"] == [[rank] * (rank + 1) + [-1] * (SIZE - rank - 1)]
        assert one["trigger"]


def test_a_structure_with_more_tensors_on_one_agent_fails_one_call(world: World) -> None:
    for one in world.results(agents.other_structures, patience=120.0):
        assert one["outcomes"] == ["Mismatch"] * 3
        ranks = [0.0, 1.0, 2.0, 3.0]
        assert one["gathered"] == [(ranks, [10 * step + rank for rank in ranks]) for step in range(3)]
        assert one["reduced"] == [[6.0, 6.0 * step] for step in range(3)]


def test_the_samples_of_an_agent_sampler_are_not_dealt_out_again(world: World) -> None:
    result = world.results(agents.own_samples, patience=60.0)
    seen = [one["seen"] for one in result]
    assert [len(one) for one in seen] == [9] * SIZE  # 38 for 4 agents: two are left out of the epoch
    assert len({number for one in seen for number in one}) == 36
    for one in result:
        assert len(one["gathered"]) == len(set(one["gathered"])) == 36
        assert len(one["last"]) == SIZE


def test_an_optimizer_is_given_the_models_whose_parameters_it_has(world: World) -> None:
    assert world.results(agents.two_models, patience=60.0) == [[1, 2, 4 + 8]] * SIZE


def test_a_scripts_configuration_of_loaders_is_unchanged(world: World) -> None:
    assert world.results(agents.configuration, patience=60.0) == [(None, None)] * SIZE


def test_functions_of_accelerate_imported_before_use_shoal(world: World) -> None:
    result = world.results(agents.functions, patience=60.0)
    for rank, one in enumerate(result):
        assert one["gathered"] == [0, 1, 2, 3]
        assert one["nested"] == (
            "{'bool': tensor([False,  True, False, False]), 'nan': [tensor([nan, 0., nan, 1., nan, 2., nan, 3.])]}"
        )
        assert one["halves"] == [[float(agent)] * 2 for agent in range(SIZE)]
        assert one["objects"] == ["a0", 0, "a1", 1, "a2", 2, "a3", 3]
        assert one["reduced"] == [6.0, 1.5, 3.0, 6.0]  # "none" is a sum there
        assert one["broadcast"] == [2.0, 2.0]
        assert one["objects of 1"] == [1, {"rank": 1}]
        assert one["padded"] == [[rank] * (rank + 1) + [-1] * (SIZE - rank - 1)]
        assert "Process 3: [4]" in one["shapes"]
    assert len({one["drawn"] for one in result}) == 1


def test_a_loaded_state_resumes_bit_for_bit_with_each_agents_own(world: World, tmp_path: Path) -> None:
    result = world.results(agents.save_and_resume, str(tmp_path), patience=60.0)
    for one in result:
        assert one["seen"][0] == one["seen"][1]
        assert all(np.array_equal(*both) for both in zip(one["whole"], one["again"], strict=True))
        for number, mean in enumerate(one["mean"]):
            np.testing.assert_allclose(mean, np.mean([each["saved"][number] for each in result], axis=0), rtol=1e-5)
    assert len({one["drawn"] for one in result}) == SIZE, "at the mean each agent draws for itself"
    assert not np.array_equal(result[0]["whole"][0], result[1]["whole"][0])
    assert not np.array_equal(result[0]["whole"][-1], result[1]["whole"][-1])


def test_the_saved_model_is_the_mean(world: World, tmp_path: Path) -> None:
    result = world.results(agents.save_model, str(tmp_path), patience=60.0)
    assert not np.array_equal(result[0]["own"]["0.weight"], result[1]["own"]["0.weight"])
    for name, value in result[0]["saved"].items():
        np.testing.assert_allclose(value, np.mean([one["own"][name] for one in result], axis=0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("optimizer first", "Prepare both together"),
        ("join", "even_batches"),
        ("hook", "calls no hooks"),
        ("environment", "shares one model"),
        ("dispatch", "from rank 0 over a process group"),
        ("dispatching loader", "from rank 0 over a process group"),
        ("object", "object"),
        ("group", "already opened a process group"),
    ],
)
def test_silently_wrong_settings_are_refused(world: World, what: str, why: str) -> None:
    for result in world.results(agents.refused, what, patience=60.0):
        assert result.startswith(("ValueError", "TypeError")), result
        assert why in result


def test_agents_that_are_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="Start processes"):
        shoal.Fleet(2, timeout=20.0).run(ShoalAccelerator)


def test_shoal_run_starts_the_example_and_accelerate_launch_resumes_it(tmp_path: Path) -> None:
    script, state = str(EXAMPLES / "accelerate_digits.py"), tmp_path / "state"
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes=4",
        "--num_machines=1",
    ]
    launch += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    environment = plain_environment() | {"OMP_NUM_THREADS": "1"}
    printed = ""
    for launcher, option in (([*RUN, "--no-prefix", "-n", "4"], "--stop-after=2"), (launch, "--resume")):
        command = [*launcher, script, f"--output={state}", "--epochs=4", option]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=scaled(200), check=False
        )
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    results = re.findall(r"epoch (\d): the mean model reads ([\d.]+)% of 449 images", printed)
    assert [number for number, _ in results] == ["1", "2", "3", "4"]
    assert float(results[-1][1]) > 85.0
    assert (state / "final" / "model.safetensors").exists()


def test_accelerates_own_checks_pass_on_agents(tmp_path: Path) -> None:
    """The job's checks write files into its folder. Each agent prints the checks that have passed."""
    script = Path(accelerate_scripts.__file__)
    done = subprocess.run(
        [*RUN, "--no-prefix", "-n", "2", str(script)],
        cwd=tmp_path,
        env=plain_environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=scaled(200),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    passed = Counter(re.findall(r"passed (\w+\.\w+)", done.stdout))
    assert passed == {f"{name}.{check}": 2 for name, checks in accelerate_scripts.CHECKS.items() for check in checks}


@pytest.mark.parametrize("name", accelerate_scripts.CHECKS)
def test_each_of_accelerates_own_checks_is_run_or_excluded_for_a_reason(name: str) -> None:
    script = import_module(f"{accelerate_scripts.SCRIPTS}.{name}")
    named = [*accelerate_scripts.CHECKS[name], *accelerate_scripts.LEFT_OUT[name]]
    assert sorted(named) == sorted(accelerate_scripts.checks_of(script))
