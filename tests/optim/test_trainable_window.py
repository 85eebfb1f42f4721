"""Window optimizers whose agents freeze or unfreeze parameters by themselves."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

import shoal
from support.optimizers import LR, MODEL, batch

Fleets = Callable[..., shoal.Fleet]
MAKERS = [
    shoal.optim.DistributedWinPutOptimizer,
    shoal.optim.DistributedPullGetOptimizer,
    shoal.optim.DistributedPushSumOptimizer,
    shoal.optim.DistributedADPSGDOptimizer,
]
NEVER = 3600.0
"""A deadline that the test does not live to see."""


def step_of(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(batch(shoal.rank(), step)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("first", ["frozen from the beginning", "frozen later"])
@pytest.mark.parametrize("what", ["freezes", "unfreezes"])
@pytest.mark.parametrize("make", MAKERS)
def test_a_setting_changed_on_one_agent_is_a_mismatch_that_names_the_parameter(
    fleet: Fleets, make: Any, what: str, first: str
) -> None:
    def run() -> tuple[str, tuple[int, ...]]:
        shoal.set_topology(shoal.topology.RingGraph(3))
        model = deepcopy(MODEL)
        if first == "frozen from the beginning" and what == "unfreezes":
            model[0].requires_grad_(False)
        optimizer = make(torch.optim.SGD(model.parameters(), lr=LR), model)
        step_of(model, optimizer, 0)
        if first == "frozen later" and what == "unfreezes":
            model[0].requires_grad_(False)
        step_of(model, optimizer, 1)
        shoal.barrier()  # an agent that is behind would raise what the others found in a step before
        if shoal.rank() == 0:
            model[0].requires_grad_(what == "unfreezes")
        with pytest.raises(shoal.Mismatch) as caught:
            while True:
                step_of(model, optimizer, 2)
                time.sleep(0.001)
        shoal.barrier()
        optimizer.close()
        return str(caught.value), caught.value.ranks

    output = r"The parameter '0.weight' is frozen on rank (\d) and trainable on rank (\d): change requires_grad of"
    for text, ranks in fleet(3, timeout=NEVER).run(run):
        result = re.search(output, text)
        assert result, text
        frozen, trainable = map(int, result.groups())
        assert (trainable if what == "unfreezes" else frozen) == 0
        assert frozen != trainable and {*ranks} == {frozen, trainable}


@pytest.mark.parametrize("joined", [False, True], ids=["alike", "with other numbers of batches"])
@pytest.mark.parametrize("make", MAKERS)
def test_agents_that_make_the_same_change_at_their_own_pace_train_on(fleet: Fleets, make: Any, joined: bool) -> None:
    turns = [[0], [], [2], [0], []]

    def run() -> bool:
        shoal.set_topology(shoal.topology.RingGraph(3))
        model = deepcopy(MODEL)
        optimizer = make(torch.optim.SGD(model.parameters(), lr=LR), model)
        for frozen in turns:
            for layer in (0, 2):
                model[layer].requires_grad_(layer not in frozen)
            if joined:
                with optimizer.join():
                    for step in range(3 + 2 * shoal.rank()):
                        step_of(model, optimizer, step)
            else:
                for step in range(3):
                    time.sleep(0.003 * shoal.rank())
                    step_of(model, optimizer, step)
        shoal.barrier()
        optimizer.close()
        return shoal.bluefog.get_current_created_window_names() == []

    assert fleet(3, timeout=60.0).run(run) == [True] * 3
