"""An agent that fails in ``init`` after the addresses are published and before it has links."""

from __future__ import annotations

import pytest

import shoal
from shoal.engine.engine import Engine
from support.fault_points import over_both
from support.world import World


def fail_before_links() -> None:
    start = Engine.start

    def fail(engine: Engine) -> None:
        raise OSError("no more files")  # no agent has accepted or made a connection

    Engine.start = fail  # type: ignore[assignment, method-assign]
    try:
        shoal.init()
    finally:
        Engine.start = start  # type: ignore[method-assign]


def begin_anew() -> None:
    shoal.shutdown()
    shoal.init()
    shoal.barrier()


@over_both
@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_before_the_links_reaches_the_other_agents_without_their_deadline(
    environment: dict[str, str], failing: int
) -> None:
    with World(3, environment=environment) as world:
        world.results(shoal.shutdown)
        others = [rank for rank in range(3) if rank != failing]
        pending = [world.run_on(rank, shoal.init) for rank in others]
        [failed] = world.run(fail_before_links, on=[failing])
        assert (failed.error, failed.message) == ("OSError", "no more files")
        for one in pending:
            outcome = one.outcome()
            assert (outcome.error, outcome.ranks) == ("PeerLost", (failing,)), outcome.message
            # Without a private socket an agent of the same machine is known to be gone, maybe before the store is read.
            reasons = ["OSError: no more files"] + ["connecting to it failed"] * (not environment)
            assert any(reason in outcome.message for reason in reasons), outcome.message
        world.results(begin_anew)
