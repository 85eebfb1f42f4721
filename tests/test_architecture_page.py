"""The page docs/architecture.md lists the folders of the package, is short, and names files that exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = Path(shoal.__file__).parent
MODULES = runpy.run_path(str(ROOT / "tools" / "modules.py"))
FOLDERS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_every_folder_is_listed_once() -> None:
    assert sorted(MODULES["folders"]()) == FOLDERS


def test_the_page_has_150_lines_at_most_and_one_picture() -> None:
    assert len(PAGE.splitlines()) <= 150
    assert PAGE.count("```") == 4  # the picture, and the list of folders


def test_the_files_named_on_the_page_exist() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE)
    assert len(named) > 30
    assert [name for name in named if not (PACKAGE / name).is_file() and not (ROOT / name).is_file()] == []


def test_the_page_has_ten_tasks() -> None:
    tasks = PAGE.split("## Ten tasks and where to begin")[1].split("\n## ")[0]
    assert len(re.findall(r"^\| \w.* \| `[\w/]+\.py` \| .* \|$", tasks, re.MULTILINE)) == 10


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_list_of_modules_has_every_module_with_its_sentence(folder: str) -> None:
    rows = dict(re.findall(r"^\| `([\w/.]+)` \| (.+) \|$", MODULES["page"]([folder]), re.MULTILINE))
    existing = {str(path.relative_to(PACKAGE)) for path in (PACKAGE / folder).rglob("*.py")}
    assert set(rows) == {name for name in existing if (PACKAGE / name).read_text().strip()}
