"""The command ``shoal``: one module for each subcommand, imported only when it is called.

A subcommand is a line in ``COMMANDS`` and a module with ``add_arguments(parser)`` and ``run(args)``, whose result is
the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Protocol, cast

from .standard_streams import run_with_streams

COMMANDS = {
    "run": ("shoal.cli.run", "start the agents of a job on this machine"),
    "bench": ("shoal.cli.bench", "measure how fast agents average on this machine, beside their peers"),
    "report": (
        "shoal.cli.report",
        "say and draw who was slow in a run, and why; and who was there when",
    ),
    "watch": ("shoal.cli.watch", "show a run that is over on a page, from its traces and records"),
    "status": ("shoal.cli.status", "say what the agents that run on this machine do"),
    "topology": ("shoal.cli.topology", "list, show, draw and compare topologies, and say which one to take"),
    "notebook": ("shoal.cli.notebook", "start and stop agents behind a notebook, through ipyparallel"),
    "certificates": ("shoal.cli.certificates", "make, list and take back the certificates of a job, for TLS"),
    "doctor": ("shoal.cli.doctor", "say what a bug report needs, and whether agents can run on this machine"),
}


class Command(Protocol):
    """The interface of a subcommand's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``shoal`` with these arguments (those of the process if None) and return its exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and arguments[0] in COMMANDS:
        return run_with_streams(partial(_run, arguments[0], arguments[1:]), f"shoal {arguments[0]}")
    return run_with_streams(partial(_overview, arguments), "shoal")


def _overview(arguments: list[str]) -> int:
    overview = argparse.ArgumentParser(prog="shoal", description="Decentralized training on PyTorch.")
    overview.add_argument("--version", action="store_true", help="print the version and exit")
    commands = overview.add_subparsers(title="commands", metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary)
    args = overview.parse_args(arguments)
    if not args.version:
        overview.print_help()
        return 2
    from shoal._version import __version__

    print(f"shoal {__version__}")
    return 0


def _run(name: str, arguments: list[str]) -> int:
    module_name, summary = COMMANDS[name]
    command = cast(Command, importlib.import_module(module_name))
    parser = argparse.ArgumentParser(prog=f"shoal {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))
