"""Agents that wait for each other in a circle have an error soon, and only those."""

from __future__ import annotations

import contextvars
import multiprocessing
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.engine import watchdog
from shoal.errors import ProtocolError
from shoal.execution import deadlock, lifecycle
from shoal.execution.deadlock import Deadlocks
from shoal.execution.lifecycle import Lifecycle
from shoal.execution.operation import Operation
from shoal.execution.progress import Callbacks
from shoal.runtime.agent import current
from shoal.transport.messages import Kind, Message

Fleets = Callable[..., shoal.Fleet]
LOOK_AFTER = 0.1
LONG = 1.5
"""Seconds in which several probes are sent."""


@pytest.fixture(autouse=True)
def early_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_AFTER", LOOK_AFTER)


def call(name: str, **options: Any) -> float:
    return float(shoal.allreduce(torch.tensor([float(shoal.rank())]), average=False, name=name, **options)[0])


def circle(make_call: Callable[[], Any]) -> tuple[tuple[int, ...], str]:
    """The cycle that the error of a call names."""
    with pytest.raises(shoal.Mismatch, match="agents wait for each other, and none can go on") as caught:
        make_call()
    return caught.value.ranks, str(caught.value).partition("none can go on: ")[2]


def in_background(what: Callable[[], Any]) -> threading.Thread:
    """A thread of this agent that makes a call later."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(what,))
    thread.start()
    return thread


# Circles


def test_two_agents_in_different_calls_get_an_error_that_names_both(fleet: Fleets) -> None:
    def run() -> tuple[tuple[int, ...], str]:
        result = circle(lambda: call("ab"[shoal.rank()]))
        assert call("after") == 1.0  # the agents continue
        return result

    one, other = fleet(2).run(run)
    assert one == other
    ranks, text = one
    assert ranks == (0, 1)
    waits = [rf"rank {rank} waits in allreduce \(sum\) '{'ab'[rank]}' round 0 for rank {1 - rank}" for rank in (0, 1)]
    assert re.match("; ".join(waits), text), text


def test_a_cycle_of_several_agents_is_one_error_on_each(fleet: Fleets) -> None:
    """Rank 3 is in no cycle: it computes, and all continue with it."""

    def run() -> tuple[tuple[int, ...], str] | None:
        rank, results = shoal.rank(), None
        if rank < 3:
            results = circle(lambda: shoal.pair_gossip(torch.ones(2), (rank + 1) % 3))
        else:
            time.sleep(LONG)
        assert call("after") == 6.0
        return results

    *result, outside = fleet(4).run(run)
    assert outside is None
    assert result == [result[0]] * 3
    assert result[0][0] == (0, 1, 2)


def test_a_cycle_is_not_detected_again_while_its_verdict_is_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent that detects it makes its next call, and probes. The others still wait in the cycle."""
    judge, serve = Deadlocks.judge, Deadlocks.serve
    held: list[tuple[Deadlocks, int, Message]] = []

    def judge_later(deadlocks: Deadlocks, source: int, message: Message) -> None:
        held.append((deadlocks, source, message))

    def serve_before(deadlocks: Deadlocks, source: int, message: Message) -> None:
        serve(deadlocks, source, message)
        if held and held[0][0] is deadlocks and "after" in message.text:
            monkeypatch.setattr(Deadlocks, "judge", judge)
            judge(*held.pop())

    monkeypatch.setattr(Deadlocks, "judge", judge_later)
    monkeypatch.setattr(Deadlocks, "serve", serve_before)

    def run() -> tuple[int, ...]:
        rank = shoal.rank()
        ranks, _ = circle(lambda: shoal.pair_gossip(torch.ones(2), (rank + 1) % 3))
        assert call("after") == 3.0
        return ranks

    assert shoal.Fleet(3).run(run) == [(0, 1, 2)] * 3


@pytest.mark.parametrize("numel", [2, 200_000])
def test_roots_that_wait_only_for_confirmations(fleet: Fleets, numel: int) -> None:
    """Each agent is the root of a call that the other does not make. It has sent, and waits for the confirmation."""

    def run() -> tuple[tuple[int, ...], str]:
        rank = shoal.rank()
        result = circle(lambda: shoal.broadcast(torch.ones(numel), rank, name=f"of {rank}"))
        assert call("after") == 1.0
        return result

    one, other = fleet(2, timeout=3600.0).run(run)
    assert one == other
    ranks, text = one
    assert ranks == (0, 1)
    assert "rank 0 waits in broadcast 'of 0' round 0 for rank 1; rank 1 waits in broadcast 'of 1' round 0" in text


def test_roots_whose_wait_for_confirmations_starts_just_after_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check found nothing to wait for, so the wait has to request the next check."""
    wait = Lifecycle.await_confirmation

    def after_a_check(lifecycle: Lifecycle, operation: Operation, result: Any) -> None:
        lifecycle._progress.next_check = operation.deadline
        wait(lifecycle, operation, result)

    monkeypatch.setattr(Lifecycle, "await_confirmation", after_a_check)

    def run() -> tuple[int, ...]:
        rank = shoal.rank()
        return circle(lambda: shoal.broadcast(torch.ones(200_000), rank, name=f"of {rank}"))[0]

    assert shoal.Fleet(2, transport="threads", timeout=20.0).run(run) == [(0, 1)] * 2


def feeder(path: Path) -> Callable[[], None]:
    """Start the thread that feeds a queue of processes, as a data loader does; returns what ends it."""
    fed: multiprocessing.Queue[int] = multiprocessing.Queue()
    fed.put(1)
    assert fed.get() == 1
    return lambda: (fed.close(), fed.join_thread())  # type: ignore[func-returns-value, return-value]


def monitor(path: Path) -> Callable[[], None]:
    """Start a thread of an installed package, as a progress bar does."""
    path = path / "site-packages" / "monitoring.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "import threading\n"
        "class Monitor(threading.Thread):\n"
        "    over = threading.Event()\n"
        "    def run(self):\n"
        "        self.over.wait()\n"
    )
    spec = spec_from_file_location("monitoring", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["monitoring"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    thread = module.Monitor(daemon=True)
    thread.start()
    return lambda: (module.Monitor.over.set(), thread.join())  # type: ignore[func-returns-value, return-value]


@pytest.mark.parametrize("start", [feeder, monitor])
def test_library_threads_cannot_make_the_missing_call(
    fleet: Fleets, tmp_path: Path, start: Callable[[Path], Callable[[], None]]
) -> None:
    def run() -> tuple[int, ...]:
        call("first")
        end = start(tmp_path) if shoal.rank() else lambda: None
        try:
            return circle(lambda: call("ab"[shoal.rank()]))[0]
        finally:
            end()

    assert fleet(2).run(run) == [(0, 1)] * 2


def test_threads_that_can_make_the_missing_call(fleet: Fleets, tmp_path: Path) -> None:
    """A thread that runs the script's code, a timer, and a thread that has called before."""
    end = monitor(tmp_path)
    thread = next(one for one in threading.enumerate() if type(one).__name__ == "Monitor")
    frames = sys._current_frames()
    assert deadlock._is_of_a_library(thread, frames[thread.ident or 0])
    assert not deadlock._is_of_a_library(thread, frames[threading.get_ident()])
    assert not deadlock._is_of_a_library(threading.Timer(1.0, print), None)
    end()

    def run() -> bool:
        call("first")
        return threading.get_ident() in current().engine.lifecycle.callers

    assert fleet(2).run(run) == [True, True]


@pytest.mark.filterwarnings("ignore:no optimizer that averages has these parameters")
def test_parameters_added_to_the_optimizer_of_one_agent(fleet: Fleets) -> None:
    def run() -> tuple[int, ...]:
        model = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)])
        plain = torch.optim.SGD(model[0].parameters(), lr=0.1)
        optimizer = shoal.DecentralizedOptimizer(plain, model)

        def step() -> None:
            model[0](torch.ones(1, 3)).sum().backward()
            optimizer.step()

        step()
        if shoal.rank() == 0:
            optimizer.add_param_group({"params": model[1].parameters()})
        return circle(step)[0]

    assert fleet(2).run(run) == [(0, 1)] * 2


# No circles


def test_a_slow_agent_is_waited_for(fleet: Fleets) -> None:
    """Rank 0 waits for rank 1, and rank 1 for rank 2, which computes."""

    def run() -> list[float]:
        rank = shoal.rank()
        if rank == 2:
            time.sleep(LONG)
        if rank:
            shoal.pair_gossip(torch.ones(1), 3 - rank)
        return [call("a"), call("b")]

    assert fleet(3).run(run) == [[3.0, 3.0]] * 3


def test_another_thread_may_make_the_missing_call(fleet: Fleets) -> None:
    def run() -> float:
        own, other = ("a", "b") if shoal.rank() == 0 else ("b", "a")
        late = in_background(lambda: (time.sleep(LONG), call(other)))
        result = call(own)
        late.join()
        return result

    assert fleet(2).run(run) == [1.0, 1.0]


def test_a_callback_may_make_the_missing_call(fleet: Fleets) -> None:
    """Rank 1 waits in "b". On rank 2's message it starts "a", for which rank 0 waits."""

    def run() -> float:
        rank = shoal.rank()
        started: list[Any] = []

        def begin(_: Any) -> None:
            started.append(shoal.nonblocking.allreduce(torch.tensor([float(rank)]), average=False, name="a"))

        if rank == 2:
            time.sleep(LONG)
            shoal.pair_gossip(torch.ones(1), 1, name="late")
        if rank != 1:
            return call("a") + call("b")
        shoal.nonblocking.pair_gossip(torch.ones(1), 2, name="late").add_done_callback(begin)
        result = call("b")
        return result + float(started[0].wait()[0])

    assert fleet(3).run(run) == [6.0] * 3


@pytest.mark.parametrize("caller", ["call", "wait"])
def test_a_wait_with_a_timeout_is_no_deadlock(fleet: Fleets, caller: str) -> None:
    def run() -> float:
        if shoal.rank() == 0:
            return call("a") + call("b")
        handle = shoal.nonblocking.allreduce(
            torch.ones(1),
            average=False,
            name="b" if caller == "wait" else "nobody",
            timeout=None if caller == "wait" else LONG,
        )
        with pytest.raises(shoal.DeadlineExceeded):
            handle.wait(LONG if caller == "wait" else None)
        result = call("a")
        return result + (float(handle.wait()[0]) if caller == "wait" else call("b"))

    assert len(set(fleet(2).run(run))) == 1


def test_calls_in_flight_are_not_missing(fleet: Fleets) -> None:
    """Each has made the call that the other waits for, and waits in another one."""

    def run() -> float:
        own, other = ("a", "b") if shoal.rank() == 0 else ("b", "a")
        time.sleep(LONG / 2 * shoal.rank())
        handle = shoal.nonblocking.allreduce(torch.tensor([float(shoal.rank())]), average=False, name=other)
        return call(own) + float(handle.wait()[0])

    assert fleet(2).run(run) == [2.0, 2.0]


@given(st.integers(0, 2**32), st.integers(2, 4))
@settings(max_examples=15)
def test_random_programs_without_a_cycle_complete(seed: int, size: int) -> None:
    """With a probe at each query. Agents start the same calls, each in its own order, and then wait for them."""
    patched = pytest.MonkeyPatch()
    patched.setattr(watchdog, "LOOK_AFTER", 0.0)
    for module in (lifecycle, watchdog):
        patched.setattr(module, "ASK_AFTER", 0.0005)

    def run() -> None:
        common, own = random.Random(seed), random.Random(f"{seed} {shoal.rank()}")
        for step in range(4):
            roots = {f"{step} {number}": common.randrange(-size, size) for number in range(common.randrange(1, 4))}
            handles = []
            for name in own.sample([*roots], len(roots)):
                time.sleep(own.random() * 0.02)
                if roots[name] < 0:
                    handles.append(shoal.nonblocking.allreduce(torch.full((1,), 1 / size), average=False, name=name))
                else:
                    handles.append(shoal.nonblocking.broadcast(torch.ones(1), roots[name], name=name))
            for handle in own.sample(handles, len(handles)):
                assert handle.wait()[0].item() == pytest.approx(1.0)

    with patched.context():
        try:
            shoal.Fleet(size, timeout=20.0).run(run)
        finally:
            patched.undo()


# The protocol


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[1]", '[["x", "op", "name", 0]]', '[[1, "op", "name", 0]]', "[" * 500]
)
def test_an_invalid_probe_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="an invalid cycle of agents"):
        deadlock._read(text, 2)


def test_a_verdict_of_an_agent_that_is_not_waited_for_changes_nothing(fleet: Fleets) -> None:
    def run() -> float:
        rank = shoal.rank()
        if rank == 0:
            handle = shoal.nonblocking.allreduce(torch.tensor([0.0]), average=False, name="a")
            text = '[[2, "allreduce (sum)", "x", 0], [0, "allreduce (sum)", "a", 0], [1, "allreduce (sum)", "y", 0]]'
            with current().engine.lock:
                current().engine.deadlocks.judge(2, Message(Kind.DENY, deadlock.DEADLOCK, deadlock.DEADLOCK, text=text))
            return float(handle.wait()[0])
        return call("a")

    assert fleet(3).run(run) == [3.0] * 3


def test_a_verdict_on_a_call_that_does_not_wait_for_its_sender_changes_nothing(fleet: Fleets) -> None:
    """Rank 1 sends it, and would be the next agent of the cycle; the call of rank 0 waits for rank 2 alone."""

    def run() -> float:
        rank = shoal.rank()
        others, x = {1: {}, 0: {2: 0.5}, 2: {0: 0.5}}[rank], torch.tensor([float(rank)])
        handle = None
        if rank == 0:
            handle = shoal.nonblocking.neighbor_allreduce(x, 0.5, others, dict.fromkeys(others, 1.0), name="a")
            text = '[[2, "neighbor_allreduce", "x", 0], [0, "neighbor_allreduce", "a", 0], [1, "allreduce", "y", 0]]'
            with current().engine.lock:
                current().engine.deadlocks.judge(1, Message(Kind.DENY, deadlock.DEADLOCK, deadlock.DEADLOCK, text=text))
        call("rank 0 has the verdict")
        if rank == 2:
            return float(shoal.neighbor_allreduce(x, 0.5, others, dict.fromkeys(others, 1.0), name="a")[0])
        return float(handle.wait()[0]) if handle is not None else 1.0

    assert fleet(3).run(run) == [1.0] * 3


def test_a_callback_is_pending_until_it_has_returned() -> None:
    """Its operation has ended by then, so only the pending callback shows that a call may still come."""
    callbacks, seen = Callbacks(), []
    assert not callbacks.pending
    callbacks.add(lambda _: seen.append(callbacks.pending), None, "a test")
    assert callbacks.pending
    callbacks.run()
    assert seen == [True]
    assert not callbacks.pending
