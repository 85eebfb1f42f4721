"""A resumed run is equal to the bit, and begins at the mean with another number of agents."""

from __future__ import annotations

import collections
import errno
import math
import os
import pickle
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.optim.checkpoints.checkpoint_files import all_try, from_one_agent, write_atomically
from support.checkpoints import DATA, MODEL, SIZE, Run, folders, same, weight

Fleets = Callable[..., shoal.Fleet]


def momentum(run: Run) -> Tensor:
    return torch.cat(
        [run.optimizer.state[parameter]["momentum_buffer"].view(-1) for parameter in run.model.parameters()]
    )


def flat(run: Run) -> Tensor:
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


def save(folder: Path, steps: int, size: int = SIZE) -> list[dict[str, Any]]:
    """A run that is saved after some steps; each agent's state then."""

    def run() -> dict[str, Any]:
        run = Run().steps(steps)
        run.checkpoint.save(folder, steps)
        return run.all()

    return shoal.Fleet(size, timeout=20.0).run(run)


# The same number of agents


def test_a_resumed_run_equals_an_uninterrupted_one(fleet: Fleets, tmp_path: Path) -> None:
    def uninterrupted() -> dict[str, Any]:
        return Run().steps(7).all()

    def first() -> None:
        run = Run().steps(4)
        place = run.checkpoint.save(tmp_path, 4)
        assert place == tmp_path / "000001-step-4" and (place / f"agent-{shoal.rank()}.pt").is_file()

    def second() -> dict[str, Any]:
        run = Run()
        assert run.checkpoint.load(tmp_path) == 4
        return run.steps(3).all()

    expected = fleet(SIZE).run(uninterrupted)
    fleet(SIZE).run(first)
    assert same(fleet(SIZE).run(second), expected)
    assert not same(expected[0]["model"], expected[1]["model"]), "agents that are alike would prove little"


def test_the_latest_checkpoint_is_found_and_the_last_k_are_kept(tmp_path: Path) -> None:
    def run() -> None:
        model = weight(0.0)
        checkpoint = shoal.Checkpoint(model=model)
        for value, step in enumerate((10, 20, 30, 20)):  # gone back to 20
            nn.init.constant_(model.weight, value)
            checkpoint.save(tmp_path, step, keep=2)
        assert (checkpoint.load(tmp_path, step=30), model.weight.item()) == (30, 2.0)
        assert (checkpoint.load(tmp_path), model.weight.item()) == (20, 3.0)
        with pytest.raises(FileNotFoundError, match=r"of step 10; there are those of \[20, 30\]"):
            checkpoint.load(tmp_path, step=10)

    shoal.Fleet(2).run(run)
    assert folders(tmp_path) == ["000003-step-30", "000004-step-20"]


def test_all_checkpoints_are_kept_if_requested(tmp_path: Path) -> None:
    def run() -> None:
        for step in range(5):
            shoal.Checkpoint(model=weight(0.0)).save(tmp_path, step, keep=None)

    shoal.Fleet(1).run(run)
    assert len(folders(tmp_path)) == 5


def test_files_without_a_manifest_are_ignored_and_removed_by_the_next_save(tmp_path: Path) -> None:
    def save_at(step: int) -> None:
        shoal.Checkpoint(model=weight(float(step))).save(tmp_path, step)

    def load() -> tuple[int, float]:
        model = weight(0.0)
        return shoal.Checkpoint(model=model).load(tmp_path), model.weight.item()

    for step in (1, 2):
        shoal.Fleet(2).run(save_at, step)
    (tmp_path / "000002-step-2" / "manifest.json").unlink()
    assert shoal.Fleet(2).run(load) == [(1, 1.0)] * 2
    (tmp_path / "notes").mkdir()
    shoal.Fleet(2).run(save_at, 2)
    assert folders(tmp_path) == ["000001-step-1", "000003-step-2", "notes"]
    assert shoal.Fleet(2).run(load) == [(2, 2.0)] * 2


def test_an_old_manifest_that_a_power_cut_brings_back_does_no_harm(tmp_path: Path) -> None:
    """Its unlinking is not on the disk yet when the next checkpoint counts. Its files may be gone, or there in part."""
    manifest = tmp_path / "000001-step-10" / "manifest.json"

    def run() -> None:
        model = weight(1.0)
        checkpoint = shoal.Checkpoint(model=model)
        checkpoint.save(tmp_path, 10, keep=1)
        before = manifest.read_bytes()
        nn.init.constant_(model.weight, 2.0)
        checkpoint.save(tmp_path, 20, keep=1)
        assert not manifest.exists()
        for part in (None, b"the begin of a file"):
            manifest.parent.mkdir(exist_ok=True)
            manifest.write_bytes(before)
            if part is not None:
                (manifest.parent / "agent-0.pt").write_bytes(part)
            nn.init.constant_(model.weight, 0.0)
            with pytest.raises(shoal.ShoalError, match=r"agent-0\.pt"):
                checkpoint.load(tmp_path, step=10)
            assert model.weight.item() == 0.0
            assert (checkpoint.load(tmp_path), model.weight.item()) == (20, 2.0)
        checkpoint.save(tmp_path, 30, keep=1)

    shoal.Fleet(1).run(run)
    assert folders(tmp_path) == ["000003-step-30"]


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_text("before")

    def write(partial: Path) -> None:
        partial.write_text("a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, write)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("model.pt", "before")]


def test_a_manifest_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def run() -> None:
        with pytest.raises(shoal.ShoalError, match="No space left"):
            shoal.Checkpoint(model=weight(0.0)).save(tmp_path, 1)

    monkeypatch.setattr(Path, "write_text", full)
    shoal.Fleet(2).run(run)
    assert list(tmp_path.iterdir()) == [], "files of a save that failed would keep a full disk full"


@pytest.mark.parametrize(
    "content",
    [
        '{"step": "x", "agents": 2, "parts": ["model"]}',
        '{"step": [1], "agents": 2, "parts": ["model"]}',
        '{"step": 5, "agents": "2", "parts": ["model"]}',
        '{"step": 5, "agents": 2, "parts": 7}',
        "[" * 100_000,
    ],
    ids=["word", "list", "agents", "parts", "deep"],
)
def test_a_manifest_of_another_form_hides_no_checkpoint(tmp_path: Path, content: str) -> None:
    other = tmp_path / "000009-step-5"
    other.mkdir()
    (other / "manifest.json").write_text(content)

    def run() -> int:
        checkpoint = shoal.Checkpoint(model=weight(0.0))
        checkpoint.save(tmp_path, 4)
        return checkpoint.load(tmp_path)

    with pytest.warns(UserWarning, match="is damaged"):
        assert shoal.Fleet(2).run(run) == [4, 4]


def test_loading_from_an_empty_folder(tmp_path: Path) -> None:
    def run() -> None:
        model = weight(1.0)
        checkpoint = shoal.Checkpoint(model=model)
        for folder in (tmp_path, tmp_path / "none"):
            with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
                checkpoint.load(folder)
            assert checkpoint.load(folder, missing_ok=True) == 0
        assert model.weight.item() == 1.0

    shoal.Fleet(2).run(run)


def test_a_machine_needs_only_the_files_of_its_own_agents(tmp_path: Path) -> None:
    """Two disks: the folder of rank 1 never sees rank 0's file or the manifest."""

    def own_folder() -> Path:
        return tmp_path / str(shoal.rank())

    def save_twice() -> None:
        for step in (1, 2):
            shoal.Checkpoint(model=weight(shoal.rank() + step)).save(own_folder(), step, keep=1)

    def load() -> float:
        model = weight(0.0)
        assert shoal.Checkpoint(model=model).load(own_folder()) == 2
        return model.weight.item()

    shoal.Fleet(2).run(save_twice)
    assert shoal.Fleet(2).run(load) == [2.0, 3.0]
    assert [folders(tmp_path / str(rank)) for rank in (0, 1)] == [["000002-step-2"]] * 2


def test_parts_not_requested_are_skipped_and_missing_ones_are_named(tmp_path: Path) -> None:
    save(tmp_path, 2)

    def run() -> None:
        run = Run()
        before = run.all()
        shoal.Checkpoint(model=run.model).load(tmp_path)
        after = run.all()
        assert not same(after.pop("model"), before.pop("model")) and same(after, before)
        with pytest.raises(ValueError, match=r"has model, .*, and not average"):
            shoal.Checkpoint(model=run.model, average=run.model).load(tmp_path)

    shoal.Fleet(SIZE).run(run)


class Recorder:
    """A part that notes when it is loaded."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def state_dict(self) -> dict[str, Any]:
        return {"view": torch.zeros(1_000_000)[:2]}

    def load_state_dict(self, state_dict: Any) -> None:
        self._log.append("other")


def test_models_are_loaded_first(tmp_path: Path) -> None:
    """An optimizer's state may depend on the model's values."""

    def run() -> list[str]:
        log: list[str] = []
        model = weight(0.0)
        model.register_load_state_dict_post_hook(lambda *_: log.append("model"))
        checkpoint = shoal.Checkpoint(optimizer=Recorder(log), model=model)
        checkpoint.save(tmp_path, 1)
        checkpoint.load(tmp_path)
        checkpoint.load_state_dict(checkpoint.state_dict())
        return log

    assert shoal.Fleet(1).run(run) == [["model", "other"] * 2]


def test_a_view_is_saved_without_its_base(tmp_path: Path) -> None:
    def run() -> None:
        checkpoint = shoal.Checkpoint(view=Recorder([]))
        file = checkpoint.save(tmp_path, 1) / "agent-0.pt"
        assert file.stat().st_size < 100_000
        [state] = checkpoint.state_dict()["agent0of1"]["view"]
        assert state["view"].untyped_storage().nbytes() == 8

    shoal.Fleet(1).run(run)


def test_all_files_are_on_disk_before_the_manifest_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    sync, rename = os.fsync, Path.replace

    def noted_sync(descriptor: int) -> None:
        log.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        sync(descriptor)

    def noted_rename(self: Path, to: Path) -> Path:
        log.append(f"rename {to.name}")
        return rename(self, to)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_rename)
    shoal.Fleet(1).run(lambda: shoal.Checkpoint(model=weight(0.0)).save(tmp_path, 1))
    assert log == [
        *("sync .agent-0.pt.partial", "rename agent-0.pt", "sync 000001-step-1"),
        *("sync .manifest.json.partial", "rename manifest.json", "sync 000001-step-1", f"sync {tmp_path.name}"),
    ]


# Another number


def test_another_number_of_agents_is_refused_with_both_numbers_and_the_remedy(tmp_path: Path) -> None:
    save(tmp_path, 2)

    def run() -> None:
        run = Run()
        before = run.all()
        with pytest.raises(ValueError, match=r"of 3 agents, and there are 2 now.*start='consensus'"):
            run.checkpoint.load(tmp_path)
        assert same(run.all(), before)

    shoal.Fleet(2).run(run)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_agent_starts_at_the_mean_of_the_consensus(size: int, tmp_path: Path) -> None:
    saved = save(tmp_path, 6)

    def run() -> tuple[Tensor, Tensor, dict[str, Any]]:
        run = Run()
        noise = run.noise.get_state()
        assert run.checkpoint.load(tmp_path, start="consensus") == 6
        assert torch.equal(run.noise.get_state(), noise), "agents would draw alike"
        result = flat(run), momentum(run), run.all()
        run.steps(2)
        return result

    results = shoal.Fleet(size, timeout=20.0).run(run)
    for x, v, state in results:
        assert torch.equal(x, results[0][0]) and torch.equal(v, results[0][1])
        for name, tensor in state["model"].items():
            stacked = torch.stack([one["model"][name] for one in saved])
            if tensor.is_floating_point():
                assert torch.equal(tensor, stacked.double().mean(0).float()), name
            else:
                assert tensor == stacked[0] == 6, name
        for key, entry in state["optimizer"]["state"].items():
            stacked = torch.stack([one["optimizer"]["state"][key]["momentum_buffer"] for one in saved])
            assert torch.equal(entry["momentum_buffer"], stacked.double().mean(0).float())
        assert state["optimizer"]["shoal"]["rounds"] == 6
        assert same(state["optimizer"]["param_groups"], saved[0]["optimizer"]["param_groups"])
        assert same(state["schedule"], saved[0]["schedule"]) and same(state["scaler"], saved[0]["scaler"])
        assert state["sampler"]["epoch"] == saved[0]["sampler"]["epoch"]


def masses(folder: Path, start: Any = None) -> dict[str, Any]:
    """What push-sum has saved, or loaded."""
    model = deepcopy(MODEL)
    optimizer = shoal.optim.DistributedPushSumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer)
    if start is None:
        for step in range(3):
            model(DATA[step : step + 4 + shoal.rank()]).square().mean().backward()
            optimizer.step()
        checkpoint.save(folder, 3)
    else:
        checkpoint.load(folder, start=start)
    [result] = deepcopy(optimizer.state_dict()["shoal"]["way"]).values()
    optimizer.close()
    return dict(result)


def test_an_asynchronous_run_keeps_its_masses_and_starts_from_their_mean_with_another_size(tmp_path: Path) -> None:
    saved = shoal.Fleet(3, timeout=20.0).run(masses, tmp_path)
    assert sum(one["p"] for one in saved) == pytest.approx(3.0, abs=1e-12)
    assert same(shoal.Fleet(3, timeout=20.0).run(masses, tmp_path, "own"), saved)
    for one in shoal.Fleet(2, timeout=20.0).run(masses, tmp_path, "consensus"):
        assert one["p"] == pytest.approx(1.0, abs=1e-12)
        assert torch.equal(one["u"], torch.stack([each["u"] for each in saved]).double().mean(0).float())


# What goes wrong


def test_one_agents_damaged_file_is_an_error_on_all_and_changes_nothing(fleet: Fleets, tmp_path: Path) -> None:
    save(tmp_path, 2)
    file = tmp_path / "000001-step-2" / "agent-1.pt"
    file.write_bytes(file.read_bytes()[:-1000])

    def run() -> None:
        run = Run()
        before = run.all()
        with pytest.raises(shoal.ShoalError, match="000001-step-2 is not loaded: at rank 1") as caught:
            run.checkpoint.load(tmp_path)
        assert caught.value.ranks == (1,) and same(run.all(), before)

    fleet(SIZE).run(run)


def test_an_error_whose_text_cannot_be_encoded_is_an_error_on_all() -> None:
    """As that of a part whose state_dict() names a file with bytes that are no UTF-8."""

    def fail() -> None:
        raise ValueError("run \udcff")

    def run() -> None:
        errors, _ = all_try("checkpoint.test", fail if shoal.rank() == 1 else lambda: None, None)
        assert errors == {1: "ValueError: run ?"}
        with pytest.raises(shoal.ShoalError, match=r"checkpoint: at rank 0, ValueError: run \?$"):
            from_one_agent(0, "checkpoint.test", fail, None)

    shoal.Fleet(2, timeout=20.0).run(run)


class PicklePayload:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["TRAP"],)


def test_a_file_that_would_run_code_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    save(tmp_path, 1, size=1)
    torch.save({"model": PicklePayload()}, tmp_path / "000001-step-1" / "agent-0.pt")

    def run() -> None:
        with pytest.raises(shoal.ShoalError, match="not loaded"):
            shoal.Checkpoint(model=deepcopy(MODEL)).load(tmp_path)

    shoal.Fleet(1).run(run)
    assert not (tmp_path / "sprung").exists()
    pickle.loads(pickle.dumps(PicklePayload()))
    assert (tmp_path / "sprung").exists(), "the trap works"


class UnloadablePart:
    """A part whose state cannot be loaded again, on one agent."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("x") if shoal.rank() == self._rank else "x"}

    def load_state_dict(self, state_dict: Any) -> None: ...


def test_a_state_that_could_not_be_loaded_is_refused_by_save_on_all_agents(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def run() -> None:
        checkpoint = shoal.Checkpoint(model=weight(0.0), strange=UnloadablePart(1))
        with pytest.raises(shoal.ShoalError, match=r"not saved: at rank 1, TypeError: the state of strange .*pathlib"):
            checkpoint.save(tmp_path, 2)
        shoal.barrier()
        assert folders(tmp_path) == ["000001-step-1"]

    shoal.Fleet(SIZE).run(run)


def test_agents_at_different_steps_do_not_save(tmp_path: Path) -> None:
    def run() -> None:
        with pytest.raises(
            shoal.ShoalError, match=r"at rank 1, Mismatch: step=11 was given, and rank 0 saves .*-step-1"
        ):
            shoal.Checkpoint(model=weight(0.0)).save(tmp_path, 11 if shoal.rank() else 1)

    shoal.Fleet(2).run(run)
    assert folders(tmp_path) == []


def test_agents_with_different_parts_do_not_save(tmp_path: Path) -> None:
    def run() -> None:
        parts = {"model": weight(0.0), f"counter{shoal.rank()}": {"step": 0}}
        expected = "at rank 1, Mismatch: the parts are counter1, model, and those of rank 0 are counter0, model"
        with pytest.raises(shoal.ShoalError, match=expected):
            shoal.Checkpoint(**parts).save(tmp_path, 1)

    shoal.Fleet(2).run(run)
    assert folders(tmp_path) == []


@pytest.mark.parametrize("asking", [0, 1])
def test_a_part_that_one_agent_alone_requests_and_no_file_has_is_an_error_on_all(tmp_path: Path, asking: int) -> None:
    save(tmp_path, 2)

    def run() -> None:
        model = Run().model
        parts = {"model": model} | ({"average": model} if shoal.rank() == asking else {})
        with pytest.raises((ValueError, shoal.ShoalError), match=r"has model, .*, and not average"):
            shoal.Checkpoint(**parts).load(tmp_path, timeout=5.0)

    shoal.Fleet(SIZE).run(run)


def test_a_folder_that_cannot_be_created_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def run() -> None:
        with pytest.raises(shoal.ShoalError, match=r"at rank 0, NotADirectoryError.*at rank 1, NotADirectoryError"):
            shoal.Checkpoint(model=weight(0.0)).save(tmp_path / "file" / "below", 1)

    shoal.Fleet(2).run(run)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda folder: shoal.Checkpoint(), ValueError, "a checkpoint without parts"),
        (lambda folder: shoal.Checkpoint(lr=0.1), TypeError, r'lr is a float.* state=\{"lr": \.\.\.\}'),
        (lambda folder: shoal.Checkpoint(state={"at": folder}), TypeError, r"state\['at'\] is a pathlib.*plain data"),
        (lambda folder: shoal.Checkpoint(model=MODEL).save(folder, -1), ValueError, "step=-1"),
        (lambda folder: shoal.Checkpoint(model=MODEL).save(folder, 1.5), TypeError, "step must be an int, got 1.5"),  # type: ignore[arg-type]
        (lambda folder: shoal.Checkpoint(model=MODEL).save(folder, 1, keep=0), ValueError, "keep=0"),
        (lambda folder: shoal.Checkpoint(model=MODEL).load(folder, start="mean"), ValueError, "'own' or 'consensus'"),
    ],
)
def test_invalid_arguments_are_refused(
    call: Callable[[Path], object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    def run() -> None:
        with pytest.raises(error, match=message):
            call(tmp_path)

    shoal.Fleet(1).run(run)


# The script's own numbers


def test_keys_that_a_checkpoint_does_not_have_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of a script that has gained a counter since."""

    def run() -> None:
        shoal.Checkpoint(state={"step": 3}).save(tmp_path, 3)
        state = {"step": 0, "best": 1e9}
        shoal.Checkpoint(state=state).load(tmp_path)
        assert state == {"step": 3}

    shoal.Fleet(1).run(run)
    assert "state has 'best' here and not in the checkpoint" in caplog.text


def test_plain_data_are_saved_and_filled_in_place(tmp_path: Path) -> None:
    def run() -> None:
        loss = (weight(2.0).weight * 3).sum()
        inner = {"lists": [1, (2.5, None)], "text": "é", "loss": loss}
        state = {"step": 7, "best": math.inf, "mean": np.float32(0.5), 3: True, "inner": inner}
        shoal.Checkpoint(state=state, seen=[1.0, np.int64(2)]).save(tmp_path, 1)
        other: dict[Any, Any] = collections.defaultdict(int, step=100, more=1)
        seen = [9, 9, 9]
        checkpoint = shoal.Checkpoint(state=other, seen=seen)
        assert checkpoint.load(tmp_path) == 1
        loaded = other["inner"].pop("loss")
        assert other == {
            "step": 7,
            "best": math.inf,
            "mean": 0.5,
            3: True,
            "inner": {"lists": [1, (2.5, None)], "text": "é"},
        }
        assert loaded.item() == 6.0 and seen == [1.0, 2]
        other["step"] += 1
        assert checkpoint.load(tmp_path) == 1 and other["step"] == 7

    shoal.Fleet(2).run(run)


def test_floating_point_entries_start_at_their_mean_and_counters_at_agent_0s(tmp_path: Path) -> None:
    def save() -> None:
        state = {"step": 10 + shoal.rank(), "best": 1.0 + shoal.rank(), "worst": math.inf}
        shoal.Checkpoint(state=state).save(tmp_path, 1)

    def load() -> dict[str, float]:
        state: dict[str, float] = {}
        shoal.Checkpoint(state=state).load(tmp_path, start="consensus")
        return state

    shoal.Fleet(2).run(save)
    assert shoal.Fleet(3).run(load) == [{"step": 10, "best": 1.5, "worst": math.inf}] * 3


def test_loading_another_type_than_was_saved_is_an_error(tmp_path: Path) -> None:
    def run() -> None:
        shoal.Checkpoint(state={"step": 1}).save(tmp_path, 1)
        with pytest.raises(ValueError, match="state is a list here, and a dict in the checkpoint"):
            shoal.Checkpoint(state=[1]).load(tmp_path)

    shoal.Fleet(1).run(run)


def test_data_that_changed_type_are_named_by_save(tmp_path: Path) -> None:
    def run() -> None:
        state: dict[str, Any] = {"step": 1}
        checkpoint = shoal.Checkpoint(state=state)
        state["model"] = weight(1.0)
        with pytest.raises(shoal.ShoalError, match=r"state\['model'\] is a torch.*Linear"):
            checkpoint.save(tmp_path, 1)

    shoal.Fleet(1).run(run)


def test_a_schedule_that_is_not_saved_is_reported_once(tmp_path: Path) -> None:
    def run() -> None:
        model = weight(1.0)
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        without = shoal.Checkpoint(model=model, optimizer=optimizer)
        without.save(tmp_path, 1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        shoal.Checkpoint(model=model, optimizer=optimizer, schedule=schedule).save(tmp_path, 2)
        with pytest.warns(UserWarning, match="a learning-rate schedule .* is not saved itself"):
            without.save(tmp_path, 3)
        without.save(tmp_path, 4)

    shoal.Fleet(1).run(run)
