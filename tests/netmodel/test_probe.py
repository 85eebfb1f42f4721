"""Measuring the network: what agents find is what is put in, and a failed measurement says why."""

import subprocess
from types import SimpleNamespace

import pytest

import shoal
from shoal.netmodel import Link, probe
from shoal.netmodel.fit import Observation
from shoal.netmodel.probe import Measured, measure, measure_here


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SIZES", (1_000, 100_000))
    monkeypatch.setattr(probe, "REPETITIONS", 1)


@pytest.mark.usefixtures("quick")
def test_all_agents_find_the_same(fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured goes into the fit on every agent; so little of it need not make sense as a network."""
    asked = []

    def fit(observations: list[Observation]) -> Link:
        asked.append(tuple(observations))
        return Link(latency=sum(one.seconds for one in observations))

    monkeypatch.setattr(probe, "fit_link", fit)
    found = fleet(3).run(measure)
    assert len({*map(repr, found)}) == len({*asked}) == 1
    assert found[0].agents == found[0].agents_per_machine == 3
    assert found[0].between is None
    assert [(one.degree, one.nbytes) for one in asked[0]] == [(1, 1_000), (1, 100_000), (2, 1_000), (2, 100_000)]
    assert min(one.seconds for one in asked[0]) > 0


@pytest.mark.usefixtures("quick")
def test_the_slowest_agents_time_counts(fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks that go on by the rank and one each time somebody looks."""
    clocks = [0, 0, 0]

    def look() -> int:
        clocks[shoal.rank()] += shoal.rank() + 1
        return clocks[shoal.rank()]

    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=look))
    monkeypatch.setattr(probe, "fit_link", lambda observations: Link(max(one.seconds for one in observations)))
    assert {found.inside.latency for found in fleet(3).run(measure)} == {3.0}


@pytest.mark.usefixtures("quick")
def test_measured_times_are_fitted_for_every_degree_and_size(fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are made up, by a NIC of known latency, bandwidth and overhead."""
    nic = Link(2e-3, 1e7, 5e-4)
    monkeypatch.setattr(probe, "_timed", lambda group, degree, nbytes: nic.seconds(nbytes, degree))
    for found in fleet(4).run(measure):
        assert found.inside.latency == pytest.approx(nic.latency)
        assert found.inside.bandwidth == pytest.approx(nic.bandwidth)
        assert found.inside.overhead == pytest.approx(nic.overhead)


def test_a_slow_network_is_not_asked_for_its_longest_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def slow(group, degree, nbytes):
        asked.append((degree, nbytes))
        return degree * nbytes / 1e4

    monkeypatch.setattr(probe, "_timed", slow)
    assert probe._fitted(range(3)).bandwidth == pytest.approx(1e4)
    # 64,000 bytes take longer than two seconds, and no larger ones are tried.
    assert asked == [(1, 1_000), (1, 64_000), (2, 1_000), (2, 64_000)]


def test_one_agent_has_no_network(fleet) -> None:
    with pytest.raises(Exception, match="a network is measured between agents, and there is one"):
        fleet(1).run(measure)


def test_a_measurement_that_fails_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_, **__):
        return subprocess.CompletedProcess([], 3, stdout="", stderr="rank 1: no more memory\n")

    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(RuntimeError, match=r"measuring with 2 agents failed \(status 3\): rank 1: no more memory"):
        measure_here(2)


def test_what_agents_print_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    line = '{"agents": 2, "agents_per_machine": 2, "inside": {"latency": 1e-05, "bandwidth": 2e9, "overhead": 0.0}, '
    printed = f'warming up\n{line}"between": null}}\n'

    def told(command, **_):
        assert command[-1] == "shoal.netmodel.probe"
        return subprocess.CompletedProcess(command, 0, stdout=printed, stderr="")

    monkeypatch.setattr(subprocess, "run", told)
    assert measure_here(2) == Measured(2, 2, Link(1e-5, 2e9), None)
