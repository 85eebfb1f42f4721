"""Programs in Triton run on a CUDA device where there is one, and in Triton's interpreter otherwise."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from support.kernels import DEVICE

VARIABLE = "TRITON_INTERPRET"
INTERPRETED = importlib.util.find_spec("triton") is not None and DEVICE == "cpu"

if INTERPRETED:
    # It counts where a module with programs is imported, Triton's own among them, so before any test is.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        from shoal.kernels import programs  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    """And while they run; processes of other tests are not to see it."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setenv(VARIABLE, "1")
        yield
