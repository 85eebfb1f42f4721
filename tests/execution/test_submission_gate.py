"""Calls while the gate is shut: they wait, fail in time, and use a round in any case."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import PeerLost
from shoal.execution.submission_gate import SubmissionGate
from shoal.runtime.agent import current

Fleets = Callable[..., shoal.Fleet]


def test_a_held_gate_is_shut_until_its_release_and_until_an_agreement() -> None:
    opened: list[bool] = []
    gate = SubmissionGate(lambda: opened.append(gate.shut))
    for first, second in ((gate.release, lambda: gate.resume(())), (lambda: gate.resume(()), gate.release)):
        gate.hold()
        gate.pause()
        assert gate.shut and gate.paused
        first()
        assert gate.shut
        second()
        assert not gate.shut and not gate.paused
    gate.release()  # again
    assert opened == [True, False] * 2


@pytest.mark.parametrize("call", ["allreduce", "neighbor_allreduce"])
def test_a_call_that_times_out_at_the_shut_gate_uses_a_round(fleet: Fleets, call: str) -> None:
    """Otherwise each later call of this agent would match an earlier one of the others, without an error."""

    def step(number: int, **keywords: Any) -> float:
        result: torch.Tensor = getattr(shoal, call)(torch.tensor(float(number)), name="x", **keywords)
        return result.item()

    def run() -> list[float]:
        gate, lock = current("test").engine.lifecycle.gate, current("test").engine.lock
        if shoal.rank() == 0:
            gate.pause()
            with pytest.raises(shoal.DeadlineExceeded, match="have not acknowledged the loss of an agent"):
                step(0, timeout=0.2)
            with lock:
                gate.resume(())
        else:
            with pytest.raises(shoal.ShoalError, match="whose own call failed there"):
                step(0)
        return [step(number) for number in (1, 2)]

    assert fleet(3).run(run) == [[1.0, 2.0]] * 3


def test_a_call_that_waits_at_the_gate_raises_at_once_when_its_agent_ends(fleet: Fleets) -> None:
    def run() -> float:
        engine = current("test").engine
        if shoal.rank() == 1:
            return 0.0
        engine.lifecycle.gate.pause()
        began = time.monotonic()

        threading.Timer(0.3, engine.abort, [PeerLost("the others count it as lost", (1,))]).start()
        with pytest.raises(PeerLost, match="the others count it as lost"):
            shoal.barrier(timeout=15.0)
        return time.monotonic() - began

    assert max(fleet(2).run(run)) < 10.0


def test_an_agent_whose_only_neighbour_has_left_makes_one_call_before_the_survivors_agree(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for nobody. So it would make all its calls, and the agreement would come too late for each of them."""
    monkeypatch.setenv("SHOAL_ON_LOSS", "continue")

    def run() -> tuple[int, ...]:
        engine = current("test").engine
        shoal.set_topology(shoal.topology.ChainGraph(3))
        shoal.neighbor_allreduce(torch.ones(2))
        if shoal.rank() == 1:
            return ()
        engine.progress.drive_until(lambda: 1 not in engine.membership.view.alive)
        with engine.lock:  # no other thread of this agent checks
            for _ in range(2):
                shoal.neighbor_allreduce(torch.ones(2))
        alive = shoal.alive()
        shoal.barrier()
        return alive

    assert fleet(3).run(run) == [(0, 2), (), (0, 2)]
