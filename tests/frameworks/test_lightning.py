"""Lightning's Trainer with agents of Shoal: each agent's data, averaging, evaluation, saving, and refusals."""

from __future__ import annotations

import csv
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from support import lightning_agents as agents
from support.lightning_agents import TRAIN, VALID, Fitted, Params
from support.limits import scaled
from support.world import World

if importlib.util.find_spec("lightning") is None:
    pytest.skip("pip install 'shoal[lightning]'", allow_module_level=True)

SIZE = 4
IMPORTS = ("lightning.pytorch",)
PATIENCE = 120.0
pytestmark = pytest.mark.timeout(300)


def fitted(world: World, folder: Path, **options: Any) -> list[Fitted]:
    return world.results(partial(agents.fit, **options), str(folder), patience=PATIENCE)


def mean_of(models: list[Params]) -> Params:
    return {name: np.mean([one[name] for one in models], axis=0) for name in models[0]}


def same(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def close(left: Params, right: Params, atol: float = 1e-6) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_allclose(value, right[name], rtol=1e-5, atol=atol, err_msg=name)


def network_with(params: Params) -> torch.nn.Module:
    net = agents.network()
    net.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    return net


def adapt_then_combine(models: list[Fitted], accumulate: int, clip: float) -> list[Params]:
    """What SGD of the tests makes of the batches that the agents saw, averaging with one peer after each step."""
    nets = [network_with(models[0].first) for _ in models]
    sgds = [torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5) for net in nets]
    batches = len(models[0].seen)
    ends = [k for k in range(batches) if (k % 7 + 1) % accumulate == 0 or k % 7 == 6]  # of seven in an epoch
    for number, end in enumerate(ends):
        begin = ends[number - 1] + 1 if number else 0
        for net, sgd, one in zip(nets, sgds, models, strict=True):
            sgd.zero_grad()
            for indices in one.seen[begin : end + 1]:
                loss = cross_entropy(net(TRAIN.inputs[indices]), TRAIN.labels[indices]) / accumulate
                loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            sgd.step()
        after = [[param.detach().clone() for param in net.parameters()] for net in nets]
        hop = 2 ** (number % 2)
        for rank, net in enumerate(nets):
            for param, own, other in zip(net.parameters(), after[rank], after[(rank - hop) % SIZE], strict=True):
                param.data = (own + other) / 2
    return [agents.params_of(net) for net in nets]


@pytest.mark.parametrize(("accumulate", "clip"), [(1, 0.0), (2, 0.3)])
def test_a_step_is_the_equation_also_accumulated_and_clipped(
    world: World, tmp_path: Path, accumulate: int, clip: float
) -> None:
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip or None}
    result = fitted(world, tmp_path, max_epochs=2, **options)
    assert all(same(one.first, result[0].first) for one in result), "agents begin with rank 0's weights"
    for epoch in (0, 7):
        seen = [index for one in result for batch in one.seen[epoch : epoch + 7] for index in batch]
        assert sorted(seen) == list(range(56))
    steps = 2 * -(-7 // accumulate)  # the last of an epoch has one batch only
    assert [(one.steps, one.rounds) for one in result] == [(steps, [steps])] * SIZE
    for one, wanted in zip(result, adapt_then_combine(result, accumulate, clip), strict=True):
        close(one.params, wanted)
    assert not same(result[0].params, result[1].params)
    assert [one.ranks for one in result] == [(rank, SIZE, rank == 0, rank) for rank in range(SIZE)]
    assert {(one.has_group, one.optimizer) for one in result} == {(False, "DecentralizedOptimizer")}
    losses = np.mean([one.losses for one in result], axis=0)
    assert [one.metrics["train_loss"] for one in result] == pytest.approx([losses[-1]] * SIZE, rel=1e-5)


@pytest.mark.parametrize("options", [{"loader": {"dealt_out": True}}, {"seeds": True}])
def test_each_sample_is_used_once_with_an_agent_sampler_and_with_seeds_by_rank(
    world: World, tmp_path: Path, options: dict[str, Any]
) -> None:
    result = fitted(world, tmp_path, max_epochs=2, **options)
    for epoch in (slice(7), slice(7, 14)):
        assert sorted(index for one in result for batch in one.seen[epoch] for index in batch) == list(range(56))


def test_other_strategies_average_at_their_point_of_the_loop(world: World, tmp_path: Path) -> None:
    plain = fitted(world, tmp_path)
    overlapped = fitted(world, tmp_path, wrapper="overlapping")
    assert all(same(one.params, other.params) for one, other in zip(plain, overlapped, strict=True))
    seldom = fitted(world, tmp_path, wrapper="every second", accumulate_grad_batches=2)
    assert [(one.steps, one.rounds) for one in seldom] == [(4, [1])] * SIZE  # passes 4 of 7
    both = fitted(world, tmp_path, wrapper="gradients", optimizer="two")
    assert [one.rounds for one in both] == [[7, 7]] * SIZE
    assert all(same(one.params, both[0].params) for one in both)
    tracking = fitted(world, tmp_path, wrapper="tracking")
    assert [one.rounds for one in tracking] == [[7]] * SIZE


def test_the_windows_of_a_fast_agent_stay_until_the_slow_ones_have_trained(world: World, tmp_path: Path) -> None:
    result = fitted(world, tmp_path, wrapper="push-sum", module={"delay": 0.05}, limit_val_batches=0)
    assert [one.steps for one in result] == [7] * SIZE


def test_bfloat16_mixed(world: World, tmp_path: Path) -> None:
    result = fitted(world, tmp_path, precision="bf16-mixed")
    assert {tuple(one.dtypes) for one in result} == {("torch.bfloat16",)}
    assert {value.dtype for one in result for value in one.params.values()} == {np.dtype("float32")}
    assert [one.rounds for one in result] == [[7]] * SIZE


def test_the_mean_model_is_evaluated_and_each_agent_keeps_its_own(world: World, tmp_path: Path) -> None:
    result = world.results(agents.evaluate, str(tmp_path), patience=PATIENCE)
    own = [one["own"] for one in result]
    assert not same(own[0], own[1])
    assert all(same(one["own"], one["again"]) for one in result)
    net = network_with(mean_of(own))
    with torch.no_grad():
        out = net(VALID.inputs)
    loss, right = cross_entropy(out, VALID.labels).item(), (out.argmax(-1) == VALID.labels).float().mean().item()
    for one in result:
        assert one["validated"]["val_loss"] == pytest.approx(loss, rel=1e-5)
        assert one["validated"]["accuracy"] == pytest.approx(right)
        assert one["validated"]["labels"] == VALID.labels.sum().item()
        assert one["tested"]["val_loss"] == pytest.approx(loss, rel=1e-5)
        assert one["released"] and one["trained_under_grad"]
    for rank, one in enumerate(result):
        np.testing.assert_allclose(one["predicted"], out.numpy()[rank::SIZE], rtol=1e-4, atol=1e-5)
    apart = [np.concatenate([value.ravel() for value in one.values()]) for one in own]
    mean = np.mean(apart, axis=0)
    distance = np.sqrt(np.mean([np.square(one - mean).sum() for one in apart]))
    rows = list(csv.DictReader((tmp_path / "logs" / "metrics.csv").read_text().splitlines()))
    logged = [float(row["consensus_distance"]) for row in rows if row.get("consensus_distance")]
    assert len(logged) == 2 and logged[-1] == pytest.approx(distance, rel=1e-4)
    after = world.results(agents.loaded_anywhere, str(tmp_path / "after.ckpt"), on=[0])[0]
    close(after["params"], mean_of(own))
    assert after["keys"] == ["param_groups", "state"]
    assert after["said"]["agents"] == SIZE


def test_a_validation_between_the_passes_of_a_step_changes_no_exchange(world: World, tmp_path: Path) -> None:
    options = {"wrapper": "with combine", "accumulate_grad_batches": 2}
    often = fitted(world, tmp_path, val_check_interval=1, **options)
    once = fitted(world, tmp_path, **options)
    assert all(same(one.params, other.params) for one, other in zip(often, once, strict=True))
    assert not same(often[0].params, often[1].params)


def test_the_best_checkpoint_has_the_mean_and_worse_ones_are_removed_with_their_folder(
    world: World, tmp_path: Path
) -> None:
    checkpoint = {"monitor": "val_loss", "save_top_k": 1, "filename": "{epoch}-{val_loss:.4f}"}
    stop = {"monitor": "val_loss", "patience": 1, "min_delta": 10.0}
    result = fitted(world, tmp_path, max_epochs=9, checkpoint=checkpoint, stop=stop)
    assert [one.epochs for one in result] == [2] * SIZE
    assert len({one.metrics["val_loss"] for one in result}) == 1
    # Listed after all agents have ended: the first agent removes worse files while the others go on.
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.ckpt*"))
    [file, folder] = files[:2]
    assert folder == f"{file}.agents" and all(one.startswith(file) for one in files)
    params = world.results(agents.loaded_anywhere, str(tmp_path / file), on=[0])[0]["params"]
    if file.startswith("epoch=1"):
        close(params, mean_of([one.params for one in result]))
    with torch.no_grad():
        loss = cross_entropy(network_with(params)(VALID.inputs), VALID.labels).item()
    assert float(file.partition("val_loss=")[2].removesuffix(".ckpt")) == pytest.approx(loss, abs=2e-4)


def test_metrics_local_to_each_agent_are_not_monitored(world: World, tmp_path: Path) -> None:
    options = {"optimizer": "plateau", "module": {"sync": False}, "max_epochs": 2}
    for one in world.run(partial(agents.fit, **options), str(tmp_path), patience=PATIENCE):
        assert one.error == "ValueError"
        assert "'val_loss' is monitored" in one.message and "sync_dist=True" in one.message
    synced = fitted(world, tmp_path, optimizer="plateau", max_epochs=3)
    assert [one.lr for one in synced] == pytest.approx([0.2 / 10 / 10**3] * SIZE)


@pytest.mark.parametrize("checkpoint", [None, {"monitor": "train_loss", "every_n_train_steps": 2}])
def test_metrics_local_to_each_agent_are_not_monitored_by_the_step(
    world: World, tmp_path: Path, checkpoint: dict[str, Any] | None
) -> None:
    for message, rates in world.results(agents.own_rates, str(tmp_path), checkpoint, patience=PATIENCE):
        assert "'train_loss' is monitored" in message
        assert rates == [0.2] * 2, "in the second batch, before anything has used it"


def test_agents_with_different_numbers_of_batches_raise_a_mismatch(world: World, tmp_path: Path) -> None:
    options = {"loader": {"uneven": True}, "use_distributed_sampler": False}
    for one in world.run(partial(agents.fit, **options), str(tmp_path), patience=PATIENCE):
        assert one.error == "ValueError" and "the agents have 4, 5, 6, 7 batches" in one.message
    limited = fitted(world, tmp_path, limit_train_batches=4, **options)
    assert [one.rounds for one in limited] == [[4]] * SIZE


def test_the_code_on_its_page_runs(world: World, tmp_path: Path) -> None:
    result = world.results(agents.run_page, str(tmp_path), patience=PATIENCE)
    assert [one.rounds for one in result] == [[7]] * SIZE


def test_collectives_of_lightning_between_agents(world: World) -> None:
    for one in world.results(agents.exchange):
        assert (one["mean"], one["sum"], one["max"]) == (1.5, [6.0, 6.0], 3)
        assert one["nan"] != one["nan"]
        assert one["path"] == "/of/2"
        assert one["gathered"] == [[0, 1], [1, 2], [2, 3], [3, 4]]
        assert (one["all"], one["any"]) == (False, True)
        assert "no other agent" in one["refused"]


def test_features_that_need_one_common_model_are_refused(world: World) -> None:
    reasons = {
        "devices": "each process is one agent",
        "num_nodes": "the launcher sets",
        "sync_batchnorm": "needs a process group",
        "transformer-engine": "shards or quantizes",
        "on exception": "save alone",
        "save_on_exception": "save alone",
        "weight averaging": "one agent's weights",
        "batch size": "a batch size of its own",
        "lbfgs": "LBFGS cannot be decentralized",
        "overlap and accumulation": "steps in every backward pass",
        "overlap and clipping": "would clip after it",
        "closure and accumulation": "at points that it chooses",
    }
    for result in world.results(agents.refusals, list(reasons), patience=PATIENCE):
        for case, why in reasons.items():
            assert result[case].startswith("ValueError") and why in result[case], (case, result[case])


def test_the_example_trains_and_resumes(world: World, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    arguments = ["--output", str(tmp_path), "--epochs", "2", "--quiet"]
    full = world.results(agents.run_example, arguments, patience=PATIENCE)
    assert full[0][0] > 0.8 and len({accuracy for accuracy, _ in full}) == 1
    again = world.results(agents.run_example, [*arguments, "--resume", "epoch=0"], patience=PATIENCE)
    assert all(same(one[1], other[1]) for one, other in zip(full, again, strict=True))


def test_the_failure_of_an_agent_ends_the_others_at_once_and_leaves_nothing(world: World, tmp_path: Path) -> None:
    results = world.run(agents.fit_until_killed, str(tmp_path), 3, patience=30.0)
    assert results[3].error == "Died"
    assert [one.value for one in results[:3]] == [("PeerLost (3,)", [])] * 3
    assert all(one.ended - results[3].ended < scaled(10.0) for one in results[:3])
