"""The layer as a whole: its names, what it imports, and that its page in the docs tells the truth."""

import ast
import doctest
import re
import sys
from pathlib import Path

import pytest

import shoal.topology
import shoal.topology_util

PACKAGE = Path(shoal.topology.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "topology.md"

BLUEFOGS_NAMES = [
    "ExponentialTwoGraph",
    "ExponentialGraph",
    "SymmetricExponentialGraph",
    "RingGraph",
    "StarGraph",
    "MeshGrid2DGraph",
    "FullyConnectedGraph",
    "IsTopologyEquivalent",
    "IsRegularGraph",
    "GetRecvWeights",
    "GetSendWeights",
    "GetDynamicOnePeerSendRecvRanks",
    "GetExp2DynamicSendRecvMachineRanks",
    "GetInnerOuterRingDynamicSendRecvRanks",
    "GetInnerOuterExpo2DynamicSendRecvRanks",
]


def imported_packages(module):
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level if node.level else str(node.module).split(".")[0]


@pytest.mark.parametrize("name", BLUEFOGS_NAMES)
def test_topology_util_has_bluefogs_names(name):
    assert getattr(shoal.topology_util, name) is getattr(shoal.topology, name)


@pytest.mark.parametrize("module", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_topology_imports_nothing_from_the_rest_of_shoal(module):
    allowed = {"networkx", "numpy", ".", *sys.stdlib_module_names}
    if module.name == "drawing.py":
        allowed |= {"matplotlib"}
    assert set(imported_packages(module)) <= allowed


def test_matplotlib_is_imported_only_inside_functions():
    tree = ast.parse((PACKAGE / "drawing.py").read_text())
    at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [node for node in at_import if "matplotlib" in ast.unparse(node)]


def test_the_examples_of_the_page_print_what_they_say():
    text = PAGE.read_text()
    # Blank the fences and the prose, so that line numbers in a failure are those of the page.
    inside, kept = False, []
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```pycon"
            kept.append("")
        else:
            kept.append(line if inside else "")
    example = doctest.DocTestParser().get_doctest("\n".join(kept), {}, PAGE.name, str(PAGE), 0)
    assert len(example.examples) >= 10
    failures: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)  # it would read pytest's own -v otherwise
    runner.run(example, out=failures.append)
    assert not failures, "".join(failures)


def test_every_public_name_is_on_the_page():
    words = set(re.findall(r"\w+", PAGE.read_text()))
    public = {name for name in vars(shoal.topology) if not name.startswith("_")}
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert public - modules - words == set()
