"""Transformers' Trainer with agents of Shoal: streams, what people ask a Trainer for, and going on after a loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="pip install 'shoal[transformers]'")
pytest.importorskip("accelerate", reason="pip install 'shoal[transformers]'")

from transformers import GPT2LMHeadModel

from support import trainer_features as agents
from support.trainer_agents import params_of
from support.trainer_features import same
from support.world import World

SIZE = 4
PATIENCE = 120.0
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def mean_of(values: list[Any]) -> Any:
    return np.mean(np.stack([np.asarray(one, dtype=np.float64) for one in values]), axis=0)


@pytest.fixture
def disposable_world() -> Iterator[World]:
    made = World(SIZE, init=False, timeout=60.0)
    try:
        yield made
    finally:
        made.destroy()


def test_a_stream_is_distributed_once_and_all_agents_end_together(world: World, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"count": 1000, "max_steps": 3}, list(range(24))),
        ({"count": 40, "max_steps": 2, "gradient_accumulation_steps": 2}, list(range(32))),
        (
            {
                "count": 1000,
                "max_steps": 3,
                "per_device_train_batch_size": 8,
                "accelerator_config": {"split_batches": True},
            },
            list(range(24)),
        ),
        # Of 20 the last round is made up by the first four; then the stream restarts.
        ({"count": 20, "max_steps": 4}, sorted([*range(20), *range(4), *range(8)])),
    ]
    for options, numbers in cases:
        result = world.results(partial(agents.stream, **options), str(tmp_path), patience=PATIENCE)
        assert sorted(number for one in result for number in one["numbers"]) == numbers
        assert [(one["steps"], one["rounds"]) for one in result] == [(options["max_steps"],) * 2] * SIZE


def test_a_run_on_a_stream_resumes_bit_for_bit_in_its_first_epoch(world: World, tmp_path: Path) -> None:
    options: dict[str, Any] = {"count": 100, "max_steps": 6, "dropout": 0.2, "save_strategy": "steps", "save_steps": 4}
    full = world.results(partial(agents.stream, **options), str(tmp_path), patience=PATIENCE)
    resumed = world.results(
        partial(agents.stream, resume=str(tmp_path / "checkpoint-4"), **options), str(tmp_path), patience=PATIENCE
    )
    for one, again in zip(full, resumed, strict=True):
        assert again["losses"] == one["losses"][4:] and same(one["params"], again["params"])
        assert again["numbers"] == one["numbers"][8:]


def test_each_sample_is_evaluated_and_predicted_once_also_of_a_stream(world: World, tmp_path: Path) -> None:
    rows = agents.Sequences(21)
    labels = [rows[index]["labels"].tolist() for index in range(21)]
    tokens = [(index + step) % agents.VOCABULARY for index in range(21) for step in range(2 + index % 7)]
    for one in world.results(agents.evaluations, str(tmp_path), patience=PATIENCE):
        for name in ("plain", "accumulated"):
            assert one[name]["eval_labels"] == labels
            assert one[name]["eval_loss"] == one["plain"]["eval_loss"]
            right = one["predicted"][:, :-1].argmax(-1) == np.array(labels)[:, 1:]
            assert one[name]["eval_accuracy"] == pytest.approx(right.mean())
        assert one["predicted"].shape[0] == 21
        np.testing.assert_array_equal(one["stream"], one["predicted"])
        assert one["stream metrics"]["test_labels"] == labels
        assert one["stream metrics"]["test_loss"] == one["predicted metrics"]["test_loss"]
        assert one["full stream"].shape[0] == 24
        np.testing.assert_array_equal(one["full stream"][:21], one["predicted"])
        assert one["tokens"] == (len(tokens), sum(tokens))


def test_early_stopping_the_best_model_callbacks_and_tensorboard(world: World, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    result = world.results(agents.conveniences, str(tmp_path), patience=PATIENCE)
    best = params_of(GPT2LMHeadModel.from_pretrained(result[0]["best"]))
    for one in result:
        assert one["steps"] == 4  # of 20: the second evaluation is no better by 100
        assert one["losses"] == result[0]["losses"] and len(one["losses"]) == 2
        assert same(one["params"], best)
    assert [one["places"] for one in result] == [{(True, True)}, {(False, False)}, {(False, False)}, {(False, False)}]
    assert len(result[0]["boards"]) == 1


def test_gradient_checkpointing_changes_no_value(world: World, tmp_path: Path) -> None:
    for plain, again, reentrant in world.results(agents.recomputing, str(tmp_path), patience=PATIENCE):
        assert len(plain) == 4 and again == plain and reentrant == plain


def test_batches_of_similar_lengths_have_each_sample_once_and_are_resumed(world: World, tmp_path: Path) -> None:
    full = world.results(partial(agents.train, by_length=True), str(tmp_path), patience=PATIENCE)
    for epoch in (slice(-16, -8), slice(-8, None)):  # before them all were read for their lengths
        assert sorted(index for one in full for index in one["seen"][epoch]) == list(range(32))
    resumed = world.results(
        partial(agents.train, by_length=True, resume=str(tmp_path / "checkpoint-3")), str(tmp_path), patience=PATIENCE
    )
    for one, again in zip(full, resumed, strict=True):
        assert again["losses"] == one["losses"][3:] and same(one["params"], again["params"])


def test_another_number_of_agents_resumes_at_the_mean(world: World, two: World, tmp_path: Path) -> None:
    """With the agents' state at that time, from which their own resumed runs start."""
    world.results(agents.train, str(tmp_path), patience=PATIENCE)
    checkpoint = str(tmp_path / "checkpoint-3")
    own = [
        one["begun"]
        for one in world.results(partial(agents.train, resume=checkpoint), str(tmp_path), patience=PATIENCE)
    ]
    assert not same(own[0]["params"], own[1]["params"])
    by_mean = partial(agents.train, resume=checkpoint, resume_from="consensus")
    for agents_now, steps in ((world, 8), (two, 16)):
        for one in agents_now.results(by_mean, str(tmp_path), patience=PATIENCE):
            started = one["begun"]
            for name, value in started["params"].items():
                np.testing.assert_allclose(value, mean_of([each["params"][name] for each in own]), rtol=0, atol=1e-6)
            for number, value in enumerate(started["moments"]):
                wanted = mean_of([each["moments"][number] for each in own])
                np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-8)
            assert (started["step"], started["rounds"], started["lr"]) == (3, 3, own[0]["lr"])
            assert one["steps"] == steps and len(one["losses"]) == steps - 3
    for refused in two.run(partial(agents.train, resume=checkpoint), str(tmp_path), patience=PATIENCE):
        assert refused.error == "ValueError" and "consensus" in refused.message


def test_after_the_death_of_an_agent_a_resumed_run_equals_an_uninterrupted_one(
    world: World, disposable_world: World, tmp_path: Path
) -> None:
    full = world.results(agents.train, str(tmp_path / "whole"), patience=PATIENCE)
    folder = str(tmp_path / "killed")
    ended = disposable_world.run(partial(agents.train, killed=(2, 5)), folder, patience=PATIENCE)
    assert [one.error for one in ended] == ["PeerLost", "PeerLost", "Died", "PeerLost"]
    assert [path.name for path in Path(folder).iterdir()] == ["checkpoint-3"]
    resumed = world.results(partial(agents.train, resume=True), folder, patience=PATIENCE)
    for one, again in zip(full, resumed, strict=True):
        assert again["begun"]["step"] == 3 and again["steps"] == 8
        assert again["losses"] == one["losses"][3:] and same(one["params"], again["params"])
        assert all(np.array_equal(*both) for both in zip(one["moments"], again["moments"], strict=True))
