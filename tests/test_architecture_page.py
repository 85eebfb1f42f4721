"""The rooms that docs/architecture.md lists are those there are, and so are the modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shoal
from shoal import cli

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
PACKAGE = Path(shoal.__file__).parent
SAID_IN_WORDS = {"algorithms", "compression", "topology"}
"""Rooms whose modules the list does not name one by one."""
COMMANDS = {f"{name}.py" for name in cli.COMMANDS}
"""Which it names by their words."""


def rooms() -> dict[str, set[str]]:
    """The names of modules in the list, under the room that they are listed in."""
    listed = re.search(r"## Source layout.*?```(.*?)```", PAGE.read_text(), re.DOTALL)
    assert listed is not None
    found: dict[str, set[str]] = {}
    room = ""
    for line in listed[1].splitlines():
        begins = re.match(r"  (\w+)/", line)
        if begins is not None:
            room = begins[1]
            found[room] = set()
        elif line.startswith("  ") and not line.startswith("    "):
            room = ""
        found.setdefault(room, set()).update(re.findall(r"(?<![\w/])\w+\.py", line))
    return found


def test_every_room_is_listed() -> None:
    assert set(rooms()) - {""} == {one.parent.name for one in PACKAGE.glob("*/*.py")}


@pytest.mark.parametrize("room", rooms())
def test_every_module_that_is_listed_is_there(room: str) -> None:
    assert rooms()[room] <= {one.name for one in (PACKAGE / room).rglob("*.py")}


@pytest.mark.parametrize("room", sorted(set(rooms()) - {"", *SAID_IN_WORDS}))
def test_every_module_of_a_room_is_listed(room: str) -> None:
    there = {one.name for one in (PACKAGE / room).glob("*.py") if not one.name.startswith("_")}
    assert there - rooms()[room] == (COMMANDS if room == "cli" else set())
