"""Measuring the network: what agents find is what is put in, and a failed measurement says why."""

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal.netmodel import Link, probe
from shoal.netmodel.probe import MeasuredNetwork, Observation, measure, measure_difference, measure_this_machine


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SIZES", (1_000, 100_000))
    monkeypatch.setattr(probe, "REPETITIONS", 1)


@pytest.mark.usefixtures("quick")
def test_all_agents_get_the_same_estimate(fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every agent fits all measurements. So few of them need not describe a plausible network."""
    requested = []

    def fit(observations: list[Observation]) -> Link:
        requested.append(tuple(observations))
        return Link(latency=sum(one.seconds for one in observations))

    monkeypatch.setattr(probe, "fit_link", fit)
    results = fleet(3).run(measure)
    assert len({*map(repr, results)}) == len({*requested}) == 1
    assert results[0].agents == results[0].agents_per_machine == 3
    assert results[0].between is None
    assert [(one.degree, one.nbytes) for one in requested[0]] == [(1, 1_000), (1, 100_000), (2, 1_000), (2, 100_000)]
    assert min(one.seconds for one in requested[0]) > 0


@pytest.mark.usefixtures("quick")
def test_the_slowest_agents_time_counts(fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks that advance by the rank plus one at each reading."""
    clocks = [0, 0, 0]

    def read_clock() -> int:
        clocks[shoal.rank()] += shoal.rank() + 1
        return clocks[shoal.rank()]

    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=read_clock))
    monkeypatch.setattr(probe, "fit_link", lambda observations: Link(max(one.seconds for one in observations)))
    assert {result.inside.latency for result in fleet(3).run(measure)} == {3.0}


@pytest.mark.usefixtures("quick")
def test_measured_times_are_fitted_for_every_degree_and_size(fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times are synthetic, from a NIC of known latency, bandwidth and overhead."""
    nic = Link(2e-3, 1e7, 5e-4)
    monkeypatch.setattr(probe, "_timed", lambda group, degree, nbytes: nic.seconds(nbytes, degree))
    for result in fleet(4).run(measure):
        assert result.inside.latency == pytest.approx(nic.latency)
        assert result.inside.bandwidth == pytest.approx(nic.bandwidth)
        assert result.inside.overhead == pytest.approx(nic.overhead)


def test_a_slow_network_is_not_measured_with_the_longest_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def slow(group, degree, nbytes):
        requested.append((degree, nbytes))
        return degree * nbytes / 1e4

    monkeypatch.setattr(probe, "_timed", slow)
    assert probe._fitted(range(3)).bandwidth == pytest.approx(1e4)
    # 64,000 bytes take longer than two seconds, and no larger ones are tried.
    assert requested == [(1, 1_000), (1, 64_000), (2, 1_000), (2, 64_000)]


def test_one_agent_has_no_network(fleet) -> None:
    with pytest.raises(Exception, match="a network is measured between agents, and there is one"):
        fleet(1).run(measure)


def test_a_failed_measurement_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_, **__):
        return subprocess.CompletedProcess([], 3, stdout="", stderr="rank 1: no more memory\n")

    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(RuntimeError, match=r"measuring with 2 agents failed \(status 3\): rank 1: no more memory"):
        measure_this_machine(2)


def test_printed_measurements_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    line = '{"agents": 2, "agents_per_machine": 2, "inside": {"latency": 1e-05, "bandwidth": 2e9, "overhead": 0.0}, '
    printed = f'warming up\n{line}"between": null}}\n'

    def run_probe(command, **_):
        assert command[-1] == "shoal.netmodel.probe"
        return subprocess.CompletedProcess(command, 0, stdout=printed, stderr="")

    monkeypatch.setattr(subprocess, "run", run_probe)
    assert measure_this_machine(2) == MeasuredNetwork(2, 2, Link(1e-5, 2e9), None)


def gradients(rank: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(5, 3, generator=draw), torch.randn(4, generator=draw, dtype=torch.float64)]


def test_the_difference_of_gradients_is_their_distance_from_the_mean_relative_to_it(fleet) -> None:
    results = fleet(4).run(lambda: measure_difference(gradients(shoal.rank())))
    rows = torch.stack([torch.cat([gradient.double().view(-1) for gradient in gradients(rank)]) for rank in range(4)])
    mean = rows.mean(0)
    expected = (rows - mean).square().sum(1).mean().sqrt() / mean.norm()
    assert results == [pytest.approx(expected.item(), rel=1e-12)] * 4
    assert len({*results}) == 1


def of_a_model(scale: float) -> float:
    """Its second layer has no gradient, which counts as zero."""
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1)])
    (model[0].weight.sum() * (1.0 + scale * (-1.0) ** shoal.rank())).backward()
    return measure_difference(model)


def test_the_difference_of_models_after_their_backward_pass(fleet) -> None:
    assert fleet(2).run(of_a_model, 0.0) == [0.0, 0.0]
    assert fleet(2).run(of_a_model, 0.5) == [0.5, 0.5]


def with_bad_ones(bad: Any) -> str:
    with pytest.raises(ValueError, match="cannot be measured") as caught:
        measure_difference(bad if shoal.rank() == 1 else torch.ones(2))
    return str(caught.value)


@pytest.mark.parametrize("bad", [torch.tensor([1.0, float("nan")]), torch.nn.Linear(2, 1), [torch.ones(2), None]])
def test_incomparable_gradients_are_refused_on_all_agents(fleet, bad) -> None:
    other, own = fleet(2).run(with_bad_ones, bad)
    assert "another agent has no gradient, or one that is not finite" in other
    assert "rank 1 has no gradient, or one that is not finite" in own
