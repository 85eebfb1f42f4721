"""The table of environment variables: what is read, what is refused, and that nothing is read beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import shoal
from shoal import config

VALUES = {
    "SHOAL_TIMEOUT": ("2.5", 2.5),
    "SHOAL_DROP_AFTER": ("7", 7.0),
    "SHOAL_STALL_SECONDS": ("inf", float("inf")),
    "SHOAL_ENTRY_TIMEOUT": ("1e3", 1000.0),
    "SHOAL_ON_LOSS": ("continue", "continue"),
    "SHOAL_ON_PARTITION": ("stop", "stop"),
    "SHOAL_CHECK_FINITE": ("1", True),
    "SHOAL_DEVICE_MEMORY": ("1", True),
    "SHOAL_COMPRESS_LOCALLY": ("1", True),
    "SHOAL_NATIVE": ("0", False),
    "SHOAL_TLS": ("on", True),
    "SHOAL_AGENTS_PER_MACHINE": ("3", 3),
    "SHOAL_CACHE_CAPACITY": ("0", 0),
}
"""Those with a value other than their text."""


def field_of(name: str) -> str:
    return next(field.name for field in fields(config.Config) if field.metadata["variable"].name == name)


def test_unset_and_empty_variables_have_their_defaults() -> None:
    assert config.read({}) == config.read(dict.fromkeys(config.NAMES, "")) == config.Config()
    assert config.Config().timeout == 300.0 and config.Config().drop_after == float("inf")


@pytest.mark.parametrize("name", config.NAMES)
def test_each_variable_sets_its_own_field(name: str) -> None:
    text, value = VALUES.get(name, ("text", "text"))
    result, default = config.read({name: text}), config.Config()
    changed = {
        field.name for field in fields(config.Config) if getattr(result, field.name) != getattr(default, field.name)
    }
    assert changed == {field_of(name)}
    assert getattr(result, field_of(name)) == value


@pytest.mark.parametrize(
    ("name", "text", "must"),
    [
        ("SHOAL_TIMEOUT", "soon", "a positive number of seconds"),
        ("SHOAL_TIMEOUT", "0", "a positive number of seconds"),
        ("SHOAL_STALL_SECONDS", "nan", "a positive number of seconds"),
        ("SHOAL_ON_LOSS", "go", "'raise' or 'continue'"),
        ("SHOAL_ON_PARTITION", "raise", "'continue' or 'stop'"),
        ("SHOAL_CHECK_FINITE", "yes", "0 or 1"),
        ("SHOAL_TLS", "1", "on or off"),
        ("SHOAL_AGENTS_PER_MACHINE", "-1", "a positive integer"),
        ("SHOAL_CACHE_CAPACITY", "1.5", "a number of entries"),
    ],
)
def test_an_invalid_variable_is_named_with_its_value_and_the_valid_ones(name: str, text: str, must: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={text!r}: it must be {must}")):
        config.read({name: text})


def test_the_secret_is_not_shown() -> None:
    representation = repr(config.read({"SHOAL_SECRET": "open sesame", "SHOAL_TIMEOUT": "5"}))
    assert "open sesame" not in representation and "timeout=5.0" in representation


def test_the_table_has_each_variable_that_the_library_names() -> None:
    [package] = shoal.__path__
    sources = [path.read_text() for path in Path(package).rglob("*.py")]
    names = {name for text in sources for name in re.findall(r"SHOAL_[A-Z][A-Z_]*[A-Z]", text)}
    assert names == {*config.NAMES, config.BUILD_NATIVE}


def test_no_other_module_reads_them() -> None:
    """Except ``rendezvous/launch.py``, which reads the variables of all launchers from a mapping;
    ``launcher_notes.py``, which must not fail at exit because another variable is invalid; and a launcher that reads
    its own agent's environment.
    """
    [package] = shoal.__path__
    constants = [name for name, text in vars(config).items() if isinstance(text, str) and text in config.NAMES]
    reads = re.compile(rf"environ(?:\.get\(|\[)\s*(?:\"SHOAL_|{'|'.join(constants)})")
    results = {path.name for path in Path(package).rglob("*.py") if reads.search(path.read_text())}
    assert results == {"launcher_notes.py", "agent_processes.py"}


def test_a_misspelled_variable_is_found_by_its_resemblance() -> None:
    unread = {
        "SHOAL_TRANPORT": "tcp",
        "SHOAL_TIMOUT": "5",
        "SHOAL_SUITE": "x",
        "SHOAL_BUILD_NATIVE": "1",
        "TIMOUT": "5",
    }
    assert config.misspelled(unread | {"SHOAL_TIMEOUT": "5"}) == {
        "SHOAL_TIMOUT": "SHOAL_TIMEOUT",
        "SHOAL_TRANPORT": "SHOAL_TRANSPORT",
    }


def test_init_warns_of_a_misspelled_variable_at_the_line_that_calls_it() -> None:
    environ = os.environ | {"SHOAL_TIMOUT": "5"}
    script = "import shoal\nshoal.init()\nshoal.shutdown()"
    process = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert re.fullmatch(r"<string>:2: UserWarning: .*SHOAL_TIMOUT.* did you mean SHOAL_TIMEOUT\?\n", process.stderr)
