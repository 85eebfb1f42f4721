"""Torch's compiler, for tests that compile: other tests go without it (tests/support/site)."""

from __future__ import annotations

import torch

from shoal.optim.exchanges import hooks


def load_compiler() -> None:
    """Import the compiler, and have hooks that an earlier test made without it excluded from compilation again."""
    torch._dynamo.reset()
    hooks._leave_uncompiled.cache_clear()
