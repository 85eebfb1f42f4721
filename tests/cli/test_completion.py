"""``shoal completion``: what a shell offers."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from shoal.cli.completion import SHELLS, script


def offered(*given: str) -> set[str]:
    """What bash offers for the last of these words."""
    line = (
        f"COMP_WORDS=({' '.join(given)!s}); COMP_CWORD={len(given) - 1}; _shoal; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    command = ["bash", "-c", f"{script('bash')}\n{line}"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.split())


def test_bash_offers_commands_options_choices_and_files() -> None:
    assert offered("shoal", "st") == {"status"}
    assert {"--timeline", "--on-failure"} <= offered("shoal", "run", "--")
    assert "recommend" in offered("shoal", "topology", "re")
    assert "etc" in offered("shoal", "run", "et")


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_is_valid_in_its_shell(shell: str) -> None:
    text = script(shell)
    assert "--on-failure" in text or "-l on-failure" in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
