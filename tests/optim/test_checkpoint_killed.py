"""SIGKILL of an agent in the middle of saving: a complete checkpoint is there, and the next save clears up."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

import shoal
from shoal.optim.checkpoints import checkpoint
from support.agent_main import die
from support.checkpoints import folders, weight
from support.world import World

SIZE = 3


def step_and_save(folder: Path, step: int) -> None:
    shoal.Checkpoint(model=weight(10.0 * step + shoal.rank())).save(folder, step, keep=1)


def killed_while_saving(folder: Path, step: int, where: str) -> None:
    """Save, and end at a place in the middle of it."""
    if where == "half a file":
        write = torch.save

        def half(states: object, file: BinaryIO) -> None:
            write(states, file)
            file.flush()
            file.truncate(file.tell() // 2)
            die()

        torch.save = half
    elif where == "half a manifest":
        write_text = Path.write_text
        Path.write_text = lambda self, text: (write_text(self, text[:10]), die())  # type: ignore
    elif where.startswith("rename"):
        rename = Path.replace
        Path.replace = lambda self, to: die() if where.endswith(to.name) else rename(self, to)  # type: ignore
    elif where == "unlink the old manifest":
        Path.unlink = lambda self, missing_ok=False: die()  # type: ignore[method-assign]
    else:
        # Not in the middle of it: another agent may have been quicker to remove them.
        checkpoint.remove_all_but = lambda *args: die()
    step_and_save(folder, step)


def load_weight(folder: Path) -> tuple[int, float]:
    model = weight(0.0)
    return shoal.Checkpoint(model=model).load(folder), model.weight.item()


@pytest.mark.transport("shared_memory")
@pytest.mark.parametrize(
    ("victim", "where", "counts"),
    [
        (1, "half a file", 1),
        (1, "rename agent-1.pt", 1),
        (0, "rename agent-0.pt", 1),
        (0, "half a manifest", 1),
        (0, "rename manifest.json", 1),
        (0, "unlink the old manifest", 2),
        (1, "remove the old files", 2),
    ],
)
def test_a_kill_during_save_leaves_a_complete_checkpoint(victim: int, where: str, counts: int, tmp_path: Path) -> None:
    with ExitStack() as last:
        world = World(SIZE)
        last.callback(world.destroy)
        world.results(step_and_save, tmp_path, 1)
        others = [rank for rank in range(SIZE) if rank != victim]
        pending = [world.run_on(rank, step_and_save, tmp_path, 2) for rank in others]
        assert world.run_on(victim, killed_while_saving, tmp_path, 2, where).outcome().error == "Died"
        for one in pending:
            assert one.outcome().error in ("", "PeerLost")
    with World(SIZE) as world:
        expected = [(counts, 10.0 * counts + rank) for rank in range(SIZE)]
        assert world.results(load_weight, tmp_path) == expected
        world.results(step_and_save, tmp_path, 3)
    assert len(folders(tmp_path)) == 1 and folders(tmp_path)[0].endswith("-step-3")
