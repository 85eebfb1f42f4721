"""``shoal topology recommend``: the ranking, and figures that the test derives independently."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import pty
import subprocess
import sys
import threading
from typing import Any

import pytest

from shoal.cli import main
from shoal.netmodel import Link
from shoal.netmodel.probe import MeasuredNetwork
from support.world import World

NIC = ("--latency", "5ms", "--bandwidth", "1gbit", "--model-mb", "100")
NETWORK = ("--agents", "16", "--per-machine", "4", *NIC)


@functools.cache
def recommended(*options: str) -> dict[str, dict[str, float]]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["topology", "recommend", "--json", *options]) == 0
    return {one["name"]: one for one in json.loads(out.getvalue())["candidates"]}


def test_a_round_of_one_message_a_nic_takes_the_latency_and_its_bytes() -> None:
    """100 MB at 1 Gbit/s are 0.8 s, and 5 ms before them."""
    one = recommended(*NETWORK)["one-peer-exponential of machines"]
    assert one["seconds_per_round"] == pytest.approx(0.805, rel=1e-3)
    assert one["rounds"] == 2
    assert one["seconds"] == pytest.approx(2 * 0.805, rel=1e-3)


def test_a_progress_bar_is_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, remote = pty.openpty()
    output = bytearray()

    def read_terminal() -> None:
        with contextlib.suppress(OSError):  # which is how Linux ends a terminal whose other side is closed
            while piece := os.read(ours, 4096):
                output.extend(piece)

    looking = threading.Thread(target=read_terminal)
    looking.start()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with os.fdopen(remote, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        assert main(["topology", "recommend", "-n", "8"]) == 0
    looking.join()
    os.close(ours)
    assert "8 agents on 8 machines" in capsys.readouterr().out
    assert b"timing" in output


def test_agents_of_one_machine_share_its_nic() -> None:
    alone = recommended("--agents", "4", "--per-machine", "1", *NIC)["ring"]
    shared = recommended(*NETWORK)["random-matchings"]
    assert alone["models_on_a_nic"] == pytest.approx(2.0)
    assert shared["seconds_per_round"] > alone["seconds_per_round"]


def test_the_fastest_is_listed_first() -> None:
    """Within 5%, fewer rounds count more than a difference below the model's error."""
    seconds = [value["seconds"] for value in recommended(*NETWORK).values() if value["rounds"] is not None]
    assert all(one <= 1.056 * min(later) for one, later in ((one, seconds[at:]) for at, one in enumerate(seconds)))
    assert len(set(seconds)) > 10


def test_all_options_reach_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """Four agents, 10 MB: 800 ms per message out, 80 ms in. Training sends half of it every fourth step."""
    nic = ["--agents", "4", "--model-mb", "10", "--latency", "1ms", "--upload", "100mbit", "--download", "1gbit"]
    training = ["--local-steps", "4", "--compute", "1s", "--compression", "0.5", "--difference", "0.1"]
    training += ["--accuracy", "0.2"]
    assert main(["topology", "recommend", "--json", *nic, *training]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["network"]["between"] == {"latency": 1e-3, "bandwidth": 1.25e7, "overhead": 0.0, "download": 1.25e8}
    requested = {"difference": 0.1, "local_steps": 4, "compute": 1.0, "compression": "0.5", "accuracy": 0.2}
    assert status["training"] == requested
    by_name = {one["name"]: one for one in status["candidates"]}
    assert by_name["all-reduce (parameter server)"]["seconds"] == pytest.approx(0.801 + 2.401, rel=1e-3)
    ring = by_name["ring"]
    assert ring["seconds_per_round"] == pytest.approx(1.601, rel=1e-3)
    assert ring["seconds_per_step"] == pytest.approx(1 + 0.801 / 4, rel=1e-3)
    assert ring["training_seconds"] == pytest.approx(
        ring["seconds_per_step"] * math.hypot(1, 0.5 * ring["steps_apart"])
    )
    assert status["to_train"] and by_name[status["to_train"][0]]["refused"] == ""


def test_topologies_unfit_for_training_are_listed_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "recommend", "-n", "6", "--all", "--download", "1gbit"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "a NIC 10 Gbit/s out and 1 Gbit/s in" in out
    assert "to train, ring-star-delegates: GradientDescent needs W to be doubly stochastic" in out
    assert "ceca with its second buffer" in out and "refused" in out
    assert "To train, take " in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--latency 5", "'5' is not a duration: it has no unit. Write one of ns, us, ms, s or min, as in 5ms."),
        ("--latency -5ms", "'-5ms' is not a duration. Write a number and a unit"),
        ("--latency", "argument --latency: expected one argument"),
        ("--overhead -.5us", "'-.5us' is not a duration"),
        ("--bandwidth fast", "'fast' is not a bandwidth"),
        ("--bandwidth -1gbit", "'-1gbit' is not a bandwidth"),
        ("--inside-bandwidth 1gb/s", "may be in bits or in bytes"),
        ("--agents 0", "'0' is not a number of them: write 1 or more"),
        ("--agents -4", "'-4' is not a number of them: write 1 or more"),
        ("--agents 1", "a single agent has no neighbour"),
        ("--agents 1000001", "-n 1000001: so many agents cannot be timed. The limit is 1,000,000."),
        ("--per-machine some", "'some' is not a number of them"),
        ("--model-mb -3", "'-3' is not a number above zero"),
        ("--upload fast", "'fast' is not a bandwidth"),
        ("--download -1mbit", "'-1mbit' is not a bandwidth"),
        ("--bandwidth 1gbit --upload 1mbit --download 1gbit", "has no effect beside --upload and --download"),
        ("--local-steps 0", "'0' is not a number of them: write 1 or more"),
        ("--difference -1", "'-1' is not a number, zero or more"),
        ("--accuracy 0", "'0' is not a number above zero"),
        ("--difference much", "'much' is not a number, zero or more"),
        ("--compute 5", "'5' is not a duration: it has no unit"),
        ("--compression zip", "'zip' is no share of the bytes and no compressor"),
        ("--compression 2", "compression is 2.0. Pass the share of the bytes, above 0 and at most 1."),
        ("--compression qsgd:1", "is no contraction"),
        ("-n 8 --per-machine 8", "no message takes any time on this network"),
        ("--model-mb much", "'much' is not a number above zero"),
        ("--error 0", "'0' is not a number above zero"),
        ("--error 1", "--error 1: agents begin with an error of 1. Pass a number below it."),
        ("--measure --inside-bandwidth 1gbit", "and --measure give the same value"),
        ("ring", "unrecognized arguments: ring"),
    ],
)
def test_invalid_options_are_refused_with_the_valid_ones(
    capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    try:
        status = main(["topology", "recommend", *options.split()])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


def document(text: str) -> dict[str, Any]:
    """The one JSON document in it: rank 0 prints, and nobody else."""
    status = json.loads(text)
    assert isinstance(status, dict)
    return status


def is_a_measured_machine_of_two(measure: dict[str, Any]) -> bool:
    network = measure["network"]
    assert (network["agents"], network["agents_per_machine"]) == (2, 2)
    # Nothing passes a NIC: all is one machine, and its ports were measured.
    assert network["between"]["bandwidth"] is None
    assert 1e6 < network["inside"]["bandwidth"] < 1e12
    assert 0 <= network["inside"]["latency"] < 10
    assert all(one["models_on_a_nic"] == 0 for one in measure["candidates"])
    return min(one["seconds"] for one in measure["candidates"] if one["seconds"] is not None) > 0


@pytest.mark.slow
def test_measure_alone_starts_agents_on_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "recommend", "--measure", "-n", "2", "--model-mb", "1", "--json"]) == 0
    out, err = capfd.readouterr()
    assert is_a_measured_machine_of_two(document(out))
    assert "measuring with agents on this machine" in err


def printed_by(*options: str) -> str:
    """The command's output in this process, which a launcher has started."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["topology", "recommend", *options]) == 0
    return out.getvalue()


def test_measure_under_a_launcher_queries_its_agents_and_rank_0_prints() -> None:
    with World(2, init=False) as world:
        first, other = world.results(printed_by, "--measure", "--model-mb", "1", "--json")
    assert is_a_measured_machine_of_two(document(first))
    assert other == ""


@pytest.mark.parametrize("status", [3, None], ids=["failed", "out of time"])
def test_a_measurement_that_fails_is_an_error_without_a_traceback(
    status: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if status is None:
            raise subprocess.TimeoutExpired(command, 600)
        return subprocess.CompletedProcess(command, status, stdout="", stderr="no such transport")

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["topology", "recommend", "--measure", "-n", "2", "--model-mb", "1"]) == 1
    assert "error: measuring with 2 agents failed (" in capsys.readouterr().err


@pytest.fixture
def two_measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Measuring takes no time and finds one machine; the numbers of agents that were asked to."""
    requested: list[int] = []

    def measure(agents: int) -> MeasuredNetwork:
        requested.append(agents)
        return MeasuredNetwork(agents, agents, Link(1e-5, 4e9), None)

    monkeypatch.setattr("shoal.netmodel.probe.measure_this_machine", measure)
    return requested


def test_a_measurement_of_few_agents_predicts_for_many(
    capsys: pytest.CaptureFixture[str], two_measured: list[int]
) -> None:
    assert main(["topology", "recommend", "--measure", "-n", "8", "--json"]) == 0
    network = document(capsys.readouterr().out)["network"]
    assert two_measured == [4]
    assert (network["agents"], network["agents_per_machine"], network["inside"]["bandwidth"]) == (8, 8, 4e9)


def test_options_about_the_network_are_shown_beside_the_measurement(
    capsys: pytest.CaptureFixture[str], two_measured: list[int]
) -> None:
    assert main(["topology", "recommend", "--measure", "-n", "4", "--per-machine", "2", *NIC, "--json"]) == 0
    network = document(capsys.readouterr().out)["network"]
    assert network["between"] == {"latency": 5e-3, "bandwidth": 1.25e8, "overhead": 0.0, "download": None}
    assert network["inside"] == {"latency": 1e-5, "bandwidth": 4e9, "overhead": 0.0, "download": None}
    assert network["agents_per_machine"] == 2


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        (["-n", "8", "--per-machine", "4"], "puts 8 agents on several machines, but one was measured"),
        (["--inside-bandwidth", "1gbit"], "--inside-bandwidth and --measure give the same value"),
    ],
)
def test_missing_measurements_are_requested(
    capsys: pytest.CaptureFixture[str], two_measured: list[int], options: list[str], expected_message: str
) -> None:
    assert main(["topology", "recommend", "--measure", *options]) != 0
    assert expected_message in capsys.readouterr().err


def test_of_equally_fast_ones_an_exact_and_simple_one_is_listed_first() -> None:
    """Two agents: most topologies are the same one exchange."""
    first, *_ = recommended("-n", "2", "--model-mb", "10")
    assert first == "ring"
