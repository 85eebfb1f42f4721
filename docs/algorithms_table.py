"""Writes the table of docs/algorithm-catalog.md from the catalog: ``python docs/algorithms_table.py``."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.algorithms import CATALOG, Entry

PAGE = Path(__file__).with_name("algorithm-catalog.md")
BEGIN, END = "<!-- table: written by algorithms_table.py -->\n", "<!-- end of the table -->"


def row(entry: Entry) -> str:
    example = entry.example()
    needs = ", ".join(dict.fromkeys(need.name for need in example.needs))
    source = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", example.source)
    finds = "exact" if entry.exact else "near"
    return f"| {entry.name} | `{example!r}` | {needs} | {entry.messages:.2g} | {finds} | {entry.use} | {source} |"


def table() -> str:
    columns = ["algorithm", "example", "needs", "sends", "finds", "use", "source"]
    rules = ["---:" if column == "sends" else "---" for column in columns]
    heads = [f"| {' | '.join(cells)} |" for cells in (columns, rules)]
    return "\n".join([*heads, *(row(entry) for entry in CATALOG.values())]) + "\n"


def page() -> str:
    """The page as it should be."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
