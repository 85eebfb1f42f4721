"""Links between the pages lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").glob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
    *(ROOT / "reproduce").glob("*.md"),
]


LONG = {"algorithm-catalog.md", "command-line.md", "topologies/README.md", "topologies/papers.md"}
"""Pages that programs write."""


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.relative_to(ROOT).parts[0] in ("docs", "reproduce")],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_pages_are_short(page: Path) -> None:
    """A page has under 2,000 words, and instructions for one task under 1,000."""
    name = page.relative_to(ROOT).as_posix().removeprefix("docs/")
    assert name in LONG or len(page.read_text().split()) < (1000 if name.startswith("howto/") else 2000)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target) or target.startswith("../reference/"):  # made by `make docs`, which checks these
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_extras_are_installed_from_a_checkout(page: Path) -> None:
    """Shoal is not on PyPI: where it is not installed yet, ``shoal[demo]`` would be another package."""
    assert not re.findall(r"pip install '?shoal\b.*", page.read_text())


EXAMPLES = {"average.py", "src/shoal/X/y.py", "tests/X/test_y.py"}
"""Files that a page tells its reader to write, and patterns of names."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_files_named_on_a_page_exist(page: Path) -> None:
    """``execution/sender.py``, also without its folder."""
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text())) - EXAMPLES
    folders = ["src", "tests", "benchmarks", "reproduce", "examples", "docs", "tools"]
    paths = [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    files = [f"/{path.relative_to(ROOT)}" for path in paths]
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


def test_headings_cited_in_the_code_exist() -> None:
    """``docs/training.md, "Adam on heterogeneous data"``: in messages, docstrings, and the heads of manifests."""
    cited = []
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "deploy").rglob("*.yaml"), ROOT / "Dockerfile"]:
        text = re.sub(r"['\"]?\n\s*#?\s*f?['\"]?", " ", path.read_text())
        cited += [(path.name, *result) for result in re.findall(r'(docs/[\w/-]+\.md), "([^"\n]+)"', text)]
        for page in re.findall(r"docs/[\w/-]+\.md", text):
            assert (ROOT / page).exists(), (path, page)
    assert len(cited) >= 5
    for name, page, heading in cited:
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert re.sub(r"\s+", " ", heading) in headings, (name, page, heading)
