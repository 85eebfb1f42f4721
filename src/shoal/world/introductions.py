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
import secrets
from dataclasses import asdict
from typing import Any

from ..errors import Mismatch
from ..transport.router import Endpoint
from .launch import Launch
from .meeting import Meeting

ENDPOINT = "endpoint"


def introduce(
    meeting: Meeting, launch: Launch, found: list[dict[str, Any]], endpoint: Endpoint
) -> tuple[list[Endpoint], bytes, bool]:
    """Tell the others where this agent listens. Where each does, by rank; what agents must know to connect; and
    whether nobody else can know it.

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
        raise _doubt(launch.rank, [launch.rank])
    mine: dict[str, Any] = {"endpoint": asdict(endpoint)}
    if given:
        mine["proof"] = _proof(given, meeting, launch.rank, found, mine["endpoint"])
    elif launch.rank == 0:
        mine["secret"] = secrets.token_hex(32)
    heard = meeting.gather(ENDPOINT, mine)
    if given:
        _believe(given, meeting, launch, found, heard)
    elif signed := [rank for rank, one in enumerate(heard) if "proof" in one]:
        raise Mismatch(
            f"shoal.init() on rank {launch.rank}: ranks {signed} were given a secret and this one was not; set the "
            "same SHOAL_SECRET for all agents, or for none",
            signed,
        )
    if heard[launch.rank] != mine:
        raise _doubt(launch.rank, [launch.rank])
    secret = given or heard[0]["secret"].encode()
    proof = _digest(secret, "shoal job", meeting, found, heard)
    return [Endpoint(**one["endpoint"]) for one in heard], proof, bool(given)


def _believe(
    given: bytes, meeting: Meeting, launch: Launch, found: list[dict[str, Any]], heard: list[dict[str, Any]]
) -> None:
    """Mismatch for those who cannot have said what they are said to have said."""
    unproven = []
    for rank, one in enumerate(heard):
        proof = _proof(given, meeting, rank, found, one.get("endpoint"))
        if not hmac.compare_digest(str(one.get("proof")).encode(), proof.encode()):
            unproven.append(rank)
    if unproven or len(heard) != launch.size:
        raise _doubt(launch.rank, unproven)


def _doubt(rank: int, unproven: list[int]) -> Mismatch:
    return Mismatch(
        f"shoal.init() on rank {rank}: ranks {unproven} do not know this job's secret, or the rendezvous store does "
        "not say what they said; set the same SHOAL_SECRET for all agents. If it is the same, somebody else writes to "
        "the store",
        unproven,
    )


def _proof(secret: bytes, meeting: Meeting, rank: int, found: list[dict[str, Any]], endpoint: Any) -> str:
    return _digest(secret, "shoal endpoint", meeting, rank, found, endpoint).hex()


def _digest(secret: bytes, what: str, meeting: Meeting, *said: Any) -> bytes:
    text = json.dumps([what, meeting.attempt, *said], sort_keys=True)
    return hmac.digest(secret, text.encode(), "sha256")
