"""The suite's own guard: it says how many tests ran over each transport, and fails when one was left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import pytest

@pytest.mark.transport("threads")
@pytest.mark.parametrize("_", range(3))
def test_threads(_):
    pass

@pytest.mark.transport("network")
@pytest.mark.transport("network namespaces")
def test_network():
    assert {network}

@pytest.mark.transport("process-group")
def test_process_group():
    pass

@pytest.mark.transport("shared_memory")
def test_shared_memory():
    if {skipped}:
        pytest.skip("left out")
"""


Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the program above in a pytest of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makeini("[pytest]\nmarkers = transport(name): moves bytes over it")

    def start(*arguments: str, skipped: bool, network: bool = True) -> pytest.RunResult:
        pytester.makepyfile(PROGRAM.format(skipped=skipped, network=network))
        return pytester.runpytest_subprocess("-p", "support.transport_counts", *arguments)

    return start


def test_the_summary_counts_the_tests_of_each_transport(run: Run) -> None:
    result = run("--every-transport", skipped=False)
    result.stdout.fnmatch_lines(
        ["transports: threads 3, shared_memory 1, network 1, process-group 1, network namespaces 1"]
    )
    assert result.ret == pytest.ExitCode.OK


def test_a_transport_whose_tests_were_all_skipped_fails_the_run_only_on_request(run: Run) -> None:
    result = run("--every-transport", skipped=True)
    result.stdout.fnmatch_lines(["*shared_memory 0*", "error: no test ran over shared_memory"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert run(skipped=True).ret == pytest.ExitCode.OK


def test_a_test_that_fails_has_run(run: Run) -> None:
    result = run("--every-transport", skipped=False, network=False)
    result.stdout.fnmatch_lines(
        ["transports: threads 3, shared_memory 1, network 1, process-group 1, network namespaces 1"]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
