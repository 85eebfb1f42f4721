"""Tests here run on the slow device, and on the first CUDA device where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.on_device import Moves
from support.slow_device import in_use, to_device

CUDA = torch.cuda.is_available()


@pytest.fixture(params=["slow", *(["cuda"] * CUDA)])
def to_its_device(request: pytest.FixtureRequest, transport: str) -> Iterator[Moves]:
    """Makes a copy of a tensor on the device; agents leave it there."""
    if request.param == "cuda":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHOAL_DEVICE_MEMORY", "1")
            yield lambda tensor: torch.empty_like(tensor, device="cuda").copy_(tensor)
        return
    with in_use():
        yield to_device
