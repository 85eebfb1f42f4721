"""``shoal run --watch`` with real agents: the page in a real browser, and no resource left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.config import WATCH
from support.browser import MISSING, browser
from support.launcher import RUN
from support.leftovers import wait_until
from support.limits import scaled
from support.world import plain_environment, reserved_port

TRAIN = Path(__file__).with_name("train.py")
COUNTING = Path(__file__).with_name("counting.py")
GROWING = Path(__file__).with_name("growing.py")
Start = Callable[..., "Job"]
ENVIRON = """
import os, sys, time
from pathlib import Path
part = Path(sys.argv[1], "part" + os.environ["RANK"])
part.write_text(repr(dict(os.environ)))
part.rename(part.with_name(os.environ["RANK"]))
while not Path(sys.argv[1], "stop").exists():
    time.sleep(0.05)
"""


class Job:
    """A launcher that runs."""

    def __init__(self, *arguments: object, environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [*RUN, *map(str, arguments)], env=plain_environment() | environ, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line)
            if "watch the run at" in line or "error" in line:
                break
        result = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", self.lines[-1])
        self.address = result[0] if result else ""
        joins = re.search(r"--join (\S+) -n K", "".join(self.lines))
        self.where = joins[1] if joins else ""

    def rest(self) -> tuple[int, str]:
        """Its exit status, and the output until then."""
        _, output = self.process.communicate(timeout=scaled(60))
        return self.process.returncode, output

    def news(self) -> dict[str, Any]:
        """The data that a page receives now."""
        with urllib.request.urlopen(f"{self.address}news", timeout=10) as page:
            status: dict[str, Any] = json.loads(page.readline().removeprefix(b"data: "))
        return status

    def until(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        assert wait_until(lambda: true(self.news()), 45.0), self.news()
        return self.news()


@pytest.fixture
def start() -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(*arguments: object, **environ: str) -> Job:
        jobs.append(Job(*arguments, environ=environ))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.communicate()


def states(message: dict[str, Any]) -> list[str]:
    return [one["state"] for one in message["agents"]]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_agents_do_not_get_the_address_and_nothing_outlives_the_launcher(
    start: Start, tmp_path: Path, how: signal.Signals
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENVIRON)
    job = start("--watch", "-n", 2, script, tmp_path)
    output = job.until(lambda message: states(message) == ["starting"] * 2 and len(list(tmp_path.glob("[01]"))) == 2)
    pids = [one["pid"] for one in output["agents"]]
    token = job.address.rstrip("/").rpartition("/")[2]
    for rank, pid in enumerate(pids):
        environ = (tmp_path / str(rank)).read_text()
        assert token not in environ and WATCH in environ
        assert token not in Path(f"/proc/{pid}/cmdline").read_text()
    assert token not in Path(f"/proc/{job.process.pid}/cmdline").read_text()
    job.process.send_signal(how)
    _, said_last = job.rest()
    assert token not in said_last
    assert wait_until(lambda: not any(map(is_running, pids)))
    with pytest.raises(OSError):
        job.news()


def test_missing_requirements_are_refused_with_the_reason(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    two = ("--watch", "-n", 1, "--nnodes", 2, "--rendezvous", "127.0.0.1:1")
    with reserved_port() as port:
        cases = [
            (("--watch", "--watch-port", 70000, "-n", 1), {}, 2, "--watch-port 70000"),
            (two, {}, 2, "set SHOAL_SECRET to the same for all machines"),
            (two, {"SHOAL_SECRET": "s", "SHOAL_TLS": "on"}, 2, "authenticate their messages and do not encrypt them"),
            (("--watch", "-n", 1, "--join", f"127.0.0.1:{port}"), {}, 2, "--join with --watch"),
        ]
        for arguments, environ, status, why in cases:
            job = start(*arguments, script, **environ)
            assert why in "".join(job.lines) + job.rest()[1]
            assert job.process.returncode == status
    with socket.create_server(("127.0.0.1", 0)) as listener:
        job = start("--watch", "--watch-port", listener.getsockname()[1], "-n", 1, script)
        assert "Address already in use" in job.lines[-1] and job.rest()[0] == 1


def test_a_launcher_without_watch_sets_no_address_for_its_agents(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENVIRON)
    (tmp_path / "stop").touch()
    done = subprocess.run(
        [*RUN, "-n", "1", str(script), str(tmp_path)],
        env=plain_environment() | {WATCH: "of an outer one"},
        timeout=scaled(60),
    )
    assert done.returncode == 0 and WATCH not in (tmp_path / "0").read_text()


@pytest.mark.slow
def test_the_launcher_of_another_machine_shows_its_agents_on_the_first(start: Start, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with reserved_port() as port:
        common = ("--watch", "-n", 1, "--nnodes", 2, "--rendezvous", f"127.0.0.1:{port}", "--on-failure", "continue")
        secret = {"SHOAL_SECRET": "of this job"}
        first = start(*common, "--node-rank", 0, TRAIN, stop, **secret)
        other = subprocess.Popen(
            [*RUN, *map(str, common), "--node-rank", "1", str(TRAIN), str(stop)],
            env=plain_environment() | secret,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output = first.until(lambda message: all(one["step"] and one["loss"] for one in message["agents"]))
            os.kill(output["agents"][1]["pid"], signal.SIGKILL)
            output = first.until(lambda message: states(message)[1] == "lost")
            assert "SIGKILL" in output["agents"][1]["words"]
            stop.touch()
            assert first.rest()[0] == 0
            other.communicate(timeout=scaled(60))
        finally:
            other.kill()
            other.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_joined_agents_are_shown_and_failed_ones_with_their_exit_status(
    start: Start, tmp_path: Path, machines: int
) -> None:
    stop = tmp_path / "stop"
    with contextlib.ExitStack() as others:
        port = others.enter_context(reserved_port())
        where, secret = (), dict[str, str]()
        if machines == 2:
            where, secret = ("--nnodes", 2, "--rendezvous", f"127.0.0.1:{port}"), {"SHOAL_SECRET": "of this job"}
        common = (*where, "--max-agents", 4, "-n", 2 // machines)
        job = start("--watch", *common, GROWING, stop, **secret)

        def launch(*arguments: object) -> subprocess.Popen[str]:
            command = [*RUN, *map(str, arguments), str(GROWING), str(stop)]
            environ = plain_environment() | secret
            made = others.enter_context(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
            others.callback(made.kill)
            return made

        launched = [launch("--watch", *common, "--node-rank", 1)] if machines == 2 else []
        assert states(job.news())[2:] == ["not there"] * 2
        launched.append(launch("--join", job.where, "-n", 2))
        output = job.until(
            lambda message: (
                all(one["step"] and one["loss"] for one in message["agents"])
                and {*states(message)} <= {"computing", "waiting"}
            )
        )
        assert [one["again"] for one in output["agents"]] == [0] * 4
        events = [text for _, text, _ in output["events"]]
        assert sorted(text for text in events if "joined" in text) == [f"rank {rank} has joined" for rank in (2, 3)]
        os.kill(output["agents"][3]["pid"], signal.SIGKILL)
        job.until(lambda message: states(message)[3] == "lost" and "SIGKILL" in message["agents"][3]["words"])
        stop.touch()
        for one in launched:
            _, err = one.communicate(timeout=scaled(60))
            assert one.returncode == 0, err
        assert job.rest()[0] == 0


def display_delays(folder: Path, seen: list[tuple[float, int]]) -> list[float]:
    """Delays in seconds between the logging of each number by ``counting.py`` and its display, if displayed."""
    lines = [line.split() for line in (folder / "logged").read_text().splitlines()]
    logged = {int(number): float(at) for number, at in lines}
    first, last = seen[0][1], seen[-1][1]  # where two came at once, the later one is shown
    return [min(at for at, result in seen if result >= index) - logged[index] for index in range(first + 1, last + 1)]


def loss_in(message: dict[str, Any]) -> int:
    return next((int(one["points"][-1][1]) for one in message["series"] if one["name"] == "loss"), 0)


@pytest.mark.soak  # of a quiet machine
def test_logged_values_are_served_within_a_second(start: Start, tmp_path: Path) -> None:
    """For at least half of the values, as the machine runs other processes too."""
    job, seen = start("--watch", "-n", 2, COUNTING, tmp_path / "stop"), list[tuple[float, int]]()
    with urllib.request.urlopen(f"{job.address}news", timeout=45) as page:
        while not seen or seen[-1][1] < seen[0][1] + UPDATES:
            line = page.readline()
            if line.startswith(b"data: ") and (status := loss_in(json.loads(line.removeprefix(b"data: ")))):
                seen.append((time.time(), status))
    (tmp_path / "stop").touch()
    assert statistics.median(display_delays(tmp_path, seen)) < 1.0, display_delays(tmp_path, seen)
    assert job.rest()[0] == 0


@pytest.mark.soak
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.timeout(180)
def test_logged_values_are_on_the_page_within_a_second(start: Start, tmp_path: Path) -> None:
    """For at least half of the values. The page itself records when it shows a number."""
    job = start("--watch", "-n", 2, COUNTING, tmp_path / "stop")
    with browser() as page:
        page.open(job.address)
        page.until(FIGURE.format("loss, mean"), lambda text: text != DASH)
        page.run(NOTE_WHEN)
        page.until("return window.seen.length", lambda count: count > UPDATES)
        seen = [(at, int(text)) for at, text in page.run("return window.seen")]
    (tmp_path / "stop").touch()
    assert statistics.median(display_delays(tmp_path, seen)) < 1.0, display_delays(tmp_path, seen)
    assert job.rest()[0] == 0


UPDATES = 12
NOTE_WHEN = """
window.seen = [];
new MutationObserver(() => {
  const text = document.querySelector('[data-figure="loss, mean"] b').textContent;
  const last = window.seen[window.seen.length - 1];
  if (!last || last[1] !== text) window.seen.push([Date.now() / 1000, text]);
}).observe(document.getElementById("figures"), {childList: true});
"""
ROW = "document.querySelector('#agents tbody tr[data-rank=\"{}\"]')"
DASH = "\N{EN DASH}"
STATES = "return [...document.querySelectorAll('#agents tbody tr')].map(row => row.dataset.state)"
# The page makes its figures when the first report arrives.
FIGURE = "return document.querySelector('[data-figure=\"{}\"] b')?.textContent ?? '\N{EN DASH}'"
LUMINANCE = """
const of = (text) => text.match(/\\d+/g).slice(0, 3).map(Number).reduce((sum, one) => sum + one, 0) / 765;
const style = getComputedStyle(document.body);
return [of(style.backgroundColor), of(style.color)];
"""


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.timeout(180)
@pytest.mark.slow
def test_the_page_in_a_browser_follows_a_run_to_its_end(start: Start, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    job = start("--watch", "-n", 4, "--on-failure", "continue", TRAIN, stop)
    with browser() as page:
        page.open(job.address)
        # It loads, and shows all known data.
        page.until(FIGURE.format("loss, mean"), lambda text: text != DASH)
        page.until(FIGURE.format("consensus distance"), lambda text: text != DASH)
        page.until(FIGURE.format("a step"), lambda text: text.endswith("s"))
        page.until(STATES, lambda texts: {*texts} <= {"computing", "waiting"})
        drawn = "return [...document.querySelectorAll('#graph [data-edge]')].map(one => one.dataset.edge)"
        page.until(drawn, lambda edges: {"0-1", "1-2", "2-3", "3-0", "0-2"} <= {*edges})
        page.until(STATES, lambda texts: "waiting" in texts)  # for the slow one
        # It follows.
        updates = int(page.run("return document.body.dataset.updates"))
        step = int(page.run(FIGURE.format("step")))
        page.until(FIGURE.format("step"), lambda text: int(text) > step)
        page.until("return document.body.dataset.updates", lambda text: int(text) > updates + 2)
        # An agent is stopped, and one is killed.
        pids = [int(page.run(f"return {ROW.format(rank)}.cells[7].textContent").split(", ")[1]) for rank in range(4)]
        os.kill(pids[3], signal.SIGSTOP)
        page.until(STATES, lambda texts: texts[3] == "stopped")
        os.kill(pids[3], signal.SIGCONT)
        os.kill(pids[2], signal.SIGKILL)
        page.until(STATES, lambda texts: texts[2] == "lost" and texts[3] != "stopped")
        page.until("return document.getElementById('events').textContent", lambda text: "SIGKILL" in text)
        # Light and dark, and on a telephone.
        for scheme, ground_is_lighter in (("light", True), ("dark", False)):
            page.scheme(scheme)
            ground, text = page.run(LUMINANCE)
            assert abs(ground - text) > 0.6 and (ground > text) == ground_is_lighter
        page.resize(400, 800)
        assert page.run("return [document.documentElement.scrollWidth, innerWidth]") == [400, 400]
        assert page.run("return document.getElementById('graph').getBoundingClientRect().width") > 300
        # To the end, with nothing to complain of, and nobody else asked.
        stop.touch()
        assert job.rest()[0] == 0
        page.until("return document.getElementById('status').textContent", lambda text: text == ENDED)
        requested = page.run("return performance.getEntriesByType('resource').map(one => one.name)")
        assert requested and all(one.startswith(job.address) for one in requested)
        assert page.complaints() == []


ENDED = "the run has ended, with status 0"
