"""Several machines on one: network namespaces joined by a bridge, so that agents meet a real network between them.

A namespace has its own interfaces, addresses and ports, and another one is reached over an Ethernet bridge only. The
bridge lies in a namespace of its own: no firewall, route or address of the host plays a part, and any number of test
runs may do this at the same time.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

INTERFACE = "eth0"
_PREFIX = "shoal-test"
_numbers = itertools.count()
_ANY, _DROP = 0, 2


def _no_syn(but_port: int) -> str:
    """For the kernel's classic packet filter, which needs no program but tc: instruction, where to jump if true and if
    not (so many instructions), and a number."""
    program = (
        (0x28, 0, 0, 12),  # the Ethernet type:
        (0x15, 0, 8, 0x0800),  # IPv4, else to the end
        (0x30, 0, 0, 23),  # the protocol:
        (0x15, 0, 6, 6),  # TCP
        (0x28, 0, 0, 36),  # the port, behind a header of IPv4 without options:
        (0x15, 4, 0, but_port),  # the one that is open
        (0x30, 0, 0, 47),  # the flags:
        (0x54, 0, 0, 0x12),
        (0x15, 0, 1, 0x02),  # SYN, and not ACK
        (0x06, 0, 0, _DROP),
        (0x06, 0, 0, _ANY),
    )
    return ",".join([str(len(program)), *(" ".join(map(str, one)) for one in program)])


@dataclass(frozen=True)
class Namespace:
    """One machine of the network: its namespace, its one address, and the bridge's end of its cable."""

    name: str
    address: str
    switch: str
    port: str

    @property
    def address6(self) -> str:
        return f"fd77::{self.address.rpartition('.')[2]}"

    @property
    def path(self) -> str:
        return f"/run/netns/{self.name}"

    def plug(self, plugged: bool) -> None:
        """Pull the cable out at the bridge, or put it back."""
        _ip("-n", self.switch, "link", "set", self.port, "up" if plugged else "down")

    def cut(self, to: Namespace, cut: bool) -> None:
        """Drop all packets from this machine to another, in one direction; or end that."""
        unknown_neighbour = "lladdr 02:00:00:00:00:01 nud permanent"
        for address in (to.address, to.address6):
            _ip(
                "-n",
                self.name,
                "neigh",
                *(
                    f"replace {address} dev {INTERFACE} {unknown_neighbour}".split()
                    if cut
                    else f"del {address} dev {INTERFACE}".split()
                ),
            )

    def let_no_connection_in(self, but_port: int = 0) -> None:
        """Drop every request to connect (a TCP segment with SYN and without ACK) that comes through the cable, except
        to one port. Answers to this machine's own connections pass as before."""
        no_syn = _no_syn(but_port)
        commands = "qdisc add dev {} clsact", f"filter add dev {{}} ingress bpf bytecode '{no_syn}' direct-action"
        for command in commands:
            argv = shlex.split(command.format(INTERFACE))
            subprocess.run(["tc", "-n", self.name, *argv], check=True, capture_output=True)

    def slow(self, kbit: int) -> None:
        """Let so much through the cable in a second, each way; 0: as much as there is."""
        for name, interface in ((self.name, INTERFACE), (self.switch, self.port)):
            what = f"replace dev {interface} root tbf rate {kbit}kbit burst 4k latency 1s"
            command = ["tc", "-n", name, "qdisc", *(what if kbit else f"del dev {interface} root").split()]
            subprocess.run(command, check=True, capture_output=True)

    def rename_link(self, name: str) -> None:
        """Give the machine's own interface another name; what it had of IPv6 is lost."""
        commands = (f"{INTERFACE} down", f"{INTERFACE} name {name}", f"{name} up")
        _batch(self.name, [f"link set {command}" for command in commands])

    def add_address(self, address: str, interface: str, label: str) -> None:
        """One more address, under a label of its own (eth0:1)."""
        _batch(self.name, [f"address add {address} dev {interface} label {label}"])

    def set_link(self, up: bool) -> None:
        """Set the machine's own interface up or down."""
        _ip("-n", self.name, "link", "set", INTERFACE, "up" if up else "down")


def require_namespaces() -> None:
    """Skip the test where network namespaces cannot be made; fail it in CI, which must not leave it out."""
    if os.geteuid() != 0:
        reason = "network namespaces need root"
    elif shutil.which("ip") is None:
        reason = "network namespaces need the program ip (Debian: iproute2)"
    else:
        return
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; CI must provide it")
    pytest.skip(reason)


@contextmanager
def network_namespaces(count: int) -> Iterator[list[Namespace]]:
    """``count`` machines with addresses 10.77.0.1 and fd77::1, 10.77.0.2 and fd77::2, ... on one Ethernet."""
    require_namespaces()
    _remove_leftovers()
    own = f"{_PREFIX}-{os.getpid()}-{_start_of(os.getpid())}-{next(_numbers)}"
    switch = f"{own}-switch"
    machines = [Namespace(f"{own}-{k}", f"10.77.0.{k + 1}", switch, f"port{k}") for k in range(count)]
    try:
        _ip("netns", "add", switch)
        _batch(switch, ["link add bridge0 type bridge", "link set bridge0 up"])
        for machine in machines:
            _connect(machine)
        yield machines
    finally:
        for name in [*(machine.name for machine in machines), switch]:
            _delete(name)


def _connect(machine: Namespace) -> None:
    _ip("netns", "add", machine.name)
    _batch(
        machine.switch,
        [
            f"link add {machine.port} type veth peer name {INTERFACE} netns {machine.name}",
            f"link set {machine.port} master bridge0 up",
        ],
    )
    _batch(
        machine.name,
        [
            "link set lo up",
            f"address add {machine.address}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
            f"address add {machine.address6}/64 dev {INTERFACE} nodad",
        ],
    )


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _batch(name: str, commands: list[str]) -> None:
    subprocess.run(["ip", "-n", name, "-batch", "-"], input="\n".join(commands), check=True, text=True)


def _delete(name: str) -> None:
    if Path("/run/netns", name).exists():
        _ip("netns", "delete", name)


def _start_of(pid: int) -> str:
    """When a process started; with its pid, a name that no later process has. Empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _remove_leftovers() -> None:
    """Remove the remains of a killed test run."""
    folder = Path("/run/netns")
    for entry in folder.iterdir() if folder.exists() else ():
        if not entry.name.startswith(_PREFIX):
            continue
        pid, start = entry.name.removeprefix(f"{_PREFIX}-").split("-")[:2]
        if _start_of(int(pid)) != start:
            _delete(entry.name)


def bytes_sent_by_the_interface() -> int:
    """Since it is there; of the namespace that this process lives in."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counts,) = (line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(counts[8])
