"""Evaluation over all agents: the mean of their models, and metrics of rank 0, of the mean and of the worst agent."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import shoal

Fleets = Callable[..., shoal.Fleet]


def model() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))
    torch.nn.init.constant_(made[0].weight, float(shoal.rank()))
    made[1].running_mean.fill_(2.0 * shoal.rank())
    made[1].num_batches_tracked.fill_(7 + shoal.rank())
    return made


def test_the_file_has_the_mean_and_each_agent_keeps_its_own_values(fleet: Fleets, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def run() -> float:
        own = model()
        shoal.save(own, path)
        assert path.exists()
        return own[0].weight.item()

    assert fleet(3).run(run) == [0.0, 1.0, 2.0]
    saved = torch.load(path, weights_only=True)
    assert (saved["0.weight"].item(), saved["1.running_mean"].item()) == (1.0, 2.0)
    assert saved["1.num_batches_tracked"].item() == 7
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_an_agent_that_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    def run() -> None:
        with pytest.raises(shoal.ShoalError, match=re.escape("save: at rank 0, FileNotFoundError")):
            shoal.save(model(), tmp_path / "none" / "model.pt")

    shoal.Fleet(2).run(run)


def test_a_call_on_rank_0_only_raises_an_error_that_explains_it() -> None:
    def run() -> None:
        with pytest.raises(shoal.Mismatch, match=r"none inside `if shoal\.rank\(\) == 0`"):
            if shoal.rank() == 0:
                shoal.save(model(), "model.pt")
            shoal.neighbor_allreduce(torch.ones(1))

    shoal.Fleet(2).run(run)


def test_a_state_dict_in_place_of_the_model_is_refused_before_anything_is_sent(fleet: Fleets, tmp_path: Path) -> None:
    def run() -> list[str]:
        state, found = model().state_dict(), []
        for call in (
            lambda: shoal.save(state, tmp_path / "model.pt"),  # type: ignore[arg-type]
            lambda: shoal.consensus_distance(state),  # type: ignore[arg-type]
            lambda: shoal.consensus(state).__enter__(),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError) as caught:
                call()
            found.append(str(caught.value))
        return found

    expected = [
        f"{op} takes a model, a torch.nn.Module, not a OrderedDict"
        for op in ("save", "consensus_distance", "consensus")
    ]
    assert fleet(2).run(run) == [expected] * 2
    assert not list(tmp_path.iterdir())


SIZE = 4
LOSS, ACCURACY = (0.25, 2.0, 0.5, 0.25), (0.5, 0.75, 0.125, 1.0)


def gathered_metrics() -> shoal.optim.Metrics:
    """The dictionary in another order on every second agent."""
    rank = shoal.rank()
    pairs: list[tuple[str, Any]] = [("loss", torch.tensor([LOSS[rank]])), ("accuracy", ACCURACY[rank])]
    return shoal.metrics(dict(pairs[:: 1 if rank % 2 else -1]), worst={"accuracy": min})


def test_every_agent_has_rank_0s_value_the_mean_and_the_worst(fleet: Fleets) -> None:
    for each in fleet(SIZE).run(gathered_metrics):
        assert set(each) == {"loss", "accuracy"}
        assert each["loss"] == shoal.optim.Metric(LOSS, 0.75, 1)
        assert (each["loss"].rank0, each["loss"].worst) == (0.25, 2.0)
        assert each["accuracy"] == shoal.optim.Metric(ACCURACY, 0.59375, 2)
        assert (each["accuracy"].rank0, each["accuracy"].worst) == (0.5, 0.125)


@pytest.mark.parametrize("largest", [True, False])
def test_nan_is_the_worst(largest: bool) -> None:
    def run() -> shoal.optim.Metric:
        value = (1.0, math.nan, math.inf, -math.inf)[shoal.rank()]
        return shoal.metrics({"loss": value}, {"loss": max if largest else min})["loss"]

    [first, *_] = shoal.Fleet(SIZE).run(run)
    assert first.worst_rank == 1 and math.isnan(first.mean)


def test_weights_make_the_mean_that_over_all_samples(fleet: Fleets) -> None:
    samples = [[1.0, 2.0, 6.0], [4.0]]

    def run() -> shoal.optim.Metric:
        own = samples[shoal.rank()]
        return shoal.metrics({"loss": sum(own) / len(own)}, weight=len(own))["loss"]

    assert [one.mean for one in fleet(2).run(run)] == [3.25] * 2


def test_all_metrics_share_one_message_between_each_two_agents() -> None:
    def run() -> list[str]:
        shoal.barrier()
        started: list[str] = []
        shoal.observability.events().subscribe(
            lambda event: started.append(event.operation) if event.kind == "submitted" else None
        )
        shoal.metrics({f"metric {number}": number for number in range(20)})
        return started

    assert shoal.Fleet(2).run(run) == [["allgather"]] * 2


def test_names_that_differ_are_a_mismatch_that_lists_them(fleet: Fleets) -> None:
    def run() -> None:
        with pytest.raises(shoal.Mismatch, match="acc") as caught:
            shoal.metrics({"loss": 1.0} | ({"acc": 1.0} if shoal.rank() == 1 else {"accuracy": 1.0}))
        assert "accuracy (worst: max)" in str(caught.value)
        assert 1 in caught.value.ranks

    fleet(3).run(run)


def test_the_definition_of_worst_must_be_the_same_on_all_agents() -> None:
    def run() -> None:
        with pytest.raises(shoal.Mismatch, match=r"accuracy \(worst: min\)"):
            shoal.metrics({"accuracy": 1.0}, {"accuracy": min if shoal.rank() else max})

    shoal.Fleet(2).run(run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"worst": {"acuracy": min}}, "worst names acuracy, and values has accuracy"),
        ({"worst": {"accuracy": sum}}, "function max or min itself"),
        ({"worst": {"accuracy": "min"}}, "'accuracy': 'min'"),
        ({"weight": 0.0}, "weight=0.0"),
        ({"weight": math.nan}, "weight=nan"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=message):
            shoal.metrics({"accuracy": 1.0}, **arguments)

    shoal.Fleet(1).run(run)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "takes a dict of numbers, .* not a list"),
        ({"loss": "low"}, "'loss' is 'low'; give a number"),
        ({"loss": None}, "'loss' is None"),
        ({"loss": 1j}, "'loss' is 1j"),
        ({"loss": torch.ones(2)}, r"'loss' is a tensor of shape \[2\]"),
    ],
)
def test_a_value_that_is_no_number_is_named(values: Any, message: str) -> None:
    def run() -> None:
        with pytest.raises(TypeError, match=f"metrics.*{message}"):
            shoal.metrics(values)

    shoal.Fleet(2).run(run)


def test_an_empty_call_raises() -> None:
    assert shoal.Fleet(2).run(lambda: dict(shoal.metrics({}))) == [{}, {}]


def test_the_table_has_a_row_for_each_name() -> None:
    each = shoal.Fleet(SIZE).run(gathered_metrics)[1]
    console = Console(width=60)
    with console.capture() as capture:
        console.print(each)
    rows = [line.replace("│", " ").split() for line in capture.get().splitlines()]
    assert ["loss", "0.25", "0.75", "2", "1"] in rows
    assert ["accuracy", "0.5", "0.5938", "0.125", "2"] in rows
    assert str(each).splitlines()[0] == "loss: rank 0 0.25, mean 0.75, worst 2 (rank 1)"


LOGGED = {
    "loss/mean": 0.75,
    "loss/worst": 2.0,
    **{f"loss/agent{rank}": value for rank, value in enumerate(LOSS)},
    "accuracy/mean": 0.59375,
    "accuracy/worst": 0.125,
    **{f"accuracy/agent{rank}": value for rank, value in enumerate(ACCURACY)},
}


class Scalars:
    """As TensorBoard's."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, number: float, step: int) -> None:
        self.logged.append((name, number, step))


class Rows:
    """A metrics sink of the kind that gets all numbers of a step in one call."""

    def __init__(self, method: str) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        setattr(self, method, self._take)

    def _take(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((numbers, step))


def test_loggers_get_the_mean_the_worst_and_every_agents_value() -> None:
    def run() -> tuple[list[tuple[str, float, int]], ...]:
        scalars, metrics, log = Scalars(), Rows("log_metrics"), Rows("log")
        for step in (1, 5):
            numbers = gathered_metrics()
            for to in (scalars, metrics, log, None):
                numbers.log(to, step)
        assert metrics.logged == log.logged == [(LOGGED, 1), (LOGGED, 5)]
        with pytest.raises(TypeError, match="int has neither add_scalar, nor log_metrics, nor log"):
            numbers.log(3, 1)
        return (scalars.logged,)

    for (logged,) in shoal.Fleet(SIZE).run(run):
        assert sorted(logged) == sorted((name, number, step) for step in (1, 5) for name, number in LOGGED.items())


def test_a_loss_with_gradient_is_accepted_as_a_number(recwarn: pytest.WarningsRecorder) -> None:
    def run() -> float:
        loss = torch.tensor(0.5, requires_grad=True) * 2
        return shoal.metrics({"loss": loss})["loss"].mean

    assert shoal.Fleet(2).run(run) == [1.0, 1.0]
    assert not recwarn.list


@pytest.mark.parametrize("numel", [1, 100_000])  # a small parameter, and one that neighbours read where it is
def test_the_consensus_between_a_forward_pass_and_its_step_changes_no_exchange(fleet: Fleets, numel: int) -> None:
    def run(evaluates: bool) -> tuple[float, float, float]:
        net = torch.nn.Linear(numel, 1, bias=False)
        torch.nn.init.constant_(net.weight, float(shoal.rank()))
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        optimizer = shoal.bluefog.DistributedAdaptWithCombineOptimizer(sgd, net)
        shoal.bluefog.set_topology(shoal.topology.RingGraph(3))
        mean = 1.0
        net(torch.ones(1, numel)).sum().backward()
        if evaluates:
            with shoal.consensus(net):
                mean = net.weight.mean().item()
        own = net.weight.mean().item()
        optimizer.step()
        return mean, own, net.weight.mean().item()

    plain = fleet(3).run(run, False)
    assert fleet(3).run(run, True) == plain
    assert [one[:2] for one in plain] == [(1.0, float(rank)) for rank in range(3)]


def test_a_step_and_a_checkpoint_inside_the_consensus_are_refused(fleet: Fleets, tmp_path: Path) -> None:
    """They would use or save the mean in place of this agent's own parameters."""

    def run() -> tuple[float, float]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, float(shoal.rank()))
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer)
        with shoal.consensus(model), shoal.consensus(model):
            mean = model.weight.item()
            with pytest.raises(RuntimeError, match=r"Checkpoint\.save inside `with shoal\.consensus"):
                checkpoint.save(tmp_path, 0)
            model(torch.ones(1)).backward()
            with pytest.raises(RuntimeError, match=r"optimizer\.step inside `with shoal\.consensus"):
                optimizer.step()
        own = model.weight.item()
        optimizer.zero_grad()
        model(torch.zeros(1)).backward()
        optimizer.step()
        checkpoint.save(tmp_path, 0)
        return mean, own

    assert fleet(2).run(run) == [(0.5, 0.0), (0.5, 1.0)]
