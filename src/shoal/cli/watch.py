"""``shoal watch``: a page that shows a finished run, from its agents' traces and membership logs."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path

from ..observability.watch.replay import read
from ..observability.watch.server import PageServer
from .launcher_signals import Signals

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "It serves until Ctrl-C. A run that goes on is shown by shoal run --watch."
    parser.add_argument("folder", help="the folder that SHOAL_TIMELINE or SHOAL_RECORD named in the run")
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="of the page, on 127.0.0.1 (any)")


def run(args: argparse.Namespace) -> int:
    """Serve the page until a signal comes."""
    try:
        run = read(Path(args.folder))
        with contextlib.closing(PageServer(lambda: run, args.port)) as server, Signals() as signals:
            print(f"watch the run at {server.address} (Ctrl-C ends it)", flush=True)
            while not any(one in _ENDS for one in signals.wait_with(server, server.due - time.monotonic())):
                server.serve()
    except (OSError, ValueError, OverflowError) as error:
        print(f"shoal watch: error: {error}", file=sys.stderr)
        return 2
    return 0
