"""Names in a trace that its readers need."""

from __future__ import annotations

FUSED = "small calls that travel together"
"""The name of their row."""
ASKED, ORDERING, MOVING = "asked", "ordering", "moving"
"""Events of a process group for a stage of an operation: requested, ordered, moved."""
