"""``shoal watch``, and the setup of ``shoal run --watch``: the page of a run.

``shoal watch`` shows a finished run, from its agents' traces and membership logs. In ``shoal run --watch`` this
launcher shows the run, or reports to another launcher. See docs/watch.md.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import sys
import time
from pathlib import Path

from .. import config
from ..observability.watch.launcher_link import StatusSender
from ..observability.watch.live import LocalViewer, RemoteViewer, Watch, print_message
from ..observability.watch.server import PageServer
from ..rendezvous.elastic_join import Invitation
from ..rendezvous.launch import LOOPBACK, join_address
from ..rendezvous.rendezvous import listen
from .launcher_signals import Signals

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "It serves until Ctrl-C. A run that goes on is shown by shoal run --watch."
    parser.add_argument("folder", help="the folder that SHOAL_TIMELINE or SHOAL_RECORD named in the run")
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="of the page, on 127.0.0.1 (any)")


def run(args: argparse.Namespace) -> int:
    """Serve the page until a signal comes."""
    from ..observability.watch.replay import read  # here: ``shoal run`` imports this module without it

    try:
        run = read(Path(args.folder))
        with contextlib.closing(PageServer(lambda: run, args.port)) as server, Signals() as signals:
            print(f"watch the run at {server.address} (Ctrl-C ends it)", flush=True)
            while not any(signum in _ENDS for signum in signals.wait(server.due - time.monotonic(), server)):
                server.serve()
    except (OSError, ValueError, OverflowError) as error:
        print(f"shoal watch: error: {error}", file=sys.stderr)
        return 2
    return 0


LAST_PORT = 65535


def watch_of(args: argparse.Namespace, host: str, port: int) -> Watch:
    """The watch of a run that begins here: it shows the run, or reports to the launcher that does.

    Raises:
        OSError: A port that it needs is taken.
        ValueError: There is no port at which launchers could meet.
    """
    begins, secret = args.agents * args.nnodes, config.read().secret
    size = args.max_agents or begins
    title = f"{size} agents of {Path(args.script).name}"
    if args.nnodes == 1:
        return LocalViewer(size, args.agents, title, args.watch_port, begins)
    if port == LAST_PORT:
        raise ValueError(f"launchers meet at the port after that of --rendezvous, and there is none after {port}")
    if args.node_rank > 0:
        return RemoteViewer(_status_sender(host, port + 1, secret), args.agents)
    try:
        listener = listen(host, port + 1, config.read().interface)
    except OSError as error:
        where = join_address(host, port + 1)
        raise OSError(error.errno, f"cannot listen on {where}, for other launchers: {error.strerror}") from None
    shown = LocalViewer(size, args.agents, title, args.watch_port, begins)
    shown.gather(listener, secret, args.nnodes - 1 + size - begins)
    return shown


def check_between_machines() -> None:
    """Refuse to watch several machines if launchers could not send their reports safely."""
    if not config.read().secret:
        raise ValueError(
            "--watch with --nnodes: set SHOAL_SECRET to the same for all machines; launchers authenticate with it"
        )
    if _would_be_read(""):
        raise ValueError(
            "--watch with --nnodes and SHOAL_TLS=on: launchers authenticate their messages and do not encrypt them; "
            "watch without TLS, or look at each machine with shoal status"
        )


def is_this_machine(host: str) -> bool:
    """The host is this machine, so all connections to it come from this machine."""
    return host in (LOOPBACK, "localhost", "::1")


def listen_for_joining(
    watch: Watch | None, invitation: Invitation, secret: str, host: str, port: int, nodes: int
) -> int:
    """Listen for joining launchers, and return the port for their agents' status; 0 if they cannot send it, or the run
    is not watched.

    Raises:
        OSError: The system gives no port.
    """
    if not isinstance(watch, LocalViewer) or invitation.size == invitation.begins or _would_be_read(host):
        return 0
    if nodes > 1:
        return port + 1  # where launchers of other machines connect
    listener = listen(host, 0, config.read().interface)
    watch.gather(listener, secret, invitation.size - invitation.begins)
    return int(listener.getsockname()[1])


def watch_of_joining(invitation: Invitation, secret: str, host: str, agents: int) -> Watch | None:
    """The watch of a joining launcher, which reports to the run's launcher; None if the run is not watched or on an
    error.
    """
    port = invitation.watch_port
    if not port or _would_be_read(host):
        return None
    try:
        return RemoteViewer(_status_sender(host, port, secret), agents)
    except OSError as error:
        print_message(f"the page there does not show these agents: {error.strerror or error}")
        return None


def _would_be_read(host: str) -> bool:
    """Reports would be sent authenticated but unencrypted, while all other traffic is encrypted."""
    return config.read().tls and not is_this_machine(host)


def _status_sender(host: str, port: int, secret: str) -> StatusSender:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        where = join_address(host, port)
        raise OSError(error.errno, f"where is {where}, the first launcher's? {error.strerror}") from None
    return StatusSender(family, address, secret)
