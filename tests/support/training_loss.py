"""What every agent must have learnt when one was killed: which, and soon."""

from __future__ import annotations

from collections.abc import Sequence

from support.agent_main import Outcome
from support.limits import scaled

SECONDS = 1.0


def assert_all_name_the_killed(outcomes: Sequence[Outcome], victim: int, seconds: float = SECONDS) -> None:
    """All but the victim have an error that is about it alone, and had it within some seconds of its death."""
    dead = outcomes[victim]
    assert (dead.error, dead.message) == ("Died", "exit code -9")
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        assert outcome.error == "PeerLost", f"rank {outcome.rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
        assert outcome.ranks == (victim,), outcome.message
        assert f"rank {victim}" in outcome.message
        late = outcome.ended - dead.ended
        assert late < scaled(seconds), f"rank {outcome.rank} learnt it after {late:.2f} s"
