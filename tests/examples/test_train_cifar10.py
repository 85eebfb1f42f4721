"""ResNet-20 on CIFAR-10: the data format, each agent's share, exact resuming, and the final output."""

from __future__ import annotations

import os
import pickle
import re
import struct
import sys
from collections.abc import Iterable
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shoal
from support.saved_runs import assert_same_bits, saved
from support.scripts import in_processes

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import _cifar10  # noqa: E402
import train_cifar10  # noqa: E402

TRAIN, TEST = 50, 20
SMALL = ("--batch", "4", "--limit-train", "12", "--limit-test", "6", "--epochs", "2", "--warm-up", "2")
"""One step in each epoch."""


def batch_of(count: int, seed: int) -> dict[bytes, Any]:
    """One file's content: images whose colour says what they are, with noise."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(10, size=count)
    data = (20 * labels[:, None] + rng.integers(60, size=(count, 3072))).astype(np.uint8)
    return {b"data": data, b"labels": labels.tolist(), b"batch_label": b"made for a test"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in the standard format with 50 images to train on and 20 to test with."""
    place = tmp_path / "cifar-10-batches-py"
    place.mkdir()
    for seed, name in enumerate([*_cifar10.TRAIN, *_cifar10.TEST]):
        (place / name).write_bytes(pickle.dumps(batch_of(TEST if name == "test_batch" else TRAIN // 5, seed)))
    return place


def in_fleet(size: int, folder: Path, *options: str) -> list[list[train_cifar10.Run]]:
    args = train_cifar10.parse(["--data", str(folder), *SMALL, *options])
    return shoal.Fleet(size, timeout=20.0).run(train_cifar10.main, args)


# Resuming


@pytest.mark.parametrize("algorithm", train_cifar10.ALGORITHMS)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, folder: Path, algorithm: str) -> None:
    """With three agents the second round differs from the first."""
    options = ("--algorithm", algorithm, "--checkpoint")
    in_fleet(3, folder, *options, str(tmp_path / "whole"))
    (stopped,) = in_fleet(3, folder, *options, str(tmp_path / "parts"), "--stop-after", "1")[0]
    assert (stopped.done, stopped.evaluated) == (1, [1])
    (resumed,) = in_fleet(3, folder, *options, str(tmp_path / "parts"), "--resume")[0]
    assert (resumed.done, resumed.evaluated, len(resumed.seconds)) == (2, [1, 2], 2)
    full = saved(tmp_path / "whole")
    assert list(full) == [f"{algorithm}/step-2/agent-{rank}" for rank in range(3)]
    assert_same_bits(full, saved(tmp_path / "parts"))


@pytest.mark.slow  # test_train_digits.py runs its script in processes, and this one in a fleet
@pytest.mark.timeout(150)  # modules are imported in each process, which takes long where others want the cores, too
def test_processes_resume_a_fleets_checkpoint(tmp_path: Path, folder: Path) -> None:
    in_fleet(2, folder, "--compare", "--checkpoint", str(tmp_path / "whole"))
    in_fleet(2, folder, "--compare", "--checkpoint", str(tmp_path / "parts"), "--stop-after", "1")
    picture = tmp_path / "not yet there" / "cifar10.png"
    options = ("--compare", "--checkpoint", str(tmp_path / "parts"), "--resume", "--picture", str(picture))
    output, other = in_processes(2, EXAMPLES / "train_cifar10.py", "--data", str(folder.parent), *SMALL, *options)
    assert other == ""
    assert_same_bits(saved(tmp_path / "whole"), saved(tmp_path / "parts"))
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    epochs = re.findall(r"^(adapt, then combine|all-reduce) +epoch (\d)/2", output, re.MULTILINE)
    assert epochs == [("adapt, then combine", "2"), ("all-reduce", "1"), ("all-reduce", "2")]
    assert re.search(r"Verdict: .* over one-peer reads \d+\.\d\d% .* all-reduce from the same", output)


def test_checkpoints_that_cannot_be_resumed_are_refused(tmp_path: Path, folder: Path) -> None:
    options = ("--checkpoint", str(tmp_path / "c"))
    in_fleet(2, folder, *options, "--stop-after", "1")
    with pytest.raises(SystemExit, match=r"c/atc has checkpoints already: go on with --resume"):
        in_fleet(2, folder, *options)
    with pytest.raises(SystemExit, match=r"c/atc/\S+ is of 2 agents, and there are 3 now\. Run with 2"):
        in_fleet(3, folder, *options, "--resume")
    with pytest.raises(SystemExit, match=r"of a job with lr 0\.1, and this one has 0\.2"):
        in_fleet(2, folder, *options, "--resume", "--lr", "0.2")
    (tmp_path / "c" / "atc" / "000001-step-1" / "agent-1.pt").unlink()
    with pytest.raises(SystemExit, match=r"000001-step-1 is not loaded: at rank 1, FileNotFoundError: .*agent-1\.pt"):
        in_fleet(2, folder, *options, "--resume")


# Training


def test_adapt_then_combine_with_all_is_all_reduce(tmp_path: Path, folder: Path) -> None:
    """Averaging x - lr m over all agents is x - lr (average of m): momentum and weight decay are linear.

    The default topology of four agents is another one.
    """
    options = ("--compare", "--topology", "full", "--lr", "0.05", "--limit-train", "16", "--evaluate-every", "2")
    in_fleet(4, folder, *options, "--checkpoint", str(tmp_path / "c"))
    states = saved(tmp_path / "c")
    names = [name for name, _ in train_cifar10.resnet20(0).named_parameters()]
    for rank in range(4):
        ours, remote = (states[f"{algorithm}/step-2/agent-{rank}"]["model"] for algorithm in ("atc", "allreduce"))
        for name in names:
            assert (ours[name] - remote[name]).norm() < 1e-3 * remote[name].norm() + 1e-5, name
        assert (ours["0.weight"] - train_cifar10.resnet20(0).state_dict()["0.weight"]).norm() > 1e-3


def test_every_agent_reports_the_same(folder: Path) -> None:
    agents_results = in_fleet(4, folder, "--limit-train", "16", "--epochs", "3", "--evaluate-every", "2")
    for (run,) in agents_results:
        assert run == agents_results[0][0]
        assert run.evaluated == [2, 3]
        assert len(run.of_agents[0]) == 4
        assert run.distance[-1] > 0


def test_evaluation_is_of_each_agent_and_of_the_consensus_and_changes_nothing() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2])
    test = _cifar10.Images(torch.zeros(10, 3, 32, 32, dtype=torch.uint8), labels)

    def run() -> tuple[train_cifar10.Run, list[float], bool]:
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
        bias = torch.zeros(10)
        bias[[shoal.rank(), 2]] = torch.tensor([2.0, 1.5])  # this agent says its rank, and the mean of both says 2
        with torch.no_grad():
            model[1].weight.zero_()
            model[1].bias.copy_(bias)
        results = train_cifar10.Run("atc", done=7)
        train_cifar10.evaluate(model, test, results)
        return results, model[1].bias.tolist(), model.training

    for rank, (result, bias, training) in enumerate(shoal.Fleet(2).run(run)):
        assert (result.evaluated, result.of_agents, result.of_consensus) == ([7], [[0.3, 0.2]], [0.5])
        assert result.distance == [pytest.approx(2**0.5)]
        assert bias[rank] == 2.0 and bias[1 - rank] == 0.0
        assert training


def test_the_model_is_the_paper_s() -> None:
    model = train_cifar10.resnet20(seed=3)
    assert sum(param.numel() for param in model.parameters()) == 269_722
    assert sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in model.modules()) == 20
    seen = []
    for block in model:
        block.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    model(torch.zeros(2, 3, 32, 32))
    assert seen[3:12:3] == [(2, 16, 32, 32), (2, 32, 16, 16), (2, 64, 8, 8)]
    again, other = train_cifar10.resnet20(seed=3), train_cifar10.resnet20(seed=4)
    assert torch.equal(model[0].weight, again[0].weight) and not torch.equal(model[0].weight, other[0].weight)


def test_the_shortcut_is_every_other_pixel_and_channels_of_zeros() -> None:
    block = train_cifar10.Block(2, 4).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(1, 2, 4, 4)
    assert torch.equal(block(x), torch.cat([x[:, :, ::2, ::2], torch.zeros(1, 2, 2, 2)], dim=1))


def test_the_learning_rate_rises_to_that_of_the_total_batch_and_falls(folder: Path) -> None:
    rates = []

    def record_rate(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if shoal.rank() == 0:
            rates.append(optimizer.param_groups[0]["lr"])

    hook = register_optimizer_step_pre_hook(record_rate)
    options = ("--limit-train", "16", "--epochs", "3", "--warm-up", "1", "--evaluate-every", "3", "--lr", "0.8")
    in_fleet(2, folder, *options)  # two steps in each epoch
    hook.remove()
    risen = [1 / 2, 3 / 4, 1, 1, 1, 1]
    fallen = [(1 + cos(pi * step / 6)) / 2 for step in range(6)]
    assert rates == pytest.approx([0.8 * 8 / 128 * up * down for up, down in zip(risen, fallen, strict=True)])


def test_every_epoch_and_seed_has_its_own_images_and_draws(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders, seeds = [], []

    def batches(images: _cifar10.Images, chosen: Iterable[int], size: int, seed: int) -> list[object]:
        orders.append(tuple(chosen))
        seeds.append(seed)
        return []

    monkeypatch.setattr(_cifar10.Images, "batches", batches)
    for seed in ("0", "1"):
        in_fleet(1, folder, "--seed", seed, "--evaluate-every", "2")
    assert len(set(orders)) == len(set(seeds)) == 4
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(12))}


def test_the_verdict_is_below_for_lower_accuracy() -> None:
    runs = [train_cifar10.Run(name, of_consensus=[result]) for name, result in (("atc", 0.871), ("allreduce", 0.8755))]
    assert "reads 87.10% of the test images, 0.45 points below all-reduce" in train_cifar10.verdict(*runs, "ring")
    assert "reads 87.55% of the test images, 0.45 points above" in train_cifar10.verdict(*reversed(runs), "ring")


# Data


def test_files_hold_images_row_by_row_and_colour_by_colour(folder: Path) -> None:
    train, test = _cifar10.load(folder)
    assert (len(train), len(test)) == (TRAIN, TEST)
    written = batch_of(10, 2)
    assert train.pixels[20:30].flatten(1).tolist() == written[b"data"].tolist()
    assert train.pixels[25, 2, 7, 3] == written[b"data"][5, 2 * 1024 + 7 * 32 + 3]
    assert train.labels[20:30].tolist() == written[b"labels"]
    few, fewer = _cifar10.load(folder.parent, limit_train=12, limit_test=3)
    assert torch.equal(few.pixels, train.pixels[:12]) and torch.equal(fewer.labels, test.labels[:3])


def of_python_2(data: np.ndarray[Any, Any], labels: list[int]) -> bytes:
    """A file as the original ones are: protocol 2, written by Python 2 and by NumPy 1."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    pixels = b"T" + struct.pack("<i", data.size) + data.tobytes()
    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xff" * 1
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    shape = b"K" + bytes([len(data)]) + b"M" + struct.pack("<H", 3072) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
    array += b"(K\x01" + shape + dtype + b"\x89" + pixels + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


@pytest.mark.parametrize("written_by", ["python 2", 2, 3, 4, 5])
def test_every_protocol_is_read(tmp_path: Path, written_by: str | int) -> None:
    batch = batch_of(3, 0)
    content = (
        of_python_2(batch[b"data"], batch[b"labels"])
        if isinstance(written_by, str)
        else pickle.dumps(batch, protocol=written_by)
    )
    (tmp_path / "batch").write_bytes(content)
    images = _cifar10.read(tmp_path / "batch")
    assert images.pixels.flatten(1).tolist() == batch[b"data"].tolist()
    assert images.labels.tolist() == batch[b"labels"]


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_file_that_would_run_code_is_refused_before_it_does(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    batch = {**batch_of(3, 0), b"more": Call(os.unlink, str(victim))}
    (tmp_path / "batch").write_bytes(pickle.dumps(batch, protocol))
    with pytest.raises(SystemExit, match=r"batch asks for posix\.unlink, which no file of CIFAR-10 needs"):
        _cifar10.read(tmp_path / "batch")
    assert victim.exists()


@pytest.mark.parametrize(
    "unpickled", [np.load, np.frombuffer, eval, getattr, pickle.loads], ids=lambda one: one.__name__
)
def test_only_the_needed_names_of_numpy_and_python_are_allowed(tmp_path: Path, unpickled: Any) -> None:
    (tmp_path / "batch").write_bytes(pickle.dumps(Call(unpickled, "x")))
    with pytest.raises(SystemExit, match="which no file of CIFAR-10 needs"):
        _cifar10.read(tmp_path / "batch")


GOOD = batch_of(3, 0)
BAD: dict[str, tuple[Any, str]] = {
    "no pickle": (b"hello", "is damaged, or no file of CIFAR-10"),
    "cut off": (pickle.dumps(GOOD)[:2000], "is damaged, or no file of CIFAR-10"),
    "empty": (b"", "is damaged, or no file of CIFAR-10: EOFError"),
    "a list": ([1, 2], "its data is no such array"),
    "no data": ({b"labels": [1]}, "its data is no such array"),
    "wrong type": ({**GOOD, b"data": GOOD[b"data"].astype(np.int64)}, r"its data is int64 \[3, 3072\]"),
    "wrong shape": ({**GOOD, b"data": GOOD[b"data"][:, 1:]}, r"its data is uint8 \[3, 3071\]"),
    "a label missing": ({**GOOD, b"labels": [1, 2]}, "its labels are not that, for 3 images"),
    "label 10": ({**GOOD, b"labels": [1, 2, 10]}, "its labels are not that"),
    "CIFAR-100": ({b"data": GOOD[b"data"], b"fine_labels": [1, 2, 3]}, "its labels are not that"),
}


@pytest.mark.parametrize("bad", BAD)
def test_an_invalid_file_is_named_with_its_fault(tmp_path: Path, bad: str) -> None:
    content, complaint = BAD[bad]
    (tmp_path / "batch").write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    with pytest.raises(SystemExit, match=f"{tmp_path}/batch.*{complaint}"):
        _cifar10.read(tmp_path / "batch")


def test_files_that_are_missing_are_named(tmp_path: Path, folder: Path) -> None:
    (folder / "data_batch_3").unlink()
    with pytest.raises(SystemExit, match=r"cifar-10-batches-py lacks data_batch_3\. .* name the folder with --data"):
        _cifar10.load(folder)
    with pytest.raises(SystemExit, match=r"nowhere lacks data_batch_1, .*, test_batch"):
        _cifar10.load(tmp_path / "nowhere")


def numbered(count: int) -> _cifar10.Images:
    pixels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return _cifar10.Images(pixels, torch.arange(count))


def test_agents_have_different_images_and_other_ones_in_each_epoch() -> None:
    images = numbered(50)

    def drawn() -> list[list[int]]:
        sampler, epochs = shoal.data.AgentSampler(images), []
        for epoch in (0, 0, 1):
            sampler.set_epoch(epoch)
            epochs.append([int(label) for _, labels in images.batches(sampler, 4, seed=epoch) for label in labels])
        return epochs

    epochs = list(zip(*shoal.Fleet(3).run(drawn), strict=True))
    assert epochs[0] == epochs[1] != epochs[2]
    for epoch in epochs:
        assert [len(part) for part in epoch] == [16, 16, 16]
        assert len({label for part in epoch for label in part}) == 48


def test_an_epoch_is_independent_of_the_number_of_agents() -> None:
    images = numbered(50)

    def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(images.batches(shoal.data.AgentSampler(images), 12 // shoal.size(), seed=5))

    def total(agents: int) -> list[dict[int, list[float]]]:
        """Each step's images by number, over all agents."""
        steps = zip(*shoal.Fleet(agents).run(batches), strict=True)
        return [
            {int(n): x.flatten().tolist() for inputs, labels in step for x, n in zip(inputs, labels, strict=True)}
            for step in steps
        ]

    assert total(1) == total(3) == total(4)
    assert len(total(1)) == 4


def test_crops_are_windows_of_the_image_or_of_its_mirror_image_with_black_around() -> None:
    pixels = numbered(6).pixels
    corners = torch.tensor([[4, 4], [0, 0], [8, 8], [4, 7], [1, 6], [4, 4]])
    mirrored = torch.tensor([False, False, False, False, True, True])
    cropped = _cifar10._crop(pixels, corners, mirrored)
    assert torch.equal(cropped[0], pixels[0])
    assert torch.equal(cropped[1, :, 4:, 4:], pixels[1, :, :28, :28]) and not cropped[1, :, :4].any()
    assert torch.equal(cropped[2, :, :28, :28], pixels[2, :, 4:, 4:]) and not cropped[2, :, :, 28:].any()
    assert torch.equal(cropped[3, :, :, :29], pixels[3, :, :, 3:])
    assert torch.equal(cropped[5], pixels[5].flip(2))
    wide = nn.functional.pad(pixels[4], (4,) * 4)
    assert torch.equal(cropped[4], wide[:, 1:33, 6:38].flip(2))


def test_pixels_are_scaled_and_in_channels_last_order() -> None:
    ready = _cifar10._ready(torch.full((2, 3, 32, 32), 255, dtype=torch.uint8))
    assert ready[1, :, 0, 0].tolist() == pytest.approx([0.5086 / 0.2470, 0.5178 / 0.2435, 0.5535 / 0.2616])
    assert ready.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "options",
    [["--epochs", "0"], ["--batch", "-1"], ["--limit-train", "-1"], ["--resume"], ["--stop-after", "1"]],
)
def test_invalid_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_cifar10.parse(options)
    assert options[0] in capsys.readouterr().err


def test_fewer_images_than_a_batch_are_refused(folder: Path) -> None:
    with pytest.raises(SystemExit, match="12 images are fewer than one batch of 20 for 2 agents"):
        in_fleet(2, folder, "--batch", "20")
