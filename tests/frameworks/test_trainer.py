"""Transformers' Trainer with agents of Shoal: what each sees, what is averaged, evaluated, saved and resumed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'shoal[transformers]'")
pytest.importorskip("accelerate", reason="pip install 'shoal[transformers]'")

import transformers
from accelerate.state import AcceleratorState

import shoal
from shoal.frameworks.transformers import ShoalTrainer
from support import trainer_agents as agents
from support.scripts import printed_by
from support.world import World

if TYPE_CHECKING:
    from support.trainer_agents import Params, Trained

SIZE = 4
EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))
pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def trained(world: World, folder: Path, **options: Any) -> list[Trained]:
    return world.results(partial(agents.train, **options), str(folder), patience=120.0)


def mean_of(models: list[Params]) -> Params:
    return {name: np.mean([one[name] for one in models], axis=0) for name in models[0]}


def same(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def loss_of(params: Params) -> float:
    model, rows = agents.small_model(), agents.Sequences(agents.EVALUATED)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()}, strict=False)
    batch = torch.stack([rows[index]["input_ids"] for index in range(len(rows))])
    loss: float = model.eval()(input_ids=batch, labels=batch).loss.item()
    return loss


def test_each_example_is_used_once_and_agents_average_once_in_a_step(world: World, tmp_path: Path) -> None:
    result = trained(world, tmp_path, gradient_accumulation_steps=2)
    assert sorted(index for one in result for index in one.seen) == list(range(64))
    assert [len(one.seen) for one in result] == [16] * SIZE
    assert [(one.steps, one.rounds) for one in result] == [(2, 2)] * SIZE
    assert {(one.wrapped, one.optimizer, one.has_group) for one in result} == {("GPT2LMHeadModel", "AccumAdamW", False)}


def test_the_logged_loss_is_the_mean_over_the_agents(world: World, tmp_path: Path) -> None:
    result = trained(world, tmp_path)
    assert len({tuple(one.own_losses) for one in result}) == SIZE
    means = torch.tensor([one.own_losses for one in result], dtype=torch.float64).mean(0)
    for one in result:
        logged = [log["loss"] for log in one.logs if "loss" in log]
        torch.testing.assert_close(torch.tensor(logged, dtype=torch.float64), means, rtol=1e-5, atol=0)
        final = next(log["train_loss"] for log in one.logs if "train_loss" in log)
        assert final == pytest.approx(means.mean().item(), rel=1e-5)


def test_averaged_gradients_of_sgd_are_training_with_the_total_batch(world: World, tmp_path: Path) -> None:
    options = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    result = trained(world, tmp_path, wrapper="DistributedGradientAllreduceOptimizer", **options)
    assert all(same(result[0].params, one.params) for one in result)
    model, rows = agents.small_model(), agents.Sequences(64)
    model.train()
    for step in range(4):
        batch = torch.stack([rows[index]["input_ids"] for one in result for index in one.seen[4 * step : 4 * step + 4]])
        model.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.5 * param.grad
    for name, value in agents.params_of(model).items():
        np.testing.assert_allclose(result[0].params[name], value, rtol=1e-4, atol=1e-5)


def test_gradients_are_clipped_and_computed_in_bfloat16(world: World, tmp_path: Path) -> None:
    clipped = trained(world, tmp_path, max_grad_norm=1e-3, bf16=True)
    assert all(norm == pytest.approx(1e-3, rel=1e-2) for one in clipped for norm in one.norms)
    assert [one.dtypes for one in clipped] == [{"torch.bfloat16"}] * SIZE
    assert {str(value.dtype) for one in clipped for value in one.params.values()} == {"float32"}


def test_the_mean_model_is_evaluated_and_saved_and_agents_keep_their_own(world: World, tmp_path: Path) -> None:
    result = world.results(
        partial(agents.train_and_evaluate, optim="sgd", learning_rate=0.5, examples=52), str(tmp_path), patience=120.0
    )
    own = [one["own"] for one in result]
    assert not same(own[0], own[1])
    assert all(one["unchanged"] for one in result)
    mean = mean_of(own)
    for name, value in result[0]["saved"].items():
        np.testing.assert_allclose(value, mean[name], rtol=1e-5, atol=1e-6)
    assert [one["loss"] for one in result] == pytest.approx([loss_of(mean)] * SIZE, rel=1e-5)
    assert all(abs(loss_of(one) / loss_of(mean) - 1) > 1e-4 for one in own)
    assert [one["first"] for one in result] == [True, False, False, False]


def test_the_best_model_is_the_mean_and_all_have_it_at_the_end(world: World, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    options |= {"load_best_model_at_end": True, "save_total_limit": 1}
    result = world.results(partial(agents.train_and_evaluate, **options), str(tmp_path), patience=120.0)
    assert len({one["best"] for one in result}) == 1
    for one in result:
        for name, value in one["best_params"].items():
            assert np.array_equal(one["own"][name], value)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(world: World, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_train_epochs": 2, "dropout": 0.2, "save_strategy": "steps", "save_steps": 3}
    full = trained(world, tmp_path, **options)
    assert not same(full[0].params, full[1].params)
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()  # as if killed while it was saved
    (tmp_path / "checkpoint-8" / "trainer_state.json").unlink()
    resumed = trained(world, tmp_path, resume=True, **options)
    for one, again in zip(full, resumed, strict=True):
        assert (again.steps, again.rounds) == (one.steps, one.rounds) == (8, 8)
        assert again.own_losses == one.own_losses[3:]
        assert same(one.params, again.params)
        assert all(np.array_equal(*both) for both in zip(one.moments, again.moments, strict=True))
        assert again.drawn == one.drawn


def test_the_example_trains_saves_and_resumes(world: World, tmp_path: Path) -> None:
    text = tmp_path / "sheep.txt"
    text.write_text("".join(f"{number} sheep and {number % 7} shoals; " for number in range(400)))
    script, folder = str(EXAMPLES / "transformers_trainer.py"), tmp_path / "out"
    options = [f"--text={text}", f"--output={folder}", "--save-every=4", "--context=16", "--width=16", "--layers=1"]
    losses = []
    for steps in (["--steps=8"], ["--steps=12", "--resume"]):
        printed = world.results(printed_by, script, *options, *steps, patience=120.0)
        assert not any(printed[1:])
        losses += re.findall(r"the mean of 4 models: ([\d.]+) nats", printed[0])
    assert float(losses[1]) < float(losses[0]) < 4.0
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-12", "checkpoint-8", "final"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fsdp": "full_shard"}, "shares one model between processes"),
        ({"deepspeed": "zero2.json"}, "shares one model between processes"),
        ({"auto_find_batch_size": True}, "the others wait"),
        ({"enable_jit_checkpoint": True}, "save alone"),
        ({"optim": "lomo"}, "steps during the backward pass"),
        ({"optim": "galore_adamw_layerwise"}, "steps during the backward pass"),
        ({"optim": "schedule_free_adamw"}, "in turn"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batches of different sizes"),
        ({"resume_from": "mean"}, "'consensus'"),
        ({"adam_accumulate": -1}, "0 or more"),
    ],
)
def test_features_that_need_one_common_model_are_refused(options: dict[str, Any], why: str) -> None:
    output = agents.fails(options)
    assert output.startswith("ValueError"), output
    assert why in output


@pytest.fixture
def shut_down_the_agent() -> Iterator[None]:
    """Shut the agent of this process down after the test."""
    yield
    shoal.shutdown()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("shut_down_the_agent")
def test_transformers_own_arguments_and_models_without_a_mean_are_refused(tmp_path: Path) -> None:
    plain = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(TypeError, match="ShoalTrainingArguments, which takes the same arguments"):
        ShoalTrainer(agents.small_model(), plain)
    for attribute, value in (("is_quantized", True), ("_tp_size", 2)):
        model = torch.nn.Linear(1, 1)
        setattr(model, attribute, value)
        with pytest.raises(ValueError, match="the model is"):
            ShoalTrainer(model, agents.ShoalTrainingArguments(str(tmp_path), use_cpu=True))
