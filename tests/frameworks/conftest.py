"""Four agents in their own processes, shared by the tests of a module."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from support.world import World, template

SIZE = 4
# Ray brings pyarrow, which others import where it is there; its allocator would have a thread, which is none of ours.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Before ``init``. A module's ``IMPORTS`` are imported once for all of them."""
    for name in getattr(request.module, "IMPORTS", ()):
        template().imports(name)
    made = World(SIZE, init=False, timeout=60.0)
    try:
        yield made
    finally:
        made.destroy()  # what frameworks have imported keeps threads and files of its own


@pytest.fixture
def two() -> Iterator[World]:
    """Two agents, before ``init``: fewer than saved something."""
    made = World(2, init=False, timeout=60.0)
    try:
        yield made
    finally:
        made.destroy()
