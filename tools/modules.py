#!/usr/bin/env python3
"""The list of all modules, with the first sentence of each docstring: ``python tools/modules.py [FOLDER ...]``.

``make docs`` makes a page of it. The order of the folders is that of docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "shoal"


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?(?:shoal\.)?([^`]*)`", r"`\1`", text).replace("``", "`")
    sentence = re.match(r".*?\.(?=\s|$)", text)
    return (sentence[0] if sentence else text).rstrip(".:")


def folders() -> list[str]:
    """The folders of the package, from the top to the bottom."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.search(r"## Source layout.*?```(.*?)```", page, re.DOTALL)
    assert listed is not None, "docs/architecture.md has no block under Source layout"
    return re.findall(r"^  (\w+)/", listed[1], re.MULTILINE)


def page(chosen: list[str] | None = None) -> str:
    """The list in Markdown: of some folders, or of all and the modules of the package itself."""
    lines = ["# Modules", "", "`tools/modules.py` writes this page from the docstrings of the modules.", ""]
    for folder in chosen or ["", *folders()]:
        lines += [f"## {folder or 'shoal'}", "", "| module | contents |", "| --- | --- |"]
        inside = (PACKAGE / folder).rglob("*.py") if folder else PACKAGE.glob("*.py")
        for path in sorted(inside):
            text = first_sentence(path).replace("|", "\\|")
            if text:
                lines.append(f"| `{path.relative_to(PACKAGE)}` | {text} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(sys.argv[1:]))
