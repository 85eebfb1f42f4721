"""How a process learns of the end of its own script, in processes that end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.cli import agent_script
from shoal.runtime import script_end
from support.limits import scaled

PRELUDE = """
import atexit, sys
sys.path.insert(0, {path!r})
from shoal.errors import PeerLost, ShoalError
from shoal.runtime import script_end
atexit.register(lambda: print(script_end.failure()))
"""
LOST = "raise PeerLost('rank 1 was lost')"


def failure_of(folder: Path, body: str) -> tuple[int, str]:
    """The exit status of a script run as an agent's, and the cause that its exit handler read."""
    script = folder / "script.py"
    script.write_text(PRELUDE.format(path=str(Path(shoal.__path__[0]).parent)) + body)
    run = [sys.executable, agent_script.__file__, str(script)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=scaled(60))
    return done.returncode, done.stdout.strip()


def failed(text: str, is_peer_loss: bool = False) -> str:
    return repr(script_end.ScriptFailure(f"its script ended with {text}", is_peer_loss))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("pass", 0, "None"),
        ("raise ValueError('no data\\nat all')", 1, failed("ValueError: no data")),
        ("raise KeyError", 1, failed("KeyError")),
        ("sys.exit(9)", 9, failed("SystemExit: 9")),
        ("raise SystemExit(9)", 9, failed("SystemExit: 9")),
        ("exit(9)", 9, failed("SystemExit: 9")),
        ("quit(9)", 9, failed("SystemExit: 9")),
        ("class Stop(SystemExit): pass\nraise Stop(9)", 9, failed("Stop: 9")),
        ("raise SystemExit", 0, "None"),
        ("sys.exit('no data')", 1, failed("SystemExit: no data")),
        ("sys.exit((9,))", 9, failed("SystemExit: 9")),
        ("sys.exit(0)", 0, "None"),
        ("sys.exit()", 0, "None"),
        ("sys.exit(256)", 0, "None"),
        ("try: sys.exit(9)\nexcept SystemExit as error: assert error.code == 9", 0, "None"),
        ("import threading\none = threading.Thread(target=sys.exit, args=(9,))\none.start(); one.join()", 0, "None"),
        ("sys.excepthook = lambda *_: None\nraise ValueError('no data')", 1, failed("ValueError: no data")),
        (LOST, 1, failed("PeerLost: rank 1 was lost", True)),
        (f"try: {LOST}\nexcept PeerLost: sys.exit(3)", 3, failed("SystemExit: 3", True)),
        (f"try: {LOST}\nexcept PeerLost: raise KeyError from None", 1, failed("KeyError", True)),
        (f"try: {LOST}\nexcept PeerLost: pass\nraise KeyError", 1, failed("KeyError")),
        ("raise ShoalError('no data')", 1, failed("ShoalError: no data")),
    ],
)
def test_an_exit_handler_gets_the_exception_that_ended_the_script(
    tmp_path: Path, body: str, status: int, message: str
) -> None:
    assert failure_of(tmp_path, body) == (status, message)


def test_shoal_replaces_no_way_to_exit() -> None:
    assert sys.exit.__module__ == "sys"


@pytest.mark.parametrize("error", [ValueError("one"), KeyError("two")])
def test_a_peer_failure_is_found_behind_other_errors(error: Exception) -> None:
    assert not script_end.is_peer_loss(error)
    error.__context__ = RuntimeError("between")
    error.__context__.__context__ = error  # a circle
    assert not script_end.is_peer_loss(error)
    error.__context__.__cause__ = shoal.PeerLost("rank 1 was lost", (1,))
    assert script_end.is_peer_loss(error)
