"""A fit resumed from Lightning's checkpoint equals, bit for bit, an uninterrupted one."""

from __future__ import annotations

import importlib.util
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import lightning_agents as agents
from support.lightning_agents import Fitted
from support.world import World

if importlib.util.find_spec("lightning") is None:
    pytest.skip("pip install 'shoal[lightning]'", allow_module_level=True)

SIZE = 4
IMPORTS = ("lightning.pytorch",)
pytestmark = pytest.mark.timeout(300)
MODULE = {"dropout": 0.3, "norm": True}


def fitted(world: World, folder: Path, **options: Any) -> list[Fitted]:
    return world.results(partial(agents.fit, module=MODULE, **options), str(folder), patience=120.0)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("optimizer", "wrapper", "at_epochs_end", "workers"),
    [("adam", "mixed", True, 0), ("sgd", "ring", False, 0), ("adam", "", None, 1)],
)
def test_resuming(
    world: World, tmp_path: Path, optimizer: str, wrapper: str, at_epochs_end: bool | None, workers: int
) -> None:
    checkpoint = {"save_top_k": -1, "filename": "{epoch}", "save_on_train_epoch_end": at_epochs_end}
    options = {"optimizer": optimizer, "wrapper": wrapper, "max_epochs": 3, "loader": {"workers": workers}}
    full = fitted(world, tmp_path, checkpoint=checkpoint, **options)
    assert not same(full[0].params, full[1].params)
    assert full[0].steps == 21
    resumed = fitted(world, tmp_path / "again", resume=str(tmp_path / "epoch=0.ckpt"), checkpoint=checkpoint, **options)
    for one, again in zip(full, resumed, strict=True):
        assert (again.steps, again.rounds, again.epochs, again.lr) == (one.steps, one.rounds, one.epochs, one.lr)
        assert again.seen == one.seen[7:]
        assert again.losses == one.losses[7:]
        assert same(one.params, again.params)
        assert all(np.array_equal(*both) for both in zip(one.moments, again.moments, strict=True))
        assert again.drawn == one.drawn


def test_resuming_within_an_epoch_with_a_stateful_loader(world: World, tmp_path: Path) -> None:
    checkpoint = {"save_top_k": -1, "filename": "{step}", "every_n_train_steps": 5}
    options = {"optimizer": "adam", "max_epochs": 2, "loader": {"resumable": True}}
    full = fitted(world, tmp_path, checkpoint=checkpoint, **options)
    resumed = fitted(world, tmp_path / "again", resume=str(tmp_path / "step=5.ckpt"), checkpoint=checkpoint, **options)
    for one, again in zip(full, resumed, strict=True):
        assert again.seen == one.seen[5:]
        assert again.losses == one.losses[5:]
        assert same(one.params, again.params)
        assert (again.steps, again.rounds) == (one.steps, one.rounds) == (14, [14])


def test_another_number_of_agents_starts_at_the_mean_and_logs_it(world: World, tmp_path: Path) -> None:
    saved = fitted(world, tmp_path, checkpoint={"filename": "saved"}, max_epochs=1, optimizer="adam")
    mean = {name: np.mean([one.params[name] for one in saved], axis=0) for name in saved[0].params}
    path = tmp_path / "saved.ckpt"
    with World(2, init=False, timeout=60.0) as fewer:
        result = fitted(fewer, tmp_path / "fewer", resume=str(path), max_epochs=2, optimizer="adam")
        fewer.destroy()
    for one in result:
        for name, value in one.first.items():
            np.testing.assert_allclose(value, mean[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert any("saved by 4 agents, and there are 2 now" in text for text in result[0].messages)
    assert len(result[0].losses) == 14
    shutil.rmtree(f"{path}.agents")
    alone = fitted(world, tmp_path / "alone", resume=str(path), max_epochs=2, optimizer="adam")
    assert any("begin at the mean model" in text for text in alone[0].messages)
    assert all(same(one.first, alone[0].first) for one in alone)


def test_a_folder_of_another_save_is_not_used_for_the_files(world: World, tmp_path: Path) -> None:
    fitted(world, tmp_path, checkpoint={"filename": "saved"})
    shutil.copytree(tmp_path / "saved.ckpt.agents", tmp_path / "kept")
    fitted(world, tmp_path, checkpoint={"filename": "saved", "enable_version_counter": False})
    shutil.rmtree(tmp_path / "saved.ckpt.agents")
    shutil.move(tmp_path / "kept", tmp_path / "saved.ckpt.agents")
    options = {"resume": str(tmp_path / "saved.ckpt"), "max_epochs": 2}
    for one in world.run(partial(agents.fit, module=MODULE, **options), str(tmp_path), patience=120.0):
        assert one.error == "ShoalError" and "of another save" in one.message
