"""The command ``shoal``: one module for each subcommand, imported only when it is called.

A subcommand is a line in ``COMMANDS`` and a module with ``add_arguments(parser)`` and ``run(args)``, whose result is
the exit status.

Errors suggest the option that was probably meant, also if it is another launcher's. A closed standard stream, a full
disk, or a reader of the output that has ended cause no traceback. A closed stream (``>&-``, as for daemons and cron
jobs) is opened on ``/dev/null``. Otherwise the next file or socket that the command opens would get its descriptor, and
the printed text.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, cast

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


class _GuardedStream:
    """A text stream that ends the command where it cannot be written.

    It raises ``SystemExit`` and no ``OSError``, which a command may take for an error of a file that it reads.
    """

    def __init__(self, stream: Any) -> None:
        self.error: OSError | None = None
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        return self._try(self._stream.write, text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OSError as error:
            self.error = error
            self._failed()

    def _failed(self) -> None:
        raise SystemExit(1)

    def discard_rest(self) -> None:
        """After an error, discard the buffered text: writing it would fail again at the end of the process, and change
        its exit status.
        """
        if self.error is not None:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as null:  # noqa: PTH123
                os.dup2(null.fileno(), self.fileno())


class _MessageStream(_GuardedStream):
    """A stream for messages, without which the command does what it does."""

    def _failed(self) -> None:
        pass


def run_with_streams(command: Callable[[], int], name: str) -> int:
    """Call a command and return its exit status; 1 if its output could not be written.

    If the reader of the output has ended (``| head``) it ends without a message, else it prints the reason on stderr.
    """
    _open_closed_descriptors()
    out, err = _GuardedStream(sys.stdout), _MessageStream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            try:
                return command()
            finally:
                out.flush()
        except SystemExit:
            if out.error is None:
                raise
            if not isinstance(out.error, BrokenPipeError):
                print(f"{name}: error: cannot write the output: {out.error.strerror}", file=sys.stderr)
            return 1
        finally:
            err.flush()
            for stream in (out, err):
                stream.discard_rest()


def _open_closed_descriptors() -> None:
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(descriptor, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
