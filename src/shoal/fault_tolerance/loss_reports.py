"""The reports of a loss that agents exchange, and the decisions that they list; see :mod:`.agreement`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..execution.control_messages import parsed_counts, parsed_ranks
from ..execution.matching import Key
from ..execution.membership import Plan, Ranks, View


@dataclass(frozen=True)
class Decision:
    """The result of one agreement.

    Attributes:
        plan: The agreed plan.
        begun: The first round that follows the plan, by name; 0 for a name that is not listed.
        admitted: The ranks admitted with this decision; they take part in no earlier round.
        restarted: Collective operations, by name and round, begun before the plan and attempted with it by an agent.
    """

    plan: Plan
    begun: dict[str, int]
    admitted: Ranks = ()
    restarted: frozenset[Key] = frozenset()

    @property
    def order(self) -> tuple[int, int]:
        return self.plan.n_admitted, len(self.plan.gone)


@dataclass(frozen=True)
class LossReport:
    """One agent's report of a loss.

    Attributes:
        plan: The lost ranks that it knows, and the number of admitted agents.
        begun: The number of rounds that it has begun, by name.
        open: Its open collective operations, by name and round: the attempt whose result it has, or None without a
            result.
        kept: The rounds of ended collective operations whose results it can send, by name.
        decisions: The decisions of earlier agreements that it knows.
        out_of_reach: The lost ranks whose processes may still run, as far as it knows.
    """

    plan: Plan
    begun: dict[str, int]
    open: dict[str, dict[int, int | None]]
    kept: dict[str, list[int]]
    decisions: list[Decision]
    out_of_reach: frozenset[int]

    def has(self, name: str, round_: int, attempt: int) -> bool:
        """Whether the agent has the result of a collective operation; if that is still open there, of ``attempt``."""
        return self.begun.get(name, 0) > round_ and self.open.get(name, {}).get(round_, attempt) == attempt

    def keeps(self, name: str, round_: int) -> bool:
        """Whether the operation has ended there and the agent can send the result."""
        return round_ in self.kept.get(name, ())

    def lacks(self, name: str, round_: int) -> bool:
        """Whether the operation is open there."""
        return round_ in self.open.get(name, {})

    def as_data(self, view: View) -> dict[str, Any]:
        """The report as JSON data, with the cause of each loss in ``view``, and whether the process died."""
        return {
            "gone": [
                (rank, view.died.get(rank, "it left"), rank in view.died, rank in self.out_of_reach)
                for rank in self.plan.gone
            ],
            "admitted": self.plan.n_admitted,
            "begun": _changes(self.decisions[-1].begun if self.decisions else {}, self.begun),
            "open": self.open,
            "kept": self.kept,
            "decisions": decisions_as_data(self.decisions),
        }


def parsed_report(data: Any, size: int) -> tuple[list[tuple[int, str, bool]], LossReport]:
    """Parse another agent's report, and (rank, cause, died) of each loss; one of :data:`NONSENSE` if malformed."""
    losses = [(int(rank), str(cause)[:1000], bool(died)) for rank, cause, died, _ in data["gone"]]
    beyond = frozenset(int(rank) for rank, _, _, out_of_reach in data["gone"] if out_of_reach)
    open_ = {
        str(name): {int(round_): None if attempt is None else int(attempt) for round_, attempt in rounds.items()}
        for name, rounds in data["open"].items()
    }
    kept = {str(name): [int(round_) for round_ in rounds] for name, rounds in data["kept"].items()}
    plan = Plan(parsed_ranks([rank for rank, _, _ in losses], size), int(data["admitted"]))
    decisions = parsed_decisions(data["decisions"], size)
    begun = _changed(decisions[-1].begun if decisions else {}, data["begun"])
    return losses, LossReport(plan, begun, open_, kept, decisions, beyond)


def _changes(before: Mapping[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """The counts that differ from those before; 0 for a name without one.

    A job whose calls have many names sends each of them once, and not once for each decision.
    """
    gone = dict.fromkeys(before.keys() - counts.keys(), 0)
    return {name: count for name, count in counts.items() if before.get(name, 0) != count} | gone


def _changed(before: Mapping[str, int], changes: Any) -> dict[str, int]:
    """The counts of which :func:`_changes` are JSON data; raises one of :data:`NONSENSE` if they are malformed."""
    return {name: count for name, count in {**before, **parsed_counts(changes)}.items() if count}


def decisions_as_data(decisions: list[Decision]) -> list[Any]:
    """Convert decisions to JSON data: of each the counts that differ from those of the one before."""
    tables = [{}, *(one.begun for one in decisions)]
    return [
        (*one.plan, _changes(before, one.begun), one.admitted, sorted(one.restarted))
        for before, one in zip(tables, decisions, strict=False)
    ]


def parsed_decisions(data: Any, size: int) -> list[Decision]:
    """Parse decisions from JSON data; raises one of :data:`NONSENSE` if they are malformed."""
    decisions: list[Decision] = []
    begun: dict[str, int] = {}
    for gone, n_admitted, changes, ranks, restarted in data:
        begun = _changed(begun, changes)
        plan = Plan(parsed_ranks(gone, size), int(n_admitted))
        again = frozenset((str(name), int(round_)) for name, round_ in restarted)
        decisions.append(Decision(plan, begun, parsed_ranks(ranks, size), again))
    return decisions


def merged_decisions(reports: Iterable[LossReport]) -> list[Decision]:
    """The decisions of all reports, in order. Each lists what any agent has restarted with it."""
    merged: dict[tuple[int, int], Decision] = {}
    for decision in (decision for report in reports for decision in report.decisions):
        known = merged.get(decision.order, decision)
        merged[decision.order] = replace(known, restarted=known.restarted | decision.restarted)
    return [merged[order] for order in sorted(merged)]
