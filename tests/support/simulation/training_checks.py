"""Compares a training's outcome with the model: the participants of each call, and their results.

While no agent sees the plan change, a call is that of the plan's members. A call during which some do may be that of
the members before or after, and an average may lack what lost agents have not sent: its weight is then the receiver's.
An average may also lack an unsent tensor of an agent that the receiver knows to have left, before all agree on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np

from shoal.errors import PeerLost

from . import optimizers
from .checks import SLACK, Report, alike
from .optimizers import Style
from .programs import Array
from .training import Entry, Training

STATIC = Style(adapts_first=True, one_peer=False)
ROOTED = ("broadcast", "object")


def check(report: Report, program: Training) -> None:
    problems, history = report.problems, report.history
    if problems:
        return
    all_ranks = tuple(range(program.size))
    waits = sum(fault.seconds for fault in report.scenario.faults if fault.kind != "slow")
    slow = any(fault.kind == "slow" and fault.seconds > 0.001 for fault in report.scenario.faults)
    if report.seconds - 1000.0 > SLACK + waits and not slow:
        problems.append(f"it took {report.seconds - 1000.0:.1f} s, though nothing had to wait")
    problems += report.left
    problems += [f"rank {rank} counts {ranks} as alive" for rank, ranks in report.members.items() if ranks != all_ranks]
    if len(set(history.steps.values())) != 1 or len(history.steps) != program.size:
        problems.append(f"the agents ended after different steps: {history.steps}")
    if len(set(history.plans.values())) != 1 or any(plan.gone for plan in history.plans.values()):
        problems.append(f"the agents ended with different plans: {history.plans}")
    for step, participants in history.participants.items():
        if len({ranks for me, ranks in participants.items() if history.agreed(*me, step)}) > 1:
            problems.append(f"step {step}: the agents have different members: {participants}")
    failed = {fault.rank for fault in report.scenario.faults if fault.kind in ("returns", "joins", "departs")}
    by_call: dict[tuple[int, int], list[Entry]] = {}
    for entry in history.entries:
        by_call.setdefault((entry.step, entry.call.number), []).append(entry)
    for (step, _), entries in by_call.items():
        agreed = [one for one in entries if history.agreed(one.rank, one.start, step)]
        for problem in _Event(program, step, entries, agreed, failed).problems():
            problems.append(f"step {step}, {entries[0].call}: {problem}")


def _between(gone: list[tuple[int, ...]]) -> Iterable[tuple[int, ...]]:
    """All sets between the ranks missing in every plan and the ranks missing in some plan, ascending."""
    always = set(gone[0]).intersection(*gone)
    sometimes = sorted(set().union(*gone) - always)
    for count in range(len(sometimes) + 1):
        for some in combinations(sometimes, count):
            yield tuple(sorted(always | set(some)))


class _Event:
    """One call of all agents at one step.

    Attributes:
        ended: The outcomes on the agents whose plans agree.
        plans: All plans of an agent before or after it.
        gone: The ranks that it may lack: in one of these plans, or in a plan between them.
        calm: The plan was the same for all, and all agents that began have ended.
        lacking: By rank: the agents of which a neighbour's average there may lack the tensor.
    """

    def __init__(self, program: Training, step: int, entries: list[Entry], agreed: list[Entry], lost: set[int]) -> None:
        self.program, self.step, self.call, self.lost = program, step, entries[0].call, lost
        self.entries = entries
        self.ended = agreed
        self.plans = {plan for one in entries for plan in (one.before, one.after) if plan is not None}
        self.calm = len(self.plans) == 1 and len(self.ended) == len(entries)
        departed = {one.rank: set(self._members(one.before.gone)).difference(one.members) for one in agreed}
        self.lacking = {rank: participants if self.calm else lost - {rank} for rank, participants in departed.items()}
        gone = [plan.gone for plan in self.plans]
        # An agent may be lost and admitted again between two plans.
        if len({plan.n_admitted for plan in self.plans}) > 1:
            gone.append(tuple(lost - {one.rank for one in agreed}))
        self.gone = list(_between(gone))
        self.x = program.at_all(step, self.call)

    def problems(self) -> Iterable[str]:
        failed = [one for one in self.ended if isinstance(one.result, Exception)]
        if failed:
            yield from self._failures(failed)
            return
        kind = self.call.kind
        if kind in ("average", "sum", "allgather"):
            yield from self._collective()
        elif kind in ("static", "push", "pull", "push-pull", "optimizer"):
            for one in self.ended:
                yield from self._average(one)
            yield from self._of_one_plan()
        elif kind == "neighbor_allgather":
            for one in self.ended:
                yield from self._gathered(one)
        elif kind in ROOTED:
            for one in self.ended:
                if not alike(one.result, self.x[self.call.root]):
                    yield f"rank {one.rank} has {one.result[:8]}, and the root gave {self.x[self.call.root][:8]}"

    def _failures(self, failed: list[Entry]) -> Iterable[str]:
        root = self.call.root
        for one in failed:
            fits = self.call.kind in ROOTED and isinstance(one.result, PeerLost) and root in one.result.ranks
            if not fits or not any(root in plan.gone for plan in self.plans):
                yield f"rank {one.rank} raised {type(one.result).__name__}: {one.result}"
        if len(failed) < len([one for one in self.ended if one.rank not in self.lost]):
            yield f"ranks {[one.rank for one in failed]} of {[one.rank for one in self.ended]} raised"

    def _collective(self) -> Iterable[str]:
        """All have the same result, over all agents of the plan."""
        size, results = self.program.size, [one.result for one in self.ended]
        if any(not np.array_equal(one, results[0]) for one in results):
            yield f"the agents have different results: {[one[:size] for one in results]}"
            return
        if not results:
            return
        result = results[0]
        if self.call.kind == "allgather":
            result = result.reshape(-1, self.x.shape[1])
            took_part = tuple(int(rank) for rank in result[:, :size].argmax(1))
            right = self.x[list(took_part)]
        else:
            took_part = tuple(int(rank) for rank in np.flatnonzero(result[:size]))
            total = self.x[list(took_part)].sum(0)
            right = total / len(took_part) if self.call.kind == "average" else total
        if not alike(result, right):
            yield f"the agents have {result[:8]}, not {right[:8]}, of ranks {took_part}"
        if took_part not in map(self._members, self.gone):
            yield f"ranks {took_part} took part, with the plans {sorted(self.plans)}"
        if not set(took_part) <= {one.rank for one in self.entries}:
            yield f"ranks {took_part} took part, and {[one.rank for one in self.entries]} called it"

    def _members(self, gone: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.program.size) if rank not in gone)

    def _average(self, one: Entry) -> Iterable[str]:
        size, rank = self.program.size, one.rank
        row = one.result[:size]
        if self.call.kind == "optimizer":
            gradients = self.program.at_all(self.step, self.call, 1)
            right = optimizers.row_applied(self.call.style, row, rank, self.x, gradients)
        else:
            right = row @ self.x
        if not alike(one.result, right):
            yield f"rank {rank} has {one.result[:8]}, not {right[:8]}"
        allowed = [row for departed in self.gone for row in self._rows(departed, rank)]
        if not any(alike(row, other) for other in allowed):
            yield f"rank {rank} has the weights {row}, and may have {sorted({tuple(map(float, a)) for a in allowed})}"

    def _of_one_plan(self) -> Iterable[str]:
        """All agents have averaged by the plan of one of them: a round has one plan."""
        result = {one.rank: one.result[: self.program.size] for one in self.ended}
        for departed in self.gone:
            if all(any(alike(row, other) for other in self._rows(departed, rank)) for rank, row in result.items()):
                return
        yield f"the agents have the weights {result}, of different plans"

    def _rows(self, gone: tuple[int, ...], rank: int) -> Iterable[Array]:
        """The weights of an average, on one agent."""
        full = self._row(gone, rank)
        yield full
        missing = [other for other in self.lacking[rank] if full[other]]
        for count in range(1, len(missing) + 1):
            for some in combinations(missing, count):
                row = full.copy()
                for other in some:
                    row[other] = 0.0
                    row[rank] += self._weight_kept(other, rank, full)
                yield row

    def _weight_kept(self, other: int, rank: int, whole: Array) -> float:
        """The part of a missing agent's weight that the receiver's own tensor gets."""
        if self.call.kind == "push":
            return 0.0
        return self.call.sends[other][rank] if self.call.kind in ("pull", "push-pull") else float(whole[other])

    def _row(self, gone: tuple[int, ...], rank: int) -> Array:
        kind, call = self.call.kind, self.call
        if kind == "optimizer":
            return call.style.matrix(self.program.graph, self.step, gone)[rank]
        if kind == "static":
            return STATIC.matrix(self.program.graph, 0, gone)[rank]
        row = np.zeros(self.program.size)
        row[rank] = 0.5
        for other, sends in enumerate(call.sends):
            weight = sends.get(rank)
            if weight is not None and other in gone:
                row[rank] += 0.0 if kind == "push" else weight
            elif weight is not None:
                row[other] = weight**2 if kind == "push-pull" else weight
        return row

    def _gathered(self, one: Entry) -> Iterable[str]:
        """The tensors of the neighbours that are there, by rank."""
        result: Any = one.result.reshape(-1, self.x.shape[1])
        ranks = {int(rank) for rank in result[:, : self.program.size].argmax(1)}
        if not alike(result, self.x[sorted(ranks)]):
            yield f"rank {one.rank} has other tensors than those of ranks {sorted(ranks)}"
        for departed in self.gone:
            sources = set(np.flatnonzero(STATIC.matrix(self.program.graph, 0, departed)[one.rank])) - {one.rank}
            if ranks <= sources and sources - ranks <= self.lacking[one.rank]:
                return
        yield f"rank {one.rank} has the tensors of ranks {sorted(ranks)}, with the plans {sorted(self.plans)}"
