"""A table of how many lines of each folder the tests run, and the modules of which they run too few.

    coverage json -o coverage.json && python tools/covered.py coverage.json
    python tools/covered.py coverage.json --under 90

`make coverage` runs the tests and calls this.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple


class Lines(NamedTuple):
    """How many lines there are to run, and how many of them a test has run."""

    there: int
    run: int

    @property
    def share(self) -> float:
        """In percent."""
        return 100.0 * self.run / self.there if self.there else 100.0


def of_modules(report: Mapping[str, object]) -> dict[str, Lines]:
    """The lines of each module, from the report that ``coverage json`` writes; modules without lines are left out."""
    files = report["files"]
    assert isinstance(files, dict)
    found = {}
    for name, file in files.items():
        path = PurePath(name)
        if "shoal" in path.parts[:-1] and file["summary"]["num_statements"]:
            within = path.parts[len(path.parts) - 1 - path.parts[::-1].index("shoal") :]
            found["/".join(within)] = Lines(file["summary"]["num_statements"], file["summary"]["covered_lines"])
    return found


def of_folders(modules: Mapping[str, Lines]) -> dict[str, Lines]:
    """The sums over the modules of each room: ``shoal/engine``, and ``shoal`` for those in none."""
    sums: dict[str, list[Lines]] = defaultdict(list)
    for name, lines in modules.items():
        sums["/".join(name.split("/")[:-1][:2])].append(lines)
    return {name: Lines(sum(one.there for one in of), sum(one.run for one in of)) for name, of in sorted(sums.items())}


def table(rows: Mapping[str, Lines]) -> str:
    """Aligned columns: the name, the lines, those that no test ran, and the share of those that one did."""
    width = max(map(len, rows), default=0)
    lines = [f"{'':{width}}  lines  not run  run"]
    lines += [f"{name:{width}}  {of.there:5}  {of.there - of.run:7}  {of.share:3.0f}%" for name, of in rows.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="which folders and modules the tests run too little of")
    parser.add_argument("report", type=Path, help="what `coverage json` has written")
    parser.add_argument("--under", type=float, default=80.0, help="list modules with less than this share, in percent")
    args = parser.parse_args(arguments)
    modules = of_modules(json.loads(args.report.read_text()))
    print(table({**of_folders(modules), "together": Lines(*map(sum, zip(*modules.values(), strict=True)))}))
    few = {name: lines for name, lines in sorted(modules.items()) if lines.share < args.under}
    print(f"\nModules of which less than {args.under:g}% of the lines are run:" + ("" if few else " none"))
    if few:
        print(table(few))


if __name__ == "__main__":
    main()
