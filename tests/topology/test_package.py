"""The layer as a whole: its names, what it imports, and that its page in the docs tells the truth."""

import ast
import doctest
import re
import sys
from pathlib import Path

import networkx as nx
import pytest

import shoal.topology
import shoal.topology_util

PACKAGE = Path(shoal.topology.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / f"{name}.md" for name in ("topology", "schedules", "topology-analysis")]

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


LEVELS = ["core", "families", "analysis", "drawing"]
"""Modules import from their own level and those before it; the core is what lies in the package itself."""
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported(module):
    """The packages that a module imports, also inside functions and for types only: of the topology, its modules."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            folder = module.parents[node.level - 1]
            below = folder.joinpath(*(node.module or "").split("."))
            names = [below / alias.name for alias in node.names]
            results = {path if path.is_dir() or path.with_suffix(".py").exists() else below for path in names}
            yield from results
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).split(".")[0]


def level(path):
    inside = path.relative_to(PACKAGE).parts
    return LEVELS.index(inside[0] if inside[0] in LEVELS else "core")


@pytest.mark.parametrize("name", BLUEFOGS_NAMES)
def test_topology_util_has_bluefogs_names(name):
    assert getattr(shoal.topology_util, name) is getattr(shoal.topology, name)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_topology_imports_nothing_from_the_rest_of_shoal(module):
    allowed = {"networkx", "numpy", *sys.stdlib_module_names}
    if module == PACKAGE / "drawing" / "__init__.py":
        allowed |= {"matplotlib"}
    for result in imported(module):
        assert result.is_relative_to(PACKAGE) and result != PACKAGE if isinstance(result, Path) else result in allowed


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_inside_topology_follow_the_layers(module):
    above = [path for path in imported(module) if isinstance(path, Path) and level(path) > level(module)]
    assert not above


def test_modules_of_topology_have_no_circular_imports():
    graph = nx.DiGraph(
        (module.with_suffix(""), path)
        for module in MODULES
        if module.name != "__init__.py"
        for path in imported(module)
        if isinstance(path, Path)
    )
    assert graph.number_of_edges() > len(MODULES)
    assert not list(nx.simple_cycles(graph))


def test_matplotlib_is_imported_only_inside_functions():
    tree = ast.parse((PACKAGE / "drawing" / "__init__.py").read_text())
    at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [node for node in at_import if "matplotlib" in ast.unparse(node)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_the_page_print_their_documented_output(page):
    text = page.read_text()
    # Blank the fences and the prose, so that line numbers in a failure are those of the page.
    inside, kept = False, []
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```pycon"
            kept.append("")
        else:
            kept.append(line if inside else "")
    example = doctest.DocTestParser().get_doctest("\n".join(kept), {}, page.name, str(page), 0)
    assert len(example.examples) >= 8
    failures: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)  # it would read pytest's own -v otherwise
    runner.run(example, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGES[1].read_text(), re.DOTALL))
def test_the_scripts_of_the_page_about_schedules_run(code):
    if "import" in code:
        exec(code, {})


def test_every_public_name_is_on_the_page():
    words = {word for page in PAGES for word in re.findall(r"\w+", page.read_text())}
    public = {name for name in vars(shoal.topology) if not name.startswith("_")}
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert public - modules - words == set()
