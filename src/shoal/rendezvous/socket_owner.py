"""Finds the user at the other end of a TCP connection, if that socket is in the same network namespace.

The kernel's socket diagnosis (``sock_diag(7)``) answers for one connection. A list of all connections, as in
``/proc/net/tcp``, would take longer the more connections a stranger opens.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct

Address = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]
"""An IP address and a port. An IPv4 address that is mapped into IPv6 is given as IPv4."""
_SOCK_DIAG, _BY_FAMILY, _ERROR, _REQUEST_FLAG = 4, 20, 2, 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI 2s2s16s16sI8s")
_ANSWER = struct.Struct("=BBxx 2s2s16s16sI8s III II")
_ANY_COOKIE = b"\xff" * 8
_ESTABLISHED = 1
_ALL_STATES = 0xFFF
_SECONDS = 2.0


def address_of(name: tuple[str, int]) -> Address:
    """Convert a result of ``getpeername`` or ``getsockname`` to a value that can be compared."""
    address = ipaddress.ip_address(name[0].partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address, name[1]


def owner_of(peer: Address, own: Address) -> int | None:
    """The user id of the other end of an established connection; None if that is not on this machine, or is closed.

    Args:
        peer: The address of the other end.
        own: The address of this end.

    Raises:
        OSError: The kernel gives no answer.
    """
    family = socket.AF_INET if peer[0].version == 4 else socket.AF_INET6
    ends = [end[1].to_bytes(2, "big") for end in (peer, own)] + [end[0].packed.ljust(16, b"\0") for end in (peer, own)]
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES, *ends, 0, _ANY_COOKIE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as diag:
        diag.settimeout(_SECONDS)
        diag.sendto(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST_FLAG, 1, 0) + body, (0, 0))
        answer = diag.recv(1 << 12)
    if _HEADER.unpack_from(answer)[1] == _ERROR:
        number = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        if number == errno.ENOENT:
            return None
        raise OSError(number, os.strerror(number))
    _, state, port, other_port, *_, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    # The answer may also be a listener on that port, and a closed socket has no user any more.
    is_it = state == _ESTABLISHED and [port, other_port] == ends[:2] and inode
    return int(uid) if is_it else None
