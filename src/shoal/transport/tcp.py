"""TCP sockets between machines: listening, connecting, and the detection of silent hosts."""

from __future__ import annotations

import errno
import socket

from .addresses import resolved

DEAD_HOST_SECONDS = 20
SYN_COUNT = 3
"""How often a request to connect is repeated: it is given up after 15 s, or 19 on a kernel that begins more evenly."""
UNSENT_BYTES = 1 << 17
"""The bytes that the system queues unsent: a small message waits behind at most this part of a large one."""
UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM})
"""Errors of an attempt to connect that a firewall may cause, or an outage that passes."""


def listen(address: str, ports: range = range(1)) -> socket.socket:
    """Listen on one address, at the first free port of ``ports``; 0 is a port that the system picks.

    Raises:
        OSError: No port is free.
    """
    for port in ports:
        family, name = resolved(address, port)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a job before do not matter
            sock.bind(name)
            sock.listen(1024)
            # For the listener that is for agents (listeners.py). After listen(): two agents would share a port
            # otherwise.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise
        sock.setblocking(False)
        return sock
    raise OSError(
        errno.EADDRINUSE,
        f"none of the ports {ports[0]} to {ports[-1]} is free on {address}: each agent of this machine needs one. Give "
        "SHOAL_PORTS more of them",
    )


def start_connecting(address: str, port: int) -> socket.socket:
    family, name = resolved(address, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    tune(sock)
    try:
        sock.connect(name)
    except BlockingIOError:
        pass
    except BaseException as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
            return sock  # no local port is free, as in a flood from here: the first read raises the error
        sock.close()
        raise
    return sock


def unconnected(address: str) -> socket.socket:
    """A socket whose first read raises that it is not connected."""
    sock = socket.socket(resolved(address, 0)[0], socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


def tune(sock: socket.socket) -> None:
    """No delay for small messages; a host that vanished silently is detected after ``DEAD_HOST_SECONDS``.

    The receiving side detects it, by probes that a running host answers independently of its processes. The sending
    side sets no ``TCP_USER_TIMEOUT``: it would also end the connection to an agent that is stopped or busy for so long,
    for which deadlines exist.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_HOST_SECONDS // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_HOST_SECONDS // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, SYN_COUNT)
