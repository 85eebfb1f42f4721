"""Random faults over training loops of every wrapper: errors name the failed rank, soon, and no resources stay.

A seed is a fault (``training_faults.draw``), so a failure can be repeated: ``-k 137-``. A few run always, many in
``make soak``.
"""

from __future__ import annotations

import signal
import time

import pytest

from support.agent_main import Outcome
from support.leftovers import wait_until
from support.training_faults import BEGUN, KINDS, UNTIL_SECONDS, WRAPPERS, AgentEnd, Fault, draw, ready, train
from support.world import World

SAMPLE = range(10)
USUAL = range(len(KINDS))
"""Of these, seeds that meet every kind of fault; the others of the sample are slow tests."""
SOAK = range(160)
ENDED_SECONDS = 5.0
"""Beyond the deadline of a wait, in which everybody has an answer."""
SHUTDOWN_SECONDS = 2.0
ONE_IS_LOST = ("kill", "interrupt", "exception", "leave", "busy")
"""Faults after which all other agents must name the failed one."""


def check(fault: Fault) -> None:
    with World(fault.size, environment={"SHOAL_TRANSPORT": fault.transport}, timeout=fault.timeout) as world:
        world.results(ready)
        pending = [
            world.run_on(rank, train, fault, caught=not (rank == fault.victim and fault.kind == "exception"))
            for rank in range(fault.size)
        ]
        began = time.monotonic()
        _send_signals(world, fault)
        patience = UNTIL_SECONDS + 2 * fault.timeout + ENDED_SECONDS
        outcomes = [one.outcome(max(1.0, began + patience - time.monotonic())) for one in pending]
        complaints = [line for outcome in outcomes for line in _complaints(fault, outcome, outcomes)]
        assert not complaints, f"{fault}\n" + "\n".join(complaints)


def _send_signals(world: World, fault: Fault) -> None:
    signum = {"kill": signal.SIGKILL, "busy": signal.SIGKILL, "interrupt": signal.SIGINT, "stop": signal.SIGSTOP}
    if fault.kind not in signum:
        return
    assert wait_until(lambda: BEGUN in world.members[fault.victim].log.read_text(), 30.0)
    time.sleep(0.05 + fault.after)
    world.kill(fault.victim, signum[fault.kind])
    if fault.kind == "stop":
        time.sleep(1.0)
        world.kill(fault.victim, signal.SIGCONT)


def _complaints(fault: Fault, one: Outcome, all_: list[Outcome]) -> list[str]:
    """The differences between one agent's outcome and the expected one."""
    if one.rank == fault.victim and fault.kind in ("kill", "busy", "exception"):
        code = "exit code 1" if fault.kind == "exception" else "exit code -9"
        return [] if one.message == code else [f"rank {one.rank} ended with {one.message} instead of {code}"]
    if one.error:
        return [f"rank {one.rank}: {one.error}: {one.message}\n{one.trace}"]
    ended: AgentEnd = one.value
    wrong = _misjudged(fault, one.rank, ended, all_)
    results = [f"rank {one.rank} {wrong}: {ended.error} {ended.ranks}: {ended.said}"] if wrong else []
    if ended.shutdown > SHUTDOWN_SECONDS:
        results.append(f"rank {one.rank} needed {ended.shutdown:.1f} s to shut down after {ended.error} {ended.said}")
    return results


def _misjudged(fault: Fault, rank: int, ended: AgentEnd, all_: list[Outcome]) -> str:
    """Empty if the agent ended as it should, or what is wrong."""
    if fault.kind == "stop":
        return "failed, though nobody did" if ended.error else ""
    if rank == fault.victim:
        return _victim_misjudged(fault, ended)
    departed = {
        other.rank for other in all_ if isinstance(other.value, AgentEnd) and other.value.noticed < ended.noticed
    }
    if fault.kind in ONE_IS_LOST or (fault.kind == "unequal" and fault.then == "leave"):
        right = (ended.error, ended.ranks) == ("PeerLost", (fault.victim,))
        return "" if right else f"does not name rank {fault.victim}, which failed first"
    # A deadline, or somebody who has ended the loop and does not leave: whoever is impatient first, leaves.
    if ended.error == "PeerLost":
        return (
            "" if set(ended.ranks) <= departed and ended.ranks else f"names who has not left before (left: {departed})"
        )
    if ended.error in ("DeadlineExceeded", "Mismatch"):
        # A neighbour that waits for the late one is late itself.
        late = {
            fault.victim,
            *departed,
            *(one.rank for one in all_ if one.rank != rank and (one.error or one.value.error)),
        }
        return "" if set(ended.ranks) & late else f"names neither rank {fault.victim} nor one that it held up ({late})"
    return "" if not ended.error and not fault.in_step else "did not notice"


def _victim_misjudged(fault: Fault, ended: AgentEnd) -> str:
    expected = {"interrupt": ("KeyboardInterrupt",), "leave": ("OwnError",), "unequal": ("",)}
    if fault.kind in expected:
        return "" if ended.error in expected[fault.kind] else f"did not end with {expected[fault.kind][0] or 'success'}"
    return ""


def test_the_sample_contains_every_kind_of_fault_and_every_wrapper() -> None:
    faults = [draw(seed) for seed in SAMPLE]
    assert {faults[seed].kind for seed in USUAL} == set(KINDS)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.wrapper for fault in faults} == set(WRAPPERS)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=str(fault), marks=[] if fault.seed in USUAL else [pytest.mark.slow])
        for fault in map(draw, SAMPLE)
    ],
)
def test_a_fault_in_training_is_named_ends_all_agents_in_time_and_leaves_nothing(fault: Fault) -> None:
    check(fault)


@pytest.mark.soak
@pytest.mark.parametrize("fault", [draw(seed) for seed in SOAK if seed not in SAMPLE], ids=str)
def test_every_fault_in_training_is_named_ends_all_agents_in_time_and_leaves_nothing(fault: Fault) -> None:
    check(fault)
