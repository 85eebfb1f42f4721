"""``on_loss="continue"``: an agent dies while all write a checkpoint; the survivors have a checkpoint that loads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import shoal
from support.fault_points import Point, arm, over_both
from support.namespaces import require_namespaces
from support.survivors import CONTINUE
from support.world import World

SIZE = 4
SAVES = 6


def save_through(folder: Path, victim: int, point: Point) -> list[str]:
    """Save repeatedly while the victim ends at its given place; the names of the saved checkpoints."""
    rank, model = shoal.rank(), torch.nn.Linear(1, 1, bias=False)
    checkpoint = shoal.Checkpoint(model=model)
    shoal.barrier()
    if rank == victim:
        arm(point)
    saved = []
    for step in range(SAVES):
        torch.nn.init.constant_(model.weight, 100.0 * step + rank)
        saved.append(checkpoint.save(folder, step, keep=None).name)
    return saved


def load_one(folder: Path, step: int) -> float:
    model = torch.nn.Linear(1, 1, bias=False)
    assert shoal.Checkpoint(model=model).load(folder, step, start="consensus") == step
    return model.weight.item()


def load_own(folder: Path) -> float:
    model = torch.nn.Linear(1, 1, bias=False)
    assert shoal.Checkpoint(model=model).load(folder) == SAVES - 1
    return model.weight.item()


@over_both
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    "point",
    [
        Point("finished", 2),
        pytest.param(Point("sent", 21), marks=pytest.mark.soak),
        Point("received", 33),
        *(pytest.param(Point("finished", k), marks=pytest.mark.soak) for k in range(3, 17)),
    ],
    ids=str,
)
def test_every_checkpoint_is_complete(environment: dict[str, str], victim: int, point: Point, tmp_path: Path) -> None:
    left = [rank for rank in range(SIZE) if rank != victim]
    with World(SIZE, environment=environment | CONTINUE) as world:
        outcomes = world.run(save_through, tmp_path, victim, point)
        failed = [
            f"rank {outcome.rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
            for outcome in outcomes
            if outcome.error
        ]
        assert outcomes[victim].error == "Died" and len(failed) == 1, "\n".join(failed)
        names = [outcomes[rank].value for rank in left]
        assert names == [names[0]] * len(left)
    with World(len(left), environment=environment) as world:
        means = {sum(range(SIZE)) / SIZE, sum(left) / len(left)}
        for step in range(SAVES):
            [result] = set(world.results(load_one, tmp_path, step))
            assert any(abs(result - (100.0 * step + mean)) < 1e-4 for mean in means), (step, result)
        assert world.results(load_own, tmp_path) == [100.0 * (SAVES - 1) + rank for rank in left]


def save_on_a_full_disk(folders: list[str]) -> tuple[str, list[float]]:
    """The error where one agent's disk is full; averages and a checkpoint elsewhere still work."""
    model = torch.nn.Linear(200, 200)
    checkpoint = shoal.Checkpoint(model=model)
    output = ""
    try:
        checkpoint.save(folders[shoal.rank()], 1)
    except shoal.ShoalError as error:
        output = f"{error.ranks} {error}"
    x = torch.tensor([float(shoal.rank())])
    means = [shoal.allreduce(x).item()]
    with torch.no_grad():
        model.weight.fill_(shoal.rank())
    checkpoint.save(folders[-1], 2)
    loaded = torch.nn.Linear(200, 200)
    assert shoal.Checkpoint(model=loaded).load(folders[-1]) == 2 and torch.equal(loaded.weight, model.weight)
    return output, means


def test_a_full_disk_on_one_agent_ends_the_save_of_all_and_nothing_else(tmp_path: Path) -> None:
    require_namespaces()  # a disk is mounted, which needs the same rights
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(full)], check=True)
    try:
        folders = [str(tmp_path / "room"), str(full), str(tmp_path / "room"), str(tmp_path / "later")]
        with World(3, environment=CONTINUE) as world:
            result = world.results(save_on_a_full_disk, folders)
        left = [str(path) for path in full.rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", str(full)], check=True)
    for output, means in result:
        assert output.startswith("(1,)") and "is not saved: at rank 1" in output and means == [1.0]
        assert "No space left on device" in output, output
    assert not left, left
