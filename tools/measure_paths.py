"""Measures how far a reader has to follow a call, and how large the parts of the package are.

    python tools/measure_paths.py            # both tables
    python tools/measure_paths.py --sizes    # only what is counted in the source, without agents

Calls are those of Python functions of the package in one round on rank 0, in the thread of the script, after 20 rounds;
the median of 20 rounds. Files are those that these functions are in. Two agents, shared memory.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import networkx as nx

PACKAGE = Path(__file__).parent.parent / "src" / "shoal"
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
ROUNDS = 20
BELOW_THE_ENGINE = {"engine", "execution", "fault_tolerance"}
"""Folders whose modules may use each other's parts."""


def median_path(call: Callable[[], Any]) -> tuple[int, int]:
    """The calls of one round, and the files that they are in."""
    for _ in range(ROUNDS):
        call()
    calls, files = [], []
    for _ in range(ROUNDS):
        seen: Counter[str] = Counter()

        def note(frame: FrameType, event: str, _: Any, seen: Counter[str] = seen) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
                seen[frame.f_code.co_filename] += 1

        sys.setprofile(note)
        call()
        sys.setprofile(None)
        calls.append(seen.total())
        files.append(len(seen))
    return int(statistics.median(calls)), int(statistics.median(files))


def paths_of_an_agent() -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """As one of two agents: what some calls pass, and the largest circles of parts."""
    import torch

    import shoal
    from shoal.runtime.agent import current

    shoal.init()
    shoal.set_topology(shoal.topology.RingGraph(2))
    small, large = torch.ones(1), torch.ones(1 << 18)
    model = torch.nn.Linear(4, 4)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    window = shoal.windows.create(torch.ones(1), "measured")

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    def put_and_update() -> None:
        window.put()
        window.update()

    found = {
        "neighbor_allreduce, 4 bytes": median_path(lambda: shoal.neighbor_allreduce(small, name="small")),
        "neighbor_allreduce, 1 MiB": median_path(lambda: shoal.neighbor_allreduce(large, name="large")),
        "allreduce, 4 bytes": median_path(lambda: shoal.allreduce(small, name="all")),
        "optimizer step, one small bucket": median_path(step),
        "window put and update, 4 bytes": median_path(put_and_update),
    }
    shoal.barrier()
    first, engine = shoal.rank() == 0, current("measure_paths").engine
    circles = {
        "largest circle of parts of an agent at run time": largest_circle(engine),
        "the same without references to a folder above": largest_circle(engine, upwards=False),
    }
    shoal.shutdown()
    return (found, circles) if first else ({}, {})


def held(part: object) -> Iterator[object]:
    """The parts of an agent that a part has as attributes, also in containers; callbacks are not counted."""
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    values = [*getattr(part, "__dict__", {}).values(), *(getattr(part, name, None) for name in slots)]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, (list, tuple, set, deque)):
            values += value
        elif type(value).__module__.startswith("shoal.") and not isinstance(value, type):
            yield value


def levels() -> dict[str, int]:
    """The folders and modules of the package with their places in the list of docs/architecture.md, from the top."""
    listed = PAGE.read_text().partition("## Source layout")[2].partition("## ")[0]
    return {room: at for at, room in enumerate(re.findall(r"^  (\w+)(?:/|\.py)", listed, re.MULTILINE))}


def room_of(part: object) -> str:
    """The folder or module of the package that has the class of an object."""
    return type(part).__module__.split(".")[1]


def largest_circle(root: object, upwards: bool = True) -> int:
    """The number of classes in the largest circle of objects that hold each other, of all that ``root`` holds.

    Args:
        root: An object of the package.
        upwards: Count references from a folder to one above it, too. Imports never go upwards: such an object is one
            that the lower folder calls through a protocol of its own (a receiver of messages, a service), or keeps.
    """
    graph, seen, waiting, level = nx.DiGraph(), set[int](), [root], levels()
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            for other in held(part):
                if upwards or level[room_of(part)] <= level[room_of(other)]:
                    graph.add_edge(type(part).__name__, type(other).__name__)
                waiting.append(other)
    return max(map(len, nx.strongly_connected_components(graph)))


class Size(NamedTuple):
    """A number that is to become smaller, and where it was found."""

    number: int
    where: str = ""


def constructors_of(tree: ast.Module) -> Iterator[Size]:
    """The parameters of each constructor; not of optimizers, whose arguments are the user's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.endswith("Optimizer"):
            made = (part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
            for part in made:
                yield Size(len(part.args.args) + len(part.args.kwonlyargs) - 1, node.name)


def reaches_into_the_engine(node: ast.AST) -> bool:
    """Whether this is ``engine.<part>.<member>``."""
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)):
        return False
    owner = node.value.value
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return name in ("engine", "_engine")


def code_lines(text: str, tree: ast.Module) -> int:
    """The lines that are neither blank nor a comment, nor part of an import or of a string that stands by itself."""
    left = {at for at, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and (is_text or isinstance(node, (ast.Import, ast.ImportFrom))):
            left.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(left)


def sizes() -> dict[str, Size]:
    """What is counted in the source."""
    texts = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    code = sum(code_lines(text, trees[path]) for path, text in texts.items())
    folder, files = Counter(path.parent for path in texts).most_common(1)[0]
    longest = max(lines, key=lambda path: lines[path])
    outside = [node for path, tree in trees.items() if path.parts[0] not in BELOW_THE_ENGINE for node in ast.walk(tree)]
    names = (PACKAGE.parents[1] / "tests" / "public_names.txt").read_text().split()
    return {
        "modules": Size(len(texts)),
        "lines": Size(sum(lines.values())),
        "lines of code, without imports, comments and docstrings": Size(code),
        "files in the largest folder": Size(files, str(folder)),
        "lines of the longest module": Size(lines[longest], str(longest)),
        "parameters of the largest internal constructor": max(
            one for tree in trees.values() for one in constructors_of(tree)
        ),
        "uses of engine.<part>.<member> outside of the engine": Size(sum(map(reaches_into_the_engine, outside))),
        "names of shoal": Size(sum(name.count(".") == 1 for name in names)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", action="store_true", help="only what is counted in the source")
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        found = paths_of_an_agent()
        if found[1]:
            print(json.dumps(found), flush=True)
        return
    for what, size in sizes().items():
        print(f"{what:55} {size.number:6,}  {size.where}".rstrip())
    if not args.sizes:
        command = [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", "2", __file__, "--agent"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if run.returncode:
            raise SystemExit(run.stderr)
        paths, circles = json.loads(run.stdout.splitlines()[0])
        for what, circle in circles.items():
            print(f"{what:55} {circle:6,}")
        print(f"\n{'one round on rank 0':35} calls  files")
        for what, (calls, files) in paths.items():
            print(f"{what:35} {calls:5}  {files:5}")


if __name__ == "__main__":
    main()
