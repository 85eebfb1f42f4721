"""What ended the script of this process: for the last message to the other agents, and for the launcher.

Python calls ``sys.excepthook`` for an exception that nothing caught. ``SystemExit`` has no such hook, and exit handlers
do not see it. So what runs the script has to note it: ``cli/agent_script.py`` does, for ``shoal run``. Under another
launcher a script that ends with ``SystemExit`` counts as one that ended normally, and the launcher has its exit code.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..errors import PeerLost

_MOST = 500
"""Characters of one message."""


@dataclass(frozen=True)
class ScriptFailure:
    """What ended a script other than normally.

    Attributes:
        text: For the other agents.
        is_peer_loss: The loss of another agent caused it.
    """

    text: str
    is_peer_loss: bool


_failures: list[ScriptFailure] = []


def failure() -> ScriptFailure | None:
    """What ended the script of this process; None if it ended normally. For exit handlers."""
    if not _failures and sys.excepthook is not _excepthook and not hasattr(sys, "ps1"):
        # Another hook took the place of this one and did not call it. The interpreter keeps the exception, too; an
        # interactive session, which goes on after an exception, keeps its last one as well.
        error = getattr(sys, "last_value", None)
        if error is not None:
            _note(error)
    return _failures[-1] if _failures else None


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception is a :class:`~shoal.PeerLost`, or was raised because of one or while one was handled."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        one = rest.pop()
        if one is None or id(one) in seen:
            continue
        if isinstance(one, PeerLost):
            return True
        seen.add(id(one))
        rest += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]  # those of an exception group
    return False


def note_exit(error: SystemExit) -> None:
    """Note the ``SystemExit`` with which the script has ended, unless its status is 0."""
    if not _is_success(error.code):
        _note(error)


def _note(error: BaseException) -> None:
    kind = type(error).__name__
    lines = str(error).splitlines()
    text = f"its script ended with {kind}{': ' + lines[0] if lines else ''}"
    _failures.append(ScriptFailure(text[:_MOST], is_peer_loss(error)))


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _note(error)
    _previous_hook(kind, error, trace)


def _is_success(code: Any) -> bool:
    """Whether a process that ends with this ``SystemExit.code`` has exit status 0."""
    return code is None or (isinstance(code, int) and code & 0xFF == 0)


_previous_hook, sys.excepthook = sys.excepthook, _excepthook
