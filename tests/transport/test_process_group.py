"""The thread that uses process groups: its effect on the other threads of the process."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from shoal.transport.process_group import GroupBackend, ProcessGroups


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
