"""The directory of the agents' addresses, exchanged through a store that other processes may read and write too.

An agent with a given secret (``SHOAL_SECRET``, which ``shoal run`` sets on one machine) never publishes the secret. It
signs its data, and accepts only signed data. The signature covers the attempt, the rank and the addresses of all, in
which each agent checks its own. So the addresses are trusted as well, and a replay of another attempt is useless.
Without a given secret, rank 0 generates one and the store is trusted: a reader of the store during ``init`` can join
the job.

In both cases the exchanged data are part of the proof by which agents authenticate each other: agents with different
data do not connect. With TLS no other process can impersonate an agent, so the store need not be trusted.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from .. import clock
from ..config import Config
from ..errors import DeadlineExceeded, Mismatch
from ..transport.peer_address import Endpoint, PeerId, unknown_peer_id
from .bootstrap_barrier import DIRECTORY, LOST, BootstrapBarrier, ended_before
from .launch import Launch
from .store import Store

ENDPOINT = "endpoint"


class PeerDirectory(NamedTuple):
    """The addresses and the key that agents have exchanged at the barrier."""

    attempt: str
    published: list[dict[str, Any]]
    """Each agent's data at the barrier, by rank."""
    reached_from: list[dict[str, Any]]
    """Each agent's endpoint, by rank."""
    key: bytes
    """The key with which agents authenticate each other."""
    is_private: bool
    """Whether no other process can know the key."""
    begins: int | None = None
    """The number of agents that have met, if others may join later."""

    @property
    def places(self) -> list[PeerId]:
        """The addresses of the agents, by rank."""
        return [PeerId(**agent["place"]) for agent in self.published]

    @property
    def endpoints(self) -> list[Endpoint]:
        """The endpoints on which the agents listen, by rank."""
        return [Endpoint(**agent["endpoint"]) for agent in self.reached_from]

    def written(self) -> bytes:
        """The directory as bytes, for agents that join later and know the given secret."""
        # Without the placeholders, because the signatures cover only the agents that have met.
        return json.dumps([self.attempt, self.published[: self.begins], self.reached_from[: self.begins]]).encode()


def with_absent(published: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """The agents' data by rank, with placeholders for agents that have not started yet."""
    return [
        *published,
        *({"place": asdict(unknown_peer_id(rank)), "reached": ""} for rank in range(len(published), size)),
    ]


def _complete_directory(
    launch: Launch,
    attempt: str,
    published: list[dict[str, Any]],
    answers: list[dict[str, Any]],
    key: bytes,
    is_private: bool,
) -> PeerDirectory:
    """The directory of the agents that have met, with placeholders for agents that have not started yet."""
    endpoints = [*answers, *({"endpoint": asdict(Endpoint())} for _ in range(len(answers), launch.size))]
    return PeerDirectory(attempt, with_absent(published, launch.size), endpoints, key, is_private, launch.begins)


def directory(store: Store, launch: Launch, deadline: float, secret: str) -> PeerDirectory:
    """The addresses of the agents that have met, and of agents that have joined since.

    For an agent that was given the job's secret.

    Raises:
        Mismatch: The other agents do not know that secret, or another process has written the directory.
    """
    given = secret.encode()
    if not given:
        raise _unproven_error(launch.rank, [launch.rank])
    try:
        attempt, published, answers = json.loads(_directory_of(store, launch, deadline))
        _check_proofs(given, attempt, launch, published, answers)
        met = _complete_directory(
            launch, attempt, published, answers, _digest(given, "shoal job", attempt, published, answers), True
        )
        for rank in range(launch.size):
            if store.has(f"{DIRECTORY}/{rank}"):
                *came, proof = json.loads(store.get(f"{DIRECTORY}/{rank}", deadline))
                # An entry without a valid signature is of another process: the address from the barrier remains.
                if hmac.compare_digest(str(proof).encode(), _verified_peer(given, attempt, rank, came).encode()):
                    met.published[rank], met.reached_from[rank] = came
        return met
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise Mismatch(
            f"shoal.init() on rank {launch.rank}: the rendezvous store has invalid data about the agents "
            f"({error}); another program writes to it",
            (),
        ) from None


def _directory_of(store: Store, launch: Launch, deadline: float) -> bytes:
    """Wait for the directory: joining agents may start before the first agents have met."""
    try:
        key, text = store.first([DIRECTORY, LOST], deadline)
    except DeadlineExceeded:
        raise DeadlineExceeded(
            f"shoal.init() on rank {launch.rank}: the agents that begin the run did not connect in time; "
            "SHOAL_TIMEOUT sets how long to wait",
            tuple(range(launch.begins)),
        ) from None
    if key == LOST:
        raise ended_before(launch.rank, text)
    return text


def numbered(store: Store, launch: Launch, deadline: float, config: Config) -> tuple[Launch, dict[str, Any]]:
    """The launch of an agent that a replacement may have started, after its machine's first launcher has ended.

    A launcher counts how often it has started an agent. A replacement, as in a restarted pod, begins at 0 again,
    although the other agents know a higher count. So its agents continue the count of the earlier launcher, and publish
    it for later launchers.

    Returns:
        The launch with the continued count, and the data to publish about the launcher.
    """
    me = config.launcher
    base = 0
    if store.has(DIRECTORY):
        known = directory(store, launch, deadline, config.secret).published[launch.rank]
        of = known.get("launcher", {"id": "", "base": 0})
        # With a lower count than a predecessor's, the others would refuse this agent as a stale process of its rank.
        base = int(of["base"]) if of["id"] == me else int(known["place"]["incarnation"]) + 1
    return replace(launch, incarnation=base + launch.incarnation), {"launcher": {"id": me, "base": base}}


def add_to_directory(store: Store, launch: Launch, met: PeerDirectory, secret: str) -> None:
    """Publish this agent's address for agents that join later."""
    given = secret.encode()
    came = [met.published[launch.rank], met.reached_from[launch.rank]]
    text = json.dumps([*came, _verified_peer(given, met.attempt, launch.rank, came)])
    store.set(f"{DIRECTORY}/{launch.rank}", text.encode())


def _verified_peer(secret: bytes, attempt: str, rank: int, came: list[Any]) -> str:
    return _digest(secret, "shoal came later", attempt, rank, came).hex()


def introduce(
    meeting: BootstrapBarrier, launch: Launch, found: list[dict[str, Any]], endpoint: Endpoint, secret: str
) -> PeerDirectory:
    """Exchange the addresses at which agents listen.

    Args:
        meeting: The barrier of this attempt.
        launch: This agent's launch.
        found: The data of all agents at the barrier.
        endpoint: The address at which this agent listens.
        secret: The job's secret; empty if this agent was given none.

    Raises:
        Mismatch: An agent does not know this agent's secret, or has a secret while this agent has none.
    """
    given = secret.encode()
    if found[launch.rank] != meeting.published:  # another process has changed this agent's data
        raise _unproven_error(launch.rank, [launch.rank])
    mine: dict[str, Any] = {"endpoint": asdict(endpoint)}
    if given:
        # It covers `found` as read here: a store that shows different data to different agents is detected.
        mine["proof"] = _proof(given, meeting.attempt, launch.rank, found, mine["endpoint"])
    elif launch.rank == 0:
        mine["secret"] = clock.random_hex(32)
    answers = meeting.gather(ENDPOINT, mine)
    if given:
        _check_proofs(given, meeting.attempt, launch, found, answers)
    elif signed := [rank for rank, answer in enumerate(answers) if "proof" in answer]:
        raise Mismatch(
            f"shoal.init() on rank {launch.rank}: ranks {signed} were given a secret and this one was not; set the "
            "same SHOAL_SECRET for all agents, or for none",
            signed,
        )
    # Another process may have replaced this agent's endpoint, and the others would connect to that process.
    if answers[launch.rank] != mine:
        raise _unproven_error(launch.rank, [launch.rank])
    of_job = given or answers[0]["secret"].encode()
    key = _digest(of_job, "shoal job", meeting.attempt, found, answers)
    return _complete_directory(launch, meeting.attempt, found, answers, key, bool(given))


def _check_proofs(
    given: bytes, attempt: str, launch: Launch, found: list[dict[str, Any]], answers: list[dict[str, Any]]
) -> None:
    """Raise Mismatch for agents whose data have no valid signature."""
    unproven = []
    for rank, answer in enumerate(answers):
        proof = _proof(given, attempt, rank, found, answer.get("endpoint"))
        if not hmac.compare_digest(str(answer.get("proof")).encode(), proof.encode()):
            unproven.append(rank)
    # No signature covers the length of the list: another process could leave out the last agents.
    if unproven or len(answers) != launch.begins:
        raise _unproven_error(launch.rank, unproven)


def _unproven_error(rank: int, unproven: list[int]) -> Mismatch:
    return Mismatch(
        f"shoal.init() on rank {rank}: ranks {unproven} do not know this job's secret, or the rendezvous store does "
        "not return their messages; set the same SHOAL_SECRET for all agents. If it is the same, another process "
        "writes to the store",
        unproven,
    )


def _proof(secret: bytes, attempt: str, rank: int, found: list[dict[str, Any]], endpoint: Any) -> str:
    return _digest(secret, "shoal endpoint", attempt, rank, found, endpoint).hex()


def _digest(secret: bytes, purpose: str, attempt: str, *parts: Any) -> bytes:
    # Sorted: equal data must give equal bytes on all agents, in whatever order their keys were added.
    text = json.dumps([purpose, attempt, *parts], sort_keys=True)
    return hmac.digest(secret, text.encode(), "sha256")
