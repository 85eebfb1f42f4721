"""The layering: imports go one way, down the list of folders in docs/architecture.md, and no file writes another's
fields."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import shoal

PACKAGE = Path(shoal.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imported(module: str) -> Iterator[str]:
    """The modules of the package that one imports: at its top, in functions, and for types only."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                yield name if name in MODULES else origin
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def import_graph() -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(MODULES)
    graph.add_edges_from((module, other) for module in MODULES for other in imported(module) if other in MODULES)
    graph.remove_edges_from([(module, other) for module, other in graph.edges if other == "shoal"])  # __version__
    return graph


def room_of(module: str) -> str:
    return ([*module.split("."), ""])[1]


def rooms() -> list[str]:
    """From the top to the bottom, as the page lists them."""
    listed = re.search(r"## Source layout.*?```(.*?)```", PAGE.read_text(), re.DOTALL)
    assert listed is not None
    return [one.removesuffix(".py") for one in re.findall(r"^  (\w+)(?:/|\.py)", listed[1], re.MULTILINE)]


def test_there_are_no_circular_imports() -> None:
    circles = [sorted(part) for part in nx.strongly_connected_components(import_graph()) if len(part) > 1]
    assert not circles


def test_imports_follow_the_list_of_folders() -> None:
    order = {room: at for at, room in enumerate(rooms())}
    up = [
        f"{module} -> {other}"
        for module, other in import_graph().edges
        if room_of(module) in order and order[room_of(module)] > order.get(room_of(other), len(order))
    ]
    assert not up


def test_every_folder_is_in_the_list() -> None:
    assert {room_of(module) for module in MODULES} - {"", "__main__", "_version"} <= set(rooms())


@pytest.mark.parametrize("room", ["engine", "windows"])
def test_no_module_assigns_attributes_of_its_arguments(room: str) -> None:
    """``self.engine.closing = True``: the owner of the attribute should do that itself."""
    results = []
    for path in sorted((PACKAGE / room).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute):
                    results.append(f"{path.name}:{target.lineno} {ast.unparse(target)}")
    assert not results


OF_THE_HOUSE = {
    *("wheel", "hearing", "departures", "hearsay", "believed", "owed", "debtors", "fate", "seat", "seats", "census"),
    *("lend", "lends", "lent", "lending", "strangers", "stranger", "card", "cards", "heap", "bundled", "parcel"),
}
"""Words of a former dialect, which names no longer use."""


def test_names_are_the_fields_words() -> None:
    result = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                words = re.split(r"_|(?<=[a-z])(?=[A-Z])", token.string)
                if token.type == tokenize.NAME and OF_THE_HOUSE & {word.lower() for word in words}:
                    result.add(f"{path.relative_to(PACKAGE)}:{token.start[0]} {token.string}")
    assert not result


FORBIDDEN_STEMS = {
    *(
        "said",
        "told",
        "doing",
        "later",
        "missed",
        "handing",
        "carrying",
        "lobby",
        "doors",
        "place",
        "asking",
        "outside",
    ),
    *("reunion", "introductions", "keeping", "joining", "together", "entering", "begun", "finished", "inbox"),
}
"""File names that say nothing to a reader who knows distributed systems."""
MOST_CLASSES_WITH_TWO_MEANINGS = 5


def test_file_names_are_the_fields_terms() -> None:
    results = [module for module, path in MODULES.items() if FORBIDDEN_STEMS & set(path.stem.split("_"))]
    assert not results


def test_class_names_have_one_meaning() -> None:
    """Except for a few public names, and those of other libraries in ``compat``."""
    where: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, set()).add(module)
    twice = {name: sorted(modules) for name, modules in where.items() if len(modules) > 1}
    assert len(twice) <= MOST_CLASSES_WITH_TWO_MEANINGS, twice
