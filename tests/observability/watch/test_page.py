"""The page in a browser, of a run that is made up: its charts have axes, and nothing is cut on a narrow screen."""

from __future__ import annotations

import math
import selectors
import threading
import time
from collections.abc import Iterator

import pytest

from shoal.observability.watch import run_state
from shoal.observability.watch.run_state import RunState
from shoal.observability.watch.server import PageServer
from support.browser import MISSING, Browser, browser
from support.status_messages import summary

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
CALL = "neighbor_allreduce 'a name of a call that is quite long' round 123456"
TEXTS = "return [...document.querySelectorAll('{}')].map(one => one.textContent)"
CUT = """
return [...document.querySelectorAll('td, .figure b, .chart span, #events li')]
    .filter(one => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflow !== 'visible')
    .map(one => one.textContent)
"""
CONTRAST = """
const light = (text) => {
    const [r, g, b] = text.match(/[0-9.]+/g).slice(0, 3).map((one) => one / 255)
        .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = light(getComputedStyle(document.querySelector('.card')).backgroundColor);
return ['.mean', '.worst', '.axis', '.edge', 'td.words', '.chart span'].map((name) => {
    const style = getComputedStyle(document.querySelector(name));
    const own = light(style.stroke !== 'none' ? style.stroke : name === '.axis' ? style.fill : style.color);
    return [name, (Math.max(own, ground) + 0.05) / (Math.min(own, ground) + 0.05)];
});
"""


def made_up() -> RunState:
    """Four agents: one waits, one was killed, one was restarted and is not admitted yet."""
    state = RunState(4, "4 agents of train.py")
    for rank in range(4):
        state.process(rank, 1000 + rank, "a-machine-with-a-long-name", "S")
    waits = [{"call": CALL, "ranks": [1, 2], "seconds": 12.0, "gives_up": 9.0}]
    for times in range(1, 60):
        loss = {"times": times, "own": 1 / times, "mean": 1 / times, "worst": 1.5 / times, "worst_rank": 0}
        sent = {"sent": [[1, times * 750_000]], "edges": [1], "bytes_sent": times * 750_000}
        state.take(summary(0, step=times, step_seconds=0.25, measured={"loss": loss}, **sent))
        state._history.add("bytes per second", (times / 2, 1.5e6, 1.5e6))
        state._history.add("nothing changes", (times / 2, 3.0, 3.0))
    state.take(summary(1, waiting=waits, stands_still=True, lost=[3]))
    state.ended(2, "rank 2 (pid 1002) was killed by SIGKILL after 3.0 s", False)
    state.ended(3, "rank 3 (pid 1003) exited with code 1 after 4.0 s", False)
    state.process(3, 2003, "a-machine-with-a-long-name", "S")
    state.take(summary(3, pid=2003, incarnation=1, rejoins=True))
    return state


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    patched = pytest.MonkeyPatch()
    patched.setattr(run_state, "SILENT_SECONDS", math.inf)
    state = made_up()
    server = PageServer(state.as_json, 0)
    stop = threading.Event()

    def serve() -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while not stop.is_set():
                selector.select(max(0.0, min(0.02, server.due - time.monotonic())))
                server.serve()
        server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with browser() as one:
        one.open(server.address)
        one.until("return document.querySelectorAll('.chart').length", lambda count: count == 3)
        yield one
    stop.set()
    thread.join()
    patched.undo()


def test_charts_have_scales_in_round_numbers(page: Browser) -> None:
    scale = TEXTS.format('[data-series=\\"loss\\"] .axis.y')
    numbers = [float(one) for one in page.run(scale)]
    assert 2 <= len(numbers) <= 5 and numbers == sorted(numbers) and numbers[-1] <= 1.5
    assert all(math.isclose(number % 0.5, 0, abs_tol=1e-9) for number in numbers)
    times = page.run(TEXTS.format('[data-series=\\"bytes per second\\"] .axis.x'))
    assert len(times) >= 2 and all(one.endswith("s") for one in times)
    assert all(one.endswith("B/s") for one in page.run(TEXTS.format('[data-series=\\"bytes per second\\"] .axis.y')))
    assert page.run(TEXTS.format('[data-series=\\"nothing changes\\"] .axis.y'))
    assert page.run(TEXTS.format('[data-series=\\"loss\\"] .line')) == ["mean 0.01695", "worst 0.02542"]


def test_states_are_complete_and_a_restarted_agent_is_rejoining(page: Browser) -> None:
    texts = page.run(TEXTS.format("#agents td.words"))
    assert texts[1] == f"waiting for 1, 2, since 12 s, in {CALL}"
    assert texts[2] == "lost: was killed by SIGKILL after 3.0 s"
    assert texts[3] == "rejoining when the others save their checkpoint"
    assert page.run("return document.querySelector('[data-figure=\"agents\"] b').textContent") == "2 of 4"
    assert page.run(CUT) == []


@pytest.mark.parametrize("width", [420, 1200])
def test_nothing_is_outside_the_screen(page: Browser, width: int) -> None:
    page.resize(width, 900)
    assert page.run("return document.documentElement.scrollWidth") == width
    assert (
        page.run(
            "const box = document.querySelector('#agents').parentElement; return box.scrollWidth - box.clientWidth"
        )
        <= 1
    )
    assert page.run(CUT) == []
    heading = page.run("return getComputedStyle(document.querySelector('#agents td:nth-child(3)'), '::before').content")
    assert ("step" in heading) == (width == 420), "a narrow page has no columns"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_and_texts_are_visible_on_both_backgrounds(page: Browser, scheme: str) -> None:
    page.scheme(scheme)
    results = page.run(CONTRAST)
    assert all(contrast >= 3.0 for _, contrast in results), results
