"""What ``import shoal`` costs, and that nobody sees that its names come later: every agent, and every command of the
command line, pays for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from support.limits import scaled

BROKEN = 'raise OSError("libtorch_cpu.so: cannot open shared object file")'


def output_of(program: str, *front: Path) -> str:
    """The output of a program in a new interpreter; with folders before the installed packages."""
    path = os.pathsep.join([*map(str, front), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_shoal_imports_no_other_library() -> None:
    unwanted = ("torch", "numpy", "networkx", "rich")
    assert output_of(f"import shoal, sys; print([name for name in {unwanted} if name in sys.modules])") == "[]"


def test_using_shoal_imports_no_compiler_of_torch_and_no_notebook() -> None:
    unwanted = ("torch._dynamo.config", "sympy", "IPython")
    program = f"import shoal, sys; shoal.init; print([name for name in {unwanted} if name in sys.modules])"
    assert output_of(program) == "[]"


def test_topologies_are_imported_without_torch() -> None:
    assert (
        output_of("import shoal, sys; shoal.topology.OnePeerExponential(8); print('torch' in sys.modules)") == "False"
    )


@pytest.mark.parametrize("package", ["shoal", "shoal.observability", "shoal.netmodel"])
def test_all_names_are_listed_before_their_import(package: str) -> None:
    program = f"""
import {package} as package
before = set(dir(package))
import {package}._public as public
names = [name for name in vars(public) if not name.startswith("_")]
assert names and before >= {{*names, *getattr(package, "__all__", ())}}
assert all(vars(package)[name] is vars(public)[name] for name in names)
from {package} import *
last = [name for name in names if name in getattr(package, "__all__", names)][-1]
assert globals()[last] is vars(public)[last]
"""
    output_of(program)


def test_help_lists_them() -> None:
    assert "neighbor_allreduce(" in output_of("import pydoc, shoal; print(pydoc.render_doc(shoal))")


def test_a_missing_name_is_an_attribute_error() -> None:
    program = """
import shoal
try:
    shoal.swim
except AttributeError as error:
    print(error)
"""
    assert output_of(program) == "module 'shoal' has no attribute 'swim'"


def test_an_import_error_of_torch_is_raised_in_every_thread(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(BROKEN)
    program = """
import shoal
by_import = lambda: exec("from shoal import rank")
for ask in (lambda: shoal.rank, lambda: hasattr(shoal, "rank"), lambda: dir(shoal), by_import):
    try:
        ask()
    except OSError as error:
        print(error)
"""
    assert output_of(program, tmp_path).splitlines() == [BROKEN.partition('"')[2].rpartition('"')[0]] * 4


def test_concurrent_first_imports_work() -> None:
    program = """
import importlib, sys, threading, traceback
import shoal
sys.setswitchinterval(1e-6)
ways = [
    lambda: shoal.rank, lambda: shoal.optim, lambda: shoal.Fleet, lambda: importlib.import_module("shoal.windows"),
    lambda: dir(shoal), lambda: shoal.observability.timeline_context, lambda: exec("from shoal import ops, allreduce"),
    lambda: importlib.import_module("shoal.bluefog").init,
]
together, went_well = threading.Barrier(len(ways)), []
def first(way):
    together.wait()
    way()
    went_well.append(way)
threads = [threading.Thread(target=first, args=(way,)) for way in ways]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(went_well) == len(ways))
"""
    assert output_of(program) == "True"


@pytest.mark.parametrize(
    ("name", "place"),
    [("machine_rank", "bluefog"), ("AgentSampler", "data"), ("bytes_sent", "observability"), ("RingGraph", "topology")],
)
def test_the_error_for_a_name_of_another_package_says_where_it_is(name: str, place: str) -> None:
    missing = "^module 'shoal' has no attribute '{}'"
    with pytest.raises(AttributeError, match=rf"{missing.format(name)}; there is .*shoal\.{place}\.{name}\b"):
        getattr(shoal, name)
    with pytest.raises(AttributeError, match=rf"{missing.format('nowhere')}$"):
        _ = shoal.nowhere  # type: ignore[attr-defined]


def test_a_replaced_name_stays_replaced() -> None:
    program = """
import shoal
shoal.rank = None
dir(shoal), hasattr(shoal, "swim"), shoal.size
assert shoal.rank is None
"""
    output_of(program)


def test_a_removed_package_is_imported_again() -> None:
    program = """
import sys, shoal
rank, optim = shoal.rank, shoal.optim
del sys.modules["shoal"], shoal
import shoal
assert shoal.rank is rank and shoal.optim is optim
"""
    output_of(program)


def test_an_agent_created_by_a_partial_import_is_recorded_too(tmp_path: Path) -> None:
    """Records, traces and the status page attach to agents where they are imported."""
    program = f"""
import os
os.environ |= {{name: {str(tmp_path)!r} for name in ("SHOAL_RECORD", "SHOAL_TIMELINE")}}
from shoal.runtime.bootstrap import init, shutdown
init()
shutdown()
"""
    output_of(program)
    assert {path.name for path in tmp_path.iterdir()} == {"agent0.jsonl", "shoal-rank0.json"}
