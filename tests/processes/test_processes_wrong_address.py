"""Misconfigured agents: the error of ``init`` for a mistake in one of several commands, and how soon it comes."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shoal
from shoal.rendezvous import bootstrap_barrier, rendezvous
from support.limits import scaled
from support.world import World, plain_environment, reserved_port

TIMEOUT = 60.0
"""Seconds for what should take two; far below ``SHOAL_TIMEOUT``."""


def stderr_of(tmp_path: Path, *launchers: tuple[int, int], timeout: float = 300.0) -> list[str]:
    """The output on stderr of launchers of one job, given -n and --node-rank; both must fail."""
    script = tmp_path / "script.py"
    script.write_text("import shoal\nshoal.init()\n")
    with reserved_port() as port, contextlib.ExitStack() as ending:
        common = [sys.executable, "-m", "shoal", "run", "--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}"]
        jobs = []
        for count, node in launchers:
            job = subprocess.Popen(
                [*common, "-n", str(count), "--node-rank", str(node), str(script)],
                env=plain_environment() | {"SHOAL_TIMEOUT": str(timeout)},
                stderr=subprocess.PIPE,
                text=True,
            )
            ending.callback(job.kill)
            jobs.append(job)
        texts = [job.communicate(timeout=TIMEOUT)[1] for job in jobs]
        assert all(job.returncode == 1 for job in jobs), texts
        return texts


@pytest.mark.slow
@pytest.mark.parametrize(
    "launchers",
    [[(2, 0), (3, 1)], pytest.param([(3, 0), (2, 1)], marks=pytest.mark.soak), [(1, 1), (2, 0)]],
    ids=str,
)
def test_launchers_with_different_numbers_of_agents_raise_at_once(
    launchers: list[tuple[int, int]], tmp_path: Path
) -> None:
    """No launcher starts some of the agents that one waits for."""
    for text in stderr_of(tmp_path, *launchers):
        assert "also calls itself rank" in text or "WORLD_SIZE is" in text, text


def test_launchers_without_a_first_one_name_what_is_missing(tmp_path: Path) -> None:
    """No launcher hosts the store. One may still start, as far as they know."""
    for text in stderr_of(tmp_path, (1, 1), (1, 1), timeout=1.0):
        assert "Check that a launcher was started with --node-rank 0" in text, text


def init_as(rank: int) -> None:
    os.environ["RANK"] = str(rank)
    shoal.init()


@pytest.mark.slow
@pytest.mark.parametrize("twins", [[0, 1, 1], [0, 0, 1]], ids=str)
def test_both_agents_with_the_same_rank_raise_mismatch_at_once(twins: list[int]) -> None:
    """Otherwise each would wait for the missing rank."""
    world = World(4, init=False, restarts=True)
    try:
        start = time.monotonic()
        pending = [world.run_on(agent, init_as, rank) for agent, rank in enumerate(twins)]
        outcomes = [one.outcome() for one in pending]
        reported = [one for one, rank in zip(outcomes, twins, strict=True) if twins.count(rank) == 2]
        # One may hear it from the other first.
        assert "Mismatch" in [one.error for one in reported], outcomes
        assert all("also calls itself rank" in one.message for one in reported), outcomes
        assert max(one.ended for one in reported) < start + scaled(5.0)
    finally:
        world.destroy()


def wait_and_listen() -> list[str]:
    """The log's lines about missing agents while this one waits in ``init`` for longer than they take."""
    received: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: received.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal").addHandler(listener)
    # Longer than a name server is waited for that does not answer: who is to be there must have come.
    bootstrap_barrier.REPORT_AFTER = rendezvous.REPORT_AFTER = 1.2
    os.environ["SHOAL_TIMEOUT"] = "3.0"
    with pytest.raises(shoal.DeadlineExceeded):
        shoal.init()
    return received


@pytest.mark.slow
@pytest.mark.parametrize("served", [True, False])
def test_an_agent_waiting_in_init_names_the_missing_ones(served: bool) -> None:
    world = World(4, init=False, restarts=served)
    try:
        without_1 = world.run(wait_and_listen, on=[0, 2])
        without_0 = world.run(wait_and_listen, on=[3])
    finally:
        world.destroy()
    assert not [one.trace for one in (*without_1, *without_0) if one.error]
    [leader] = without_1[0].value
    assert "waited" in leader
    assert "ranks [1, 3]" in leader
    [follower] = without_1[1].value
    assert "ranks [1, 3]" in follower
    [alone] = without_0[0].value
    assert "rank 0 hosts" in alone or "ranks [0] have not come" in alone
