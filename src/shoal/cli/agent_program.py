"""What each agent of ``shoal run`` runs: a script, a module, code, or a program."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import agent_script

FILE, MODULE, CODE, PROGRAM = "script", "-m", "-c", "--no-python"
STDIN = "-"
"""The script that is read from the standard input."""
_PYTHON = re.compile(r"python[\d.]*(\.exe)?")


def words_of(kind: str, script: str, arguments: Sequence[str]) -> list[str]:
    """The part of a command line of ``shoal run`` that says what to run."""
    return [*([] if kind == FILE else [kind]), script, *arguments]


def command_of(kind: str, script: str, arguments: Sequence[str]) -> list[str]:
    """The command of an agent's process."""
    if kind == PROGRAM:
        return [script, *arguments]
    # Unbuffered: lines come when they are printed, and a killed agent's last words are not lost.
    return [sys.executable, "-u", agent_script.__file__, *words_of(kind, script, arguments)]


def check_program(kind: str, script: str, arguments: Sequence[str], count: str) -> None:
    """Refuse what cannot be run.

    Raises:
        ValueError: There is no such script or program; the message says what to give instead.
    """
    if kind == PROGRAM and shutil.which(script) is None:
        raise ValueError(f"--no-python: there is no program {script!r}")
    if kind != FILE or script == STDIN or Path(script).exists():
        return
    if _PYTHON.fullmatch(Path(script).name) and arguments:
        words = [word for word in arguments if word != "-u"]
        raise ValueError(
            f"each agent runs Python already, so leave {script!r} out: shoal run {count} {shlex.join(words)}"
        )
    if shutil.which(script) is not None:
        command = shlex.join([script, *arguments])
        raise ValueError(f"{script!r} is a program and no Python script: shoal run {count} --no-python {command}")
    raise ValueError(f"there is no script {script!r} in {Path.cwd()} (-m runs a module)")


def variables(texts: Iterable[str]) -> dict[str, str]:
    """The variables of ``--env NAME=VALUE``.

    Raises:
        ValueError: A text is of another form.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"--env {text}: give NAME=VALUE")
        found[name] = value
    return found
