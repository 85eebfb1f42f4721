"""The memory of a window as a reader without the lock of an edge sees it, also on a CPU that reorders accesses."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shoal.windows.locks import ByteLocks
from shoal.windows.window_memory import _PUTS, _WRITES, WindowLayout, WindowMemory, WriteKind

FOREVER = float("inf")
X = torch.ones(3)


@pytest.fixture
def memory() -> Iterator[WindowMemory]:
    layout = WindowLayout((3,), torch.float32, (1,), True)
    with tempfile.TemporaryFile() as file:
        locks = ByteLocks(file.fileno())
        made = WindowMemory(layout, torch.zeros(layout.nbytes, dtype=torch.uint8), locks)
        made.begin(None)
        yield made
        locks.close()


def at_fences(memory: WindowMemory, monkeypatch: pytest.MonkeyPatch, what: Callable[[], Any]) -> list[Any]:
    """The results of a function at each later fence; the fences inside of the function do not count."""
    results: list[Any] = []

    def recording_fence() -> None:
        monkeypatch.setattr(memory, "_fence", lambda: None)
        results.append(what())
        monkeypatch.setattr(memory, "_fence", recording_fence)

    monkeypatch.setattr(memory, "_fence", recording_fence)
    return results


@pytest.mark.parametrize("reset", [False, True])
def test_a_write_is_complete_before_the_fence_and_valid_after_it(
    memory: WindowMemory, monkeypatch: pytest.MonkeyPatch, reset: bool
) -> None:
    memory.write(WriteKind.PUT, 1, X, 2.0, None, FOREVER)

    def seen() -> tuple[int, list[int], list[float]]:
        return (
            int(memory._index[0][_WRITES]),
            [int(meta[_PUTS]) for meta in memory._meta[0]],
            [float(slot[0]) for slot in memory._slots[0]],
        )

    results = at_fences(memory, monkeypatch, seen)
    if reset:
        out = torch.empty(3)
        memory.combine(out, X, 1.0, {1: 1.0}, [1], FOREVER)
        assert out.tolist() == [3.0] * 3
        results = [one for one in results if one[1] == [1, 1]]  # the others are of the reading of the state
    else:
        memory.write(WriteKind.PUT, 1, X, 5.0, None, FOREVER)
    assert results == [(1, [1 if reset else 2, 1], [0.0 if reset else 5.0, 2.0])]
    assert int(memory._index[0][_WRITES]) == 2


@pytest.mark.parametrize("fence", [0, 1])
def test_a_state_is_that_of_one_write_whatever_is_written_meanwhile(
    memory: WindowMemory, monkeypatch: pytest.MonkeyPatch, fence: int
) -> None:
    """Two writes pass while it is copied, so its place has other numbers: between the index and the copy, or after."""
    fences = iter(range(100))

    def write() -> None:
        if next(fences) == fence:
            for p in (1.0, 2.0):
                memory.write(WriteKind.PUT, 1, X, 1.0, p, FOREVER)

    at_fences(memory, monkeypatch, write)
    state = memory.state(1)
    assert (state.puts, state.p) == (2, 2.0)


@pytest.mark.parametrize("cause", [None, 0, 7])
def test_a_freed_window_has_its_cause_at_once(memory: WindowMemory, cause: int | None) -> None:
    assert not memory.freed and memory.cause is None
    stores: list[bool] = []
    flags = memory._flags

    class RecordingFlags:
        """Notes the words of the flags after each store."""

        def __getitem__(self, at: int) -> Any:
            return flags[at]

        def __setitem__(self, at: int, value: int) -> None:
            flags[at] = value
            stores.append(memory.freed)
            assert memory.cause == (cause if memory.freed else None)

    memory._flags = RecordingFlags()  # type: ignore[assignment]
    memory.free(cause)
    assert stores == [True]
    assert memory.freed and memory.cause == cause
