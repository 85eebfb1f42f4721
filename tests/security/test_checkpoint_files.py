"""Checkpoints: a spoiled file is found, named, and passed over; rank 0 says a checkpoint's name and no other path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shoal
from shoal.optim.checkpoints import checkpoint as module

Fleets = Callable[..., shoal.Fleet]
SIZE = 3


def saved(folder: Path, steps: int) -> None:
    """Steps 1, 2, ... of a model whose weights say which agent and step they are of."""

    def run() -> None:
        model = torch.nn.Linear(40, 10)
        for step in range(1, steps + 1):
            torch.nn.init.constant_(model.weight, 100 * shoal.rank() + step)
            shoal.Checkpoint(model=model).save(folder, step, keep=None)

    shoal.Fleet(SIZE).run(run)


def loaded(folder: Path, step: int | None = None, start: str = "own") -> list[tuple[int, float]]:
    def run() -> tuple[int, float]:
        model = torch.nn.Linear(40, 10)
        result = shoal.Checkpoint(model=model).load(folder, step, start=start)  # type: ignore[arg-type]
        (value,) = set(model.weight.flatten().tolist())
        return result, value

    return shoal.Fleet(SIZE).run(run)


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("where", [0.0, 0.02, 0.3, 0.6, 0.9, 0.999])
@pytest.mark.parametrize("start", ["own", "consensus"])
def test_one_flipped_bit_is_detected_named_and_the_checkpoint_skipped(tmp_path: Path, where: float, start: str) -> None:
    saved(tmp_path, 2)
    (spoiled,) = tmp_path.glob("*-step-2/agent-1.pt")
    flip(spoiled, int(where * spoiled.stat().st_size), 3)
    with pytest.warns(
        UserWarning,
        match="step-2 is not loaded: .*at rank 1, Damaged: .*agent-1.pt has changed .* the one before it is tried",
    ):
        result = loaded(tmp_path, start=start)
    assert result == [(1, 100.0 * rank + 1 if start == "own" else 101.0) for rank in range(SIZE)]
    with pytest.raises(
        shoal.ShoalError, match=r"step-2 is not loaded: .*agent-1\.pt has changed since it was written"
    ) as error:
        loaded(tmp_path, 2, start)
    assert error.value.ranks == ((1,) if start == "own" else (0, 1, 2))


def test_if_all_are_corrupt_the_error_names_the_latest(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    for step, rank in ((1, 0), (2, 2)):
        (spoiled,) = tmp_path.glob(f"*-step-{step}/agent-{rank}.pt")
        flip(spoiled, 700)
    with pytest.raises(shoal.ShoalError, match=r"step-2 is not loaded: at rank 2"), pytest.warns(UserWarning):
        loaded(tmp_path)


@pytest.mark.parametrize("spoil", ["nothing", "no json", "another step", "a flipped bit", "no dictionary", "no text"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_corrupt_manifest_is_named_and_its_checkpoint_skipped_and_kept(tmp_path: Path, spoil: str, step: int) -> None:
    saved(tmp_path, 2)
    (manifest,) = tmp_path.glob(f"*-step-{step}/manifest.json")
    if spoil == "a flipped bit":
        flip(manifest, manifest.read_text().index("parts") + 2)
    elif spoil == "another step":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": 9}))
    else:
        manifest.write_bytes(
            {"nothing": b"", "no json": b'{"step": 1', "no dictionary": b"[1]"}.get(spoil, b"\xff\xfe")
        )
    with pytest.warns(UserWarning, match=f"step-{step}/manifest.json is damaged"):
        assert [result for result, _ in loaded(tmp_path)] == [3 - step] * SIZE

    def save() -> None:
        shoal.Checkpoint(model=torch.nn.Linear(40, 10)).save(tmp_path, 3, keep=1)

    with pytest.warns(UserWarning, match="is damaged"):
        shoal.Fleet(SIZE).run(save)
    assert {path.name for path in tmp_path.iterdir()} == {manifest.parent.name, "000003-step-3"}


def test_checkpoints_of_earlier_versions_are_loaded(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (manifest,) = tmp_path.glob("*/manifest.json")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({name: content[name] for name in ("step", "agents", "parts")}))
    assert loaded(tmp_path) == [(1, 100.0 * rank + 1) for rank in range(SIZE)]


NAMES = ["../precious", "/tmp/shoal-precious", "..", "", "000001-step-1/../../precious", 7, None, "000001-step-1\n"]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_path_from_rank_0_cannot_leave_the_folder(
    tmp_path: Path, name: object, monkeypatch: pytest.MonkeyPatch, fleet: Fleets
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("all that I have")
    honest = module.from_one_agent
    folder = tmp_path / "run"

    def lie(rank: int, what: str, ask: Callable[[], object], timeout: float | None) -> object:
        result = honest(rank, what, ask, timeout)
        if what == "checkpoint.find":
            return {"found": [(name, {"step": 1, "agents": 2, "parts": ["model"]})], "steps": [1], "parts": ["model"]}
        return [name, "model"] if what == "checkpoint.name" else result

    monkeypatch.setattr(module, "from_one_agent", lie)  # as if rank 0 had said it

    def run() -> list[str]:
        model, errors = torch.nn.Linear(2, 2), []
        for call in ("save", "load"):
            with pytest.raises(shoal.ShoalError, match="which is no checkpoint's name") as caught:
                getattr(shoal.Checkpoint(model=model), call)(folder, 1)
            errors.append(str(caught.value))
        return errors

    assert all(repr(name) in text for errors in fleet(2).run(run) for text in errors)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]


def test_a_failed_save_removes_only_its_own_file(tmp_path: Path) -> None:
    """Rank 0 may name an old checkpoint."""
    saved(tmp_path, 1)
    (place,) = tmp_path.iterdir()
    (place / "notes.txt").write_text("of the user")

    def run() -> str:
        with pytest.raises(shoal.ShoalError) as caught:
            shoal.Checkpoint(model=torch.nn.Linear(2, 2)).save(tmp_path, 7 if shoal.rank() else 8)
        return str(caught.value)

    assert all("is not saved" in text for text in shoal.Fleet(2).run(run))
    assert [path.name for path in tmp_path.iterdir()] == [place.name]
    assert (place / "notes.txt").exists()
