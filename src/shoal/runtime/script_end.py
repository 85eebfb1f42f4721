"""Records the error that ended the script of this process, for the shutdown message and for the launcher.

Python calls ``sys.excepthook`` for an uncaught exception. ``SystemExit`` has no such hook, and exit handlers do not see
it. So the runner of the script has to record it: ``cli/agent_script.py`` does, for ``shoal run``. Under another
launcher a script that ends with ``SystemExit`` counts as ended normally, and the launcher has its exit code.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from ..errors import DeadlineExceeded, PeerLost, ShoalError

E = TypeVar("E", bound=ShoalError)

_MOST = 500
"""Characters of one message at most."""


@dataclass(frozen=True)
class ScriptFailure:
    """The error that ended a script.

    Attributes:
        text: The description for the other agents.
        is_peer_loss: Whether the loss of another agent caused it.
        awaited: The ranks for which a call waited until its deadline, if that caused it.
    """

    text: str
    is_peer_loss: bool
    awaited: tuple[int, ...] = ()


_failures: list[ScriptFailure] = []


def failure() -> ScriptFailure | None:
    """The error that ended the script of this process; None if it ended normally. For exit handlers."""
    if not _failures and sys.excepthook is not _excepthook and not hasattr(sys, "ps1"):
        # Another hook has replaced this one and has not called it. The interpreter keeps the exception too. So does an
        # interactive session, but that continues after an exception, and is left out.
        error = getattr(sys, "last_value", None)
        if error is not None:
            _note(error)
    return _failures[-1] if _failures else None


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception is a :class:`~shoal.PeerLost`, or was raised because of one or while one was handled."""
    return _cause(error, PeerLost) is not None


def awaited_ranks(error: BaseException) -> tuple[int, ...]:
    """The ranks of the :class:`~shoal.DeadlineExceeded` that caused an exception; empty if none did."""
    cause = _cause(error, DeadlineExceeded)
    return () if cause is None else cause.ranks


def _cause(error: BaseException, kind: type[E]) -> E | None:
    """The first exception of a kind among ``error``, its causes and contexts, and the members of exception groups."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        current = rest.pop()
        if current is None or id(current) in seen:
            continue
        if isinstance(current, kind):
            return current
        seen.add(id(current))
        members = getattr(current, "exceptions", ())  # of an exception group
        rest += [current.__cause__, current.__context__, *members]
    return None


def note_exit(error: SystemExit) -> None:
    """Record the ``SystemExit`` with which the script has ended, unless its status is 0."""
    is_success = error.code is None or (isinstance(error.code, int) and error.code & 0xFF == 0)
    if not is_success:
        _note(error)


def _note(error: BaseException) -> None:
    kind = type(error).__name__
    lines = str(error).splitlines()
    text = f"its script ended with {kind}{': ' + lines[0] if lines else ''}"
    _failures.append(ScriptFailure(text[:_MOST], is_peer_loss(error), awaited_ranks(error)))


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _note(error)
    _previous_hook(kind, error, trace)


_previous_hook, sys.excepthook = sys.excepthook, _excepthook
