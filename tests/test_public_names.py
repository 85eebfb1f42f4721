"""Nothing public is lost: every name that a release has had is still there, or the changelog says what became of it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

NAMES = Path(__file__).with_name("public_names.txt").read_text().splitlines()


@pytest.mark.parametrize("package", sorted({name.rpartition(".")[0] for name in NAMES}))
def test_every_public_name_is_still_there(package: str) -> None:
    names = [name.rpartition(".")[2] for name in NAMES if name.rpartition(".")[0] == package]
    assert not [name for name in names if not hasattr(importlib.import_module(package), name)]


@pytest.mark.parametrize("package", ["shoal", "shoal.bluefog", "shoal.data", "shoal.windows"])
def test_what_a_room_says_it_has_is_there(package: str) -> None:
    room = importlib.import_module(package)
    assert len(room.__all__) == len(set(room.__all__))
    assert [name for name in room.__all__ if not hasattr(room, name)] == []
