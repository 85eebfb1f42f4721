"""Unix sockets between processes of one user: the kernel identifies the user of each end to the other.

This module does not import torch, because status queries need none.
"""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, from the kernel."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def listen(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind("\0" + name)
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def connect(name: str) -> socket.socket:
    """Connect without waiting: if the queue is full, the first read raises that it is not connected.

    ``name`` begins with a zero byte, or is a path.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        sock.connect(name)
        if peer_credentials(sock)[1] != os.getuid():
            raise PermissionError(f"the socket {name!r} belongs to another user")
    except BlockingIOError:
        pass
    except BaseException:
        sock.close()
        raise
    return sock
