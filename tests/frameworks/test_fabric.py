"""Fabric of Lightning with agents of Shoal: setup, averaging, saving, resuming, and refused arguments."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from support import fabric_agents as agents
from support.lightning_agents import TRAIN, VALID, Params, network, params_of
from support.world import World

if importlib.util.find_spec("lightning") is None:
    pytest.skip("pip install 'shoal[lightning]'", allow_module_level=True)

SIZE = 4
IMPORTS = ("lightning.pytorch", "lightning.fabric")
PATIENCE = 120.0
pytestmark = pytest.mark.timeout(300)


def same(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def close(left: Params, right: Params) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_allclose(value, right[name], rtol=1e-5, atol=1e-6, err_msg=name)


def mean_of(models: list[Params]) -> Params:
    return {name: np.mean([one[name] for one in models], axis=0) for name in models[0]}


def with_params(params: Params) -> torch.nn.Module:
    net = network()
    net.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    return net


def test_each_sample_is_used_once_agents_average_once_a_step_and_the_mean_is_evaluated(world: World) -> None:
    result = world.results(agents.train, patience=PATIENCE)
    assert [one["place"] for one in result] == [(rank, SIZE, rank == 0) for rank in range(SIZE)]
    assert {one["kinds"] for one in result} == {("DecentralizedOptimizer", False)}
    assert all(same(one["first"], result[0]["first"]) for one in result)
    assert sorted(index for one in result for batch in one["seen"] for index in batch) == list(range(56))
    assert [one["rounds"] for one in result] == [7] * SIZE
    assert not same(result[0]["params"], result[1]["params"])
    net = with_params(mean_of([one["params"] for one in result]))
    with torch.no_grad():
        loss = cross_entropy(net(VALID.inputs), VALID.labels).item()
    for one in result:
        assert one["loss"] == pytest.approx(loss, rel=1e-5)
        assert one["gathered"] == [[0], [1], [2], [3]] and one["said"] == {"rank": 2}


@pytest.mark.parametrize("sampler", ["agents", "shuffled", "stream"])
def test_agents_with_seeds_of_their_own_see_each_sample_once(world: World, sampler: str) -> None:
    result = world.results(agents.seen_of, sampler, patience=PATIENCE)
    assert sorted(index for one in result for index in one) == list(range(56))


def test_an_optimizer_over_modules_that_are_set_up_one_by_one(world: World) -> None:
    assert world.results(agents.one_by_one, patience=PATIENCE) == [1] * SIZE


@pytest.mark.parametrize("accumulate", [1, 2])
def test_averaged_gradients_are_training_with_the_total_batch(world: World, accumulate: int) -> None:
    result = world.results(partial(agents.train, True, accumulate), patience=PATIENCE)
    assert [one["rounds"] for one in result] == [7 // accumulate] * SIZE
    assert all(same(one["params"], result[0]["params"]) for one in result)
    net = with_params(result[0]["first"])
    sgd = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
    for step in range(7 // accumulate):
        passes = slice(step * accumulate, (step + 1) * accumulate)
        indices = [index for one in result for batch in one["seen"][passes] for index in batch]
        sgd.zero_grad()
        cross_entropy(net(TRAIN.inputs[indices]), TRAIN.labels[indices]).backward()
        sgd.step()
    close(result[0]["params"], params_of(net))


def test_the_mean_is_saved_and_a_run_resumes_bit_for_bit(world: World, two: World, tmp_path: Path) -> None:
    result = world.results(agents.save_and_resume, str(tmp_path), patience=PATIENCE)
    for one in result:
        assert same(one["begun"], one["own"])
        (params, momenta, *rest), (params_again, momenta_again, *rest_again) = one["whole"], one["again"]
        assert same(params, params_again) and rest == rest_again and rest[1:] == [14, 2]
        assert all(np.array_equal(*both) for both in zip(momenta, momenta_again, strict=True))
        assert one["left"] == {}
    own = [one["own"] for one in result]
    assert not same(own[0], own[1])
    close(world.results(agents.anywhere, str(tmp_path), on=[0])[0], mean_of(own))
    for one in two.results(agents.resume, str(tmp_path), patience=PATIENCE):
        close(one["params"], mean_of(own))
        assert one["epoch"] == 1


def test_features_that_need_one_common_model_are_refused(world: World) -> None:
    reasons = {
        "devices": "each process is one agent",
        "optimizer first": "Set up both together",
        "entry": "Give that entry another name",
        "sync_grads": "no other agent",
    }
    for result in world.results(agents.refused, patience=PATIENCE):
        for case, why in reasons.items():
            assert result[case].startswith("ValueError") and why in result[case], (case, result[case])
