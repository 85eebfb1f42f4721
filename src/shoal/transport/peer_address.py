"""The location and the listeners of an agent, as other agents need them.

``ProcessWatch`` detects the end of another agent's process on this machine, even if a child keeps its sockets open.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import clock
from .addresses import LOOPBACK, interface_address, is_loopback, reachable_address
from .poller import Poller

TRANSPORTS = ("threads", "shared_memory", "network")


@dataclass(frozen=True)
class PeerId:
    """The location of an agent, which determines the transports that can reach it."""

    rank: int
    host: str
    boot: str
    namespace: int
    uid: int
    process: str
    pid: int
    started: int
    incarnation: int = 0
    """How often this agent has been restarted."""
    pid_namespace: int = 0
    """In which ``pid`` is the number of its process."""

    @property
    def machine(self) -> tuple[str, int, int]:
        return self.boot, self.namespace, self.uid

    @property
    def known(self) -> bool:
        """An agent has come there."""
        return bool(self.process)


@dataclass(frozen=True)
class Endpoint:
    """The addresses of an agent's listeners; empty without a listener."""

    inbox: str = ""
    unix: str = ""
    host: str = ""
    port: int = 0
    listener: int = -1
    """The descriptor of its process by which agents of its user on its machine find the socket that is for them."""


_process = clock.random_hex(16)


def _name_process() -> None:
    global _process
    _process = clock.random_hex(16)


os.register_at_fork(after_in_child=_name_process)


def process_start(pid: int) -> int:
    """When a process of this machine started, in clock ticks since boot; 0 where that cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def pid_namespace() -> int:
    """The namespace that the pids are of which this process sees: containers of one pod have each their own."""
    return Path("/proc/self/ns/pid").stat().st_ino


def unknown_peer_id(rank: int) -> PeerId:
    """The place of an agent that has not come yet."""
    return PeerId(rank, "", "", 0, -1, "", 0, 0)


def local_peer_id(rank: int, incarnation: int = 0) -> PeerId:
    """The place of the caller."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/net").stat().st_ino
    pid = os.getpid()
    started = process_start(pid)
    seen = rank, socket.gethostname(), boot, namespace, os.getuid(), _process, pid, started
    return PeerId(*seen, incarnation, pid_namespace())


def choose_transports(mine: PeerId, places: list[PeerId], forced: str = "") -> list[str]:
    """The transport to each rank from one place, empty for agents that have not come yet.

    ``forced`` (``SHOAL_TRANSPORT``) is used for all, or refused with the reason.

    Raises:
        ValueError: The forced transport cannot reach a rank.
    """
    kinds = []
    for place in places:
        if not place.known:
            kinds.append("")
            continue
        best = "network"
        if place.machine == mine.machine:
            best = "threads" if place.process == mine.process else "shared_memory"
        if forced and TRANSPORTS.index(forced) < TRANSPORTS.index(best):
            raise ValueError(
                f"SHOAL_TRANSPORT={forced} cannot reach rank {place.rank} on {place.host} from rank {mine.rank} on "
                f"{mine.host}: they share no {'process' if forced == 'threads' else 'machine'}; unset it, or use {best}"
            )
        kinds.append(forced or best)
    return kinds


def address_for_listening(
    mine: PeerId, places: list[PeerId], interface: str, rendezvous: str, reached: list[str]
) -> str:
    """The address of an agent's listener for other agents that share no memory with it.

    Args:
        mine, places: The location of the agent, and the locations of all by rank.
        interface: An interface or address of this machine, as ``SHOAL_INTERFACE``; empty if none is given.
        rendezvous, reached: As for :meth:`~.router.Router.listen`.
    """
    if interface:
        far = [address for address in reached if address and not is_loopback(address)]
        return interface_address(interface, prefer_ipv6=bool(far) and ":" in far[0])
    there = reached[mine.rank] or rendezvous
    network_of = {place.rank: (place.boot, place.namespace) for place in places if place.known}
    whole = len(network_of) == len(places)
    if len(set(network_of.values())) == 1 and (whole or is_loopback(there)):
        return LOOPBACK
    own = network_of[mine.rank]
    return reachable_address(there, [reached[rank] for rank, other in network_of.items() if other != own])


class ProcessWatch:
    """The watched processes, by rank; ``on_end`` is called when one has ended."""

    def __init__(self, poller: Poller, on_end: Callable[[int], None]) -> None:
        self._poller = poller
        self._on_end = on_end
        self._watched: dict[int, tuple[PeerId, int]] = {}  # with its descriptor

    def watch(self, place: PeerId) -> None:
        """Watch the process of an agent, if this process can see it."""
        if place.pid_namespace != pid_namespace():
            return
        try:
            fd = os.pidfd_open(place.pid)
        except OSError:
            return
        if process_start(place.pid) != place.started:  # it has ended, and its number is another one's
            os.close(fd)
            return
        self._watched[place.rank] = place, fd
        self._poller.add(fd, lambda _: self._end(place))

    def _end(self, place: PeerId) -> None:
        # A callback of the same poll may have admitted the next start of this rank, whose process has not ended.
        known = self._watched.get(place.rank)
        if known is not None and known[0] is place:
            self.forget(place.rank)
            self._on_end(place.rank)

    def forget(self, rank: int) -> None:
        known = self._watched.pop(rank, None)
        if known is not None:
            self._poller.remove(known[1])
            os.close(known[1])

    def __contains__(self, rank: int) -> bool:
        return rank in self._watched

    def descriptors(self) -> list[int]:
        return [fd for _, fd in self._watched.values()]

    def close(self) -> None:
        for rank in list(self._watched):
            self.forget(rank)
