"""A process group of the script's does not survive failures, so agents that are to survive them warn of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shoal


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def optimizer() -> None:
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    shoal.DecentralizedOptimizer(sgd, model).close()


def test_init_warns_once_if_failures_are_survived(process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ON_LOSS", "continue")
    with pytest.warns(UserWarning, match=r"torch.distributed is initialized.*Remove dist.init_process_group") as result:
        shoal.Fleet(2).run(optimizer)
    assert len(result) == 2, "each agent, once"


def test_init_does_not_warn_if_a_failure_ends_all(process_group: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shoal.Fleet(2).run(optimizer)


def test_a_process_group_created_later_is_detected_by_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_ON_LOSS", "continue")

    def run() -> None:
        if shoal.rank() == 0:
            dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
        shoal.barrier()
        optimizer()

    with pytest.warns(UserWarning, match="torch.distributed is initialized"):
        shoal.Fleet(2).run(run)
    dist.destroy_process_group()
