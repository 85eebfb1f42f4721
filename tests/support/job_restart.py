"""A training run whose agents all die at once, as often as configured, and that writes its final state."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.optim.checkpoints import checkpoint
from support.checkpoints import Run

STEPS, EVERY = 30, 5
SAVING = "saving"


def train(folder: Path, began: list[int] | None = None, dies_at: int = STEPS, saving: bool = False) -> dict[str, Any]:
    """Train and save; the state in the end.

    Args:
        folder: Where checkpoints are.
        began: Is told the step that it begins with.
        dies_at: The step at which it is killed, if before the last.
        saving: Not before that step, but in the midst of the next save.
    """
    run, chance = Run(), torch.Generator().manual_seed(1)
    for parameter in run.model.parameters():  # each process has drawn others
        torch.nn.init.normal_(parameter, std=0.3, generator=chance)
    step = run.checkpoint.load(folder, missing_ok=True)
    if began is not None:
        began.append(step)
    while step < STEPS:
        if step == dies_at:
            if not saving:
                os.kill(os.getpid(), signal.SIGKILL)
            die_in_the_next_save()
        run.steps(1)
        step += 1
        if step % EVERY == 0:
            run.checkpoint.save(folder, step)
    return run.all()


def die_in_the_next_save() -> None:
    """When the own file is written, and before the checkpoint counts."""
    write = checkpoint.write_states

    def write_and_die(place: Path, rank: int, states: dict[str, Any]) -> int:
        write(place, rank, states)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    checkpoint.write_states = write_and_die


def main(folder: Path, *deaths: str) -> None:
    """Train in an agent that is one, or that a launcher has started.

    Args:
        folder: Where all is written.
        deaths: The n-th, a step or ``saving`` and a step, is that of the n-th attempt.
    """
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    how = deaths[attempt] if attempt < len(deaths) else str(STEPS)
    began: list[int] = []
    shoal.init()
    folder.mkdir(exist_ok=True)
    state = train(folder / "checkpoints", began, int(how.removeprefix(SAVING)), how.startswith(SAVING))
    torch.save({"began": began, "attempt": attempt, "state": state}, folder / f"ended.{shoal.rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    shoal.shutdown()
