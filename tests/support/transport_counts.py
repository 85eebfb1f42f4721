"""A pytest plugin that says how many tests moved bytes over each transport, and can insist that none was left out.

A test counts for a transport when it carries ``@pytest.mark.transport(name)``; the ``transport`` fixture gives it that
mark. A suite that skipped a transport looks just as green as one that ran it, so CI passes ``--every-transport``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import pytest

from . import TRANSPORTS

_counts = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-transport", action="store_true", help="fail if no test ran over one of the transports")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_counts] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and not report.skipped:
        item.config.stash[_counts].update({marker.args[0] for marker in item.iter_markers("transport")})
    return report


def _missing(config: pytest.Config) -> list[str]:
    return [name for name in TRANSPORTS if not config.stash[_counts][name]]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--every-transport") and _missing(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash[_counts]
    names = [*TRANSPORTS, *sorted(set(counts) - set(TRANSPORTS))]
    terminalreporter.write_line("transports: " + ", ".join(f"{name} {counts[name]}" for name in names))
    if config.getoption("--every-transport") and _missing(config):
        terminalreporter.write_line(f"error: no test ran over {', '.join(_missing(config))}", red=True)
