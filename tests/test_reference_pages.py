"""The pages of reference are complete: errors and their messages, environment variables, the command line."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from pathlib import Path

import pytest

import shoal
from shoal import errors

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COMMANDS = (DOCS / "command-line.md").read_text()
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text()
CLASSES = [one.__name__ for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, errors.ShoalError)]
MESSAGES = [
    one
    for line in (TROUBLESHOOTING + (DOCS / "rendezvous.md").read_text()).splitlines()
    for one in re.findall(r"^\| `([^`]*…[^`]*)` \| .* \| .* \|$", line)
]


def section(name: str) -> str:
    result = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", TROUBLESHOOTING, re.DOTALL | re.MULTILINE)
    return result[1] if result else ""


@pytest.mark.parametrize("name", [*CLASSES, "AgentFailed"])
def test_each_error_class_has_its_section(name: str) -> None:
    text = section(name)
    assert "`ranks`" in text or name in ("NotInitialized", "ShoalError")
    assert "| message | cause | what to do |" in text
    assert f"[`{name}`](#{name.lower()})" in TROUBLESHOOTING


def strings_of_the_source() -> str:
    """All strings of the package, a line each, with an ellipsis for each expression."""
    results = []
    for path in Path(shoal.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                results.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                results.append(node.value)
    return "\n".join(results)


def test_the_messages_are_those_of_the_source() -> None:
    """The text between the ellipses of a message is in the strings of the package."""
    source = strings_of_the_source()
    unknown = [
        (message, part)
        for message in MESSAGES
        for part in (part.strip(" .,:;()") for part in message.split("…"))
        if len(part) > 3 and part not in source
    ]
    assert len(MESSAGES) > 40
    assert not unknown


def test_the_reports_on_the_page_about_hangs_are_those_of_the_source() -> None:
    page, source = " ".join((DOCS / "howto" / "hang.md").read_text().split()), strings_of_the_source()
    for part in (
        "agents wait for each other, and none can go on",
        "it waits in no call of Shoal's",
        "; it gives up after",
    ):
        assert part in page and part in source


def test_the_page_of_environment_variables_is_current() -> None:
    """``tests/test_config.py`` checks that the table has each variable that the library reads."""
    written = runpy.run_path(str(ROOT / "tools" / "environment_page.py"))["page"]()
    assert (DOCS / "environment.md").read_text() == written, "run: python tools/environment_page.py"
    assert '"SHOAL_BUILD_NATIVE"' in (ROOT / "hatch_build.py").read_text()


def test_the_page_of_the_command_line_is_current() -> None:
    written = runpy.run_path(str(ROOT / "tools" / "command_line_page.py"))["page"]()
    assert (DOCS / "command-line.md").read_text() == written, "run: python tools/command_line_page.py"


@pytest.mark.parametrize("page", sorted((DOCS / "howto").glob("*.md")), ids=lambda page: page.stem)
def test_the_commands_of_instructions_have_the_options_they_use(page: Path) -> None:
    """``shoal run --option``: the subcommand has it, by docs/command-line.md."""
    sections = dict(re.findall(r"^#+ `?shoal (\w+).*?\n(.*?)(?=^#+ |\Z)", COMMANDS, re.DOTALL | re.MULTILINE))
    unknown = [
        (command, option)
        for command, rest in re.findall(r"\bshoal (\w+)((?: +[^\s`|#]+)*)", page.read_text())
        if command in sections
        for option in re.findall(r"(?<= )--[\w-]+", rest)
        if option not in sections[command]
    ]
    assert {"run", "doctor", "report", "status"} <= set(sections)
    assert not unknown
