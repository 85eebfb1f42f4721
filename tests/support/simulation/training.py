"""A script that survives losses: the same calls in each step, then ``Checkpoint.save``, where agents enter.

Each tensor begins with the unit vector of its agent. So the result of an average begins with the weights it was made
with, and the result of a collective shows its participants.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

import shoal
from shoal.execution.membership import Plan

from . import optimizers
from .fleet import Agents, Simulated
from .programs import Array, Call, Program, as_array

KINDS = (
    *("average", "sum", "static", "static", "push-pull", "push", "pull"),
    *("allgather", "neighbor_allgather", "broadcast", "object", "barrier", "optimizer"),
)
SPANNING = ("average", "sum", "static")
AFTER = 2
"""Steps that follow once all agents are there and no fault is to come."""
PAUSE = 0.05
"""Seconds between steps until then: an agent that was started again needs some time to ask to enter."""
MOST_STEPS = 1000


@dataclass
class Entry:
    """One call of one agent at one step.

    Attributes:
        start: How often the agent had been started.
        before, after: The agent's plan when it made the call and when the call had ended.
        members: The agents that it counted as members when the call had ended. It may know by then that an agent of its
            plan has left, before the others have agreed on it.
        result: Its value or exception; None where the agent crashed before its end.
    """

    rank: int
    start: int
    step: int
    call: Call
    before: Plan
    after: Plan | None = None
    members: tuple[int, ...] = ()
    result: Any = None


@dataclass
class History:
    """The observations of the agents of a run.

    Attributes:
        participants: By step, and by rank and start: the members at its end, as each agent counted them.
        reached: By rank and start: the last step begun, or its successor where the agent has ended well.
        steps: By rank: the number of steps that it ended with.
        plans: By rank: its plan at the end.
    """

    entries: list[Entry] = field(default_factory=list)
    participants: dict[int, dict[tuple[int, int], tuple[int, ...]]] = field(default_factory=dict)
    reached: dict[tuple[int, int], int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)

    def agreed(self, rank: int, start: int, step: int) -> bool:
        """Whether the agent reached the next step: only together with agents that had ended this one, too.

        The result of an agent that crashed before that may be known to no other agent.
        """
        return self.reached.get((rank, start), -1) > step

    def failed(self, rank: int) -> set[str]:
        """The names of the calls that have raised on an agent."""
        return {one.call.name for one in self.entries if one.rank == rank and isinstance(one.result, Exception)}


@dataclass
class Training(Program):
    """The calls of one step; ``seed`` decides the numbers of each step and the order on each agent."""

    @staticmethod
    def draw(chance: random.Random, size: int, length: int, kinds: tuple[str, ...] = KINDS) -> Training:
        drawn = Program.draw(chance, size, length, kinds)
        calls = [
            replace(call, spans=not call.blocking and call.kind in SPANNING and chance.random() < 0.6)
            for call in drawn.calls
        ]
        return Training(size, drawn.topology, calls, drawn.seed, kinds)

    def at(self, step: int, call: Call, rank: int, what: int = 0) -> Array:
        """The tensor of an agent at a step: its unit vector, and small whole numbers; or what is drawn second."""
        return np.concatenate([np.eye(self.size)[rank] * (what == 0), self.drawn(call, step, what)[rank]])

    def at_all(self, step: int, call: Call, what: int = 0) -> Array:
        return np.concatenate([np.eye(self.size) * (what == 0), self.drawn(call, step, what)], 1)


Handles = dict[int, tuple[Entry, Any]]


class _Progress:
    """How many steps all have been there; handed over to agents that enter."""

    def __init__(self) -> None:
        self.full_steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"whole": self.full_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.full_steps = state["whole"]


def run_training(
    program: Training,
    world: Simulated,
    agents: Agents,
    history: History,
    over: Callable[[], bool],
    departs: Callable[[int, int], bool],
) -> Callable[[int], bool]:
    """Run an agent, from ``init()`` to ``shutdown()``.

    Args:
        over: No fault is to come.
        departs: Whether an agent leaves before a step.
    """

    def run_agent(rank: int) -> bool:
        shoal.set_topology(program.graph)
        me = rank, agents.starts[rank]
        one = _Agent(program, world, agents.engines[rank], history, *me)
        progress = _Progress()
        checkpoint = shoal.Checkpoint(progress=progress, **one.parts)
        step = checkpoint.load(None, missing_ok=True)
        agents.loaded.add(rank)
        while progress.full_steps < AFTER:
            history.reached[me] = step
            if departs(rank, step):
                return False
            one.take(step)
            result = shoal.allgather(torch.tensor([[rank, over()]]), name="there").tolist()
            participants = tuple(int(row[0]) for row in result)
            history.participants.setdefault(step, {})[me] = participants
            full = len(participants) == program.size and all(row[1] for row in result)
            progress.full_steps = progress.full_steps + 1 if full else 0
            started = one.begin_spanning(step, participants)
            checkpoint.save(None, step + 1)
            one.end_spanning(step, participants, started)
            step += 1
            if not progress.full_steps:
                world.scheduler.sleep(PAUSE)
            assert step < MOST_STEPS, f"rank {rank} has taken {step} steps, and has {participants}"
        history.steps[rank] = history.reached[me] = step
        history.plans[rank] = agents.engines[rank].agreement.plan
        return True

    return run_agent


def _latest(call: Call, step: int, participants: tuple[int, ...]) -> int:
    """The agent that begins a call after the step has ended. An agent that enters then takes no part in it."""
    return participants[(step + call.number) % len(participants)]


class _Agent:
    """One agent's calls. Each optimizer of the program lasts for the whole training."""

    def __init__(
        self, program: Training, world: Simulated, engine: Any, history: History, rank: int, start: int
    ) -> None:
        self._program, self._world, self._engine, self._history = program, world, engine, history
        self._rank, self._start = rank, start
        self._models: dict[int, optimizers.Point] = {}
        self._optimizers: dict[int, shoal.DecentralizedOptimizer] = {}
        self.parts: dict[str, Any] = {}
        for call in program.calls:
            if call.kind == "optimizer":
                model = optimizers.Point(torch.zeros(program.size + call.elements, dtype=torch.float64))
                optimizer = optimizers.optimizer_of(call.style, model, call.name)
                self._models[call.number], self._optimizers[call.number] = model, optimizer
                self.parts |= {f"model{call.number}": model, f"optimizer{call.number}": optimizer}

    def take(self, step: int) -> None:
        """One step of training."""
        handles: Handles = {}
        for what, call in self._program.order(self._rank):
            if what == "wait":
                if call.number in handles:
                    entry, handle = handles.pop(call.number)
                    self._record(entry, handle.wait)
                continue
            entry = Entry(self._rank, self._start, step, call, self._engine.agreement.plan)
            self._history.entries.append(entry)
            if call.kind == "optimizer":
                self._record(entry, partial(self._optimize, step, call))
                continue
            tensor = torch.from_numpy(self._program.at(step, call, self._rank))
            try:
                given = self._program.begin(call, self._rank, tensor)
            except shoal.ShoalError as error:
                self._end(entry, error)
                continue
            if what == "begin":
                handles[call.number] = entry, given
            else:
                self._end(entry, as_array(given))

    def begin_spanning(self, step: int, participants: tuple[int, ...]) -> Handles:
        """Begin the calls that span the end of a step, except the calls that this agent begins later."""
        handles: Handles = {}
        for call in self._program.calls:
            if call.spans and len(participants) > 2 and self._rank != _latest(call, step, participants):
                self._begin(step, call, handles)
        return handles

    def end_spanning(self, step: int, participants: tuple[int, ...], handles: Handles) -> None:
        for call in self._program.calls:
            if call.spans and self._rank == _latest(call, step, participants) and len(participants) > 2:
                self._begin(step, call, handles)
        for entry, handle in handles.values():
            self._record(entry, handle.wait)

    def _begin(self, step: int, call: Call, handles: Handles) -> None:
        entry = Entry(self._rank, self._start, step, call, self._engine.agreement.plan)
        self._history.entries.append(entry)
        try:
            tensor = torch.from_numpy(self._program.at(step, call, self._rank))
            handles[call.number] = entry, self._program.begin(call, self._rank, tensor)
        except shoal.ShoalError as error:
            self._end(entry, error)

    def _record(self, entry: Entry, call: Callable[[], Any]) -> None:
        try:
            result = as_array(call())
        except shoal.ShoalError as error:
            result = error
        self._end(entry, result)

    def _end(self, entry: Entry, result: Any) -> None:
        entry.result, entry.after = result, self._engine.agreement.plan
        entry.members = self._engine.membership.view.alive

    def _optimize(self, step: int, call: Call) -> torch.Tensor:
        model = self._models[call.number]
        with torch.no_grad():
            model.x.copy_(torch.from_numpy(self._program.at(step, call, self._rank)))
        gradient = self._program.at(step, call, self._rank, 1)
        optimizers.take_step(self._optimizers[call.number], model, gradient, lambda: self._world.scheduler.sleep(0.0))
        return model.x.detach().clone()
