"""Executes the tutorial: each page of docs/tutorial becomes a Jupyter notebook with its outputs, in out/tutorial.

    python tools/tutorial.py                   all pages, each in a process of its own, two at a time
    python tools/tutorial.py 03-gradient-descent --out FOLDER

A page is Markdown, and each of its ```python blocks is a cell. So GitHub shows it, its diffs are readable, and the
checks of pages (links, English, format) read it like any other. `make docs` calls this program with the Python of
``.venv``, which has torch and matplotlib. tools/documentation.py then adds the outputs to the pages of the site, and
the notebooks as downloads. No output is committed, so none can be out of date. A page is executed again only if the
page, this program, the package or torch has changed: `make docs` and the test of the pages, in one run of CI, execute
each page once.

Rejected: committed .ipynb files, because their diffs are JSON and pictures; jupytext with mkdocs-jupyter, because
nbconvert and a kernel bring some fifty packages. A notebook is JSON, so this program needs no package of Jupyter.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "tutorial"
RESULTS = ROOT / "out" / "tutorial"
SITE = "https://shoal-project.github.io/shoal/"
REPOSITORY = "https://github.com/shoal-project/shoal/blob/main/"
CELL = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    return sorted(PAGES.glob("[0-9]*.md"))


def execute(page: Path) -> dict[str, Any]:
    """The notebook of a page, with its outputs.

    Raises:
        Exception: That of a cell; its traceback has the line numbers of the page.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.close("all")  # a figure that the process has left open would stand below the first cell
    executed, text = key(page), page.read_text()
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, end = [], 0
    for number, cell in enumerate(CELL.finditer(text), 1):
        cells.append(_prose(text[end : cell.start()]))
        above = "\n" * (text.count("\n", 0, cell.start()) + 1)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(above + cell[1], str(page), "exec"), names)
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
        cells.append(
            {
                "cell_type": "code",
                "execution_count": number,
                "metadata": {},
                "outputs": outputs + _figures(),
                "source": cell[1].rstrip("\n"),
            }
        )
        end = cell.end()
    cells.append(_prose(text[end:]))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "executed": executed}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}


def key(page: Path) -> str:
    """A hash of everything that an execution depends on."""
    found = hashlib.sha256(importlib.metadata.version("torch").encode())
    package = (one for one in (ROOT / "src").rglob("*") if one.suffix in (".py", ".cpp", ".h"))
    for path in [page, Path(__file__), *sorted(package)]:
        found.update(path.read_bytes())
    return found.hexdigest()


def is_current(page: Path, notebook: Path) -> bool:
    return notebook.exists() and json.loads(notebook.read_text())["metadata"].get("executed") == key(page)


def _prose(text: str) -> dict[str, Any]:
    """A cell of text. Its links to other pages lead to the site, because a notebook is read anywhere."""
    text = re.sub(r"\]\((\d[\w-]*)\.md\)", r"](\1.ipynb)", text)
    text = re.sub(r"\]\(\.\./\.\./", f"]({REPOSITORY}", text)
    text = re.sub(r"\]\(\.\./([\w/-]+?)(?:/README)?\.md", rf"]({SITE}\1/", text)
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip("\n")}


def _figures() -> list[dict[str, Any]]:
    """The open figures, which are closed, as Jupyter shows them below a cell."""
    import matplotlib.pyplot as plt

    shown = []
    for number in plt.get_fignums():
        figure, picture = plt.figure(number), io.BytesIO()
        figure.savefig(picture, format="png", dpi=100, bbox_inches="tight", metadata={"Software": None})
        title = "; ".join(filter(None, (axes.get_title() for axes in figure.axes)))
        data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": title}
        shown.append({"output_type": "display_data", "data": data, "metadata": {}})
        plt.close(figure)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute pages of the tutorial.")
    parser.add_argument("page", nargs="?", help="the name of a page, without .md; all pages if not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the notebooks")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.page:
        page, notebook = PAGES / f"{options.page}.md", options.out / f"{options.page}.ipynb"
        if not is_current(page, notebook):
            notebook.write_text(json.dumps(execute(page), indent=1, ensure_ascii=False) + "\n")
        return
    # One thread of torch for each of two processes: with more they would compete for two cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(page: Path) -> bool:
        command = [sys.executable, __file__, page.stem, "--out", str(options.out)]
        return subprocess.run(command, env=environment).returncode == 0

    with ThreadPoolExecutor(2) as two:
        failed = [page.stem for page, good in zip(pages(), two.map(run, pages()), strict=True) if not good]
    if failed:
        sys.exit(f"pages of the tutorial failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
