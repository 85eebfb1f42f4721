"""A pytest plugin that reports how many tests moved bytes over each transport, and can require all transports.

A test counts for a transport when it carries ``@pytest.mark.transport(name)``; the ``transport`` fixture gives it
that mark. A suite that skipped a transport looks as green as a full run, so CI passes ``--every-transport``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import pytest

from . import PROCESS_GROUP, TRANSPORTS

_counts = pytest.StashKey[Counter[str]]()
_PROPERTY = "transport"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-transport", action="store_true", help="fail if no test ran over one of the transports")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_counts] = Counter()
    config.pluginmanager.register(_Count(config.stash[_counts]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and not report.skipped:  # the report reaches the counting process, the item may not
        report.user_properties += [(_PROPERTY, name) for name in {m.args[0] for m in item.iter_markers("transport")}]
    return report


class _Count:
    """Counts what is reported, by whichever process ran it."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._counts.update(str(value) for name, value in report.user_properties if name == _PROPERTY)


def _missing(config: pytest.Config) -> list[str]:
    return [name for name in (*TRANSPORTS, PROCESS_GROUP) if not config.stash[_counts][name]]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):  # only the process that counts for all can judge
        return
    if session.config.getoption("--every-transport") and _missing(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash[_counts]
    named = [*TRANSPORTS, PROCESS_GROUP]
    names = [*named, *sorted(set(counts) - set(named))]
    terminalreporter.write_line("transports: " + ", ".join(f"{name} {counts[name]}" for name in names))
    if config.getoption("--every-transport") and _missing(config):
        terminalreporter.write_line(f"error: no test ran over {', '.join(_missing(config))}", red=True)
