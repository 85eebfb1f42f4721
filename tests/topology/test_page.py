"""The page that shows every topology: it is what the code makes, all pictures are there, and its example works."""

import importlib.util
import re
import struct
import sys
from pathlib import Path

import pytest

from shoal.topology import CATALOG, Topology
from support.topology_suite import run_all

DOCS = Path(__file__).parents[2] / "docs" / "topologies"
PAGE = DOCS / "README.md"


def load(name, path):
    """The module in this file, importable by its name, as pickling needs it."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate():
    yield load("generate", DOCS / "generate.py")
    del sys.modules["generate"]


@pytest.fixture
def copy(generate, monkeypatch, tmp_path):
    """The page and its pictures where a test may change them, and the text that the code makes said once."""
    for path in DOCS.iterdir():
        if path.suffix in (".md", ".png"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(generate, "HERE", tmp_path)
    monkeypatch.setattr(generate, "PAGE", tmp_path / PAGE.name)
    monkeypatch.setattr(generate, "page", PAGE.read_text)
    return tmp_path


@pytest.fixture
def example(tmp_path):
    """The topology of the page's example, registered as long as the test runs."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "page_example.py"
    path.write_text(code)
    before = set(CATALOG)
    load("page_example", path)
    (name,) = set(CATALOG) - before
    yield CATALOG[name]
    del CATALOG[name], sys.modules["page_example"]


def test_the_page_equals_the_generated_one(generate, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().out


def test_every_topology_has_a_section_with_its_picture():
    text = PAGE.read_text()
    for name in CATALOG:
        assert re.search(rf"^## {name}\n\n!\[{name}, .*\]\({name}\.png\)$", text, re.MULTILINE)


def test_links_in_the_page_have_targets():
    text = PAGE.read_text()
    headings = {line[3:] for line in text.splitlines() if line.startswith("## ")}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings
        else:
            assert (DOCS / target).exists()


def test_pictures_are_small():
    sizes = [path.stat().st_size for path in DOCS.glob("*.png")]
    assert sum(sizes) < 700_000


def test_a_line_that_is_not_generated_fails_the_check_with_its_number(generate, copy, capsys):
    page = copy / PAGE.name
    lines = page.read_text().splitlines(keepends=True)
    page.write_text("".join([*lines[:41], "nonsense\n", *lines[42:]]))
    assert generate.main(["--check"]) == 1
    assert f"{page}:42 says\n  nonsense\nand the code makes" in capsys.readouterr().out


def test_a_missing_or_additional_picture_fails_the_check(generate, copy, capsys):
    (copy / "ring.png").rename(copy / "necklace.png")
    assert generate.main(["--check"]) == 1
    output = capsys.readouterr().out
    assert f"{copy / 'ring.png'} is missing" in output
    assert f"{copy / 'necklace.png'} is of no topology" in output


def test_generating_again_restores_page_and_pictures(generate, copy, monkeypatch):
    few = {name: CATALOG[name] for name in ("ring", "one-peer-hypercube")}
    monkeypatch.setattr(generate, "CATALOG", few)
    (copy / "ring.png").unlink()
    (copy / PAGE.name).unlink()
    assert generate.main([]) == 0
    assert {path.stem for path in copy.glob("*.png")} == set(few)
    for name in few:
        header = (copy / f"{name}.png").read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", header[16:])
        assert width > 300 and height > 100
    assert generate.main(["--check"]) == 0


def test_the_example_of_the_page_takes_at_most_twenty_lines():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


def test_the_example_of_the_page_passes_the_property_suite(example):
    run_all(example)


def test_the_example_of_the_page_pairs_all_agents_once(example):
    for size in range(1, 10):
        schedule = example.schedule(size)
        met = [
            (rank, peer)
            for t in range(schedule.period)
            for rank in range(size)
            for peer in schedule.mixing(t, rank).source_ranks
        ]
        assert sorted(met) == [(rank, peer) for rank in range(size) for peer in range(size) if rank != peer]


def test_the_example_of_the_page_gets_a_section_and_a_picture_of_its_own(example, generate):
    assert isinstance(example, Topology)
    assert "round-robin, 8 agents" in generate.section(example, generate.analyses(example))
    assert generate.picture(example).startswith(b"\x89PNG")
