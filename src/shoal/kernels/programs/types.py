"""Types of a program's parameters: Triton reads their names as text, mypy takes them for anything."""

from __future__ import annotations

from typing import Any, TypeAlias

fp64: TypeAlias = Any
"""A float with all its bits; without it Triton hands a float over in 32. A value is never compiled in."""
i64: TypeAlias = Any
