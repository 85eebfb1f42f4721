"""Checkpoints of a job: each agent saves a file of its own, and all of them go on from the newest that all have.

A file appears whole or not at all, under a name that says whose it is (``step-00000200.agent-1-of-4.pt``), and the one
before it goes when every agent has the new one. So whenever the job is killed, a complete set is there.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import shoal

State = dict[str, Any]
"""What `torch.save` and `torch.load(..., weights_only=True)` carry: tensors, numbers, strings, and lists and dicts."""
_NAME = re.compile(r"step-(\d+)\.agent-(\d+)-of-(\d+)\.pt")


class Checkpoints:
    """This agent's checkpoints in a folder. All agents make one, and call its methods together.

    Args:
        folder: On one machine or a shared disk the same for all; on machines of their own each has the files of its
            agents. Empty: nothing is ever saved.
        settings: What must be the same when the job goes on, such as the learning rate: ``{option: value}``.
    """

    def __init__(self, folder: str | Path, settings: State) -> None:
        self._folder = Path(folder) if folder else None
        self._settings = settings

    def save(self, step: int, state: State) -> None:
        """Save this agent's `state` after `step` steps, and then drop what it had saved before."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        earlier = [path for number, path in self._mine().items() if number != step]
        path = self._path(step)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            torch.save({"step": step, "settings": self._settings, "state": state}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        shoal.barrier()  # until all have theirs, the set before is the one to go on from
        for path in earlier:
            path.unlink()

    def restore(self, resume: bool) -> tuple[int, State | None]:
        """The newest step that all agents have saved, and this agent's state after it; 0 and None if there is none.

        Args:
            resume: If not, the folder must be one without checkpoints, which would be taken for this job's.

        Raises:
            SystemExit: On all agents: the checkpoints are of another number of agents or of other settings, some are
                missing, or there are some and `resume` is not set.
        """
        if self._folder is None:
            return 0, None
        mine = torch.tensor(sorted(self._mine()), dtype=torch.int64)
        counts = shoal.allgather(torch.tensor([len(mine)])).tolist()
        steps = Counter(shoal.allgather(mine).tolist())
        foreign = shoal.allreduce(torch.tensor(self._other_size()), op="max").item()
        if not resume and (steps or foreign):
            raise SystemExit(f"{self._folder} has checkpoints already: go on with --resume, or name another folder")
        if foreign and not steps:
            raise SystemExit(
                f"the checkpoints in {self._folder} are of {foreign} agents, and these are {shoal.size()}: each agent "
                f"has a model of its own, so go on with as many (shoal run -n {foreign} ...)"
            )
        if not steps:
            return 0, None
        complete = [step for step, count in steps.items() if count == shoal.size()]
        if not complete:
            lacking = [rank for rank, count in enumerate(counts) if not count]
            raise SystemExit(
                f"{self._folder} has no step that all {shoal.size()} agents have saved"
                + (f"; there is nothing of agents {lacking}. Bring their files here" if lacking else "")
            )
        step = max(complete)
        saved: State = torch.load(self._path(step), weights_only=True)
        self._check(saved["settings"])
        state: State = saved["state"]
        return step, state

    def _path(self, step: int) -> Path:
        assert self._folder is not None
        return self._folder / f"step-{step:08}.agent-{shoal.rank()}-of-{shoal.size()}.pt"

    def _names(self) -> dict[Path, tuple[int, int, int]]:
        """Step, rank and size of every file here."""
        assert self._folder is not None
        found = {path: _NAME.fullmatch(path.name) for path in self._folder.glob("*.pt")}
        return {path: (int(name[1]), int(name[2]), int(name[3])) for path, name in found.items() if name}

    def _mine(self) -> dict[int, Path]:
        """The files of this agent of as many agents, by step."""
        me = (shoal.rank(), shoal.size())
        return {step: path for path, (step, *whose) in self._names().items() if tuple(whose) == me}

    def _other_size(self) -> int:
        """Of how many agents the files are that are of another number than these; 0 if there are none."""
        return max((size for _, _, size in self._names().values() if size != shoal.size()), default=0)

    def _check(self, saved: State) -> None:
        for name in sorted(saved.keys() | self._settings.keys()):
            then, now = saved.get(name), self._settings.get(name)
            if then != now:
                raise SystemExit(
                    f"the checkpoint in {self._folder} is of a job with {name} {then}, and this one has {now}: "
                    f"a job goes on as it began"
                )
