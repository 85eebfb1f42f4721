"""Simulated TCP sockets between agents: streams are cut into pieces, delayed, broken, partitioned.

A socket here has the calls that the transport makes. Its behaviour at the end of a connection follows Linux. Received
bytes are read before an error. Closing a socket with unread bytes resets the connection.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.transport.addresses import DEAD_HOST_SECONDS
from shoal.transport.poller import READ, WRITE

from .scheduler import Scheduler, Task

SYN_SECONDS = 15.0
MOST_CUTS = 3
"""Of the bytes of one call. More pieces take more time and show no more."""


BUSY, BUSY_SECONDS = 200, 0.01
"""Polls in a row that return at once, after which each takes some time."""


@dataclass
class Weather:
    """How the network behaves in a run.

    Attributes:
        latency: The longest delay of a piece, in seconds.
        cutting: How often a piece ends early.
        room: Bytes that a connection takes before its receiver reads.
    """

    latency: float = 0.0005
    cutting: float = 0.3
    room: int = 1 << 16


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class Socket:
    """One end of a connection, or a listener."""

    family = socket.AF_INET

    def __init__(self, network: Network, agent: int) -> None:
        self.network, self.agent = network, agent
        self.number = network.number()
        network.sockets[self.number] = self
        self.peer: Socket | None = None
        self.name: tuple[str, int] = (network.address(agent), 0)
        self.unread = bytearray()
        self.coming = 0  # bytes on their way here
        self.last = 0.0  # when the last of them comes
        self.ended = False
        self.error: OSError | None = None
        self.queue: list[Socket] | None = None  # of a listener
        self.lowest = 1
        self.watchers: list[Poller] = []

    # The calls of the transport

    def fileno(self) -> int:
        return self.number

    def setblocking(self, _: bool) -> None: ...

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT):
            self.lowest = value
            self.changed()

    def getsockname(self) -> tuple[str, int]:
        return self.name

    def getpeername(self) -> tuple[str, int]:
        if self.peer is None:
            raise _error(errno.ENOTCONN)
        return self.peer.name

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        if not self.queue:
            raise BlockingIOError
        sock = self.queue.pop(0)
        return sock, sock.getpeername() if sock.peer else ("10.0.0.0", 0)

    def recv_into(self, room: memoryview) -> int:
        data = self.recv(len(room))
        room[: len(data)] = data
        return len(data)

    def recv(self, most: int) -> bytes:
        if self.unread:
            some = bytes(self.unread[:most])
            del self.unread[:most]
            if self.peer is not None:
                self.peer.changed()
            return some
        if self.error is not None:
            raise self.error
        if self.ended:
            return b""
        raise BlockingIOError

    def send(self, data: Any) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Any) -> int:
        if self.error is not None:
            raise self.error
        peer = self.peer
        if peer is None:
            raise BlockingIOError
        room = self.network.weather.room - len(peer.unread) - peer.coming
        if room <= 0:
            raise BlockingIOError
        data = b"".join(buffers)[:room]
        self.network.carry(self, peer, data)
        return len(data)

    def close(self) -> None:
        if self.number < 0:
            return
        self.network.sockets.pop(self.number, None)
        self.number = -1
        for one in self.queue or ():
            one.close()
        if self.queue is not None:
            self.network.listeners.pop(self.name, None)
        peer, self.peer = self.peer, None
        if peer is not None:
            self.network.disconnect(self, peer, bool(self.unread))

    # The behaviour of the network

    def ready(self) -> int:
        if self.number < 0:  # its process has crashed: epoll forgets a descriptor that is closed
            return 0
        if self.queue is not None:
            return READ if self.queue else 0
        if self.error is not None:
            return READ | WRITE
        room, peer, unread = self.network.weather.room, self.peer, len(self.unread)
        # The kernel makes room for the requested size.
        events = READ if unread >= self.lowest or self.ended or (self.lowest > 1 and unread >= room // 2) else 0
        if peer is not None and len(peer.unread) + peer.coming < room:
            events |= WRITE
        return events

    def changed(self) -> None:
        number = self.number
        for poller in self.watchers:
            poller.notice(number)

    def fail(self, code: int) -> None:
        if self.error is None and not self.ended:
            self.error, self.peer = _error(code), None
            self.changed()

    def arrive(self, piece: bytes) -> None:
        self.coming -= len(piece)
        if self.number >= 0 and self.error is None:
            self.unread += piece
            self.changed()

    def end(self, reset: bool) -> None:
        if self.number < 0 or self.error is not None:
            return
        if reset:
            self.fail(errno.ECONNRESET)
        else:
            self.ended = True
            self.changed()


class Network:
    """Between the agents of one run."""

    def __init__(self, scheduler: Scheduler, weather: Weather) -> None:
        self.scheduler, self.weather = scheduler, weather
        self.sockets: dict[int, Socket] = {}
        self.listeners: dict[tuple[str, int], Socket] = {}
        self.partitioned: dict[tuple[int, int], float] = {}  # pairs of agents, until when
        self.log: Callable[[str], None] = lambda what: None
        self._numbers = 10_000

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    @staticmethod
    def address(agent: int) -> str:
        return f"10.0.0.{agent + 1}"

    def _me(self) -> int:
        task = self.scheduler.current
        assert task is not None
        return task.agent

    def listen(self, address: str, _ports: range = range(1)) -> Socket:
        sock = Socket(self, self._me())
        sock.queue, sock.name = [], (address, 7000 + sock.number)
        self.listeners[sock.name] = sock
        return sock

    def start_connecting(self, address: str, port: int) -> Socket:
        sock = Socket(self, self._me())
        destination = int(address.rpartition(".")[2]) - 1
        heals = self._heals(sock.agent, destination)
        if heals - self.scheduler.now > SYN_SECONDS:
            self.scheduler.at(self.scheduler.now + SYN_SECONDS, sock.fail, errno.ETIMEDOUT)
        else:
            self.scheduler.at(max(heals, self.scheduler.now) + self._delay(), self._join, sock, address, port)
        return sock

    def _join(self, sock: Socket, address: str, port: int) -> None:
        listener = self.listeners.get((address, port))
        if sock.number < 0:
            return
        if listener is None or listener.agent in self.scheduler.dead:
            sock.fail(errno.ECONNREFUSED)
            return
        other = Socket(self, listener.agent)
        other.name = (address, port)
        sock.peer, other.peer = other, sock
        assert listener.queue is not None
        listener.queue.append(other)
        listener.changed()
        sock.changed()

    def unconnected(self, _address: str) -> Socket:
        sock = Socket(self, self._me())
        sock.fail(errno.ENOTCONN)
        return sock

    def _delay(self) -> float:
        return self.scheduler.chance.random() * self.weather.latency

    def _heals(self, one: int, other: int) -> float:
        return self.partitioned.get((min(one, other), max(one, other)), 0.0) if self.partitioned else 0.0

    def _when(self, source: Socket, to: Socket) -> float:
        scheduler = self.scheduler
        now = scheduler.now
        if self.partitioned:
            now = max(now, self._heals(source.agent, to.agent))
        when = now + scheduler.chance.random() * self.weather.latency
        if when > to.last:
            to.last = when
        return to.last

    def carry(self, source: Socket, to: Socket, data: bytes) -> None:
        scheduler, cutting = self.scheduler, self.weather.cutting
        to.coming += len(data)
        cuts = 0
        while len(data) > 1 and cuts < MOST_CUTS and scheduler.chance.random() < cutting:
            size = scheduler.chance.randrange(1, len(data))
            scheduler.at(self._when(source, to), to.arrive, data[:size])
            data, cuts = data[size:], cuts + 1
        scheduler.at(self._when(source, to), to.arrive, data)

    def disconnect(self, source: Socket, to: Socket, reset: bool) -> None:
        self.scheduler.at(self._when(source, to), to.end, reset)

        def reset_peer() -> None:  # its later packets are answered by a reset
            if to.number >= 0 and to.peer is source:
                to.peer = None
                if to.error is None and not reset:
                    to.peer = _Nobody(self, to)

        self.scheduler.at(to.last, reset_peer)

    def cut(self, one: int, other: int) -> int:
        """Break the connections between two agents; how many."""
        results = [
            sock for sock in self.sockets.values() if sock.peer and {sock.agent, sock.peer.agent} == {one, other}
        ]
        for sock in results:
            sock.fail(errno.ECONNRESET)
        return len(results)

    def part(self, groups: list[list[int]], seconds: float) -> None:
        """Nothing passes between groups of agents for some time."""
        heals = self.scheduler.now + seconds
        for a, own in enumerate(groups):
            for remote in groups[a + 1 :]:
                for one in own:
                    for other in remote:
                        self.partitioned[min(one, other), max(one, other)] = heals
                        if seconds > DEAD_HOST_SECONDS:
                            self._give_up(one, other)

    def _give_up(self, one: int, other: int) -> None:
        for sock in list(self.sockets.values()):
            if sock.peer and {sock.agent, sock.peer.agent} == {one, other}:
                late = self.scheduler.now + DEAD_HOST_SECONDS + self._delay()
                self.scheduler.at(late, sock.fail, errno.ETIMEDOUT)

    def crash(self, agent: int) -> None:
        """The kernel closes what a process has when it ends."""
        for sock in [one for one in self.sockets.values() if one.agent == agent]:
            sock.close()


class _Nobody(Socket):
    """The other end of a connection that was closed there: what is sent to it comes back as a reset."""

    def __init__(self, network: Network, back: Socket) -> None:
        self.network, self.agent, self.back = network, -1, back
        self.number, self.coming, self.last = -1, 0, 0.0
        self.unread, self.error, self.name = bytearray(), None, ("", 0)
        self.watchers = []

    def arrive(self, piece: bytes) -> None:
        self.coming -= len(piece)
        self.back.fail(errno.ECONNRESET)


class Poller:
    """As ``transport/poller.py``, on these sockets. It checks only sockets that have changed since they were idle."""

    def __init__(self, network: Network) -> None:
        self._network, self._scheduler = network, network.scheduler
        self._watched: dict[int, tuple[Socket, Callable[[int], None], int]] = {}
        self._changed: dict[int, None] = {}  # ordered, so that the same seed gives the same run
        self._woken = False
        self._asleep: Task | None = None
        self._at_once = 0  # polls since it last waited

    def add(self, number: int, callback: Callable[[int], None], events: int = READ) -> None:
        sock = self._network.sockets[number]
        self._watched[number] = sock, callback, events
        sock.watchers.append(self)
        self.notice(number)

    def modify(self, number: int, events: int) -> None:
        sock, callback, _ = self._watched[number]
        self._watched[number] = sock, callback, events
        self.notice(number)

    def remove(self, number: int) -> None:
        result = self._watched.pop(number, None)
        self._changed.pop(number, None)
        if result is not None:
            result[0].watchers.remove(self)

    def notice(self, number: int) -> None:
        self._changed[number] = None
        if self._asleep is not None:
            self._scheduler.wake(self._asleep)

    def wake(self) -> None:
        self._woken = True
        if self._asleep is not None:
            self._scheduler.wake(self._asleep)

    def _due(self) -> list[tuple[Callable[[int], None], int]]:
        due = []
        for number in list(self._changed):
            watched = self._watched.get(number)
            if watched is not None:
                sock, callback, events = watched
                result = sock.ready() & (events | READ)
                if result & events:
                    due.append((callback, result))
                    continue
            del self._changed[number]  # until it changes again
        return due

    def poll(self, timeout: float) -> list[tuple[Callable[[int], None], int]]:
        scheduler = self._scheduler
        until = scheduler.now + timeout
        self._at_once += 1
        if self._at_once > BUSY:  # else virtual time would stand still where an event is never taken
            scheduler.sleep(BUSY_SECONDS)
        if timeout > 0 and not self._woken and scheduler.chance.random() < 0.2:
            scheduler.yield_now()
        while True:
            due = self._due()
            if due or self._woken or scheduler.now >= until:
                self._woken = False
                if len(due) > 1:
                    scheduler.chance.shuffle(due)
                return due
            self._asleep, self._at_once = scheduler.current, 0
            try:
                scheduler.block(until)
            finally:
                self._asleep = None

    waker = -1

    def descriptors(self) -> list[int]:
        return []

    def close(self) -> None:
        for number in list(self._watched):
            self.remove(number)
