"""A script that is run as an agent's finds and shows what it would under ``python`` alone."""

from __future__ import annotations

import compileall
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli import agent_script
from support.limits import scaled

SHOWS = """\
import pickle, sys
from __main__ import __name__ as own_name
class Kept: pass
pickle.dumps(Kept)
print(own_name, sys.argv, sys.path, sorted(globals()))
print(__file__, __spec__ and __spec__.name, type(__loader__).__name__, type(__builtins__).__name__, __annotations__)
print(sorted(name for name in sys.modules if name.startswith(("shoal", "torch"))))
print(sys._getframe().f_code.co_flags)
def fail():
    raise ValueError("no data")
"""
BODIES = {
    "passes": SHOWS,
    "raises": f"{SHOWS}fail()\n",
    "interrupted": f"{SHOWS}raise KeyboardInterrupt\n",
    "exits": f"{SHOWS}raise SystemExit('no data')\n",
    "no Python": "1 +\n",
    "imports what Shoal has too": "import topology\n",
}


def as_file(folder: Path, body: str) -> list[str]:
    (folder / "script.py").write_text(body)
    return ["script.py"]


def as_link(folder: Path, body: str) -> list[str]:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "script.py").write_text(body)
    (folder / "linked.py").symlink_to("elsewhere/script.py")
    return ["linked.py"]


def as_module(folder: Path, body: str) -> list[str]:
    (folder / "package").mkdir()
    (folder / "package" / "script.py").write_text(body)
    return ["-m", "package.script"]


def as_folder(folder: Path, body: str) -> list[str]:
    (folder / "__main__.py").write_text(body)
    return ["."]


def as_archive(folder: Path, body: str) -> list[str]:
    with zipfile.ZipFile(folder / "script.zip", "w") as archive:
        archive.writestr("__main__.py", body)
    return ["script.zip"]


def as_bytecode(folder: Path, body: str) -> list[str]:
    (folder / "script.py").write_text(body)
    compileall.compile_dir(folder, legacy=True, quiet=2)
    return ["script.pyc"]


def shown(folder: Path, *command: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=scaled(60))
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        *((as_file, what) for what in BODIES),
        (as_link, "passes"),
        (as_module, "raises"),
        (as_folder, "raises"),
        (as_archive, "raises"),
        (as_bytecode, "raises"),
    ],
)
def test_a_script_is_run_as_by_python(tmp_path: Path, kind: Callable[[Path, str], list[str]], what: str) -> None:
    script = [*kind(tmp_path, BODIES[what]), "-m", "one", "--two"]
    assert shown(tmp_path, agent_script.__file__, *script) == shown(tmp_path, *script)


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    status, _, errors = shown(tmp_path, agent_script.__file__, "-m", "nowhere")
    assert status == 1
    assert "No module named nowhere" in errors


def test_the_path_is_unchanged_if_python_does_not_change_it(tmp_path: Path) -> None:
    script = as_file(tmp_path, SHOWS)
    assert shown(tmp_path, "-I", agent_script.__file__, *script) == shown(tmp_path, "-I", *script)


def test_as_a_module_it_runs_a_script_for_other_launchers(tmp_path: Path) -> None:
    """``torchrun -m shoal.cli.agent_script train.py``."""
    body = "import sys; print(__name__, sys.argv, sys.path, __file__); raise SystemExit(9)\n"
    (tmp_path / "script.py").write_text(body)

    def run(*how: str) -> tuple[int, str, str]:
        command = [sys.executable, *how, "script.py", "--lr", "0.1"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60))
        return done.returncode, done.stdout, done.stderr

    assert run("-m", "shoal.cli.agent_script") == run()
    assert run()[0] == 9


@pytest.mark.parametrize("arguments", [[], ["-m"]])
def test_without_a_script_the_error_says_what_to_pass(arguments: list[str]) -> None:
    command = [sys.executable, agent_script.__file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 1
    assert done.stderr.startswith("shoal: name a script, or -m and a module")
