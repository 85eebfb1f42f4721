"""The contract of averages with neighbours, with tensors on a device: the same tests as for those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ops.test_neighbor_allreduce_dynamic import *  # noqa: F403
from ops.test_neighbor_allreduce_static import *  # noqa: F403
from support.on_device import Moves, all_on_device


@pytest.fixture(autouse=True)
def on_device(to_its_device: Moves) -> Iterator[None]:
    with all_on_device(to_its_device):
        yield
