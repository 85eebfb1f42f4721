"""Nothing is wrong in silence: after any error the next call pairs with the same call of the others, or raises too."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import shoal
from shoal.engine.discovery import discover
from shoal.runtime.agent import current
from support import TRANSPORTS

Fleets = Callable[..., shoal.Fleet]
SOON = 5.0


def average(value: float, name: str | None = None, **options: Any) -> float | str:
    """The average of agents' ``value``; or "Mismatch"."""
    try:
        return float(shoal.neighbor_allreduce(torch.full((1,), value), name=name, **options))
    except shoal.Mismatch:
        return "Mismatch"


def test_a_call_that_raises_an_earlier_calls_error_counts_as_a_round(fleet: Fleets) -> None:
    def run() -> list[float | str]:
        other = 1 - shoal.rank()
        # Only one of the two sends, and the other has ended its round when that comes.
        targets = {other: 1.0} if shoal.rank() == 0 else {}
        average(0.0, self_weight=1.0, src_weights={}, dst_weights=targets, enable_topo_check=False)
        return [average(10.0 * step * (1 + shoal.rank())) for step in range(1, 9)]

    for result in fleet(2).run(run):
        assert result[-3:] == [15.0 * step for step in (6, 7, 8)]
        assert all(value in (15.0 * step, "Mismatch") for step, value in enumerate(result, start=1)), result


def _make(call: str, step: int, size: int) -> tuple[str, float | str]:
    """One call of a random program. Its result is exact for the agents' values of this very step."""
    rank = shoal.rank()
    x = torch.full((4,), float(1000 * step + rank))
    ring = {(rank + 1) % size: 1.0}
    try:
        if call == "average":
            result = shoal.neighbor_allreduce(x)
        elif call == "named":
            result = shoal.neighbor_allreduce(x, name="one")
        elif call == "sum":
            result = shoal.allreduce(x, average=False)
        elif call == "push":
            result = shoal.neighbor_allreduce(x, 0.0, None, ring)
        elif call == "send more":  # what nobody expects
            result = shoal.neighbor_allreduce(x, 1.0, {}, ring, enable_topo_check=False)
        elif call == "longer":
            result = shoal.neighbor_allreduce(torch.cat([x, x]))
        elif call == "other type":
            result = shoal.neighbor_allreduce(x.double())
        elif call == "tried again":
            with pytest.raises(ValueError, match="out"):
                shoal.neighbor_allreduce(x, out=torch.empty(5))
            result = shoal.neighbor_allreduce(x)
        elif call == "many":
            handles = [shoal.nonblocking.neighbor_allreduce(x * 2**k) for k in range(4)]
            values = [_outcome(handle) for handle in handles]
            right = _model("average", step, rank, size)
            wrong = [value for k, value in enumerate(values) if value not in ("Mismatch", right * 2**k)]
            return call, [*wrong, *(value for value in values if value == "Mismatch"), right][0]
        else:
            raise AssertionError(call)
        return call, float(result[0]) if bool((result == result[0]).all()) else "torn"
    except shoal.Mismatch:
        return call, "Mismatch"


def _outcome(handle: shoal.Handle[torch.Tensor]) -> float | str:
    try:
        return float(handle.wait()[0])
    except shoal.Mismatch:
        return "Mismatch"


def _model(call: str, step: int, rank: int, size: int) -> float:
    """The result of a call that all agents make."""
    values = [float(1000 * step + index) for index in range(size)]
    if call == "sum":
        return sum(values)
    if call == "push":
        return values[(rank - 1) % size]
    if call == "send more":
        return values[rank]
    around = sorted({rank, (rank + 1) % size, (rank - 1) % size})
    return float(torch.tensor([values[one] for one in around]).sum() / len(around))


FITTING = ("average", "named", "sum", "push", "many")
WITHOUT_A_NAME = ("average", "push", "send more", "longer", "other type", "tried again")
"""These count as rounds of one name, so that an agent may take one for another."""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("transport", [pytest.param(name, marks=pytest.mark.transport(name)) for name in TRANSPORTS])
@settings(max_examples=25, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_random_programs_equal_the_model_or_raise(transport: str, size: int, data: st.DataObject) -> None:
    """Agents make the same calls, except for a few wrong ones.

    A value is right, or there is an error. An error has a wrong call before it or beside it. The last calls succeed.
    """
    length = data.draw(st.integers(3, 8), label="length")
    common = data.draw(st.lists(st.sampled_from(FITTING), min_size=length, max_size=length), label="calls")
    wrong = st.tuples(st.integers(0, size - 1), st.sampled_from(WITHOUT_A_NAME))
    odd = data.draw(st.dictionaries(st.integers(0, length - 1), wrong, min_size=1, max_size=3), label="odd calls")
    odd = {step: pair for step, pair in odd.items() if common[step] in WITHOUT_A_NAME}
    late = data.draw(st.sets(st.tuples(st.integers(0, length - 1), st.integers(0, size - 1)), max_size=3), label="late")

    def run() -> list[tuple[str, float | str]]:
        shoal.set_topology(shoal.topology.RingGraph(size))
        results = []
        for step, call in enumerate([*common, *["average", "sum"] * 4]):
            own = odd[step][1] if step in odd and odd[step][0] == shoal.rank() else call
            if (step, shoal.rank()) in late:
                time.sleep(0.01)
            results.append(_make(own, step, size))
        return results

    results = shoal.Fleet(size, transport=transport, timeout=SOON).run(run)
    for rank, result in enumerate(results):
        for step, (call, value) in enumerate(result):
            if value == "Mismatch":
                assert any(number <= step for number in odd), (rank, step, results)
            elif call not in ("longer", "other type"):
                assert value == _model(call, step, rank, size), (rank, step, results)
    for result in results:
        assert "Mismatch" not in [value for _, value in result[-2:]], results


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_messages_that_arrived_before_a_change_of_topology(
    fleet: Fleets, together: bool, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if only the progress thread receives them."""

    def run() -> list[float | str]:
        rank = shoal.rank()
        shoal.set_topology(shoal.topology.FullyConnectedGraph(4) if rank == 0 else shoal.topology.RingGraph(4))
        shoal.barrier()
        if rank == 0:
            time.sleep(0.2)  # until all has come
        names = ("a", "b", "c") if together else ("a",)
        handles = [shoal.nonblocking.neighbor_allreduce(torch.full((4,), float(rank)), name=name) for name in names]
        if not waits:
            limit = time.monotonic() + SOON
            while not all(handle.poll() for handle in handles) and time.monotonic() < limit:
                time.sleep(0.01)
        results = [_outcome(handle) for handle in handles]
        shoal.set_topology(shoal.topology.RingGraph(4))
        for name in ("a", "b", "b"):
            results.append(average(float(rank), name))
        return results

    with caplog.at_level(logging.ERROR):
        results = fleet(4).run(run)
    for rank, result in enumerate(results):
        right = _model("average", 0, rank, 4)
        assert result[-3:] == pytest.approx([right] * 3), results
        assert all(value in ("Mismatch", pytest.approx(right)) for value in result), results
    assert "Mismatch" in results[0] and not caplog.records


@pytest.mark.parametrize("named", [[77], [-2], [2, 2]], ids=str)
def test_a_discovery_without_destinations(fleet: Fleets, named: list[int]) -> None:
    def run() -> str:
        engine = current().engine

        def call() -> list[int]:
            own = named if shoal.rank() == 1 else []
            return engine.submit("barrier", "x", lambda operation: discover(engine, operation, own)).wait(SOON)

        try:
            result = str(call())
        except shoal.Mismatch as error:
            result = str(error)
        assert float(shoal.allreduce(torch.ones(1), average=False)) == 4.0
        return result

    error_texts = fleet(4).run(run)
    assert any(" forwarded " in text for text in error_texts), error_texts


@pytest.mark.parametrize("blocking", [True, False])
def test_an_internal_error_in_an_exchange_ends_it_with_an_error(
    fleet: Fleets, blocking: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An internal error during an operation: its own agent raises it, and the others do not wait for long."""

    def run() -> str:
        engine = current().engine
        x = torch.ones(4)
        shoal.neighbor_allreduce(x)
        if shoal.rank() == 1:
            engine.fusion.begin = broken  # type: ignore[method-assign]
        handle = shoal.nonblocking.neighbor_allreduce(x)
        limit = time.monotonic() + SOON
        while not (blocking or handle.poll()) and time.monotonic() < limit:
            time.sleep(0.01)
        with pytest.raises(shoal.ShoalError) as caught:
            handle.wait()
        if shoal.rank() == 1:
            with pytest.raises(shoal.ShoalError, match="nobody thought of this"):
                shoal.neighbor_allreduce(x)
        return str(caught.value)

    def broken() -> None:
        raise KeyError("nobody thought of this")

    with caplog.at_level(logging.ERROR, "shoal"):
        error_texts = fleet(2).run(run)
    assert (
        "rank 1: an internal error ended the exchange" in error_texts[1] and "nobody thought of this" in error_texts[1]
    )
    assert "rank 1" in error_texts[0]
    assert any(record.exc_info for record in caplog.records)
