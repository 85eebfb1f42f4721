"""Merging the states of several agents, and copying states out of a larger storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.optim.checkpoints.states import in_own_memory, mean_state
from support.checkpoints import MODEL, same


def test_floating_point_entries_are_averaged_and_others_are_the_first_agents() -> None:
    states = [
        {
            "half": torch.tensor([1.0, 2.0]).bfloat16(),
            "count": torch.tensor(3),
            "lr": 0.1,
            "p": 0.5,
            "n": 7,
            "on": True,
        },
        {
            "half": torch.tensor([2.0, 2.0]).bfloat16(),
            "count": torch.tensor(9),
            "lr": 0.1,
            "p": 1.0,
            "n": 8,
            "on": False,
        },
        {
            "half": torch.tensor([6.0, 2.0]).bfloat16(),
            "count": torch.tensor(9),
            "lr": 0.1,
            "p": 3.0,
            "n": 8,
            "on": False,
        },
    ]
    expected = {"half": torch.tensor([3.0, 2.0]).bfloat16(), "count": torch.tensor(3), "lr": 0.1, "p": 1.5}
    assert same(mean_state(states, "x"), {**expected, "n": 7, "on": True})


def test_lists_tuples_and_complex_numbers_are_averaged() -> None:
    states = [([torch.tensor(1j)], (torch.tensor(1.0), "a")), ([torch.tensor(3.0 + 0j)], (torch.tensor(2.0), "b"))]
    assert same(mean_state(states, "x"), ([torch.tensor(1.5 + 0.5j)], (torch.tensor(1.5), "a")))


def test_entries_missing_on_some_agents_are_averaged_over_the_others() -> None:
    states = [{"a": None, "list": [1, 2]}, {"a": torch.tensor(2.0), "b": torch.tensor(1.0), "list": [3]}]
    assert same(mean_state(states, "x"), {"a": torch.tensor(2.0), "list": [1, 2], "b": torch.tensor(1.0)})


def test_entries_equal_on_all_agents_are_unchanged() -> None:
    """The mean of three times 0.1 is 0.10000000000000002."""
    state = {"lr": 0.1, "momentum": torch.tensor(0.1, dtype=torch.float64)}
    assert same(mean_state([state] * 3, "x"), state)


def test_a_sum_that_overflows_float32_is_exact() -> None:
    values = [torch.tensor(2.0**24), torch.tensor(1.0), torch.tensor(1.0), torch.tensor(2.0)]
    assert mean_state(values, "x").item() == 2.0**22 + 1


@pytest.mark.parametrize(
    "other", [torch.zeros(3), [torch.zeros(2)], {"a": torch.zeros(2)}], ids=["shape", "list", "dict"]
)
def test_entries_without_a_mean_are_named(other: Any) -> None:
    with pytest.raises(ValueError, match=r"model\.0\.weight"):
        mean_state([{"0": {"weight": torch.zeros(2)}}, {"0": {"weight": other}}], "model")


def test_the_mean_of_models_keeps_the_non_tensor_state() -> None:
    state = MODEL.state_dict()
    result = mean_state([state, state], "model")
    assert result._metadata == state._metadata and type(result) is type(state)  # type: ignore[attr-defined]


def test_a_tensor_in_a_bucket_is_saved_without_the_bucket() -> None:
    bucket = torch.arange(1000.0)
    state = {"a": bucket[:2], "tied": bucket[:2], "cut": bucket.view(100, 10)[:, 3], "whole": bucket, "n": 1}
    own = in_own_memory(state)
    assert same(own, state)
    assert own["a"].untyped_storage().nbytes() == 8 and own["cut"].untyped_storage().nbytes() == 400
    assert own["a"] is own["tied"] and own["whole"] is bucket and bucket.untyped_storage().nbytes() == 4000
