"""The thread that uses process groups: its effect on other threads of the process, and failed attempts to connect."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import shoal
from shoal.transport import process_group
from shoal.transport.process_group import GroupBackend, ProcessGroups
from support.leftovers import nothing_is_left


def of_new_thread() -> int:
    """How many threads torch uses in a thread that begins now."""
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def test_later_threads_of_the_script_have_as_many_torch_threads_as_before() -> None:
    nothing: Any = lambda *_: None  # noqa: E731
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        groups = ProcessGroups(0, GroupBackend("gloo", "127.0.0.1", None), nothing, nothing, nothing, nothing)
        time.sleep(0.1)  # in which its thread would set the number for all later ones
        try:
            assert of_new_thread() == 2
        finally:
            groups.stop()
            groups.end(time.monotonic() + 10.0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.transport("process-group")
def test_the_record_of_a_failed_attempt_keeps_no_group(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, failed = process_group._make, list[int]()

    def fail_at_first(backend: str, store: Any, place: int, *options: Any) -> Any:
        if place in failed:
            return make(backend, store, place, *options)
        failed.append(place)
        raise RuntimeError("the attempt took too long")

    monkeypatch.setattr(process_group, "_make", fail_at_first)
    with nothing_is_left():
        mean = shoal.Fleet(2, transport="process-group", timeout=20.0).run(
            lambda: shoal.allreduce(torch.tensor(float(shoal.rank()))).item()
        )
    assert mean == [0.5, 0.5]
    assert sum("the attempt took too long" in record.getMessage() for record in caplog.records) == 2
