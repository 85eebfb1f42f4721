"""Addresses of this machine, IPv4 and IPv6, and the sockets that listen at addresses or connect to them.

An address is that of an interface, or the one by which other machines reach this one. TCP sockets between machines
detect silent hosts. Unix sockets let the kernel identify the user of each end to the other. :func:`owner_of` finds the
user at the other end of a TCP connection, if that socket is in the same network namespace: the kernel's socket
diagnosis (``sock_diag(7)``) answers for one connection. A list of all connections, as in ``/proc/net/tcp``, would take
longer the more connections a stranger opens.

This module does not import torch, because status queries need none.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15
_LINK_LOCAL = 0x20
_NOT_USABLE = 0x40 | 0x08  # not yet known to be the only one of its kind on the link, or known not to be
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that no machine has, with the same route as to the rest of the world."""
DEAD_HOST_SECONDS = 20
SYN_COUNT = 3
"""How often a request to connect is repeated: it is given up after 15 s, or 19 on a kernel that begins more evenly."""
UNSENT_BYTES = 1 << 17
"""The bytes that the system queues unsent: a small message waits behind at most this part of a large one."""
UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM})
"""Errors of an attempt to connect that a firewall may cause, or an outage that passes."""


def numeric(text: str) -> str:
    """The address that a text is, in brackets or not; empty if it is a name."""
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return ""
    return text


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def text_of(name: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """The address in a socket's own name or its peer's, with the interface if the address is valid only there."""
    address, scope = str(name[0]).partition("%")[0], name[3] if len(name) == 4 else 0
    return f"{address}%{socket.if_indextoname(scope)}" if scope else address


def resolved(address: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]:
    """The family of a numeric address, and the value with which a socket binds or connects to it."""
    family, _, _, _, name = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return family, name  # type: ignore[return-value]


def interface_address(interface: str, prefer_ipv6: bool = False) -> str:
    """An address of an interface given by name, or the address itself, if the name is an address of this machine.

    Raises:
        ValueError: There is no such interface, it has no address, or this machine has no such address.
    """
    address = numeric(interface)
    if address:
        if not own_form(address):
            raise ValueError(f"SHOAL_INTERFACE={interface!r} is no address of this machine; its interfaces: {_names()}")
        return own_form(address)
    # "ip link" writes a virtual interface with the one below it: eth0.100@eth0.
    found = list(_addresses_of(interface)) or list(_addresses_of(interface.rpartition("@")[0]))
    if not found:
        known = interface in (name for _, name in socket.if_nameindex())
        problem = "has no address" if known else "is neither an interface nor an address"
        raise ValueError(f"SHOAL_INTERFACE={interface!r} {problem}; this machine has: {_names()}")
    return next((address for address in found if (":" in address) == prefer_ipv6), found[0])


def address_towards(host: str) -> str:
    """The address of this machine that packets to ``host`` leave from. Raises ``OSError`` where no way leads there."""
    found, problem = [], OSError(f"{host!r} has no address")
    for family, _, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(target)
                found.append(text_of(sock.getsockname()))
        except OSError as error:
            problem = error
    if not found:
        raise problem
    return next((address for address in found if not is_loopback(address)), found[0])


def reachable_address(rendezvous: str, reached: Iterable[str]) -> str:
    """The address by which agents of other machines reach this one.

    That is where packets to the rendezvous leave from, unless it is here under a name that means the loopback interface
    on this machine, as the machine's own name does in Debian's /etc/hosts. Then it is the address at which others have
    reached the rendezvous, or failing that where packets to the rest of the world leave from.

    Args:
        rendezvous: Host or address of the rendezvous; empty if unknown.
        reached: Addresses at which agents of other machines have reached it; empty ones say nothing.
    """
    others = (own_form(address) for address in reached if address and not is_loopback(address))
    elsewhere = (_towards(host) for host in (socket.gethostname(), *_ELSEWHERE))
    for address in (_towards(rendezvous), *others, *elsewhere):
        if address and not is_loopback(address):
            return address
    raise ValueError(
        f"this machine has no address by which other machines could reach it: the rendezvous {rendezvous!r} is "
        f"{_towards(rendezvous) or 'unknown'} here. Set SHOAL_INTERFACE to an interface or address of this machine; it "
        f"has: {_names()}"
    )


def own_form(address: str) -> str:
    """This machine's form of one of its addresses, because interfaces have other names elsewhere; empty if it is not
    its own.
    """
    bare = address.partition("%")[0]
    if ipaddress.ip_address(bare).is_link_local and ":" in bare:
        wanted = ipaddress.ip_address(bare)
        named = [f"{text}%{name}" for text, _, name in _ipv6_addresses() if ipaddress.ip_address(text) == wanted]
        return address if address in named else next(iter(named), "")
    family, name = resolved(address, 0)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind(name)
        except OSError:
            return ""
    return address


def beside(address: str, own: str) -> str:
    """An address of a neighbour as seen from here, where ``own`` is this machine's: on a link, by its own interface."""
    bare, at, _ = address.partition("%")
    return f"{bare}%{own.partition('%')[2]}" if at and "%" in own else address


def _towards(host: str) -> str:
    try:
        return address_towards(host) if host else ""
    except OSError:
        return ""


def _addresses_of(name: str) -> Iterator[str]:
    """The addresses of an interface: IPv4 first, then IPv6, where addresses valid beyond the link come first."""
    raw = name.encode()
    if not 0 < len(raw) <= _NAME_BYTES:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", raw))
            yield socket.inet_ntoa(answer[20:24])
        except OSError:
            pass
    mine = sorted((scope == _LINK_LOCAL, address) for address, scope, owner in _ipv6_addresses() if owner == name)
    yield from (f"{address}%{name}" if on_link else address for on_link, address in mine)


def _ipv6_addresses() -> Iterator[tuple[str, int, str]]:
    """Address, scope and interface of each; none where the kernel has no IPv6."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        digits, _, _, scope, flags, name = line.split()
        if not int(flags, 16) & _NOT_USABLE:
            yield str(ipaddress.IPv6Address(int(digits, 16))), int(scope, 16), name


def _names() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())


def parse_ports(where: str, text: str) -> range:
    """The ports that a setting names: one, or ``FIRST-LAST``; 0, for any free port, if the text is empty.

    Raises:
        ValueError: The text names no ports.
    """
    if not text:
        return range(1)
    first, dash, last = text.partition("-")
    try:
        ports = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        ports = range(0)
    if not ports or ports[0] < 1 or ports[-1] >= 1 << 16:
        raise ValueError(f"{where}={text!r}: it must be a port or FIRST-LAST, from 1 to 65535, such as 29500-29600")
    return ports


_CREDENTIALS = struct.Struct("3i")


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, from the kernel."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def listen_unix(name: str) -> socket.socket:
    """Listen at an abstract name of a Unix socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind("\0" + name)
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def connect(name: str) -> socket.socket:
    """Connect to a Unix socket without waiting: if the queue is full, the first read raises that it is not connected.

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


def listen_tcp(address: str, ports: range = range(1)) -> socket.socket:
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
    """Connect by TCP, without waiting."""
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
    """Set no delay for small messages, and detect a host that vanished silently after ``DEAD_HOST_SECONDS``.

    The receiving side detects it, by probes that a running host answers independently of its processes.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_HOST_SECONDS // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_HOST_SECONDS // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, SYN_COUNT)


def expect_answers(sock: socket.socket, expected: bool) -> None:
    """Whether the host of the peer must confirm what this side sends within ``DEAD_HOST_SECONDS``.

    The receiving side needs it: the system sends no probes while its last report of arrived units is unconfirmed. The
    sending side must not have it: it would also end the connection to an agent that is stopped or busy for so long and
    reads nothing, for which deadlines exist.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_HOST_SECONDS if expected else 0)


Address = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]
"""An IP address and a port. An IPv4 address that is mapped into IPv6 is given as IPv4."""
_SOCK_DIAG, _BY_FAMILY, _ERROR, _REQUEST_FLAG = 4, 20, 2, 1
_DIAG_HEADER = struct.Struct("=IHHII")
_DIAG_REQUEST = struct.Struct("=BBBxI 2s2s16s16sI8s")
_DIAG_ANSWER = struct.Struct("=BBxx 2s2s16s16sI8s III II")
_ANY_COOKIE = b"\xff" * 8
_ESTABLISHED = 1
_ALL_STATES = 0xFFF
_DIAG_SECONDS = 2.0


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
    body = _DIAG_REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES, *ends, 0, _ANY_COOKIE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as diag:
        diag.settimeout(_DIAG_SECONDS)
        diag.sendto(_DIAG_HEADER.pack(_DIAG_HEADER.size + len(body), _BY_FAMILY, _REQUEST_FLAG, 1, 0) + body, (0, 0))
        answer = diag.recv(1 << 12)
    if _DIAG_HEADER.unpack_from(answer)[1] == _ERROR:
        number = -struct.unpack_from("=i", answer, _DIAG_HEADER.size)[0]
        if number == errno.ENOENT:
            return None
        raise OSError(number, os.strerror(number))
    _, state, port, other_port, *_, uid, inode = _DIAG_ANSWER.unpack_from(answer, _DIAG_HEADER.size)
    # The answer may also be a listener on that port, and a closed socket has no user any more.
    is_it = state == _ESTABLISHED and [port, other_port] == ends[:2] and inode
    return int(uid) if is_it else None
