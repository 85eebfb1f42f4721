"""``shoal doctor --rendezvous``: whether agents of two machines can connect, in both directions.

The same command runs on both machines. Machine 0 listens at the rendezvous, as its launcher would; machine 1 connects.
Over that connection each sends the address and port on which it listens for data, as an agent does. Then each connects
to the other's data port, and reports the result. No secret is sent, and no received data is kept.

If the network loses all packets of one direction, no connection can be opened at all. Then the kernel of machine 0
shows the direction: requests of machine 1 whose answers are lost are in its table of connections.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import config
from ..rendezvous.launch import join_address
from ..rendezvous.rendezvous import listen
from ..transport.addresses import interface_address, listen_tcp, parse_ports, reachable_address, text_of

WAIT_SECONDS = 60.0
"""So long each machine waits for the other one."""
ANSWER_SECONDS = 12.0
"""So long a connection may take, as at an agent's first contact (``transport/reverse_connections.py``)."""
_AGAIN_SECONDS = 0.25
_SYN_RECEIVED = "03"
"""The state of a connection in the kernel's table whose request has arrived and been answered."""
_MOST_BYTES = 4096


class PathError(Exception):
    """The two machines have not met; the message has the reason."""


@dataclass(frozen=True)
class Direction:
    """From one machine to the data port of the other: the problem, empty if the port is open."""

    source: int
    address: str
    problem: str
    seconds: float

    def __str__(self) -> str:
        if self.problem:
            return f"CLOSED: machine {self.source} cannot connect to {self.address} ({self.problem}: a firewall?)"
        return f"open: {self.address}, {1e3 * self.seconds:.1f} ms"


def check(host: str, port: int, node: int, wait: float = WAIT_SECONDS) -> list[Direction]:
    """Meet the other machine at the rendezvous and try both directions.

    Args:
        host, port: The rendezvous, which machine 0 listens at.
        node: The number of this machine, 0 or 1.
        wait: Seconds for which each machine waits for the other one.

    Returns:
        The direction from machine 0 to machine 1, and the opposite one.

    Raises:
        PathError: The machines have not met.
        OSError: This machine cannot listen.
        ValueError: A variable is invalid.
    """
    deadline = time.monotonic() + wait
    ports = parse_ports("SHOAL_PORTS", config.read().ports)
    with (_accept if node == 0 else _connect)(host, port, deadline) as control:
        try:
            return _try_both(control, host, node, ports)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PathError(
                f"the other machine at {join_address(host, port)} sent an invalid answer: {error!r}"
            ) from None


def _try_both(control: socket.socket, host: str, node: int, ports: range) -> list[Direction]:
    control.settimeout(2 * ANSWER_SECONDS)
    lines = control.makefile("r", encoding="utf-8")
    reached = text_of(control.getsockname() if node == 0 else control.getpeername())
    interface = config.read().interface
    own = interface_address(interface, prefer_ipv6=":" in reached) if interface else reachable_address(host, [reached])

    def exchange(mine: dict[str, Any]) -> dict[str, Any]:
        control.sendall(json.dumps(mine).encode() + b"\n")
        found = json.loads(lines.readline(_MOST_BYTES))
        if not isinstance(found, dict):
            raise ValueError("its answer is no report")
        return found

    with _listening(own, ports) as (port, token):
        other = exchange({"node": node, "address": own, "port": port, "token": token})
        if other["node"] != 1 - node:
            raise ValueError(f"it is machine {node}, too: give one of them --node-rank {1 - node}")
        mine = _try(node, str(other["address"]), int(other["port"]), str(other["token"]).encode())
        answer = exchange({"address": mine.address, "problem": mine.problem, "seconds": mine.seconds})
        theirs = Direction(1 - node, str(answer["address"]), str(answer["problem"]), float(answer["seconds"]))
    return [mine, theirs] if node == 0 else [theirs, mine]


def _accept(host: str, port: int, deadline: float) -> socket.socket:
    with listen(host, port, config.read().interface) as listener:
        listener.settimeout(_AGAIN_SECONDS)
        since: dict[str, float] = {}  # by machine, the time of its first request
        while (now := time.monotonic()) < deadline:
            try:
                return listener.accept()[0]
            except TimeoutError:
                for address in _half_open(port):
                    if now >= since.setdefault(address, now) + ANSWER_SECONDS / 2:
                        raise PathError(
                            f"what {address} sends reaches this machine, and the answers do not reach it: all packets "
                            "from machine 0 to machine 1 are lost, as by a firewall or a route that is missing there"
                        ) from None
        raise PathError(
            f"no machine has connected to {join_address(host, port)} in time, and no request to connect has "
            "come either. Run the same command on the other machine meanwhile; if that has no answer there, a firewall "
            "closes this port, or all packets from machine 1 to machine 0 are lost"
        )


def _half_open(port: int) -> list[str]:
    """The addresses with half-open connections to a port of this machine: the answer to their request, or their next
    packet, was lost.
    """
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):  # a kernel without IPv6
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                _, local, remote, state = line.split()[:4]
                if state == _SYN_RECEIVED and int(local.rpartition(":")[2], 16) == port:
                    found.append(_address_of(family, remote.partition(":")[0]))
    return found


def _address_of(family: int, written: str) -> str:
    """An address from the kernel's table: words of 32 bits, each in the machine's order."""
    words = struct.pack(f"={len(written) // 8}I", *(int(written[at : at + 8], 16) for at in range(0, len(written), 8)))
    return socket.inet_ntop(family, words).removeprefix("::ffff:")


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """Machine 0 may listen later: a refusal is no answer until the deadline; silence is, sooner."""
    silent_at = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            sock = socket.create_connection(
                (host, port), timeout=max(0.1, min(ANSWER_SECONDS, deadline - time.monotonic()))
            )
            if sock.getsockname() != sock.getpeername():  # Linux may connect a socket to itself
                return sock
            sock.close()
            problem = "connection refused"
        except TimeoutError:
            problem = "no answer"
        except OSError as error:
            problem = error.strerror or str(error)
        now = time.monotonic()
        if now >= (silent_at if problem == "no answer" else deadline):
            raise PathError(
                f"this machine cannot connect to {join_address(host, port)} ({problem}: a firewall?). Run the same "
                "command on that machine meanwhile; the output of machine 0 shows which direction is closed"
            )
        time.sleep(_AGAIN_SECONDS)


@contextlib.contextmanager
def _listening(address: str, ports: range) -> Iterator[tuple[int, str]]:
    """Listen as an agent does, and send a token to every client. Yields the port and the token."""
    token = secrets.token_hex(8)
    with listen_tcp(address, ports) as listener:
        over = threading.Event()

        def serve() -> None:
            listener.settimeout(0.1)
            while not over.is_set():
                with contextlib.suppress(OSError):
                    sock, _ = listener.accept()
                    with sock:
                        sock.sendall(token.encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1], token
        finally:
            over.set()
            thread.join()


def _try(source: int, address: str, port: int, token: bytes) -> Direction:
    """Connect to the other machine's data port."""
    began = time.monotonic()
    problem = ""
    try:
        with socket.create_connection((address, port), timeout=ANSWER_SECONDS) as sock:
            if sock.recv(len(token), socket.MSG_WAITALL) != token:
                problem = "something else answers there"
    except TimeoutError:
        problem = "no answer"
    except OSError as error:
        problem = error.strerror or str(error)
    return Direction(source, join_address(address, port), problem, time.monotonic() - began)
