"""``shoal bench``: what is timed, how it is judged, how its agents end, and the whole command on small tensors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import pytest
import torch

from shoal.bench import measurement, results
from shoal.bench.measurement import Figures, Load, LoadWatch, missing_tool, wire_seconds
from shoal.bench.results import amount, speed_markdown
from shoal.cli import main
from support.leftovers import wait_until
from support.limits import scaled
from support.namespaces import require_namespaces
from support.world import World

MS = 1e-3
MIB = 1 << 20


def bench(*arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("SHOAL_", "OMP_"))}
    command = [sys.executable, "-m", "shoal", "bench", *map(str, arguments)]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=timeout)


# The verdicts


def large(ring: float = 100, fresh: float = 110, one_peer: float = 60, copies: float = 80) -> Figures:
    seconds = {"all_reduce": 200, "ring": ring, "fresh": fresh, "one-peer": one_peer, "copies": copies}
    return Figures("large", 100_000_000, 4, {case: [one * MS] for case, one in seconds.items()})


def small(agents: int, ring: float) -> Figures:
    return Figures("small", 4, agents, {"all_reduce": [0.1 * MS], "ring": [ring * MS], "one-peer": [0.05 * MS]})


def many(ring: float, grouped: float = 10) -> Figures:
    gloo = {"all_reduce, async": [90 * MS], "all_reduce, in turn": [60 * MS]}
    gloo |= {"all_reduce_coalesced": [30 * MS], "all_reduce, joined": [20 * MS]}
    return Figures("many", 4096, 4, {"ring": [ring * MS], "ring, grouped": [grouped * MS], **gloo})


def windows(nbytes: int, window: float, copies: float = 80) -> Figures:
    seconds = {"all_reduce": 200.0, "window": window} | ({"copies": copies} if nbytes == 100_000_000 else {})
    return Figures("windows", nbytes, 4, {case: [one * MS] for case, one in seconds.items()})


def latency(torch_seconds: float, python_seconds: float) -> Figures:
    """One of a hundred takes so long, all others are quick."""
    values = {"torch": [torch_seconds], "Python": [python_seconds]}
    return Figures("latency", 4, 2, {what: [0.1 * MS] * 99 + slow for what, slow in values.items()})


def published(nbytes: float) -> Figures:
    return Figures("published", MIB, 4, {"published": [nbytes], "in flight": [3], "neighbours": [2]})


def rounds(grown: float) -> Figures:
    return Figures("rounds", 65536, 4, {"rounds": [10_000], "grown": [grown], "resident": [300 * MIB]})


def wire(seconds: float) -> Figures:
    return Figures("wire", 25 * MIB, 2, {"average": [seconds], "gloo": [222 * MS], "gloo and average": [230 * MS]})


LIMITS = [
    ("ring, 100 MB", 0, large(ring=124), large(ring=126)),
    ("ring, 100 MB, a fresh result", 1, large(fresh=119.9), large(fresh=120.1)),
    ("ring, 100 MB", 2, large(copies=66.7), large(copies=66.6)),
    ("dynamic one-peer, 100 MB", 3, large(one_peer=86.9), large(one_peer=87)),
    ("ring, 4 B, 4 agents", 0, small(4, 0.119), small(4, 0.121)),
    ("ring, 4 B, 2 agents", 0, small(2, 0.099), small(2, 0.101)),
    ("100 operations in flight, 4 KB", 0, many(7.9), many(8.1)),
    ("100 tensors in one call, 4 KB", 2, many(1, 29.9), many(1, 30.1)),
    ("win_put + win_update, 4 B", 0, windows(4, 99.9), windows(4, 100.1)),
    ("win_put + win_update, 16 MB", 0, windows(16_000_000, 199), windows(16_000_000, 201)),
    ("win_put + win_update, 100 MB", 0, windows(100_000_000, 199), windows(100_000_000, 201)),
    ("win_put + win_update, 100 MB", 1, windows(100_000_000, 119.9), windows(100_000_000, 120.1)),
    ("win_put, 4 B, to a machine busy in torch: 99%", 0, latency(9.9 * MS, 1), latency(10.1 * MS, 1)),
    ("win_put, 4 B, to a machine busy in Python: 99%", 1, latency(1, 49.9 * MS), latency(1, 50.1 * MS)),
    ("published by 3 operations for 2 neighbours", 0, published(3 * MIB), published(3 * MIB + 64)),
    ("memory that 10,000 rounds add", 0, rounds(MIB), rounds(MIB + 1)),
    ("average 25 MiB over 1 Gbit/s", 0, wire(0.2324), wire(0.2325)),
]


@pytest.mark.parametrize(("what", "line", "within", "beyond"), LIMITS)
def test_a_limit_is_met_up_to_its_value_and_not_beyond(what: str, line: int, within: Figures, beyond: Figures) -> None:
    good, bad = (results.rows_of([figures])[line] for figures in (within, beyond))
    assert (good.what, bad.what) == (what, what)
    assert good.limit
    assert (good.met, bad.met) == (True, False)


def test_the_median_of_the_repetitions_is_judged() -> None:
    figures = many(1)
    figures.values["ring"][:] = [100 * MS, 7 * MS, 6 * MS, 7 * MS, 5 * MS]
    assert results.rows_of([figures])[0].shoal == 7 * MS


def test_many_operations_are_compared_with_gloos_fastest_mode() -> None:
    row, apart, _ = results.rows_of([many(10)])
    assert (row.peer, row.peer_value, row.ratio) == ("Gloo all_reduce, joined", 20 * MS, "2.00x as fast")
    assert (apart.peer, apart.peer_value, apart.limit) == ("Gloo all_reduce, in turn, 100 of them", 60 * MS, "")


def test_small_sizes_are_shown_without_limits() -> None:
    measured = [large(), small(4, 1.0), small(2, 1.0), many(90), published(MIB), rounds(MIB), wire(0.3)]
    rows = results.rows_of(measured, judged=False)
    assert len(rows) == len(results.rows_of(measured)) == 16
    assert {(row.limit, row.met) for row in rows} == {("", None)}


def test_the_table_has_its_own_order() -> None:
    kinds = [row.what.split(",")[0] for row in results.rows_of([rounds(0), many(1), large()])]
    assert kinds[0] == "ring" and kinds[-4:] == [
        *["100 operations in flight"] * 2,
        "100 tensors in one call",
        "memory that 10",
    ]


def test_the_markdown_has_every_figure_with_its_peer_limit_and_verdict() -> None:
    head, _, *lines = speed_markdown(results.rows_of([small(2, 0.2)])).splitlines()
    assert head == "| what | Shoal | compared with | its figure | ratio | limit |  |"
    assert lines[0] == (
        "| ring, 4 B, 2 agents | 0.200 ms | Gloo all_reduce | 0.100 ms | 0.50x as fast | faster | not met |"
    )
    assert lines[1].endswith("| 2.00x as fast |  |  |")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.1023, "s", "102.3 ms"), (0.00512, "s", "5.12 ms"), (42e-6, "s", "0.042 ms"), (100 * MIB, "B", "100.0 MiB")],
)
def test_amounts_have_about_three_digits(value: float, unit: str, text: str) -> None:
    assert amount(value, unit) == text


def test_the_wire_time_is_that_of_its_frames() -> None:
    assert wire_seconds(25 * MIB) == pytest.approx(0.219, abs=5e-4)
    assert wire_seconds(1448) == pytest.approx(1514 * 8 / 1e9)
    assert wire_seconds(1449) == pytest.approx((1514 + 1 + 66) * 8 / 1e9)


# The scaling


def test_the_band_is_the_confidence_interval_of_the_mean() -> None:
    result = results.band([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    # Student's t of 9 degrees of freedom at 95%, times the standard error.
    assert (result.mean, result.reach) == (5.5, pytest.approx(1.8331 * (55 / 6) ** 0.5 / 10**0.5, rel=1e-4))


def test_a_band_needs_ten_values() -> None:
    with pytest.raises(ValueError, match="9 values; the band is that of 10"):
        results.band([1.0] * 9)


# Whether the machine was quiet


@pytest.mark.parametrize(
    ("before", "others", "quiet"), [(9.0, 0.2, True), (0.0, 0.21, False), (9.0, 0.21, False), (0.0, 0.0, True)]
)
def test_a_machine_is_quiet_if_other_processes_are_idle(before: float, others: float, quiet: bool) -> None:
    assert Load(before, 5.0, others, cores=2).quiet is quiet


def test_other_processes_use_the_total_minus_our_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = {"_all_seconds": iter([100.0, 130.0]), "_own_seconds": iter([7.0, 27.0])}
    for name, values in readings.items():
        monkeypatch.setattr(measurement, name, values.__next__)
    clock = iter([50.0, 70.0])
    monkeypatch.setattr(measurement.time, "monotonic", clock.__next__)
    assert LoadWatch().load().others == pytest.approx(0.5)


def test_cpu_time_of_children_counts_as_our_own() -> None:
    before = measurement._own_seconds()
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", "while __import__('time').process_time() < 0.3: pass"], check=True
    )
    # In ticks of 10 ms, each side rounded by itself.
    assert measurement._own_seconds() - before > 0.27
    assert measurement._all_seconds() >= measurement._own_seconds()


# The jobs

COMPARISON = """
import os, sys, time
import torch.distributed as dist
from shoal.bench.measurement import Reporter, compare
rank = 1 if os.fork() == 0 else 0  # one import of torch for both
print("noise on stdout")
reporter = Reporter()
print("more of it")
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
order = []
cases = {
    "balanced": lambda: order.append("balanced"),
    "slow on rank 1": lambda: (order.append("slow on rank 1"), time.sleep(0.1 * rank)),
}
seconds = compare(reporter, "sleeping", cases, 3, calls=2)
first = order[::4]
reporter.send({"figures": [{"kind": "test", "nbytes": 0, "agents": 2, "values": seconds | {"first": first}}]})
dist.destroy_process_group()
if rank == 0 and os.wait()[1]:
    raise SystemExit("rank 1 failed")
"""


def python(script: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", script]


def ignored(doing: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Figures, list[tuple[str, int, int]]]:
    """The figures of two agents of which rank 1 is slow, and the progress that they reported."""
    meeting = tmp_path_factory.mktemp("comparison") / "meeting"
    reported: list[tuple[str, int, int]] = []
    command = [sys.executable, "-c", COMPARISON, str(meeting)]
    [figures] = measurement.run_job([command], {}, lambda *progress: reported.append(progress))
    return figures, reported


def test_a_time_is_that_of_one_call_on_the_slowest_agent(comparison: tuple[Figures, object]) -> None:
    values = comparison[0].values
    assert len(values["balanced"]) == len(values["slow on rank 1"]) == 3
    assert 0.1 <= min(values["slow on rank 1"]) < 0.19  # on a busy machine others may be longer
    assert min(values["balanced"]) < 0.05


def test_cases_alternate_in_order(comparison: tuple[Figures, object]) -> None:
    # Two repetitions to warm up, and three that count.
    turns = ["balanced", "slow on rank 1", "balanced", "slow on rank 1", "balanced"]
    assert comparison[0].values["first"] == turns


def test_agents_report_their_progress(comparison: tuple[object, list[tuple[str, int, int]]]) -> None:
    assert comparison[1] == [("sleeping", done, 5) for done in range(5)]


def test_a_failed_job_shows_its_stderr() -> None:
    with pytest.raises(measurement.JobFailed, match=r"(?s)ended with status 1.*no memory left"):
        measurement.run_job([python("raise SystemExit('no memory left')")], {}, ignored)


def test_a_job_without_results_has_failed() -> None:
    with pytest.raises(measurement.JobFailed, match="reported no figures"):
        measurement.run_job([python('print(\'{"doing": "x", "done": 1, "total": 2}\')')], {}, ignored)


def test_a_job_without_output_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "SILENCE_SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(measurement.JobFailed, match="reported nothing for"):
        measurement.run_job([python("import time; time.sleep(60)")], {}, ignored)
    assert time.monotonic() - start < scaled(10)


def test_one_launcher_that_fails_ends_the_others(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    waiting = python(f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    failing = python(f"import os\nwhile not os.path.exists({str(mark)!r}): pass\nraise SystemExit(3)")
    with pytest.raises(measurement.JobFailed, match="ended with status"):
        measurement.run_job([waiting, failing], {}, ignored)
    assert not Path(f"/proc/{mark.read_text()}").exists()


def test_a_job_gets_one_thread_an_agent_and_no_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TIMELINE", "/nowhere")
    monkeypatch.setenv("SHOAL_TRANSPORT", "network")
    script = """
import json, os
names = ["OMP_NUM_THREADS", "SHOAL_TIMELINE", "SHOAL_TRANSPORT", "OWN"]
values = {name: os.environ.get(name) for name in names}
print(json.dumps({"figures": [{"kind": "test", "nbytes": 0, "agents": 1, "values": values}]}))
"""
    [figures] = measurement.run_job([python(script)], {"OWN": "1"}, ignored)
    result = {"OMP_NUM_THREADS": "1", "SHOAL_TIMELINE": None, "SHOAL_TRANSPORT": "network", "OWN": "1"}
    assert figures.values == result


# The command


@pytest.mark.soak  # half a minute; its parts have tests of their own
@pytest.mark.timeout(300)
def test_the_quick_benchmark_measures_everything_without_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "figures.json"
    assert main(["bench", "--quick", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    content = json.loads(path.read_text())
    kinds = [(one["kind"], one["agents"]) for one in content["figures"]]
    published = ("published", 4)
    window = ("windows", 4)
    assert kinds == [published, published, published, ("rounds", 4), ("small", 4), ("many", 4), window, window, window,
                     ("large", 4), ("large", 4), ("small", 2)]  # fmt: skip
    assert content["machine"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert len(content["rows"]) == 21
    for row in content["rows"]:
        assert row["what"] in printed and row["met"] is None
    # Whatever the machine is busy with, a neighbourhood of any size reads one copy.
    copies = [row["shoal"] / row["peer_value"] for row in content["rows"] if row["what"].startswith("published")]
    assert copies == [1.0, 1.0, 1.0]
    assert "load average" in printed and ("not quiet" in printed) is not content["load"]["quiet"]


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_quick_scaling_draws_a_picture(tmp_path: Path) -> None:
    path, figures = tmp_path / "new" / "scaling.png", tmp_path / "figures.json"
    done = bench("--scaling", "--quick", "--picture", path, "--json", figures)
    assert done.returncode == 0, done.stderr
    assert f"picture: {path}" in done.stdout and path.read_bytes().startswith(b"\x89PNG")
    results = [Figures(**one) for one in json.loads(figures.read_text())["figures"]]
    assert [(one.agents, one.nbytes) for one in results] == [(2, 10_000), (2, 100_000), (3, 10_000), (3, 100_000)]
    mean = 1e3 * fmean(results[0].values["ring"])
    assert re.search(rf"0\.01 MB +2 .* {mean:.2f} ± ", done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.transport("network")
def test_the_network_is_measured_over_a_wire_of_known_speed(tmp_path: Path) -> None:
    require_namespaces()
    if missing_tool():
        pytest.skip(f"there is no {missing_tool()}")
    path = tmp_path / "figures.json"
    assert main(["bench", "--quick", "--only", "network", "--json", str(path)]) == 0
    own, *_ = json.loads(path.read_text())["rows"]
    # The wire lets its first 128 kB pass at once.
    assert own["shoal"] > wire_seconds(MIB - 128_000)


def bench_memory() -> None:
    sys.exit(main(["bench", "--only", "memory"]))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_agents_end_with_the_command(signum: int) -> None:
    world = World(1, init=False)
    try:
        command, pid = world.run_on(0, bench_memory, caught=False), world.members[0].pid
        assert wait_until(lambda: len(descendants(pid)) >= 5, seconds=30)
        started = descendants(pid)
        world.kill(0, signum)
        command.outcome()
        assert world.members[0].exit_code == (130 if signum == signal.SIGINT else 128 + signum)
        assert wait_until(lambda: not [pid for pid in started if is_running(pid)])
    finally:
        world.destroy()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--scaling", "--network"], "--scaling is a measurement of its own"),
        (["--only", "network"], "needs root"),
        (["--network"], "needs root"),
        (["--json", "/proc/nope/x.json"], "--json /proc/nope/x.json cannot be written: "),
        (["--json", "/tmp"], "--json /tmp cannot be written: it is a directory"),
        (["--scaling", "--picture", "/tmp"], "--picture /tmp cannot be written: it is a directory"),
        (["--scaling", "--picture", "x.foo"], "--picture x.foo: matplotlib writes no .foo files, but ."),
    ],
)
def test_impossible_settings_are_refused_at_once(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shoal.cli.bench._measure", lambda jobs: pytest.fail("it measures"))
    assert main(["bench", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_an_unknown_part_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--only", "nothing"])
    assert stop.value.code == 2
    assert re.search("invalid choice: 'nothing' .*memory.*small.*windows.*large.*network", capsys.readouterr().err)


def descendants(pid: int) -> set[int]:
    results = {
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    }
    return results | {below for child in results for below in descendants(child)}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
