"""The command ``shoal``: one module for each subcommand, imported only when it is called.

A subcommand is a line in ``COMMANDS`` and a module with ``add_arguments(parser)`` and ``run(args)``, whose result is
the exit status.

Errors suggest the option that was probably meant, also if it is another launcher's.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn, Protocol, cast

from .standard_streams import run_with_streams

COMMANDS = {
    "run": ("shoal.cli.run", "start the agents of a job on this machine"),
    "bench": ("shoal.cli.bench", "measure how fast agents average on this machine, compared with torch.distributed"),
    "report": (
        "shoal.cli.report",
        "report slow agents and links of a run, or its membership over time",
    ),
    "watch": ("shoal.cli.watch", "show a completed run on a page, from its traces and membership logs"),
    "status": ("shoal.cli.status", "print what the agents of this machine are doing"),
    "topology": ("shoal.cli.topology", "list, show, draw, compare and recommend topologies"),
    "notebook": ("shoal.cli.notebook", "start and stop agents behind a notebook, through ipyparallel"),
    "certificates": ("shoal.cli.certificates", "make, list and revoke the certificates of a job, for TLS"),
    "completion": ("shoal.cli.completion", "print the completion of this command for a shell"),
    "doctor": ("shoal.cli.doctor", "check whether agents can run on this machine, and print what a bug report needs"),
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
    if arguments and not arguments[0].startswith("-"):
        return run_with_streams(partial(_unknown, arguments), "shoal")
    return run_with_streams(partial(_overview, arguments), "shoal")


def _unknown(arguments: list[str]) -> int:
    """There is no such command: suggest one."""
    name = arguments[0]
    script = name.endswith(".py") or name.startswith("python")
    commands = ["run"] if script else difflib.get_close_matches(name, COMMANDS, n=1)
    rest = arguments if script else arguments[1:]
    suggestion = f" Did you mean: shoal {shlex.join([commands[0], *rest])}" if commands else ""
    print(f"shoal: error: there is no command {name!r}; there are {', '.join(COMMANDS)}.{suggestion}", file=sys.stderr)
    return 2


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


def parser_of(name: str) -> tuple[Command, argparse.ArgumentParser]:
    """A subcommand and its command line."""
    module_name, summary = COMMANDS[name]
    command = cast(Command, importlib.import_module(module_name))
    parser = SuggestingParser(prog=f"shoal {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    command.add_arguments(parser)
    return command, parser


def _run(name: str, arguments: list[str]) -> int:
    command, parser = parser_of(name)
    return command.run(parser.parse_args(arguments))


_UNKNOWN = "unrecognized arguments: "
OF_OTHERS = {
    "--np": "-n N",
    "--nproc": "-n N",
    "--num-processes": "-n N",
    "--hosts": "--nnodes K --node-rank I --rendezvous HOST:PORT on each machine",
    "--hostfile": "--nnodes K --node-rank I --rendezvous HOST:PORT on each machine",
    "--master-addr": "--rendezvous HOST:PORT",
    "--master-port": "--rendezvous HOST:PORT",
    "--rdzv-endpoint": "--rendezvous HOST:PORT",
    "--rdzv-backend": "--rendezvous HOST:PORT",
    "--rdzv-id": "SHOAL_SECRET, the same on each machine",
    "--log-dir": "a redirection: each line begins with its rank",
    "-x": "--env NAME=VALUE",
    "-genv": "--env NAME=VALUE",
    "--module": "-m",
    "--timeline-filename": "--timeline DIR",
}
"""Options of torchrun, mpirun, accelerate and horovodrun, and what ``shoal run`` has for them."""


class SuggestingParser(argparse.ArgumentParser):
    """Says which option was probably meant."""

    def error(self, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            option = message.removeprefix(_UNKNOWN).split()[0].partition("=")[0]
            message += self._suggestion(option)
        super().error(message)

    def _suggestion(self, option: str) -> str:
        dashed = option[:2] + option[2:].replace("_", "-")
        own = [name for action in self._actions for name in action.option_strings]
        if dashed in own and dashed != option:
            return f". Did you mean {dashed}?"
        if "--on-failure" in own and dashed == "--standalone":
            return f". Leave {option} out: it is the default"
        if "--on-failure" in own and dashed in OF_OTHERS:
            return f". Instead of {option} use {OF_OTHERS[dashed]}"
        near = difflib.get_close_matches(dashed, [name for name in own if name.startswith("--")], n=1)
        return f". Did you mean {near[0]}?" if near else ""
