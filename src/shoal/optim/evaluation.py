"""Evaluation over all agents: the mean of their models, how far the models are from it, and training metrics.

Rank 0 alone shows little about agents that each have a model and data of their own. So :func:`metrics` gives numbers of
rank 0, of the mean, and of the worst agent, and :func:`save` writes the mean model to a file. :func:`consensus` puts
the mean into the models for a block, and :func:`consensus_distance` measures how far they differ.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..dtensors import is_sharded, local, reshard, summed_as
from ..errors import Mismatch, PeerLost
from ..ops.arguments import Internal
from ..ops.collective import allreduce, allreduce_nonblocking, gather_by_rank
from ..ops.grouped import grouped_allreduce_nonblocking, in_batches
from ..ops.objects import agree_on_tensors, shape_of
from ..runtime.agent import current
from .checkpoints.checkpoint_files import from_one_agent, present_agents, save_tensors, write_atomically
from .checkpoints.states import in_own_memory
from .params import holding_mean, is_being_read

if TYPE_CHECKING:
    from rich.table import Table


DISTANCE = "consensus distance"
"""The name of the distance for observers."""


def _check_module(op: str, model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{op} takes a model, a torch.nn.Module, not a {type(model).__name__}")


def averaged(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, and buffers that hold numbers with fractions (running means); counters are each agent's own."""
    reshard(model)
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point() or buffer.is_complex()]
    return [local(tensor).detach() for tensor in (*model.parameters(), *buffers)]


def being_read(model: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """The parameters that an exchange reads until the next step, by their number in :func:`averaged`. The mean must lie
    in other memory: neighbours would read it as this agent's, and the step refuse the change.
    """
    return {number: param for number, param in enumerate(model.parameters()) if is_being_read(param)}


def means(tensors: list[torch.Tensor], name: str, timeout: float | None = None) -> list[torch.Tensor]:
    """The average of each over all agents. Small tensors of one dtype are sent together.

    Raises:
        Mismatch: The agents have different tensors.
    """

    def start(batch: list[int], name: Internal) -> Callable[[], list[torch.Tensor]]:
        if len(batch) > 1:
            return grouped_allreduce_nonblocking([tensors[at] for at in batch], name=name, timeout=timeout).wait
        alone = allreduce_nonblocking(tensors[batch[0]], name=name, timeout=timeout)  # a large one is not copied twice
        return lambda: [alone.wait()]

    described = [f"parameter or buffer {number} ({shape_of(tensor)})" for number, tensor in enumerate(tensors)]
    agree_on_tensors(name, described, timeout=timeout)
    batches = in_batches(tensors)
    waits = [start(batch, Internal(f"{name}.{number}")) for number, batch in enumerate(batches)]
    found = list(tensors)
    for batch, wait in zip(batches, waits, strict=True):
        for at, mean in zip(batch, wait(), strict=True):
            found[at] = mean
    return found


@contextmanager
def _put_back(model: torch.nn.Module) -> Iterator[None]:
    """Restore the memory of the model's tensors after the block, even if the model was converted within it."""
    params = [(param, param.data) for param in model.parameters() if not is_sharded(param)]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for param, data in params:
            param.data = data
        for module, of_it in buffers:
            module._buffers.update(of_it)


@contextmanager
def consensus(model: torch.nn.Module, *, timeout: float | None = None) -> Iterator[torch.nn.Module]:
    """The average of all agents' models, for as long as the block lasts; then each agent's own again. All call it.

    Of a model that is sharded (``fully_shard``, ``init(mesh=)``) each agent averages its part with its counterparts'.

    Parameters and floating-point buffers (such as a batch norm's running statistics) are averaged; integer buffers (its
    counter) are left as they are. Inside, the model may be converted, as by ``model.half()``, to be saved; not a
    sharded one.

    ``optimizer.step()`` and ``Checkpoint.save`` raise RuntimeError inside: they need this agent's own parameters.

    Args:
        model: This agent's; it holds the average inside the block.
        timeout: Seconds until :class:`~shoal.DeadlineExceeded`.

    Raises:
        Mismatch: The agents' models have different shapes or dtypes.
    """
    _check_module("consensus", model)
    tensors = averaged(model)
    averages = means(tensors, "consensus", timeout)
    elsewhere = being_read(model)
    stay = [number for number in range(len(tensors)) if number not in elsewhere]
    own = [tensors[number].clone() for number in stay]
    sharded = [(param, param.dtype) for param in model.parameters() if is_sharded(param)]
    try:  # now: a signal during the copies must not leave a model that is the mean in part
        for number in stay:
            tensors[number].copy_(averages[number])
        with _put_back(model), holding_mean(list(model.parameters())):
            for number, param in elsewhere.items():
                param.data = averages[number]
            yield model
        if any(param.dtype != dtype for param, dtype in sharded):
            raise RuntimeError("consensus: a sharded model was converted inside; convert what you save of it instead")
    finally:
        reshard(model)
        for number, mine in zip(stay, own, strict=True):
            tensors[number].copy_(mine)


@torch.no_grad()
def consensus_distance(model: torch.nn.Module, *, timeout: float | None = None) -> float:
    """``sqrt(mean over agents of |x_i - mean x|^2)`` over all parameters, the same on every agent. All call it."""
    _check_module("consensus_distance", model)
    reshard(model)
    params = list(model.parameters())
    flat = torch.cat([_reals(local(param).detach()).reshape(-1).double() for param in params])
    mean = allreduce(flat, name=Internal("consensus_distance.mean"), timeout=timeout)
    squares = torch.split((flat - mean).square(), [_reals(local(param).detach()).numel() for param in params])
    square = torch.stack([summed_as(part, param) for part, param in zip(squares, params, strict=True)]).sum()
    found = allreduce(square, name=Internal("consensus_distance"), timeout=timeout).sqrt().item()
    current("consensus_distance").engine.note_metric(DISTANCE, square.sqrt().item(), found, found)
    return found


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def save(model: torch.nn.Module, path: str | os.PathLike[str], *, timeout: float | None = None) -> None:
    """Write the mean of all agents' models, as ``torch.save(model.state_dict(), path)`` would. All agents call it. ::

        shoal.save(model, "model.pt")  # not inside `if shoal.rank() == 0`
        model.load_state_dict(torch.load("model.pt"))  # later, in any process

    The current agent of the lowest rank writes the file, which appears as a whole or not at all. When the call returns,
    it is there. Floating-point parameters and buffers are the mean (:func:`consensus`); integer buffers are those of
    the agent that writes. To resume a run use :class:`Checkpoint`, which keeps each agent's own state.

    Args:
        model: This agent's; it is unchanged afterwards.
        path: The file, on the disk of the agent that writes.
        timeout: Seconds that each wait for the other agents may take.

    Raises:
        TypeError: The model is no module, such as a ``state_dict``.
        ShoalError: The file could not be written; all agents raise it.
        ValueError: The model is sharded: no process has all of it.
    """
    agent = current("save")
    _check_module("save", model)
    if agent.launch.beside or any(is_sharded(param) for param in model.parameters()):
        raise ValueError(
            "shoal.save: the model is sharded, so no process has all of it. Save it inside shoal.consensus(model) with "
            "torch.distributed.checkpoint (docs/sharded.md)"
        )

    def write() -> None:
        state: dict[str, Any] = in_own_memory(model.state_dict())
        write_atomically(Path(path), lambda partial: save_tensors(state, partial))

    with consensus(model, timeout=timeout):
        while True:
            first = present_agents(timeout)[0]
            try:
                return from_one_agent(first, "save", write, timeout)
            except PeerLost as lost:
                if first not in lost.ranks or not agent.engine.survives_losses:
                    raise


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
    if not 0 < weight < math.inf:
        raise ValueError(f"metrics: weight={weight} must be positive and finite")
    unknown = [name for name in worst_of if name not in values]
    if unknown:
        raise ValueError(f"metrics: worst names {', '.join(map(str, unknown))}, and values has {', '.join(values)}")
    for name, pick in worst_of.items():
        if pick is not max and pick is not min:
            raise ValueError(f"metrics: worst={{{name!r}: {pick!r}}}: give Python's function max or min itself")
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
        [len(own.numbers), own.weight, *own.numbers, *"\0".join(own.names).encode()], dtype=torch.float64, device="cpu"
    )
    # As bits: a metric may be NaN, also where SHOAL_CHECK_FINITE refuses to send that.
    reports = {}
    for rank, bits in gather_by_rank(mine.view(torch.int64), Internal("metrics"), timeout=timeout).items():
        count, weight, *rest = bits.view(torch.float64).tolist()
        text = bytes(map(int, rest[int(count) :])).decode()
        reports[rank] = _MetricReport(text.split("\0") if text else [], rest[: int(count)], weight)
    return reports
