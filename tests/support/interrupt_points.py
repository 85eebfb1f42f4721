"""Ctrl-C at every line of Shoal that a call goes through, in turn: what an agent does, and what must then be true."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import shoal
from shoal.runtime.agent import current
from support.agent_main import left_over
from support.leftovers import wait_until

PACKAGE = str(Path(shoal.__file__).parent)
SETTLED_SECONDS = 2.0
"""In which whatever an interrupted call has begun must end, once all others have made the call too."""


@dataclass
class _Lines:
    """Sends a signal to this process at the n-th line of Shoal that the main thread comes to; -1: only counts."""

    at: int = -1
    signum: int = signal.SIGINT
    seen: int = 0
    place: str = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            if self.seen == self.at:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(self.signum)
            self.seen += 1
        return self

    def __enter__(self) -> _Lines:
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def blocking(name: str) -> None:
    mine = torch.full((3,), float(shoal.rank()))
    mean = (shoal.size() - 1) / 2
    assert torch.equal(shoal.neighbor_allreduce(mine, name=name), torch.full((3,), mean))


def large(name: str) -> None:
    mine = torch.full((100_000,), float(shoal.rank()))
    assert shoal.neighbor_allreduce(mine, name=name)[-1] == (shoal.size() - 1) / 2


def nonblocking(name: str) -> None:
    handle = shoal.nonblocking.neighbor_allreduce(torch.full((100_000,), float(shoal.rank())), name=name)
    assert shoal.bluefog.wait(handle)[0] == (shoal.size() - 1) / 2


def together(name: str) -> None:
    handles = [
        shoal.nonblocking.neighbor_allreduce(torch.full((3,), float(shoal.rank())), name=f"{name}.{part}")
        for part in range(3)
    ]
    for handle in handles:
        assert shoal.bluefog.wait(handle)[0] == (shoal.size() - 1) / 2


def pushed(name: str) -> None:
    other = 1 - shoal.rank()
    x = shoal.neighbor_allreduce(torch.ones(3), 0.5, dst_weights={other: 0.5}, name=name)
    assert torch.equal(x, torch.ones(3))


def everybody(name: str) -> None:
    assert shoal.allreduce(torch.ones(5), average=False, name=name)[0] == shoal.size()


CALLS: dict[str, Callable[[str], None]] = {
    call.__name__: call for call in (blocking, large, nonblocking, together, pushed, everybody)
}


def make_window() -> None:
    shoal.bluefog.win_create(torch.zeros(1000), "window", zero_init=True)


def free_window() -> None:
    shoal.barrier()
    shoal.bluefog.win_free("window")


def put_and_update() -> None:
    with shoal.bluefog.win_mutex("window"):
        shoal.bluefog.win_put(torch.ones(1000), "window", require_mutex=True)
    handle = shoal.bluefog.win_accumulate_nonblocking(torch.ones(1000), "window")
    shoal.bluefog.win_get("window")
    shoal.bluefog.win_wait(handle)
    shoal.bluefog.win_update("window", require_mutex=True)


def lines_of_window_calls() -> int:
    with _Lines() as lines:
        put_and_update()
    return lines.seen


def interrupt_window_calls(points: list[int]) -> None:
    """Window calls with Ctrl-C at each of these lines: what they hold is free afterwards, and the next calls work."""
    for at in points:
        lines = _Lines(at)
        try:
            with lines:
                put_and_update()
        except KeyboardInterrupt:
            pass
        else:
            assert not lines.place, f"Ctrl-C at {lines.place} was lost"
        finally:
            sys.settrace(None)
        with (
            shoal.bluefog.win_mutex("window", timeout=2.0),
            shoal.bluefog.win_mutex("window", for_self=True, timeout=2.0),
        ):
            put_and_update()
        assert wait_until(lambda: not in_flight(), SETTLED_SECONDS), f"{lines.place} left {in_flight()} in flight"


def lines_of(what: str) -> int:
    """The lines that ``shoal.init`` or ``shoal.shutdown`` goes through."""
    with _Lines() as lines:
        getattr(shoal, what)()
    return lines.seen


def interrupted_end(at: int) -> str:
    """Ctrl-C in the middle of shutdown(): it ends all the same, and is raised then."""
    lines = _Lines(at)
    try:
        with lines:
            shoal.shutdown()
    except KeyboardInterrupt:
        pass
    else:
        assert not lines.place, f"Ctrl-C at {lines.place} was lost"
    finally:
        sys.settrace(None)
    shoal.shutdown()  # where it came before the beginning
    left = left_over()
    assert not left, f"{lines.place} left {left}"
    return lines.place


def interrupted_beginning(at: int) -> str:
    """Ctrl-C in the middle of init(): nothing is left of it, and the next one works."""
    lines = _Lines(at)
    try:
        with lines:
            shoal.init()
    except KeyboardInterrupt:
        shoal.shutdown()
        left = left_over()
        assert not left, f"{lines.place} left {left}"
        shoal.init()
    finally:
        sys.settrace(None)
    shoal.barrier()
    return lines.place


def begin_whatever_comes() -> None:
    """init() beside agents that are interrupted in theirs."""
    for _ in range(5):
        try:
            shoal.init()
            shoal.barrier()
            return
        except shoal.ShoalError:
            shoal.shutdown()
    raise AssertionError("five attempts failed")


def end() -> None:
    shoal.shutdown()


def wait_until_a_handler_ends_it() -> str:
    """An average that nobody else takes part in; SIGTERM has a handler that shuts the agent down."""
    before = signal.signal(signal.SIGTERM, lambda *_: shoal.shutdown())
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        shoal.neighbor_allreduce(torch.ones(3))
    except shoal.NotInitialized as error:
        left = left_over()
        assert not left, left
        return str(error)
    finally:
        assert signal.signal(signal.SIGTERM, before) not in (None, before), "the script's own handler is in place"
    raise AssertionError("it went on")


def see_it_leave() -> None:
    wait_until(lambda: len(current().engine.membership.view.alive) < shoal.size())
    try:
        shoal.neighbor_allreduce(torch.ones(3))  # what it had sent counts
        shoal.neighbor_allreduce(torch.ones(3))
    finally:
        shoal.shutdown()


def in_flight() -> list[str]:
    engine = current().engine
    with engine.lock:
        return [str(operation) for operation in engine.matcher.in_flight()]


def called_in_full(kind: str, name: str) -> int:
    """Make a call without any interruption; the lines that it goes through."""
    with _Lines() as lines:
        CALLS[kind](name)
    return lines.seen


def keep_up(kind: str, name: str) -> None:
    """What an agent does that is not interrupted."""
    CALLS[kind](name)


def interrupted(kind: str, name: str, at: int) -> str:
    """Make a call, with Ctrl-C at its line ``at``, and call again what has not begun, as one would in a notebook.

    Returns where the signal came, empty if the call was over before.
    """
    call = CALLS[kind]
    lines = _Lines(at)
    try:
        with lines:
            call(name)
    except KeyboardInterrupt:
        pass
    else:
        assert not lines.place, f"Ctrl-C at {lines.place} was lost"
        return ""
    finally:
        sys.settrace(None)
    assert lines.place
    rounds = current().engine.matcher
    parts = [f"{name}.{part}" for part in range(3)] if kind == "together" else [name]
    for one in parts:
        if not rounds.rounds_begun(one):
            blocking(one) if kind == "together" else call(one)
    assert wait_until(lambda: not in_flight(), SETTLED_SECONDS), f"{lines.place} left {in_flight()} in flight"
    return lines.place
