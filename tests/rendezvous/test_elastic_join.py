"""The invitation of an elastic run, its authentication, and the claim of each rank exactly once."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import shoal
from shoal.rendezvous.elastic_join import SECRET_NAME, Invitation, claim, keep_secret
from shoal.rendezvous.rendezvous import CLAIMED, INVITATION, PREFIX, _torchs_server
from support.limits import scaled

SECRET = "a secret that nobody writes down"
WITH_SECRET = {"SHOAL_SECRET": SECRET}


def invitation(descriptor: int = -1, size: int = 8) -> Invitation:
    return Invitation("job", size, 4, os.getpid(), descriptor)


@contextmanager
def served(response: str | None) -> Iterator[int]:
    """The port of a launcher's store."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = _torchs_server(listener, time.monotonic() + 60.0)
    if response is not None:
        store.set(PREFIX + CLAIMED, "0 nobody")
        store.set(PREFIX + INVITATION, response)
    yield port
    del store


def claimed(port: int, count: int, environ: dict[str, str] = WITH_SECRET, seconds: float = 5.0) -> int:
    return claim("127.0.0.1", port, count, environ, time.monotonic() + seconds)[2]


def test_ranks_are_claimed_in_turn_until_none_is_left() -> None:
    with served(invitation().written(SECRET)) as port:
        assert [claimed(port, 1), claimed(port, 2)] == [4, 5]
        with pytest.raises(shoal.ShoalError, match=r"2 cannot join: 1 ranks are free.* with 4 of --max-agents 8"):
            claimed(port, 2)
        assert claimed(port, 1) == 7
        with pytest.raises(shoal.ShoalError, match="1 cannot join: 0 ranks are free"):
            claimed(port, 1)


def test_concurrent_claims_get_different_ranks() -> None:
    results: list[int] = []
    with served(invitation(size=16).written(SECRET)) as port:
        threads = [threading.Thread(target=lambda: results.append(claimed(port, 2))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(results) == [4, 6, 8, 10, 12, 14]


def test_a_process_of_the_same_user_finds_the_secret_in_the_launcher() -> None:
    descriptor = keep_secret(SECRET)
    with served(invitation(descriptor).written(SECRET)) as port:
        assert SECRET not in invitation(descriptor).written(SECRET)
        assert claimed(port, 1, {}) == 4
    os.close(descriptor)


@pytest.mark.parametrize("name", ["another name", SECRET_NAME])
def test_no_other_file_is_taken_for_the_secret(name: str) -> None:
    descriptor = os.memfd_create(name)
    os.write(descriptor, b"guessed")
    with served(invitation(descriptor).written(SECRET)) as port:
        message = "somebody else writes to its store" if name == SECRET_NAME else "set SHOAL_SECRET to the same"
        with pytest.raises(shoal.ShoalError, match=message):
            claimed(port, 1, {})
    os.close(descriptor)


def test_a_joiner_with_another_secret_is_refused_with_a_message() -> None:
    with served(invitation().written(SECRET)) as port, pytest.raises(shoal.ShoalError, match="is not that of the run"):
        claimed(port, 1, {"SHOAL_SECRET": "another"})


def test_modified_entries_are_rejected() -> None:
    output, proof = json.loads(invitation().written(SECRET))
    for changed in ({"size": 100}, {"watch_port": 1}):  # the launcher to which joining launchers would report
        with (
            served(json.dumps([{**output, **changed}, proof])) as port,
            pytest.raises(shoal.ShoalError, match="not signed"),
        ):
            claimed(port, 1)
    for nonsense in ("[]", "nonsense", "[1, 2]", '[{"name": 1}, 2]'):
        with served(nonsense) as port, pytest.raises(shoal.ShoalError, match="sent invalid data"):
            claimed(port, 1)


def test_a_job_without_spare_ranks_raises() -> None:
    with served("") as port, pytest.raises(shoal.ShoalError, match="started without --max-agents"):
        claimed(port, 1)


def test_wrong_and_missing_servers_are_named_in_time() -> None:
    began = time.monotonic()
    with served(None) as port, pytest.raises(shoal.ShoalError, match="no run that agents may join"):
        claimed(port, 1, seconds=1.0)
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    with pytest.raises(shoal.ShoalError, match=r"is no run of Shoal's"):
        claimed(port, 1, seconds=1.0)
    silent.close()
    with pytest.raises(shoal.ShoalError, match=r"no process answers at .* the run has ended"):
        claimed(port, 1, seconds=1.0)
    assert time.monotonic() - began < scaled(15.0)
