"""Training metrics: of rank 0, of the mean, and of the worst agent. Rank 0 alone shows little about agents that each
have a model and data of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import Mismatch
from ..ops.arguments import Internal
from ..ops.collective import gather_by_rank
from ..runtime.agent import current

if TYPE_CHECKING:
    from rich.table import Table


Logger = Any
"""Loggers of numbers by name: classes of other packages, all optional."""


@dataclass(frozen=True)
class Metric:
    """One number of all agents.

    Attributes:
        values: By rank; NaN for a lost agent.
        mean: Weighted, if weights were given.
        worst_rank: The present agent with the worst value; the first of equal ones, and of values that are not a
            number.
    """

    values: tuple[float, ...]
    mean: float
    worst_rank: int

    @property
    def rank0(self) -> float:
        return self.values[0]

    @property
    def worst(self) -> float:
        return self.values[self.worst_rank]


class Metrics(Mapping[str, Metric]):
    """The result of :func:`metrics`: ``found["loss"].mean``. ``str`` gives a line for each, and ``rich.print`` a
    table.
    """

    def __init__(self, of: Mapping[str, Metric], ranks: Iterable[int]) -> None:
        self._of = dict(of)
        self._ranks = tuple(ranks)

    def __getitem__(self, name: str) -> Metric:
        return self._of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: rank 0 {metric.rank0:.4g}, mean {metric.mean:.4g}, worst {metric.worst:.4g} "
            f"(rank {metric.worst_rank})"
            for name, metric in self.items()
        )

    def log(self, to: Logger | None, step: int) -> None:
        """Give all numbers to a logger: of each name ``name/mean``, ``name/worst``, and ``name/agent0`` and so on.

        Args:
            to: An object with ``add_scalar`` (a ``SummaryWriter`` of TensorBoard), or else ``log_metrics`` (the module
                ``mlflow``, a logger of Lightning), or else ``log`` (a run of Weights & Biases, a tracker of
                Accelerate). None, as on agents without a logger, does nothing.
            step: The number of the step.

        Raises:
            TypeError: ``to`` has none of these.
        """
        if to is None:
            return
        numbers: dict[str, float] = {}
        for name, metric in self.items():
            numbers |= {f"{name}/mean": metric.mean, f"{name}/worst": metric.worst}
            numbers |= {f"{name}/agent{rank}": metric.values[rank] for rank in self._ranks}  # lost agents have no value
        if hasattr(to, "add_scalar"):
            for name, number in numbers.items():
                to.add_scalar(name, number, step)
        elif hasattr(to, "log_metrics"):
            to.log_metrics(numbers, step=step)
        elif hasattr(to, "log"):
            to.log(numbers, step=step)
        else:
            raise TypeError(f"Metrics.log: {type(to).__name__} has neither add_scalar, nor log_metrics, nor log")

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table("", "rank 0", "mean", "worst", "of rank")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, metric in self.items():
            table.add_row(
                name, f"{metric.rank0:.4g}", f"{metric.mean:.4g}", f"{metric.worst:.4g}", str(metric.worst_rank)
            )
        return table


def metrics(
    values: Mapping[str, float | torch.Tensor],
    worst: Mapping[str, Callable[..., Any]] | None = None,
    *,
    weight: float = 1.0,
    timeout: float | None = None,
) -> Metrics:
    """Each number on rank 0, its mean over the agents, and the worst, the same on every agent. All agents call it.

    One small message from each agent to each, for any number of values. ::

        found = shoal.metrics({"loss": loss, "accuracy": accuracy}, worst={"accuracy": min})
        if shoal.rank() == 0:
            rich.print(found)

    Args:
        values: This agent's numbers, or tensors of one element; the same names on all agents, in any order.
        worst: For each name the built-in ``max`` (the default: the largest is the worst, as for a loss) or ``min`` (as
            for an accuracy). A value that is not a number is worse than any.
        weight: The weight of this agent in the means: give the number of samples of its values, and the means are over
            all samples.
        timeout: Seconds until the deadline.

    Raises:
        TypeError: ``values`` is no dict, or a value is neither a number nor a tensor of one element.
        ValueError: ``worst`` names something else, or gives neither ``max`` nor ``min``; ``weight`` is not positive.
        Mismatch: Agents give different names, or different ``worst``.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f'metrics takes a dict of numbers, as {{"loss": loss}}, not a {type(values).__name__}')
    worst_of: dict[str, Callable[..., Any]] = dict.fromkeys(values, max) | dict(worst or {})
    wrong = [name for name, pick in worst_of.items() if name not in values or (pick is not max and pick is not min)]
    if wrong or not 0 < weight < math.inf:
        raise ValueError(
            f"metrics: weight={weight} must be positive; worst may give max or min for {', '.join(values)}, and for "
            f"{', '.join(wrong) or 'nothing else'} it does not"
        )
    agent = current("metrics")
    names = [f"{name} (worst: {worst_of[name].__name__})" for name in sorted(values)]
    numbers = [_number(name, values[name]) for name in sorted(values)]
    reports = _exchange(_MetricReport(names, numbers, weight), timeout)
    for rank, theirs in ((rank, report.names) for rank, report in reports.items()):
        if theirs != names:
            ours = ", ".join(sorted(set(names) - set(theirs))) or "no more"
            others = ", ".join(sorted(set(theirs) - set(names))) or "no more"
            raise Mismatch(
                f"metrics: the names differ: rank {agent.rank} has {ours}, where rank {rank} has {others}",
                (agent.rank, rank),
            )
    weights = {rank: report.weight for rank, report in reports.items()}
    columns = {
        name: {rank: report.numbers[k] for rank, report in reports.items()} for k, name in enumerate(sorted(values))
    }
    found = {name: _metric(agent.size, columns[name], weights, worst_of[name] is max) for name in values}
    for name, metric in found.items():
        agent.engine.note_metric(name, metric.values[agent.rank], metric.mean, metric.worst, metric.worst_rank)
    return Metrics(found, sorted(reports))


def _metric(size: int, of: dict[int, float], weights: dict[int, float], largest: bool) -> Metric:
    def badness(rank: int) -> tuple[bool, float]:
        value = of[rank]
        return (True, 0.0) if math.isnan(value) else (False, value if largest else -value)

    mean = sum(value * weights[rank] for rank, value in of.items()) / sum(weights.values())
    return Metric(tuple(of.get(rank, math.nan) for rank in range(size)), mean, max(of, key=badness))


def _number(name: str, value: float | torch.Tensor) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)  # torch warns of one with a gradient
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise TypeError(f"metrics: {name!r} is {found}; give a number, or a tensor of one element") from error


class _MetricReport(NamedTuple):
    """The report of an agent: names (with the direction of the worst), their numbers in that order, and its weight."""

    names: list[str]
    numbers: list[float]
    weight: float


def _exchange(own: _MetricReport, timeout: float | None) -> dict[int, _MetricReport]:
    """The reports of all agents, by rank. The names are sent as bytes, one a float, so that one message suffices."""
    mine = torch.tensor(
        [len(own.numbers), own.weight, *own.numbers, *"\0".join(own.names).encode()], dtype=torch.float64
    )
    # As bits: a metric may be NaN, also where SHOAL_CHECK_FINITE refuses to send that.
    reports = {}
    for rank, bits in gather_by_rank(mine.view(torch.int64), Internal("metrics"), timeout=timeout).items():
        count, weight, *rest = bits.view(torch.float64).tolist()
        text = bytes(map(int, rest[int(count) :])).decode()
        reports[rank] = _MetricReport(text.split("\0") if text else [], rest[: int(count)], weight)
    return reports
