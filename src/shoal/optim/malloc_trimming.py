"""Keeps freed memory in the process: the gradients of a step reuse the memory of the previous step.

glibc gives a large block back to the kernel as soon as it is freed, or when up to 64 MB lie free at the end of its
heap. In a loop that frees its gradients after each step the kernel maps and clears all their pages again and again: 50
of 175 ms where there are 200 MB of them. Memory that is kept is used again, as torch keeps the memory of a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h
_NEVER = -1
_ONE_BLOCK = 1 << 30
_ONE_BLOCK_BEFORE_2_35 = 1 << 25
"""The largest block in bytes that is taken from the heap; an older glibc refuses more than this."""


@cache
def keep_freed_memory() -> bool:
    """Make glibc keep freed memory, for the whole process, unless the environment tunes it.

    Returns:
        Whether it does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's alone
    if mallopt is None or _is_tuned(os.environ):
        return False
    raised = mallopt(_MMAP_THRESHOLD, _ONE_BLOCK) or mallopt(_MMAP_THRESHOLD, _ONE_BLOCK_BEFORE_2_35)
    return bool(raised and mallopt(_TRIM_THRESHOLD, _NEVER))


@cache
def keep_freed_memory_of_threads() -> bool:
    """The same for short-lived threads: they get no heaps of their own any more. glibc would return such a heap to the
    kernel as soon as it is all free, despite the setting for the main heap.

    Returns:
        Whether it does.
    """
    if not keep_freed_memory() or os.environ.get("MALLOC_ARENA_MAX"):
        return False
    return bool(ctypes.CDLL(None).mallopt(_ARENA_MAX, 1))


def _is_tuned(environ: Mapping[str, str]) -> bool:
    variables = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    return any(environ.get(variable) for variable in variables) or "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
