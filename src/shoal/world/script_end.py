"""What ended the script of this process: for the last message to the other agents, and for the launcher.

Python calls ``sys.excepthook`` for an exception that nothing caught. ``SystemExit`` has no such hook, and exit handlers
do not see it. It may also be caught, as by a test runner. So ``sys.exit`` raises a subclass here, whose ``code`` shows
that the interpreter itself reads it. A script that ends with a plain ``raise SystemExit(9)`` is not recognised: the
others learn that its script ended, and the launcher has its exit code.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from ..errors import PeerLost

_MOST = 500
"""Characters of one message."""


@dataclass(frozen=True)
class Failure:
    """What ended a script other than normally.

    Attributes:
        text: For the other agents.
        is_peer_loss: The loss of another agent caused it.
    """

    text: str
    is_peer_loss: bool


_failures: list[Failure] = []
_code: Any = SystemExit.__dict__["code"]


def failure() -> Failure | None:
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


def _note(error: BaseException) -> None:
    kind = type(error).__name__
    lines = str(error).splitlines()
    text = f"its script ended with {kind}{': ' + lines[0] if lines else ''}"
    _failures.append(Failure(text[:_MOST], is_peer_loss(error)))


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _note(error)
    _previous_hook(kind, error, trace)


class _Exit(SystemExit):
    """What ``sys.exit`` raises in the main thread."""

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args

    @property
    def code(self) -> Any:
        code = _code.__get__(self)
        # Only the interpreter reads it without a frame of Python around: nothing has caught it, and the process ends.
        if sys._getframe().f_back is None and not _is_success(code):
            _note(self)
        return code

    @code.setter
    def code(self, code: Any) -> None:
        _code.__set__(self, code)


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"
_Exit.__module__ = "builtins"


def _is_success(code: Any) -> bool:
    """Whether a process that ends with this ``SystemExit.code`` has exit status 0."""
    return code is None or (isinstance(code, int) and code & 0xFF == 0)


def _exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status), as the ``sys.exit`` that this replaces."""
    if threading.current_thread() is not threading.main_thread():
        _previous_exit(status)  # it ends the thread, silently: but for subclasses
    raise _Exit(*status) if isinstance(status, tuple) else _Exit(status)


_previous_hook, sys.excepthook = sys.excepthook, _excepthook
_previous_exit, sys.exit = sys.exit, _exit
