"""``shoal topology``: its output and pictures, and its errors for invalid requests."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shoal.cli import main, topology
from shoal.cli import topology_format as words
from shoal.topology import CATALOG, Alternating, OnePeerExponential, RingGraph, Static, mixing_matrix
from shoal.topology.analysis.overview import analyse
from support.limits import slowness


@pytest.fixture
def shoal(capsys: pytest.CaptureFixture[str]):
    """Runs a command and returns its status, output and errors."""

    def run(command: str) -> tuple[int, str, str]:
        try:
            status = main(command.split())
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return run


def row(output: str, name: str) -> str:
    (result,) = (line for line in output.splitlines() if line.split()[:1] == [name])
    return result


def names_in_table(output: str) -> list[str]:
    below = output[output.index("\N{BOX DRAWINGS LIGHT HORIZONTAL}") :].splitlines()[1:]
    return [line.split()[0] for line in below if re.match(r" {2}\S", line)]


def test_list_has_a_line_for_every_topology(shoal) -> None:
    status, out, _ = shoal("topology list")
    assert status == 0
    assert names_in_table(out) == list(CATALOG)


def test_list_has_direction_exactness_and_messages(shoal) -> None:
    _, out, _ = shoal("topology list -n 16")
    assert re.search(r"directed +4 rounds +4 rounds +1$", row(out, "one-peer-exponential").rstrip())
    assert re.search(r"symmetric +static +never +2$", row(out, "ring").rstrip())
    assert re.search(r"symmetric +static +1 round +15$", row(out, "fully-connected").rstrip())
    assert re.search(r"symmetric +never repeats +never +1$", row(out, "random-matchings").rstrip())


def test_list_gives_the_reason_for_an_unsupported_number_of_agents(shoal) -> None:
    _, out, _ = shoal("topology list -n 7")
    assert "power of two" in " ".join(out[out.index(" hypercube ") :].split())


def test_show_prints_requirements_costs_and_properties(shoal) -> None:
    status, out, _ = shoal("topology show one-peer-hypercube -n 8 --latency 1ms --bandwidth 1gbit --model-mb 100")
    assert status == 0
    assert out.startswith("one-peer-hypercube: ")
    for label, value in (
        ("agents", "1, 2, 4, 8, 16, 32, 64 agents"),
        ("messages a round, busiest agent", "1"),
        ("one round", "801 ms"),
        ("time to that error", "2.4 s"),
        ("weights", "symmetric, doubly stochastic"),
        ("period", "3 rounds"),
        ("exact average after", "3 rounds"),
    ):
        assert re.search(rf"^  {label} +{re.escape(value)}$", out, re.MULTILINE), label
    assert "  0: 0-1 2-3 4-5 6-7\n  1: 0-2 1-3 4-6 5-7\n  2: 0-4 1-5 2-6 3-7\n" in out


def test_show_prints_the_matrix_of_few_agents_in_fractions(shoal) -> None:
    _, out, _ = shoal("topology show ring -n 4")
    assert out.endswith("\nW\n  1/3 1/3   . 1/3\n  1/3 1/3 1/3   .\n    . 1/3 1/3 1/3\n  1/3   . 1/3 1/3\n")
    _, out, _ = shoal("topology show ring -n 13")
    assert "\nW" not in out


def test_show_prints_the_requested_number_of_rounds(shoal) -> None:
    _, out, _ = shoal("topology show random-matchings -n 20 --rounds 7")
    assert re.findall(r"^  (\d): ", out, re.MULTILINE) == [str(t) for t in range(7)]


def test_options_of_a_topology_can_be_set(shoal) -> None:
    _, out, _ = shoal("topology show exponential -n 28 --set base=3")
    assert "  0: 0-1 0>3 0>9 0-27 1-2 1>4 " in out  # 27 ahead is 1 behind
    assert re.search(r"^  options +base=2$", out, re.MULTILINE)


def test_a_name_may_be_written_with_underscores(shoal) -> None:
    assert shoal("topology show One_Peer_Exponential -n 4")[0] == 0


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_draw_writes_a_picture(shoal, tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / "new" / f"picture.{suffix}"
    status, out, _ = shoal(f"topology draw inner-outer-ring -n 8 --per-machine 4 --rounds 2 --output {path}")
    assert status == 0
    assert str(path) in out
    assert path.read_bytes().startswith(magic)


def test_draw_chooses_a_default_file_name(shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shoal("topology draw ring -n 4 --layout circle --width 2")[0] == 0
    assert (tmp_path / "out" / "ring-4.png").exists()


def test_compare_ranks_by_predicted_time(shoal) -> None:
    status, out, _ = shoal(
        "topology compare ring star one-peer-exponential --agents 16 --latency 1ms --bandwidth 1gbit"
    )
    assert status == 0
    result = {
        name: analyse(CATALOG[name].schedule(16), nbytes=1e8, latency=1e-3, bandwidth=1.25e8)
        for name in ("ring", "star", "one-peer-exponential")
    }
    assert names_in_table(out) == sorted(result, key=lambda name: result[name].consensus_seconds)
    assert str(result["ring"].rounds) in row(out, "ring").split()


def test_compare_counts_the_agents_that_share_a_nic(shoal) -> None:
    _, out, _ = shoal("topology compare inner-outer-exponential one-peer-exponential -n 16 --per-machine 4 --json")
    traffic = {name: one["traffic"] for name, one in json.loads(out)["topologies"].items()}
    assert traffic["inner-outer-exponential"]["most_senders_on_a_nic"] == 1
    assert traffic["one-peer-exponential"]["most_senders_on_a_nic"] == 4


def test_compare_lists_all_topologies_with_reasons_for_missing_ones(shoal) -> None:
    status, out, _ = shoal("topology compare -n 9 --json")
    decoded = json.loads(out, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert status == 0
    assert set(decoded["topologies"]) | set(decoded["refused"]) == set(CATALOG)
    assert "power of two" in decoded["refused"]["hypercube"]
    assert decoded["topologies"]["one-peer-exponential"]["exact_length"] is None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("show exponentail", "there is no topology 'exponentail'. Did you mean exponential"),
        ("show exp", "Did you mean exponential or symmetric-exponential or one-peer-exponential"),
        ("show qqq", "there is no topology 'qqq'. shoal topology list shows all."),
        ("draw hypercube -n 6", "hypercube for 6 agents: a hypercube needs a power of two"),
        ("draw ring -n 10 --per-machine 4", "10 agents do not fill machines of 4"),
        ("draw ring --layout tree", "do not make a tree"),
        ("draw ring -o ring.gif", "written as .pdf, .png, .svg"),
        ("draw fully-connected -n 200", "200 agents and 19900 lines shows nothing"),
        ("show ring --set colour=2", "ring has no option 'colour'. It has connect_style."),
        ("show chain --set base=2", "chain has no option 'base'. It has no options."),
        ("show ring --set connect_style", "--set 'connect_style' is not OPTION=VALUE"),
        ("show ring --set connect_style=5", "connect_style is 5"),
        ("show ring -n 0", "'0' is not a number of them: write 1 or more"),
        ("compare ring-star -n 10 --per-machine 4", "10 agents do not fill machines of 4"),
        ("compare ring -n 10 --per-machine 4", "10 agents do not fill machines of 4"),
        ("compare --model-mb -3", "'-3' is not a number above zero"),
        ("compare --error little", "'little' is not a number above zero"),
        ("compare --latency -5ms", "'-5ms' is not a duration"),
        ("compare --latency 5", "'5' is not a duration: it has no unit"),
        ("compare --bandwidth 1gb/s", "may be in bits or in bytes"),
        ("swim", "invalid choice: 'swim'"),
        ("", "required: COMMAND"),
    ],
)
def test_invalid_requests_are_refused(shoal, command: str, message: str) -> None:
    status, _, err = shoal(f"topology {command}")
    assert status == 2
    assert message in err


@pytest.mark.parametrize("options", ["fully-connected -n 2300", "all-reduce -n 1000000000000"])
def test_dense_topologies_are_refused_before_they_are_built(shoal, options: str) -> None:
    began = time.process_time()
    status, _, err = shoal(f"topology show {options}")
    assert status == 2 and "are too dense to analyse" in err
    assert time.process_time() - began < 3 * slowness()


def test_ctrl_c_ends_it_without_a_traceback(shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(topology, "analyse", interrupt)
    status, _, err = shoal("topology show ring")
    assert (status, err) == (130, "shoal topology show: interrupted\n")


def test_a_missing_matplotlib_is_named_with_its_extra(shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = shoal("topology draw ring")
    assert status == 1
    assert "pip install 'shoal[plot]'" in err


def test_recommend_is_among_the_commands(shoal) -> None:
    status, out, _ = shoal("topology recommend --help")
    assert status == 0
    assert "usage: shoal topology recommend" in out


def test_matplotlib_is_not_imported_before_something_is_drawn() -> None:
    assert not [name for name in vars(topology) if "matplotlib" in name]
    assert not [name for name in vars(words) if "matplotlib" in name]


@pytest.mark.parametrize(
    ("refused", "expected_message"),
    [
        (lambda size: False, "any number of agents"),
        (lambda size: size < 3, "3 agents or more"),
        (lambda size: size in (2, 5), "any number of agents but 2, 5"),
        (lambda size: size & (size - 1), "1, 2, 4, 8, 16, 32, 64 agents"),
        (lambda size: size % 5, "5, 10, 15, 20, 25, 30, 35, 40, ... agents"),
    ],
)
def test_the_supported_numbers_of_agents_are_described(refused, expected_message: str) -> None:
    from shoal.topology import Topology

    made = Topology("name", RingGraph, "", "", refuses=lambda size: "no" if refused(size) else "")
    assert words.sizes(made) == expected_message


def test_a_topology_with_machines_gets_the_machine_options() -> None:
    schedule, local = words.build(CATALOG["inner-outer-ring"], 12, None, {})
    assert (schedule.size, local) in ((12, 3), (12, 4))
    schedule, local = words.build(CATALOG["ring-star"], 7, None, {})
    assert (schedule.size, local) in ((7, 1), (7, 7))


def test_directed_and_undirected_messages_are_distinguished() -> None:
    schedule = Alternating([OnePeerExponential(4), Static(RingGraph(4))])
    assert words.round_text(schedule, 0) == "0>1 1>2 2>3 3>0"
    assert words.round_text(schedule, 1) == "0-1 0-3 1-2 2-3"
    assert words.round_text(schedule, 0, most=2) == "0>1 1>2 ... and 2 more"
    assert words.round_text(OnePeerExponential(1), 0) == "nobody"


def test_a_matrix_is_printed_with_fractions_where_they_are_exact() -> None:
    assert words.matrix_text(np.array([[0.5, 0.5], [0.0, 1.0]])) == ["1/2 1/2", "  .   1"]
    assert words.matrix_text(np.array([[np.sqrt(0.5), -0.25], [1.0, 0.0]])) == ["0.707  -1/4", "    1     ."]
    assert words.matrix_text(mixing_matrix(RingGraph(1))) == ["1"]


def test_infinite_values_are_null_in_json() -> None:
    result = words.without_infinity({"a": (1, float("inf")), "b": [{"c": float("nan"), "d": 2.5}], "e": "inf"})
    assert json.dumps(result, allow_nan=False) == '{"a": [1, null], "b": [{"c": null, "d": 2.5}], "e": "inf"}'
