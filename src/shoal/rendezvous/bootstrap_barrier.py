"""The barrier in a store at which the agents of a job meet. It also works if some agents have to retry.

Rank 0 begins an attempt: it chooses and stores a name for the attempt. The other agents join the attempt and send rank
0 their data. When all have joined, rank 0 publishes the data of all. An agent that gave up may retry before that: its
latest data count. When the attempt is over, successful or not, later agents wait until rank 0 begins another one. So
agents need not have called ``init`` equally often.

The barrier detects contradictions between launchers, because each agent would otherwise wait for agents that no
launcher starts: a number of agents that differs from rank 0's, and a rank that another agent has as well.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from .. import clock
from .._signals import pause
from ..errors import DeadlineExceeded, Mismatch, PeerLost, ShoalError
from .launch import Launch, join_address
from .rendezvous import REPORT_AFTER, open_store
from .store import LEAST_SECONDS, Store

log = logging.getLogger("shoal")

BREAK_UP_SECONDS = 5.0
"""Seconds at most that rank 0 keeps the store open after a failed attempt, so that other agents can read the reason.

It is longer than any agent takes, unless its process was killed or is stopped."""
STORE_CHECK_SECONDS = 1.0
"""Seconds between two looks into the store for an agent that has failed, while an agent waits for its links.

Links take less, so most agents never look: a look at the moment when rank 0 closes its store makes torch print a
warning."""
LINKS_BREAK_UP_SECONDS = 2 * STORE_CHECK_SECONDS
"""Like :data:`BREAK_UP_SECONDS`, while agents wait for their links: an agent with a link to rank 0 gets a notice by it,
and may not look into the store."""
_LOOK_AGAIN = 0.01
LOST = "lost"
"""The key, outside of attempts, for a launcher's notice that an agent has ended while the others continue."""

DIRECTORY = "directory"
"""The key, outside of attempts, under which the agents that have met publish their addresses for later agents."""


class AlreadyMet(Exception):
    """The other agents have met and run; a restarted agent reads their addresses from the directory."""


class BootstrapBarrier:
    """One agent's part in the barrier. Used as a context, it notifies the other agents if it fails."""

    def __init__(self, store: Store, launch: Launch, deadline: float, may_rejoin: bool = False) -> None:
        self.store = store
        self._may_rejoin = may_rejoin
        self.note: dict[str, Any] | None = None  # the reason of the last failed attempt, if known
        self._launch = launch
        self._deadline = deadline
        self._begun = clock.monotonic()
        self._report_at = self._begun + REPORT_AFTER
        self._ticket = 0  # number of calls of init for this rank, including this one
        self.published: dict[str, Any] = {}
        self._me = clock.random_hex(8)  # identifies this call of init
        self.attempt = ""  # the unique name of the attempt
        self._joined = False  # whether other agents may rely on this one
        self._complete = False  # whether all agents have joined
        self._notified = False  # whether another agent has published the failure
        self._hopeless = False  # whether an agent has ended, so that no attempt can succeed
        self._may_link = False  # whether other agents may have all addresses, and wait for links instead of the store
        self._done = False

    def join(self, published: dict[str, Any]) -> list[dict[str, Any]]:
        """Publish this agent's data, and return the data of all, by rank.

        Raises:
            PeerLost: Another agent failed, or the store is gone.
        """
        self.published = published
        announcement = json.dumps({"by": self._me, "of": self._launch.size, "data": published}).encode()
        try:
            self._take_ticket()
            found = self._lead(announcement) if self._launch.rank == 0 else self._follow(announcement)
        except DeadlineExceeded:
            raise self._too_late("place") from None
        self._complete = True
        return [publication["data"] for publication in found]

    @property
    def joined_late(self) -> bool:
        """Whether the attempt was over before this agent joined; rank 0 may have closed its store since."""
        return not self._joined and self._launch.rank > 0 and not self._hopeless

    def gather(self, key: str, published: dict[str, Any]) -> list[dict[str, Any]]:
        """Publish the last data of this agent, and return the data of all, by rank.

        Agents with the data of all connect. Until :meth:`end` they call :meth:`check` while they wait for their links.
        """
        self._set(f"{key}/{self._launch.rank}", json.dumps(published).encode())
        try:
            if self._launch.rank == 0:
                parts = [self._await(f"{key}/{other}").decode() for other in range(self._launch.begins)]
                # From here on rank 0 keeps its store for agents that look into it now and then: one that has read these
                # data has also set the key by which it needs the store no more.
                self._may_link = True
                self._set(f"{key}/all", f"[{','.join(parts)}]".encode())
            found: list[dict[str, Any]] = json.loads(self._await(f"{key}/all"))
        except DeadlineExceeded:
            raise self._too_late(key) from None
        self._may_link = True
        self._need_no_store()
        return found

    def forget(self, key: str) -> None:
        """Remove data of :meth:`gather` that all agents have read, because other processes may read the store too.

        Has an effect on rank 0 only.
        """
        if self._launch.rank == 0:
            with contextlib.suppress(RuntimeError):  # a process group's store may not support it, or be gone
                for source in ("all", *range(self._launch.begins)):
                    self.store.delete(self._key(f"{key}/{source}"))

    def check(self) -> bool:
        """Whether this may be called again: not after rank 0 has closed its store, as it does once it has its links.

        Raises:
            PeerLost: Another agent has failed since :meth:`gather`, and has published that in the store.
        """
        try:
            note = json.loads(self._get("over")) if self.store.has(self._key("over")) else None
        except (DeadlineExceeded, PeerLost, RuntimeError):
            return False
        if note is not None:
            raise self._failed(note)
        return True

    def end(self) -> None:
        """Mark the barrier as complete: this agent has its links, or a notice by them. Links report later failures."""
        self._done = True

    # Join

    def _take_ticket(self) -> None:
        """Count this call of ``init``. An earlier caller for this rank is notified; if it still waits, it is another
        agent.
        """
        self._ticket = self.store.add(f"came/{self._launch.rank}", 1)
        if self._ticket > 1:
            self._publish_twin(self._ticket - 1)

    def _publish_twin(self, ticket: int) -> None:
        me = f"process {os.getpid()} on {socket.gethostname()}"
        self.store.set(self._twin(ticket), me.encode())

    def _twin(self, ticket: int) -> str:
        return f"twin/{self._launch.rank}/{ticket}"

    def _taken_twice(self, twin: bytes) -> Mismatch:
        return Mismatch(
            f"shoal.init() on rank {self._launch.rank}: {twin.decode()} also calls itself rank {self._launch.rank} of "
            "this job: give each launcher a --node-rank of its own (each agent its RANK), and see that no earlier run "
            "still waits at this rendezvous",
            (self._launch.rank,),
        )

    def _lead(self, announcement: bytes) -> list[dict[str, Any]]:
        """Begin an attempt, and wait until all have joined it. Rank 0 calls it."""
        if self.store.has(DIRECTORY):
            if self._may_rejoin:
                raise AlreadyMet
            self.store.delete(DIRECTORY)  # of an earlier barrier: restarted agents must join this attempt
        self.attempt = clock.random_hex(8)
        before = self._read("attempt").decode() if self.store.has("attempt") else ""
        self.store.set("attempt", self.attempt.encode())
        # Agents that still wait in the earlier attempt follow this key into the new one.
        if before:
            self.store.set(f"{before}/next", self.attempt.encode())
        self._joined = True
        self._set("place/0", announcement)
        others = range(1, self._launch.begins)
        for other in others:
            self._present(other)
        # Read again: the latest data of each agent count.
        parts = [announcement, *(self._present(other) for other in others)]
        self._set("place/all", b"[%s]" % b",".join(parts))
        found: list[dict[str, Any]] = json.loads(self._get("place/all"))
        return found

    def _present(self, other: int) -> bytes:
        """Wait for the data of another agent. An agent that gave up has replaced them by an empty value."""
        while not (announcement := self._await(f"place/{other}")):
            if clock.monotonic() >= self._deadline:
                raise DeadlineExceeded("it has given up")
            pause(_LOOK_AGAIN)
        return announcement

    def _follow(self, announcement: bytes) -> list[dict[str, Any]]:
        """Join the attempt of rank 0, and each later one, until all agents have joined one."""
        self.attempt = self._first_of("attempt")[1].decode()
        self._check_size()
        while True:
            over = self.store.has(self._key("over"))
            if not over:
                self._joined = True
                self._set(f"place/{self._launch.rank}", announcement)
                key, value = self._first("next", "place/all", "over")
                if key == "place/all":
                    found: list[dict[str, Any]] = json.loads(value)
                    # Otherwise rank 0 has counted an earlier call of this rank, which gave up.
                    if found[self._launch.rank]["by"] == self._me:
                        return found
                elif key == "over":
                    note = json.loads(value)
                    if not note["again"]:
                        raise self._failed(note)
            self._joined = False
            if self.store.has(self._key("over")):
                # The other agent of this rank may have ended the attempt: without this check, this one would wait
                # until its deadline for an attempt that rank 0 does not begin.
                if self.store.has(twin := self._twin(self._ticket)):
                    raise self._taken_twice(self._read(twin))
                self.note = json.loads(self._get("over"))
                # The reason is read: otherwise rank 0 would keep its store open for this agent.
                self._need_no_store()
            self.attempt = self._first("next")[1].decode()

    def _check_size(self) -> None:
        """Refuse a number of agents that differs from rank 0's, and notify the agents that still wait."""
        key, announcement = self._first("place/0", "next", "over")
        theirs = json.loads(announcement)["of"] if key == "place/0" else self._launch.size
        if theirs != self._launch.size:
            # The error ends an attempt that still waits. A complete one continues without this agent.
            self._joined = not self.store.has(self._key("place/all"))
            raise Mismatch(
                f"shoal.init() on rank {self._launch.rank}: WORLD_SIZE is {self._launch.size} here and {theirs} on "
                "rank 0: start all launchers with the same number of agents (-n) and of machines (--nnodes)",
                (0,),
            )

    # The store

    def _key(self, key: str) -> str:
        return f"{self.attempt}/{key}"

    def _set(self, key: str, value: bytes) -> None:
        self.store.set(self._key(key), value)

    def _get(self, key: str) -> bytes:
        return self._read(self._key(key))

    def _read(self, key: str) -> bytes:
        """The value of a key that is set. Reading takes a moment, so it has a minimum time even at the deadline."""
        return self.store.get(key, max(self._deadline, clock.monotonic() + LEAST_SECONDS))

    def _first(self, *keys: str) -> tuple[str, bytes]:
        """The first of these keys that is set, and its value."""
        key, value = self._first_of(*(self._key(key) for key in keys))
        return key.removeprefix(f"{self.attempt}/"), value

    def _first_of(self, *keys: str) -> tuple[str, bytes]:
        """Like :meth:`_first`, with full key names. Raises if an awaited agent has ended, or this rank is taken
        twice.
        """
        may_rejoin = [DIRECTORY] if self._may_rejoin else []
        twin = self._twin(self._ticket)
        # Only after it has joined: the error ends the attempt, and the other agents must be notified.
        twins = [twin] if self._joined else []
        # LOST comes after the awaited keys: a complete attempt has succeeded, even if an agent has ended since.
        key, value = self._first_with_report([*may_rejoin, *keys, LOST, *twins])
        if key == DIRECTORY:
            self._notified = True
            raise AlreadyMet
        if key == LOST:
            self._notified = self._hopeless = True
            raise ended_before(self._launch.rank, value)
        if key == twin:
            # The later agent of this rank waits as well: with this key it gets the same error.
            self._publish_twin(self._ticket + 1)
            raise self._taken_twice(value)
        return key, value

    def _first_with_report(self, keys: list[str]) -> tuple[str, bytes]:
        """The first of these keys that is set, and its value. A wait that takes long is logged."""
        while True:
            until = min(self._deadline, self._report_at)
            try:
                return self.store.first(keys, until)
            except DeadlineExceeded:
                if until == self._deadline:
                    raise
            self._report_at = float("inf")
            absent, gone = self._missing("place")
            missing = sorted(absent + gone)
            log.warning(
                "shoal.init() on rank %d has waited %.0f s: %s; it gives up after %.0f s",
                self._launch.rank,
                clock.monotonic() - self._begun,
                f"ranks {missing} have not come" if missing else "rank 0 does not go on",
                self._deadline - self._begun,
            )

    def _await(self, key: str) -> bytes:
        arrived, value = self._first(key, "over")
        if arrived == key:
            return value
        raise self._failed(json.loads(value))

    # Failure

    def __enter__(self) -> BootstrapBarrier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or self._done:
            return
        with contextlib.suppress(ShoalError, OSError, RuntimeError):  # the store may be what failed
            try:
                if self._joined:
                    self._publish_failure(error)
            finally:
                self._need_no_store()
                self._set(f"seen/{self._launch.rank}", b"1")

    def _publish_failure(self, error: BaseException) -> None:
        """Publish the failure of this agent and its reason, if other agents would wait for it in vain."""
        gave_up = isinstance(error, DeadlineExceeded) and not self._complete
        rank = self._launch.rank
        if rank and gave_up:
            # Otherwise rank 0 would complete the attempt with an agent that no longer waits.
            self._set(f"place/{rank}", b"")
            return
        if not self._notified and not self.store.has(self._key("over")):
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            ranks = list(getattr(error, "ranks", ()))
            note = {"rank": rank, "why": why[:1000], "ranks": ranks, "again": gave_up}
            self._set("over", json.dumps(note).encode())
        if rank:
            return
        limit = clock.monotonic() + (LINKS_BREAK_UP_SECONDS if self._may_link else BREAK_UP_SECONDS)
        while clock.monotonic() < limit and any(map(self._needs_store, range(1, self._launch.begins))):
            pause(_LOOK_AGAIN)

    def _need_no_store(self) -> None:
        """Notify rank 0 that this agent does not need the store any more, so that rank 0 may close it."""
        if self._launch.rank and self._ticket:
            self.store.set(f"read/{self._launch.rank}", str(self._ticket).encode())

    def _needs_store(self, other: int) -> bool:
        """Whether another agent is connected and has not read the reason of this attempt's failure."""
        if self._may_link:
            return not self.store.has(self._key(f"seen/{other}"))
        key = f"read/{other}"
        read = int(self._read(key)) if self.store.has(key) else 0
        return self.store.add(f"came/{other}", 0) > read

    def _failed(self, note: dict[str, Any]) -> PeerLost:
        self._notified = True
        return PeerLost(
            f"shoal.init() on rank {self._launch.rank}: rank {note['rank']} failed in it ({note['why']}). "
            "Once that is mended, all agents may call init() again",
            (note["rank"],),
        )

    def _has_joined(self, other: int, key: str = "place") -> bool:
        name = self._key(f"{key}/{other}")
        return self.store.has(name) and bool(self._read(name))

    def _too_late(self, key: str) -> DeadlineExceeded:
        rank, size = self._launch.rank, self._launch.begins
        if self.note is not None:
            return given_up(rank, self.note)
        absent, gone = self._missing(key)
        published = [f"ranks {absent} never came"] if absent else []
        published += [f"ranks {gone} came, and gave up before"] if gone else []
        why = "; ".join(published) or "rank 0 did not answer"
        return DeadlineExceeded(
            f"shoal.init() on rank {rank}: {why}. Check that all {size} agents were started and can reach "
            f"{join_address(self._launch.host, self._launch.port)}; SHOAL_TIMEOUT sets how long to wait",
            # An agent that gave up had joined in time: it waited for the absent agents, as this one does.
            absent or gone or (0,),
        )

    def _missing(self, key: str) -> tuple[list[int], list[int]]:
        """The ranks that have not published this data, and the ranks that have withdrawn it, as far as known."""
        if not self._joined:
            return [0], []
        with contextlib.suppress(ShoalError, OSError, RuntimeError):
            others = [other for other in range(self._launch.begins) if other != self._launch.rank]
            here = [other for other in others if self.store.has(self._key(f"{key}/{other}"))]
            absent = [other for other in others if other not in here]
            return absent, [other for other in here if not self._has_joined(other, key)]
        return [], []


def ended_before(rank: int, published: bytes) -> PeerLost:
    """The error if an agent has ended that the other agents need to begin, as its launcher reports."""
    lost = json.loads(published)
    return PeerLost(
        f"shoal.init() on rank {rank}: an agent has ended ({lost['why']}), and all must have met before the others can "
        "go on without it",
        (int(lost["rank"]),),
    )


def given_up(rank: int, note: dict[str, Any]) -> DeadlineExceeded:
    """The error if rank 0 has ended an attempt and has begun no other one."""
    return DeadlineExceeded(
        f"shoal.init() on rank {rank}: the attempt of the others is over (rank {note['rank']}: {note['why']}), and "
        "rank 0 began no other one in time: all agents have to call init() again",
        note["ranks"] or (0,),
    )


@contextlib.contextmanager
def gather_agents(
    store: Store | None, launch: Launch, deadline: float, published: dict[str, Any], may_rejoin: bool = False
) -> Iterator[tuple[BootstrapBarrier, list[dict[str, Any]]]]:
    """Meet the other agents in a store, by default this launch's own. Yields the barrier and the data of all, by rank.

    The store is open within the context. ``may_rejoin``: this agent may be restarted in a running job.

    Raises:
        AlreadyMet: The other agents have met and run.
    """
    note: dict[str, Any] | None = None
    while True:
        try:
            mine = store or open_store(launch, deadline)
        except DeadlineExceeded:
            if note is None:
                raise
            raise given_up(launch.rank, note) from None
        closes = contextlib.nullcontext() if store is not None else contextlib.closing(mine)
        with closes, BootstrapBarrier(mine, launch, deadline, may_rejoin) as meeting:
            meeting.note = note
            try:
                found = meeting.join({**published, "reached": mine.address})
            except PeerLost:
                if store is not None or not meeting.joined_late:
                    raise
                # Rank 0 may have closed the store of that attempt: its next one has a new store.
                note = meeting.note
                continue
            yield meeting, found
            return
