"""Types of a program's parameters. Triton reads their names as text; for mypy they are ``Any``."""

from __future__ import annotations

from typing import Any, TypeAlias

fp64: TypeAlias = Any
"""A float with all its bits; without this type Triton passes a float in 32 bits. Its value is never compiled in."""
i64: TypeAlias = Any
