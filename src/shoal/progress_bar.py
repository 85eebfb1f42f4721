"""A progress bar for long work, shown only in a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def shown(items: Sequence[T], title: str) -> Iterable[T]:
    """Go through ``items`` with a bar on stderr, called ``title``, that vanishes at the end; without one in a file."""
    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        return items
    return track(items, title, console=console, transient=True)
