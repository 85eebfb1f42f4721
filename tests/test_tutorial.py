"""The notebooks of the tutorial: each runs, shows plots, and checks what its text claims."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "tutorial").glob("[0-9]*.md"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
EXECUTED = ("01-averaging",)
"""These are executed by `make test`, too; the others by `make docs` and the slow tests."""


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tutorial", ROOT / "tools" / "tutorial.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page.stem in EXECUTED else pytest.mark.slow, id=page.stem) for page in PAGES],
)
def test_the_notebook_runs_without_a_warning_and_shows_plots(page: Path) -> None:
    """In a separate process. Skipped if `make docs` has just executed the same page with the same package."""
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "tools" / "tutorial.py", page.stem], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    notebook = json.loads((ROOT / "out" / "tutorial" / f"{page.stem}.ipynb").read_text())
    assert [cell["source"] for cell in code_of(notebook)] == re.findall(
        r"^```python\n(.*?)\n```$", page.read_text(), re.DOTALL | re.MULTILINE
    )
    plots = [one for cell in code_of(notebook) for one in cell["outputs"] if "data" in one]
    assert 1 <= len(plots) <= 4
    assert all(one["data"]["text/plain"] for one in plots)  # their titles, which the site shows to screen readers


@each_page
def test_the_notebook_has_its_parts(page: Path) -> None:
    text = page.read_text()
    cells = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    learn = re.search(r"^You learn\n\n((?:- .*\n(?:  .*\n)*)+)", text, re.MULTILINE)
    assert learn is not None and len(re.findall(r"^- ", learn[1], re.MULTILINE)) == 3
    assert re.search(r"\$\$.*?\$\$|\| \$x", text, re.DOTALL), "an equation"
    assert re.search(r"\]\(https://(arxiv|doi)\.org/", text), "its source"
    assert max(len(cell.splitlines()) for cell in cells) <= 30
    assert sum(cell.count("assert ") for cell in cells) >= 3
    for cell in cells:
        if ".subplots(" in cell and "topology.draw" not in cell:
            assert all(part in cell for part in ("title=", "ylabel=", "legend("))
    exercises = text.partition("## Exercises\n")[2]
    assert len(re.findall(r"^\d\. ", exercises, re.MULTILINE)) == 2
    assert "\nReference: " in exercises


@each_page
def test_the_notebook_is_in_the_menu_and_the_list(page: Path) -> None:
    assert f": tutorial/{page.name}\n" in (ROOT / "mkdocs.yml").read_text()
    assert f"]({page.name})" in (page.parent / "README.md").read_text()


def test_outputs_and_figures_are_below_their_cell(program: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "1.md"
    page.write_text(
        "# A\n\n[b](../topology.md#graphs), [c](02-x.md)\n\n```python\nx = 3\nprint(x)\n```\n\n```python\n"
        "import matplotlib.pyplot as plt\n\nfigure, ax = plt.subplots()\nax.set_title('Line')\n```\n\nEnd\n"
    )
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.figure()  # another test's, left open
    notebook = program.execute(page)
    first, second = code_of(notebook)
    assert [one["text"] for one in first["outputs"]] == ["3\n"]
    assert [one["data"]["text/plain"] for one in second["outputs"]] == ["Line"]
    links = "[b](https://shoal-project.github.io/shoal/topology/#graphs), [c](02-x.ipynb)"
    assert [cell["cell_type"] for cell in notebook["cells"]] == ["markdown", "code", "markdown", "code", "markdown"]
    assert notebook["cells"][0]["source"] == f"# A\n\n{links}"
    written = tmp_path / "1.ipynb"
    written.write_text(json.dumps(notebook))
    assert program.is_current(page, written)
    page.write_text(page.read_text().replace("x = 3", "x = 4"))
    assert not program.is_current(page, written)


def test_a_check_that_fails_ends_the_execution_and_names_the_line(program: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "1.md"
    page.write_text("# A\n\n```python\nx = 3\n```\n\nText\n\n```python\n\nassert x > 3\n```\n")
    with pytest.raises(AssertionError) as caught:
        program.execute(page)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno) == (str(page), 11)
