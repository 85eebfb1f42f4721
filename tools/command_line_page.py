#!/usr/bin/env python3
"""Writes docs/command-line.md, the reference of the command ``shoal``, from its parsers.

    PYTHONPATH=src python tools/command_line_page.py

``tests/test_reference_pages.py`` checks that the page is current.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from shoal.cli import COMMANDS, parser_of

PAGE = Path(__file__).parents[1] / "docs" / "command-line.md"
HEAD = """\
# Command line

<!-- Written by tools/command_line_page.py. -->

The command `shoal` has these subcommands. `shoal COMMAND --help` prints the options of one.
"""


def page() -> str:
    """The Markdown of the page."""
    parts = [HEAD, "| command | purpose |\n| --- | --- |"]
    parts += [f"| [`shoal {name}`](#shoal-{name}) | {summary} |" for name, (_, summary) in COMMANDS.items()]
    lines = ["\n".join(parts[1:])]
    for name in COMMANDS:
        lines += _of_parser(parser_of(name)[1], 2)
    return "\n\n".join([HEAD.rstrip(), *lines]) + "\n"


def _of_parser(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield f"{'#' * level} {parser.prog}"
    if parser.description:
        yield _text(parser.description)
    groups = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    rows = [_row(one, parser) for one in parser._actions if one not in groups and one.help != argparse.SUPPRESS]
    rows = [row for row in rows if row]
    if rows:
        yield "\n".join(["| argument | meaning |", "| --- | --- |", *rows])
    for group in groups:
        for command in group.choices.values():
            yield from _of_parser(command, level + 1)


def _row(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    if isinstance(action, argparse._HelpAction):
        return ""
    names = action.option_strings or [""]
    value = "" if action.nargs == 0 else _value(action)
    shown = ", ".join(f"`{f'{name} {value}'.strip()}`" for name in names)
    # As argparse fills in %(default)s, without a formatter, whose text depends on Python's version.
    help_text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return f"| {shown.replace('|', chr(92) + '|')} | {_text(help_text).replace('|', chr(92) + '|')} |"


def _value(action: argparse.Action) -> str:
    metavar = action.metavar
    if isinstance(metavar, tuple):
        return " ".join(metavar)
    if metavar is None:
        choices = list(action.choices or ())
        name = action.dest if not action.option_strings else action.dest.upper()
        metavar = "{" + ",".join(map(str, choices)) + "}" if choices else name
    if action.nargs == argparse.REMAINDER:
        return f"[{action.dest} ...]"
    if action.nargs == "*":
        return f"[{metavar} ...]"
    if action.nargs == "+":
        return f"{metavar} [...]"
    return f"[{metavar}]" if action.nargs == "?" else metavar


def _text(text: str) -> str:
    """On one line, without what Markdown would take for HTML or emphasis."""
    return " ".join(text.split()).replace("<", "&lt;").replace("*", r"\*").replace("__", r"\_\_")


if __name__ == "__main__":
    PAGE.write_text(page())
