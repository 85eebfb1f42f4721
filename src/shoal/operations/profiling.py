"""Records Shoal's work in ``torch.profiler`` under the names of the timeline: submit, sum, wait.

Without a profiler the only cost is the check of a flag of torch. A profiler records the thread that started it. Sums in
the progress thread are recorded with
``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler as profiler

from .._signals import deferred
from .fused_name import PREFIX, decode_fused_name
from .operation import INTERNAL

try:
    from torch._C._profiler import _RecordFunctionFast as _Span  # a twentieth of the cost of the public one
except ImportError:
    _Span = torch.profiler.record_function  # type: ignore[assignment,misc]

_NOTHING = nullcontext()


def span(op: str, name: str, activity: str) -> AbstractContextManager[Any]:
    """A span of the profiler's trace, if a profiler records: ``shoal neighbor_allreduce layer1: sum``."""
    if not profiler._is_profiler_enabled:
        return _NOTHING
    if name.startswith(PREFIX):
        label = f" x {sum(run.length for run in decode_fused_name(name))}"
    else:
        label = name.removeprefix("~window").removeprefix(INTERNAL)
        label = "" if label.startswith("~") else f" {label.strip()}"
    found: AbstractContextManager[Any] = _Span(f"shoal {op}{label}: {activity}")
    return found


@contextmanager
def deferred_span(op: str, name: str, activity: str) -> Iterator[None]:
    """A :func:`span` in which signals wait (``_signals.py``)."""
    with deferred, span(op, name, activity):
        yield
