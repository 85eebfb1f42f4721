"""What agents report to each other after a loss, and the decisions that follow from equal reports, as JSON data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..operations.control_messages import parsed_counts, parsed_ranks
from ..operations.membership import Plan, Ranks, View


@dataclass(frozen=True)
class Decision:
    """The result of one agreement.

    Attributes:
        plan: The agreed plan.
        begun: The first round that follows the plan, by name; 0 for a name that is not listed.
        entered: The ranks admitted with this decision; they take part in no earlier round.
    """

    plan: Plan
    begun: dict[str, int]
    entered: Ranks = ()

    @property
    def order(self) -> tuple[int, int]:
        return self.plan.entered, len(self.plan.gone)


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
            "entered": self.plan.entered,
            "begun": self.begun,
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
    plan = Plan(parsed_ranks([rank for rank, _, _ in losses], size), int(data["entered"]))
    decisions = parsed_decisions(data["decisions"], size)
    return losses, LossReport(plan, parsed_counts(data["begun"]), open_, kept, decisions, beyond)


def decisions_as_data(decisions: list[Decision]) -> list[Any]:
    """Convert decisions to JSON data."""
    return [(*decision.plan, decision.begun, decision.entered) for decision in decisions]


def parsed_decisions(data: Any, size: int) -> list[Decision]:
    """Parse decisions from JSON data; raises one of :data:`NONSENSE` if they are malformed."""
    return [
        Decision(Plan(parsed_ranks(gone, size), int(entered)), parsed_counts(begun), parsed_ranks(ranks, size))
        for gone, entered, begun, ranks in data
    ]
