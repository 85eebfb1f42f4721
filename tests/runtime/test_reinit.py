"""How often an agent was started, where the launcher that counts it is another one than before."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.config import Config
from shoal.rendezvous import peer_directory
from shoal.rendezvous.bootstrap_barrier import DIRECTORY
from shoal.rendezvous.launch import Launch
from shoal.rendezvous.peer_directory import numbered
from shoal.rendezvous.store import ThreadStore


def incarnation(
    monkeypatch: pytest.MonkeyPatch, known: dict[str, Any] | None, launcher: str, starts: int
) -> tuple[int, dict[str, Any]]:
    """Of rank 1, as its launcher has started it so often before, where the others know this of it."""
    store = ThreadStore()
    if known is not None:
        store.set(DIRECTORY, b"")
    monkeypatch.setattr(peer_directory, "directory", lambda *_: SimpleNamespace(published=[{}, known]))
    launch, output = numbered(
        store, Launch(1, 2, "torchrun", incarnation=starts), time.monotonic() + 5.0, Config(launcher=launcher)
    )
    return launch.incarnation, output["launcher"]


def test_the_init_count_is_passed_from_launcher_to_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    count, output = incarnation(monkeypatch, None, "a", 0)
    assert (count, output) == (0, {"id": "a", "base": 0})
    first = {"place": {"incarnation": 0}, "launcher": output}
    assert incarnation(monkeypatch, first, "a", 2)[0] == 2  # the same launcher has started it again
    count, output = incarnation(monkeypatch, first | {"place": {"incarnation": 2}}, "b", 0)
    assert (count, output) == (3, {"id": "b", "base": 3})
    second = {"place": {"incarnation": 3}, "launcher": output}
    assert incarnation(monkeypatch, second, "b", 1)[0] == 4
    assert incarnation(monkeypatch, second | {"place": {"incarnation": 4}}, "c", 0)[0] == 5


def test_the_init_count_continues_also_for_an_unknown_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert incarnation(monkeypatch, {"place": {"incarnation": 1}}, "a", 0)[0] == 2
