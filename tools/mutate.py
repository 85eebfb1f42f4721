"""Mutation testing: how many small defects do the tests of a file's own folder find?

    python tools/mutate.py                                      # 60 mutations of src/shoal, drawn with seed 0
    python tools/mutate.py src/shoal/engine --count 20 --seed 3
    python tools/mutate.py src/shoal/execution/fusion.py --list    # what would be tried, without a test
    python tools/mutate.py --pick 7 19 --seconds 900            # two of the default draw once more, with more time
    python tools/mutate.py src/shoal/ops/robust_rules.py --tests tests/ops/test_robust_rules.py -k trimmed

Each mutation changes one place of one source file: a comparison swapped, a sign flipped, a constant off by one, a
condition negated, a statement deleted, two arguments swapped, or a return value replaced. The draw depends only on the
seed, the paths and the sources. The tests run in a temporary copy of the repository, one mutation after another, and
stop at the first failure. First come the files named after the module, then those that name most of what it defines;
and tests over no transport or over threads come before the others.

A mutation is *killed* by a failed test that passes without the mutation, *survives* where all tests pass, and ends in a
*timeout* where they did not end in time: then nothing is known of it. A test that fails without the mutation too makes
it *unclear*. Where all are skipped, for lack of a package or a device, it is *untested*. Survivors are either gaps of
the tests or equivalent to the source: somebody has to read them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch._dynamo  # noqa: F401 - every optimizer imports it

ROOT = Path(__file__).resolve().parents[1]
SOURCES, TESTS = Path("src/shoal"), Path("tests")
COPIED = ("src", "tests", "tools", "docs", "examples", "benchmarks", "pyproject.toml", "README.md", "CHANGELOG.md")
_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
COMPARISONS = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add}
QUIET = ("log.", "warnings.")
"""Whose calls are not changed: the tests of what is logged are elsewhere."""
LIKELIEST = 4
"""Files that are run first, by themselves: to collect the tests of a folder takes longer than most failures."""
SYMMETRIC = ("max", "min", "torch.equal", "torch.maximum", "torch.minimum")


class Mutation(NamedTuple):
    """One change of one file: of its bytes from ``start`` to ``stop`` to ``new``."""

    path: Path
    line: int
    kind: str
    start: int
    stop: int
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.path}:{self.line} {self.kind}: {old[:70]}  ->  {new[:70]}"

    def of(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]


def mutations(path: Path, source: bytes) -> list[Mutation]:
    """All that this tool knows of one file."""
    starts = [0, *(found.end() for found in re.finditer(rb"\n", source))]
    found = []
    for node, kind, new in _changes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(new)
        text = f"({text})" if isinstance(new, ast.expr) else text
        found.append(Mutation(path, node.lineno, kind, start, stop, source[start:stop].decode(), text))
    return found


def _changes(node: ast.AST) -> Iterator[tuple[Any, str, ast.AST]]:
    """The nodes below one that can be changed: each with the kind of the change and what takes its place."""
    if isinstance(node, ast.Raise) and node.exc is not None:
        yield node, "statement deleted", ast.Pass()
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
        return  # texts and checks of types; of the first Python does not know the place
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return  # of a zip over what is equally long
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(QUIET):
        return
    yield from _of_expression(node)
    yield from _of_statement(node)
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_comment", "ctx"):
            continue
        for one in child if isinstance(child, list) else [child]:
            if isinstance(one, ast.AST):
                yield from _changes(one)


def _of_expression(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
            yield node, "comparison swapped", ast.Compare(left, [COMPARISONS[type(op)]()], [right])
        case ast.BinOp(left, op, right) if type(op) in SIGNS and not _is_text(left) and not _is_text(right):
            yield node, "sign flipped", ast.BinOp(left, SIGNS[type(op)](), right)
        case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield node, "sign flipped", operand
        case ast.Constant(bool(value)):
            yield node, "constant replaced", ast.Constant(not value)
        case ast.Constant(int(value)):
            yield node, "constant off by one", ast.Constant(value + 1)
        case ast.Call(func, [first, second, *rest], keywords):
            stars = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if not stars and ast.dump(first) != ast.dump(second) and ast.unparse(func) not in SYMMETRIC:
                yield node, "argument swapped", ast.Call(func, [second, first, *rest], keywords)
    test = getattr(node, "test", None)
    if isinstance(test, ast.expr) and not isinstance(test, ast.Compare | ast.Constant):
        yield test, "condition negated", ast.UnaryOp(ast.Not(), test)


def _of_statement(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    match node:
        case ast.Expr(ast.Call(func)) if not ast.unparse(func).startswith(QUIET):
            yield node, "statement deleted", ast.Pass()
        case ast.AugAssign() | ast.Delete() | ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield node, "statement deleted", ast.Pass()
        case ast.Return(ast.Compare() | ast.BoolOp() as value):
            yield node, "return replaced", ast.Return(ast.UnaryOp(ast.Not(), value))
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, "return replaced", ast.Return(ast.Constant(None))
    if isinstance(node, ast.AugAssign) and type(node.op) in SIGNS:
        yield node, "sign flipped", ast.AugAssign(node.target, SIGNS[type(node.op)](), node.value)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def drawn(paths: Sequence[Path], count: int, seed: int) -> list[Mutation]:
    """So many mutations, from each path in turn; each kind that a file has is equally likely."""
    draws, found = random.Random(seed), list[Mutation]()
    files = {path: sorted(path.rglob("*.py")) if path.is_dir() else [path] for path in paths}
    known = {path: [one for file in its for one in mutations(file, file.read_bytes())] for path, its in files.items()}
    while len(found) < count and any(known.values()):
        path = paths[len(found) % len(paths)]
        if known[path]:
            file = draws.choice(known[path]).path  # the longer the likelier
            kinds = sorted({one.kind for one in known[path] if one.path == file})
            kind = draws.choice(kinds)
            found.append(draws.choice([one for one in known[path] if (one.path, one.kind) == (file, kind)]))
            known[path].remove(found[-1])
    return found


def tests_of(path: Path, anywhere: bool) -> list[str]:
    """The test files of a source file's folder and its own ones, the likeliest to fail first.

    Its own ones have its name or a line of ``modules.txt``. If there are none, they are those that import it, in any
    folder; ``anywhere`` adds these in every case.
    """
    inside = path.relative_to(SOURCES).parts[:-1]
    folder = next(found for depth in range(len(inside), -1, -1) if (found := TESTS.joinpath(*inside[:depth])).is_dir())
    own = {name for name in re.findall(r"(?:def|class) (\w+)", path.read_text()) if name[0] != "_" and len(name) > 3}
    module = re.compile(rf"shoal\.{'.'.join(inside)}(\.| import .*\b){path.stem}\b")
    lines = re.findall(r"^(\S+\.py) (\S+)$", (TESTS / "modules.txt").read_text(), re.MULTILINE)
    its_own = {TESTS / test for name, test in lines if SOURCES / name == path}
    stem = f"test_{path.stem.strip('_')}"
    its_own |= set(TESTS.rglob(f"{stem}.py"))

    def rank(file: Path) -> tuple[bool, bool, int, int]:
        text = file.read_text()
        is_its_own = file in its_own or file.stem.startswith(stem)
        return not is_its_own, not module.search(text), -len(own & set(re.findall(r"\w+", text))), len(text)

    by_import = anywhere or not its_own
    elsewhere = {file for file in TESTS.rglob("test_*.py") if by_import and module.search(file.read_text())}
    return [str(one) for one in sorted({*folder.glob("test_*.py"), *its_own, *elsewhere}, key=rank)]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """As a plugin of pytest: tests over several processes and sockets come last."""
    items.sort(key=lambda item: any(one.args != ("threads",) for one in item.iter_markers("transport")))


def _be_pytest(copy: Path, output: Path, arguments: Sequence[str]) -> NoReturn:
    """Run tests in this process, which was forked for them."""
    status = 3  # as pytest says it, an internal error
    try:
        os.setsid()
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(copy)
        sys.path.insert(0, source := str(copy / "src"))
        os.environ |= {"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        options = ["--tb=no", "-rfE", "-p", "no:cacheprovider", "-m", "not soak"]
        status = int(pytest.main([*options, *arguments], plugins=[sys.modules[__name__]]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


@dataclass
class Runner:
    """Runs tests in a copy of the repository."""

    copy: Path
    seconds: float
    options: Sequence[str]

    def run(self, tests: Sequence[str], *options: str) -> tuple[int | None, list[str], bool]:
        """The exit status of pytest, None where it did not end in time, the tests that failed, and if any passed."""
        output = self.copy / "output"
        output.write_text("")
        child = os.fork()  # torch is imported once: that takes longer than most tests
        if not child:
            _be_pytest(self.copy, output, [*options, *self.options, *tests])
        ended, limit = 0, time.monotonic() + self.seconds
        try:
            while not ended and time.monotonic() < limit:
                time.sleep(0.1)
                ended, wait_status = os.waitpid(child, os.WNOHANG)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # and the agents that it has started
            if not ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        text = output.read_text()
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+\.py[^\n]*?)(?: - |$)", text, re.MULTILINE)
        return os.waitstatus_to_exitcode(wait_status) if ended else None, failed, " passed" in text

    def outcome(self, mutation: Mutation, tests: Sequence[str]) -> tuple[str, str]:
        """What becomes of a mutation, and the test that failed."""
        file = self.copy / mutation.path
        source = file.read_bytes()
        file.write_bytes(mutation.of(source))
        try:
            status, failed, passed = self.run(tests[:LIKELIEST], "-x")
            if status in (0, 5) and tests[LIKELIEST:]:  # 5: no test was chosen
                status, failed, others_passed = self.run(tests[LIKELIEST:], "-x")
                passed |= others_passed
        finally:
            file.write_bytes(source)
        if status in (0, 5):
            return ("survived", "") if passed else ("untested", "every test was skipped")
        if status is None:
            return "timeout", ""
        return ("killed", failed[0]) if failed else ("unclear", f"pytest ended with {status}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; if none, all folders that have tests")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="for the tests of one mutation")
    parser.add_argument("--tests", nargs="+", default=[], help="instead of those of the file's own folder")
    parser.add_argument("--anywhere", action="store_true", help="also those of other folders that import the file")
    parser.add_argument("-k", default="", help="as of pytest")
    parser.add_argument("--pick", nargs="+", type=int, help="only these of the draw, by their numbers")
    parser.add_argument("--list", action="store_true", help="only show the draw")
    given = parser.parse_args()
    os.chdir(ROOT)
    folders = [one for one in sorted(SOURCES.iterdir()) if (TESTS / one.name).is_dir()]
    paths = [path.resolve().relative_to(ROOT) for path in given.paths] or folders
    draw = dict(enumerate(drawn(paths, given.count, given.seed), 1))
    if given.list:
        print("\n".join(f"{number:3} {one}" for number, one in draw.items()))
        return 0
    # Before the copy is made: files may come and go here while it is tested.
    tests = {number: given.tests or tests_of(draw[number].path, given.anywhere) for number in given.pick or draw}
    found: dict[int, tuple[str, str]] = {}
    for one in (signal.SIGINT, signal.SIGTERM):  # it ends with a table of what it has found
        signal.signal(one, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        for name in COPIED:
            copy = shutil.copytree if Path(name).is_dir() else shutil.copy
            copy(name, Path(folder, name))
        runner = Runner(Path(folder), given.seconds, ["-k", given.k] if given.k else [])
        with contextlib.suppress(KeyboardInterrupt):
            for number in tests:
                began = time.monotonic()
                found[number] = runner.outcome(draw[number], tests[number])
                print(f"{number:3} {found[number][0]} in {time.monotonic() - began:.0f} s", flush=True)
        killers = {test for what, test in found.values() if what == "killed"}
        files = {test for test in killers if "::" not in test}  # that could not be imported
        broken = [
            test
            for some, options in ((killers - files, ()), (files, ("--collect-only",)))
            if some
            for test in runner.run(sorted(some), *options)[1]
        ]
    counts: Counter[str] = Counter()
    print("Number  Outcome   Mutation, and the test that failed")
    for number, (what, test) in found.items():
        what = "unclear" if test in broken else what
        counts[what] += 1
        print(f"{number:6}  {what:8}  {draw[number]}", *[f"\n{'':18}{test}"] * bool(test), sep="")
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
