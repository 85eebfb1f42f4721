"""Words of a trace that who reads it looks for."""

from __future__ import annotations

FUSED = "small calls that travel together"
"""The name of their row."""
ASKED, ORDERING, MOVING = "asked", "ordering", "moving"
"""What a process group did with a stage of an operation: it was asked for it, gave it its turn, moved it."""
