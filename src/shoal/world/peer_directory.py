"""Where each agent listens, told through a store that others may read and write, too.

Who has been given a secret (``SHOAL_SECRET``, which ``shoal run`` sets on one machine) never shows it: it signs what it
says, and believes only what is signed. The signature covers the attempt, the rank and everybody's place, in which each
looks for what it has said itself: so the places are believed, too, and a recording of another attempt is of no use.
Without one, rank 0 makes a secret up and the store is trusted: who can read it while ``init`` runs can join the job.

Either way what all have said goes into what agents prove to each other when they connect: agents that were told
different things do not. Inside TLS nobody can answer for them, so then the store need not be trusted.
"""

from __future__ import annotations

import hmac
import json
import os
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from .. import clock
from ..errors import DeadlineExceeded, Mismatch
from ..transport.peer_address import Endpoint, PeerId, unknown_peer_id
from .bootstrap_barrier import DIRECTORY, LOST, BootstrapBarrier, ended_before
from .launch import LAUNCHER, Launch
from .store import Store

ENDPOINT = "endpoint"


class PeerDirectory(NamedTuple):
    """What agents know of each other when they have met."""

    attempt: str
    said: list[dict[str, Any]]
    """What each said when it joined the meeting."""
    reached_from: list[dict[str, Any]]
    """Where each said that it listens."""
    key: bytes
    """What agents must know to connect."""
    is_private: bool
    """Nobody else can know it."""
    begins: int | None = None
    """How many of them have met, where others may come later."""

    @property
    def places(self) -> list[PeerId]:
        """By rank."""
        return [PeerId(**one["place"]) for one in self.said]

    @property
    def endpoints(self) -> list[Endpoint]:
        """By rank."""
        return [Endpoint(**one["endpoint"]) for one in self.reached_from]

    def written(self) -> bytes:
        """For those who come later, and know the secret that was given."""
        return json.dumps([self.attempt, self.said[: self.begins], self.reached_from[: self.begins]]).encode()


def with_absent(said: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """What has been said by rank, and the places of those who have not come yet."""
    return [*said, *({"place": asdict(unknown_peer_id(rank)), "reached": ""} for rank in range(len(said), size))]


def _complete_directory(
    launch: Launch, attempt: str, said: list[dict[str, Any]], heard: list[dict[str, Any]], key: bytes, is_private: bool
) -> PeerDirectory:
    """What agents know who have met, with those who have not come yet."""
    endpoints = [*heard, *({"endpoint": asdict(Endpoint())} for _ in range(len(heard), launch.size))]
    return PeerDirectory(attempt, with_absent(said, launch.size), endpoints, key, is_private, launch.begins)


def directory(store: Store, launch: Launch, deadline: float) -> PeerDirectory:
    """Where those are who have met, and those who have come since: for an agent that was given the job's secret.

    Raises:
        Mismatch: The others do not know that secret; or somebody else has written it.
    """
    given = os.environ.get("SHOAL_SECRET", "").encode()
    if not given:
        raise _unproven_error(launch.rank, [launch.rank])
    try:
        attempt, said, heard = json.loads(_directory_of(store, launch, deadline))
        _check_proofs(given, attempt, launch, said, heard)
        met = _complete_directory(launch, attempt, said, heard, _digest(given, "shoal job", attempt, said, heard), True)
        for rank in range(launch.size):
            if store.has(f"{DIRECTORY}/{rank}"):
                *came, proof = json.loads(store.get(f"{DIRECTORY}/{rank}", deadline))
                if hmac.compare_digest(str(proof).encode(), _verified_peer(given, attempt, rank, came).encode()):
                    met.said[rank], met.reached_from[rank] = came
        return met
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise Mismatch(
            f"shoal.init() on rank {launch.rank}: what the rendezvous store says of those who have met makes no sense "
            f"({error}); somebody else writes to it",
            (),
        ) from None


def _directory_of(store: Store, launch: Launch, deadline: float) -> bytes:
    """Who joins may be there before those who begin have met."""
    try:
        what, text = store.first([DIRECTORY, LOST], deadline)
    except DeadlineExceeded:
        raise DeadlineExceeded(
            f"shoal.init() on rank {launch.rank}: the agents that the run begins with have not met in time; "
            "SHOAL_TIMEOUT sets how long to wait",
            tuple(range(launch.begins)),
        ) from None
    if what == LOST:
        raise ended_before(launch.rank, text)
    return text


def numbered(store: Store, launch: Launch, deadline: float) -> tuple[Launch, dict[str, Any]]:
    """The launch of an agent that a new launcher may have started, where that of its machine before has ended.

    A launcher counts how often it has started an agent. One that takes the place of another, as in a pod that is
    started anew, begins at 0 again, though the others know that agent. So the agents of a launcher count on from where
    those of the one before have ended, and say so to those who come later.

    Returns:
        The launch as the others are to know it, and what is to be said of it.
    """
    me = os.environ.get(LAUNCHER, "")
    base = 0
    if store.has(DIRECTORY):
        known = directory(store, launch, deadline).said[launch.rank]
        of = known.get("launcher", {"id": "", "base": 0})
        base = int(of["base"]) if of["id"] == me else int(known["place"]["incarnation"]) + 1
    return replace(launch, incarnation=base + launch.incarnation), {"launcher": {"id": me, "base": base}}


def add_to_directory(store: Store, launch: Launch, met: PeerDirectory) -> None:
    """Say to those who come later where this agent is."""
    given = os.environ.get("SHOAL_SECRET", "").encode()
    came = [met.said[launch.rank], met.reached_from[launch.rank]]
    text = json.dumps([*came, _verified_peer(given, met.attempt, launch.rank, came)])
    store.set(f"{DIRECTORY}/{launch.rank}", text.encode())


def _verified_peer(secret: bytes, attempt: str, rank: int, came: list[Any]) -> str:
    return _digest(secret, "shoal came later", attempt, rank, came).hex()


def introduce(
    meeting: BootstrapBarrier, launch: Launch, found: list[dict[str, Any]], endpoint: Endpoint
) -> PeerDirectory:
    """Tell the others where this agent listens, and hear where they do.

    Args:
        meeting: The attempt.
        launch: Who this is.
        found: What all have said when they joined it.
        endpoint: Where this agent listens.

    Raises:
        Mismatch: An agent does not know the secret that this one was given, or this one was given none.
    """
    given = os.environ.get("SHOAL_SECRET", "").encode()
    if found[launch.rank] != meeting.said:  # all may have read the same, and it was not what this one said
        raise _unproven_error(launch.rank, [launch.rank])
    mine: dict[str, Any] = {"endpoint": asdict(endpoint)}
    if given:
        mine["proof"] = _proof(given, meeting.attempt, launch.rank, found, mine["endpoint"])
    elif launch.rank == 0:
        mine["secret"] = clock.random_hex(32)
    heard = meeting.gather(ENDPOINT, mine)
    if given:
        _check_proofs(given, meeting.attempt, launch, found, heard)
    elif signed := [rank for rank, one in enumerate(heard) if "proof" in one]:
        raise Mismatch(
            f"shoal.init() on rank {launch.rank}: ranks {signed} were given a secret and this one was not; set the "
            "same SHOAL_SECRET for all agents, or for none",
            signed,
        )
    if heard[launch.rank] != mine:
        raise _unproven_error(launch.rank, [launch.rank])
    secret = given or heard[0]["secret"].encode()
    key = _digest(secret, "shoal job", meeting.attempt, found, heard)
    return _complete_directory(launch, meeting.attempt, found, heard, key, bool(given))


def _check_proofs(
    given: bytes, attempt: str, launch: Launch, found: list[dict[str, Any]], heard: list[dict[str, Any]]
) -> None:
    """Mismatch for those who cannot have said what they are said to have said."""
    unproven = []
    for rank, one in enumerate(heard):
        proof = _proof(given, attempt, rank, found, one.get("endpoint"))
        if not hmac.compare_digest(str(one.get("proof")).encode(), proof.encode()):
            unproven.append(rank)
    if unproven or len(heard) != launch.begins:
        raise _unproven_error(launch.rank, unproven)


def _unproven_error(rank: int, unproven: list[int]) -> Mismatch:
    return Mismatch(
        f"shoal.init() on rank {rank}: ranks {unproven} do not know this job's secret, or the rendezvous store does "
        "not say what they said; set the same SHOAL_SECRET for all agents. If it is the same, somebody else writes to "
        "the store",
        unproven,
    )


def _proof(secret: bytes, attempt: str, rank: int, found: list[dict[str, Any]], endpoint: Any) -> str:
    return _digest(secret, "shoal endpoint", attempt, rank, found, endpoint).hex()


def _digest(secret: bytes, what: str, attempt: str, *said: Any) -> bytes:
    text = json.dumps([what, attempt, *said], sort_keys=True)
    return hmac.digest(secret, text.encode(), "sha256")
