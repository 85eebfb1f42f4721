"""``shoal.save``: one agent writes the mean of all agents' models."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shoal

Fleets = Callable[..., shoal.Fleet]


def model() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))
    torch.nn.init.constant_(made[0].weight, float(shoal.rank()))
    made[1].running_mean.fill_(2.0 * shoal.rank())
    made[1].num_batches_tracked.fill_(7 + shoal.rank())
    return made


def test_the_file_has_the_mean_and_each_agent_keeps_its_own_values(fleet: Fleets, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def run() -> float:
        own = model()
        shoal.save(own, path)
        assert path.exists()
        return own[0].weight.item()

    assert fleet(3).run(run) == [0.0, 1.0, 2.0]
    saved = torch.load(path, weights_only=True)
    assert (saved["0.weight"].item(), saved["1.running_mean"].item()) == (1.0, 2.0)
    assert saved["1.num_batches_tracked"].item() == 7
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_an_agent_that_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    def run() -> None:
        with pytest.raises(shoal.ShoalError, match=re.escape("save: at rank 0, FileNotFoundError")):
            shoal.save(model(), tmp_path / "none" / "model.pt")

    shoal.Fleet(2).run(run)


def test_a_call_on_rank_0_only_raises_an_error_that_explains_it() -> None:
    def run() -> None:
        with pytest.raises(shoal.Mismatch, match=r"none inside `if shoal\.rank\(\) == 0`"):
            if shoal.rank() == 0:
                shoal.save(model(), "model.pt")
            shoal.neighbor_allreduce(torch.ones(1))

    shoal.Fleet(2).run(run)


def test_a_state_dict_in_place_of_the_model_is_refused_before_anything_is_sent(fleet: Fleets, tmp_path: Path) -> None:
    def run() -> list[str]:
        state, found = model().state_dict(), []
        for call in (
            lambda: shoal.save(state, tmp_path / "model.pt"),  # type: ignore[arg-type]
            lambda: shoal.consensus_distance(state),  # type: ignore[arg-type]
            lambda: shoal.consensus(state).__enter__(),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError) as caught:
                call()
            found.append(str(caught.value))
        return found

    expected = [
        f"{op} takes a model, a torch.nn.Module, not a OrderedDict"
        for op in ("save", "consensus_distance", "consensus")
    ]
    assert fleet(2).run(run) == [expected] * 2
    assert not list(tmp_path.iterdir())
