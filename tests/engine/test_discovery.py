"""The end of a collective operation where losses are survived: with a result for others, or with their confirmation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from shoal.engine.discovery import submit_to_all
from shoal.execution.matching import Matcher
from shoal.execution.operation import WHOLE, FailurePolicy, Operation, Recovery
from shoal.execution.stage import Exchange, Steps


def steps(_: Operation) -> Steps[torch.Tensor]:
    return torch.ones(2)
    yield


def operation_of_two(
    survives: bool, take: Callable[[torch.Tensor], torch.Tensor] | None
) -> tuple[Operation, Callable[[Operation], Steps[torch.Tensor]]]:
    """An operation of rank 0 and rank 1, and the steps with which it was submitted."""
    pool = SimpleNamespace(empty=lambda shape, dtype: torch.empty(shape, dtype=dtype))
    publisher = SimpleNamespace(publish=lambda _, tensor: tensor)
    engine: Any = SimpleNamespace(rank=0, size=2, pool=pool, publisher=publisher)
    engine.agreement = SimpleNamespace(active=survives)
    engine.submit = lambda op, name, begins, *_, **__: begins
    operation = Matcher().begin("broadcast", "x", 1.0, True)
    operation.recovery = Recovery(steps, FailurePolicy.RETRY, WHOLE)
    begins: Any = submit_to_all(engine, "broadcast", "x", steps, 1.0, True, take=take)
    return operation, begins


def ended(running: Steps[torch.Tensor]) -> torch.Tensor:
    try:
        next(running)
    except StopIteration as end:
        result: torch.Tensor = end.value
        return result
    raise AssertionError("it waits for others")


def test_a_storable_result_is_cached_for_others_without_waiting() -> None:
    operation, begins = operation_of_two(True, torch.clone)
    assert torch.equal(ended(begins(operation)), torch.ones(2))
    recovery = operation.recovery
    assert recovery is not None and recovery.take is torch.clone and recovery.result is None
    assert recovery.copy is not None and torch.equal(recovery.copy, torch.ones(2))


def test_another_result_ends_only_when_all_have_it() -> None:
    operation, begins = operation_of_two(True, None)
    exchange = next(begins(operation))
    assert isinstance(exchange, Exchange) and exchange.sources == [1]
    assert [send.destination for send in exchange.sends] == [1]
    recovery = operation.recovery
    assert recovery is not None and recovery.copy is None
    assert recovery.result is not None and torch.equal(recovery.result[0], torch.ones(2))


def test_with_on_failure_raise_nothing_is_cached() -> None:
    operation, begins = operation_of_two(False, torch.clone)
    assert torch.equal(ended(begins(operation)), torch.ones(2))
    assert operation.recovery is not None and operation.recovery.copy is None
