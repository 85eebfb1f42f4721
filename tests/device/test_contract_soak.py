"""The contract of all other operations, with tensors on a device. They go through the CPU and come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ops.test_alltoall import *  # noqa: F403
from ops.test_collectives import *  # noqa: F403
from ops.test_compression import *  # noqa: F403
from ops.test_equal_weights import *  # noqa: F403
from ops.test_grouped import *  # noqa: F403
from ops.test_handles import *  # noqa: F403
from ops.test_hierarchical import *  # noqa: F403
from ops.test_neighbor_allgather import *  # noqa: F403
from ops.test_numbers import *  # noqa: F403
from ops.test_pair_gossip import *  # noqa: F403
from ops.test_reduction import *  # noqa: F403
from ops.test_robust_rules import *  # noqa: F403
from ops.test_tensors import *  # noqa: F403
from support.on_device import Moves, all_on_device

pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def on_device(to_its_device: Moves) -> Iterator[None]:
    with all_on_device(to_its_device):
        yield
