"""``shoal doctor``: a healthy machine is OK, each problem is reported with its remedy, and no check hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import shoal
from shoal.cli import doctor, live_checks, main
from shoal.cli.live_checks import CheckResult, LiveChecks, core_wait, is_starved
from shoal.device import Unshareable

# Longer than the doctor's own patience, which begins when it has imported torch.
TIMEOUT = 200
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}


def run_doctor(environ: dict[str, str]) -> tuple[int, str]:
    """Exit status and stdout; nothing may be on stderr."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("SHOAL_")}
    command = [sys.executable, "-W", "error", "-m", "shoal", "doctor", "--wait", "150"]
    done = subprocess.run(command, env=clean | environ, capture_output=True, text=True, timeout=TIMEOUT)
    assert not done.stderr
    return done.returncode, done.stdout


def init_report(capsys: pytest.CaptureFixture[str], environ: dict[str, str]) -> tuple[doctor.Report, str]:
    report = doctor.Report()
    doctor.report_init(report, environ)
    return report, capsys.readouterr().out


@pytest.mark.timeout(TIMEOUT + 20)
def test_a_healthy_machine_is_ok_over_every_transport_and_a_secret_is_not_shown() -> None:
    code, output = run_doctor({"SHOAL_SECRET": "swordfish"})
    assert (code, output.splitlines()[-1]) == (0, "OK: agents can run on this machine")
    assert re.findall(r"^  (\w[\w -]+?) +OK, \d+ ms$", output, re.M) == [
        "threads",
        "shared_memory",
        "network",
        "process-group",
        "two processes",
    ]
    assert "SHOAL_SECRET=(set, not shown)" in output and "swordfish" not in output
    versions = {"torch": torch.__version__, "kernel": os.uname().release, "python": sys.version.split()[0]}
    for name, version in versions.items():
        assert re.search(rf"^  {name} +.*{re.escape(version)}", output, re.M)


def test_a_variable_that_breaks_only_processes_fails_only_their_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_TRANSPORT", "threads")
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert re.search(r"^FAILED: two processes: ValueError: SHOAL_TRANSPORT=threads cannot reach rank", output, re.M)
    assert "FAILED: threads" not in output


def test_the_reported_launcher_is_that_of_init(capsys: pytest.CaptureFixture[str]) -> None:
    report, output = init_report(capsys, TORCHRUN | {"HOME": "/root"})
    assert not report.problems
    assert "rank 2 of 4, as the variables of torchrun say; they meet at 127.0.0.1:29501, where rank 0 hosts" in output
    assert all(f"{name}={text}" in output for name, text in TORCHRUN.items()) and "HOME" not in output
    assert "127.0.0.1: all agents are on this machine" in output


def test_without_a_launcher_it_is_a_single_agent(capsys: pytest.CaptureFixture[str]) -> None:
    report, output = init_report(capsys, {})
    assert not report.problems
    assert "a world of one" in output


def test_the_listening_interface_is_named_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    _, output = init_report(capsys, TORCHRUN | {"SHOAL_INTERFACE": "lo"})
    assert re.search(r"listens on +127\.0\.0\.1 \(lo\), between machines \(SHOAL_INTERFACE\)", output)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be less than WORLD_SIZE=2"),
        ({"SHOAL_TIMEOUT": "soon"}, "SHOAL_TIMEOUT='soon'"),
        ({"SHOAL_TRANSPORT": "pigeon"}, "SHOAL_TRANSPORT='pigeon'; it may be one of threads"),
        ({"SHOAL_INTERFACE": "eth99"}, "SHOAL_INTERFACE='eth99' is neither an interface nor an address"),
        ({"SHOAL_TLS": "on"}, "SHOAL_TLS=on, but no certificates"),
        (TORCHRUN | {"MASTER_ADDR": "no-such-host.invalid"}, "could not look up no-such-host.invalid"),
        (TORCHRUN | {"MASTER_ADDR": "no..host"}, "could not look up no..host: "),
    ],
    ids=["rank", "timeout", "transport", "interface", "certificates", "host", "no name"],
)
def test_settings_that_init_refuses_are_problems_with_their_reason(
    environ: dict[str, str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SHOAL_TIMEOUT", "SHOAL_TRANSPORT", "SHOAL_TLS"):
        monkeypatch.setenv(name, environ.get(name, ""))
    report, _ = init_report(capsys, environ)
    assert len(report.problems) == 1 and reason in report.problems[0]


def test_an_unresponsive_name_server_does_not_block(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LOOKUP_SECONDS", 0.05)
    monkeypatch.setattr(doctor, "address_towards", lambda _: time.sleep(2))
    report, _ = init_report(capsys, TORCHRUN | {"MASTER_ADDR": "far"})
    assert report.problems == ["shoal.init() would fail: could not look up far in 0.05 s"]


def test_a_slow_lookup_of_the_own_host_name_is_noted_with_its_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = []

    def look_up(address: tuple[object, ...], _: int) -> tuple[str, str]:
        requested.append(address[0])
        time.sleep(0.05 if len(requested) == 2 else 0.0)  # so the second exceeds its limit, on any machine
        return "localhost", "0"

    monkeypatch.setattr("socket.getnameinfo", look_up)
    monkeypatch.setattr(doctor, "SLOW_LOOKUP", 60.0)
    quick, _ = init_report(capsys, {})
    monkeypatch.setattr(doctor, "SLOW_LOOKUP", 0.04)
    slow, output = init_report(capsys, TORCHRUN)
    assert requested == ["::ffff:127.0.0.1"] * 2
    assert (quick.problems, quick.notes, slow.problems) == ([], [], [])
    assert re.search(r"name lookup +\d+ ms to look for the name of 127\.0\.0\.1", output)
    assert len(slow.notes) == 1 and "'::ffff:127.0.0.1 localhost'" in slow.notes[0]


def test_a_missing_host_name_is_no_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object) -> tuple[str, str]:
        raise OSError("name or service not known")

    monkeypatch.setattr("socket.getnameinfo", look_up)
    report, _ = init_report(capsys, TORCHRUN)
    assert (report.problems, report.notes) == ([], [])


def test_a_misspelt_variable_is_noted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SLOW_LOOKUP", 60.0)
    report, _ = init_report(capsys, {"SHOAL_TRANPORT": "network"})
    assert not report.problems
    assert report.notes == ["SHOAL_TRANPORT is no variable of Shoal's; did you mean SHOAL_TRANSPORT?"]


def test_available_engines_and_the_selected_one_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    report, output = init_report(capsys, {})
    assert re.search(r"^  engines +this build of torch has gloo", output, re.M) and not report.problems
    report, output = init_report(capsys, {"SHOAL_TRANSPORT": "process-group"})
    assert re.search(r"^  transport +tensors by gloo \(SHOAL_TRANSPORT\)", output, re.M) and not report.problems
    report, output = init_report(capsys, {"SHOAL_TRANSPORT": "process-group", "SHOAL_PROCESS_GROUP": "glue"})
    assert "SHOAL_PROCESS_GROUP='glue'; it may be one of gloo" in report.problems[0]


def results_of(script: str, monkeypatch: pytest.MonkeyPatch, patience: float) -> dict[str, str]:
    """The problem of each check when ``script`` replaces the live checks."""
    monkeypatch.setattr(live_checks, "_COMMAND", (sys.executable, "-I", "-S", "-c", script))
    with LiveChecks(patience) as checks:
        pids = [process.process.pid for process in checks._processes]
        result = {one.name: one.problem for one in checks.results()}
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return result


def test_a_check_that_hangs_is_ended_and_fails_and_earlier_results_count(monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import json, time
print(json.dumps({"check": "threads", "error": "", "seconds": 0.1}), flush=True)
time.sleep(60)
"""
    result = results_of(script, monkeypatch, patience=2.0)
    assert result.pop("threads") == ""
    assert set(result) == {"shared_memory", "network", "process-group", "two processes"}
    assert all(problem.startswith("it did not end in") for problem in result.values())


def test_a_check_that_crashes_fails_with_its_last_output(monkeypatch: pytest.MonkeyPatch) -> None:
    result = results_of("raise SystemExit('Illegal instruction')", monkeypatch, patience=20.0)
    assert len(result) == 5
    assert all(problem == "its process ended with status 1: Illegal instruction" for problem in result.values())


@pytest.mark.parametrize("average", [lambda x: x, lambda x: x.fill_(0.5000001)], ids=["own value", "rounding"])
def test_a_wrong_average_fails_the_check(
    average: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal, "neighbor_allreduce", average)
    with pytest.raises(RuntimeError, match="over threads it came to"):
        shoal.Fleet(2).run(live_checks.average)


def test_a_problem_shared_by_several_checks_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    report = reported(
        [
            CheckResult("threads", "no luck", 0.0),
            CheckResult("network", "no luck", 0.0),
            CheckResult("two processes", "", 0.1),
        ]
    )
    assert [problem.splitlines()[0] for problem in report.problems] == ["threads, network: no luck"]


def reported(results: list[CheckResult]) -> doctor.Report:
    class Checks(LiveChecks):
        def results(self) -> Iterator[CheckResult]:
            yield from results

    report = doctor.Report()
    doctor.report_checks(report, Checks(20.0))
    return report


def test_a_check_without_cpu_time_has_not_failed(capsys: pytest.CaptureFixture[str]) -> None:
    report = reported([CheckResult("threads", "no luck", 9.0, True), CheckResult("network", "", 0.1, True)])
    assert not report.problems and len(report.unknown) == 1
    assert report.unknown[0].startswith("threads: too busy") and "--wait 60" in report.unknown[0]
    assert "not known: too busy (no luck)" in capsys.readouterr().out


def test_too_busy_has_an_exit_status_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []

    class Checks(LiveChecks):
        def __enter__(self) -> LiveChecks:
            waited.append(self.patience)
            return self

        def results(self) -> Iterator[CheckResult]:
            yield CheckResult("threads", "no luck", 9.0, True)

    monkeypatch.setattr(doctor, "LiveChecks", Checks)
    monkeypatch.setattr(live_checks, "LiveChecks", Checks)
    monkeypatch.setattr(doctor, "report_init", lambda *_: None)
    assert main(["doctor", "--wait", "7"]) == doctor.TOO_BUSY == 3
    assert "NOT KNOWN: threads: too busy" in capsys.readouterr().out
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    main(["doctor"])
    monkeypatch.setattr("os.getloadavg", lambda: (float(len(os.sched_getaffinity(0))), 0.0, 0.0))  # all cores, no more
    main(["doctor"])
    assert waited == [7.0, live_checks.WHEN_BUSY, live_checks.CHECK_SECONDS]
    assert main(["doctor", "--wait", "-1"]) == 2


def test_a_runnable_process_without_a_core_is_distinguished_from_a_sleeping_one() -> None:
    """Three processes compete for their one allowed core, and one sleeps."""
    core = min(os.sched_getaffinity(0))
    busy = f"import os; os.nice(15); os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    scripts = [busy] * 3 + ["import time; time.sleep(60)"]
    processes = [subprocess.Popen([sys.executable, "-I", "-S", "-c", script]) for script in scripts]
    try:
        started = time.monotonic()
        while not all(is_starved(core_wait(one.pid), time.monotonic() - started) for one in processes[:3]):
            assert time.monotonic() < started + 30.0
            time.sleep(0.1)
        while is_starved(core_wait(processes[3].pid), time.monotonic() - started):
            assert time.monotonic() < started + 50.0
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_devices_are_listed_with_their_transfer_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(device: torch.device) -> object:
        if device.index:
            raise Unshareable("device 1 has no virtual memory")
        return object()

    monkeypatch.setattr(doctor, "open_device", opened)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Device {index + 7}")
    monkeypatch.setattr(doctor, "why_not_triton", lambda: "triton is not installed")
    one, other = doctor.local_devices()
    assert one.startswith("cuda:0 Device 7: SHOAL_DEVICE_MEMORY=1 leaves tensors there, summed by torch (triton is")
    assert other == "cuda:1 Device 8: tensors go through the CPU: device 1 has no virtual memory"


def test_a_machine_without_devices_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.local_devices()[0].startswith("none of CUDA")
