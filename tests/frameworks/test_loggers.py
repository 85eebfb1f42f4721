"""A run's numbers in the loggers of other packages: one run, with every agent's series."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

import shoal

SIZE, STEPS = 3, 4
NAMES = {f"loss/{what}" for what in ("mean", "worst", *(f"agent{rank}" for rank in range(SIZE)))}


def losses() -> list[shoal.optim.Metrics]:
    """Of each step, ``step * 10 + rank``."""
    agents = shoal.Fleet(SIZE).run(
        lambda: [shoal.metrics({"loss": torch.tensor(10.0 * step + shoal.rank())}) for step in range(STEPS)]
    )
    return agents[0]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for step, result in enumerate(losses()):
            result.log(writer, step)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert set(read.Tags()["scalars"]) == NAMES
    series = [(one.step, one.value) for one in read.Scalars("loss/agent2")]
    assert series == [(step, 10.0 * step + 2) for step in range(STEPS)]


def test_wandb_offline(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    with wandb.init(mode="offline", dir=tmp_path, project="shoal") as run:
        for step, result in enumerate(losses()):
            result.log(run, step)
    wandb.teardown()
    (file,) = tmp_path.rglob("*.wandb")
    data, at, rows = file.read_bytes(), 7, []
    while at < len(data):  # a log as LevelDB's; of few bytes, each record is whole
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1
        record = Record.FromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        rows += [items] if items else []
    assert [(row["_step"], row["loss/agent2"]) for row in rows] == [(step, 10.0 * step + 2) for step in range(STEPS)]
    assert all(set(row) >= NAMES for row in rows)


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("shoal")
    with mlflow.start_run() as run:
        for step, result in enumerate(losses()):
            result.log(mlflow, step)
    client = mlflow.MlflowClient()
    assert set(client.get_run(run.info.run_id).data.metrics) == NAMES
    series = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss/agent2")]
    assert series == [(step, 10.0 * step + 2) for step in range(STEPS)]
