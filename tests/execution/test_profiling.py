"""torch.profiler shows what Shoal does under the names of the timeline; while none records, nothing is done for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import shoal
from shoal.execution import events
from shoal.runtime.agent import current
from support.fault_points import over_both
from support.world import World

Fleets = Callable[..., shoal.Fleet]


def spans_of(work: Callable[[], object], *, all_threads: bool = False) -> dict[str, int]:
    """The spans of Shoal's that a profiler has recorded, of this thread or of all, and how many of each."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as recorded:
        work()
    return Counter(event.name for event in recorded.events() if event.name.startswith("shoal "))


def results(size: int, work: Callable[[], dict[str, int]], **options: Any) -> list[dict[str, int]]:
    """Results of agents that are processes. The profiler leaves a thread of torch in them."""
    world = World(size, **options)
    try:
        result: list[dict[str, int]] = world.results(work)
    finally:
        world.destroy()
    return result


def average() -> None:
    with current().engine.lock:  # no other thread drives: a call that is done is not waited for
        shoal.neighbor_allreduce(torch.ones(10_000), name="layer1")
    shoal.neighbor_allreduce(torch.ones(3))
    with current().engine.lock:
        handles = [shoal.nonblocking.neighbor_allreduce(torch.ones(3)) for _ in range(5)]
    for handle in handles:
        handle.wait()


def profiled() -> dict[str, int]:
    shoal.barrier()
    return spans_of(average, all_threads=True)  # the progress thread may be the first to find that all is there


@over_both
def test_operations_are_recorded_by_name(environment: dict[str, str]) -> None:
    for result in results(2, profiled, environment=environment):
        for what in ("submit", "wait"):
            assert result[f"shoal neighbor_allreduce layer1: {what}"] == 1
        assert result["shoal neighbor_allreduce: submit"] == 6
        for name in ("layer1", "x 5"):  # in several goes, where a tensor comes in pieces
            assert result[f"shoal neighbor_allreduce {name}: sum"] >= 1


def windows() -> dict[str, int]:
    window = shoal.windows.create(torch.ones(3), "weights")
    shoal.barrier()
    result = spans_of(window.put)
    shoal.barrier()
    shoal.bluefog.win_free("weights")
    return result


def test_calls_on_windows_are_recorded_by_the_name_of_the_window() -> None:
    assert [result["shoal win_put weights: call"] for result in results(2, windows)] == [1, 1]


def test_without_a_profiler_nothing_is_created(fleet: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"a span was made for nobody: {name}")

    monkeypatch.setattr(events, "_Span", refuse)
    fleet(2).run(average)
    with pytest.raises(AssertionError, match="for nobody"):
        spans_of(lambda: shoal.Fleet(1).run(average))


def test_a_torch_without_the_fast_api_uses_the_public_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_Span", record_function)
    assert spans_of(lambda: events.span("op", "x", "sum").__enter__()) == {"shoal op x: sum": 1}


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("x", "op x"),
        ("~op", "op"),
        ("~shoal inner", "op inner"),
        ("~window weights", "op weights"),
        ('~fused [["a",0,3,[2]],["b",1,2,[2]]]', "op x 5"),
    ],
)
def test_a_span_has_the_name_of_the_timeline(name: str, label: str) -> None:
    def one() -> None:
        with events.span("op", name, "sum"):
            pass

    assert spans_of(one) == {f"shoal {label}: sum": 1}


def wrong_call() -> dict[str, int]:
    def call() -> None:
        with current().engine.lock:
            first = shoal.nonblocking.neighbor_allreduce(torch.ones(3), "x")
            with pytest.raises(ValueError, match="still in flight"):
                shoal.nonblocking.neighbor_allreduce(torch.ones(3), "x")
        first.wait()

    return spans_of(call)


def test_an_exception_inside_a_span_is_the_same_as_outside() -> None:
    assert results(1, wrong_call)[0]["shoal neighbor_allreduce x: submit"] == 2
