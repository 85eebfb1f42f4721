"""``torch.distributed.checkpoint`` beside agents: what it loses under plain keys, and keeps under a Checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shoal
from support.checkpoints import MODEL, Run, same
from support.packing import packed, unpacked
from support.world import World

pytestmark = pytest.mark.transport("shared_memory")


def begin() -> None:
    shoal.init()
    dist.init_process_group("gloo")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Three agents with a process group beside them."""
    made = World(3, init=False)
    try:
        made.results(begin)
        yield made
    finally:
        made.destroy()  # what Gloo leaves behind is not ours to judge


def numbered(rank: int) -> nn.Linear:
    model = nn.Linear(2, 2)
    for param in model.parameters():
        nn.init.constant_(param, float(rank))
    return model


def plain_keys(folder: Path) -> set[float]:
    """Saves a model of which every element is the rank, and loads it; what it is then."""
    dcp.save({"model": numbered(shoal.rank()).state_dict()}, checkpoint_id=folder)
    state = {"model": numbered(-1).state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return {float(one) for tensor in state["model"].values() for one in tensor.flatten()}


def test_plain_keys_keep_one_agents_tensors_and_lose_the_others(world: World, tmp_path: Path) -> None:
    """The reason for the prefixed keys: one weight and one bias are saved, for one agent as for two."""
    first, *others = world.results(plain_keys, tmp_path)
    assert others == [first, first] and len(first) < 3


def plain_optimizer(folder: Path) -> int:
    """How many tensors of momentum come back into an optimizer that has not stepped."""
    model = numbered(1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    sgd.step()
    dcp.save({"optimizer": sgd}, checkpoint_id=folder)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dcp.load({"optimizer": fresh}, checkpoint_id=folder)
    return len(fresh.state)


def test_plain_optimizers_lose_their_momentum_silently(world: World, tmp_path: Path) -> None:
    """The reason for saving an optimizer's state as one object."""
    assert world.results(plain_optimizer, tmp_path) == [0, 0, 0]


def save_after(folder: Path, steps: int, later: bool = False) -> bytes:
    run = Run().steps(steps)
    saved = run.all()
    state = {"training": run.checkpoint}
    if later:
        future = dcp.async_save(state, checkpoint_id=folder)
        run.steps(2)  # while it is written
        future.result()
    else:
        dcp.save(state, checkpoint_id=folder)
    return packed(saved)


def load_and_resume(folder: Path, steps: int) -> bytes:
    run = Run()
    dcp.load({"training": run.checkpoint}, checkpoint_id=folder)
    return packed([run.all(), run.steps(steps).all()])


def train(steps: int) -> bytes:
    return packed(Run().steps(steps).all())


@pytest.mark.parametrize("later", [False, True], ids=["save", "async_save"])
def test_a_checkpoint_restores_everything_bit_for_bit(world: World, later: bool, tmp_path: Path) -> None:
    """Into a model and an optimizer that have not stepped.

    The training that follows is that of an uninterrupted run.
    """
    full = [unpacked(one) for one in world.results(train, 5)]
    saved = [unpacked(one) for one in world.results(save_after, tmp_path, 3, later)]
    assert not same(saved[0]["model"], saved[1]["model"]), "agents that are alike would prove little"
    results = [unpacked(one) for one in world.results(load_and_resume, tmp_path, 2)]
    assert same([loaded for loaded, _ in results], saved)
    assert same([later for _, later in results], full)


def load_with_another_number(folder: Path) -> tuple[str, bool]:
    run = Run()
    before = run.all()
    try:
        dcp.load({"training": run.checkpoint}, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        return str(error), same(run.all(), before)
    raise AssertionError("it was loaded")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_another_number_of_agents_is_refused_before_any_change(world: World, tmp_path: Path) -> None:
    """Three, and one, which needs no process group."""
    three, one = tmp_path / "three", tmp_path / "one"
    world.results(save_after, three, 1)
    [(text, unchanged)] = shoal.Fleet(1).run(load_with_another_number, three)
    assert "training.agent0of1" in text and unchanged
    shoal.Fleet(1).run(save_after, one, 1)
    for text, unchanged in world.results(load_with_another_number, one):
        assert "training.agent0of3" in text and unchanged


def test_model_tensors_have_keys_and_the_rest_is_one_object() -> None:
    def run() -> None:
        run = Run().steps(1)
        [[key, parts]] = run.checkpoint.state_dict().items()
        assert key == f"agent{shoal.rank()}of2"
        assert set(parts["model"]) == set(MODEL.state_dict())
        assert all(isinstance(part, tuple) for name, part in parts.items() if name != "model")

    shoal.Fleet(2, timeout=20.0).run(run)


def test_a_foreign_state_is_refused_with_the_remedy() -> None:
    states = [shoal.Fleet(size).run(lambda: shoal.Checkpoint(model=MODEL).state_dict()) for size in (2, 3)]

    def run() -> None:
        checkpoint = shoal.Checkpoint(model=deepcopy(MODEL))
        checkpoint.load_state_dict(states[0][shoal.rank()])
        for other in (states[0][1 - shoal.rank()], states[1][shoal.rank()]):
            with pytest.raises(ValueError, match=rf"this is agent{shoal.rank()}of2.*start='consensus'"):
                checkpoint.load_state_dict(other)

    shoal.Fleet(2).run(run)
