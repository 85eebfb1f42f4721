"""Optimizers of torch and of packages inside Shoal's: each equals its own steps and explicit averages.

The table in docs/optimizers.md states the same of each of them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.algorithms import ExactDiffusion
from support.two_optimizers import gradients

AGENTS, STEPS = 2, 4
UNEVEN = nx.DiGraph(
    [(0, 0, {"weight": 0.75}), (1, 1, {"weight": 0.75}), (0, 1, {"weight": 0.25}), (1, 0, {"weight": 0.25})]
)
W = torch.tensor([[0.75, 0.25], [0.25, 0.75]])


class TableEntry(NamedTuple):
    """An optimizer of the table.

    Attributes:
        package: The package that contains it.
        name: Its name in the package.
        options: Its arguments.
        mixed: The state that the page tells users to average.
        overlaps: It may step bucket by bucket.
    """

    package: str
    name: str
    options: dict[str, Any]
    mixed: tuple[str, ...] = ()
    overlaps: bool = True

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(pytest.importorskip(self.package), self.name)(
            model.parameters(), **self.options
        )
        if hasattr(made, "train"):
            made.train()
        return made


KNOWN = [
    TableEntry("torch.optim", "SGD", {"lr": 0.1, "momentum": 0.9}),
    TableEntry("torch.optim", "AdamW", {"lr": 0.01}, ("exp_avg_sq",)),
    TableEntry("torch.optim", "Adafactor", {"lr": 0.01}),
    TableEntry("torch.optim", "Muon", {"lr": 0.02}, ("momentum_buffer",)),
    TableEntry("schedulefree", "SGDScheduleFree", {"lr": 0.3, "warmup_steps": 2}, ("z",), overlaps=False),
    TableEntry(
        "schedulefree", "AdamWScheduleFree", {"lr": 0.02, "warmup_steps": 2}, ("z", "exp_avg_sq"), overlaps=False
    ),
    TableEntry("pytorch_optimizer", "Lion", {"lr": 1e-3}, ("exp_avg",), overlaps=False),
    TableEntry("pytorch_optimizer", "SOAP", {"lr": 1e-2, "precondition_frequency": 2}, overlaps=False),
    TableEntry("pytorch_optimizer", "Shampoo", {"lr": 1e-2}, overlaps=False),
    TableEntry("pytorch_optimizer", "Prodigy", {"lr": 1.0, "d0": 0.01}, overlaps=False),
]
each = pytest.mark.parametrize("known", KNOWN, ids=lambda known: f"{known.package.partition('.')[0]} {known.name}")


def initial() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))  # Muon's are matrices
    draws = torch.Generator().manual_seed(1)
    for param in model.parameters():
        nn.init.normal_(param, std=0.5, generator=draws)
    return model


def trained(known: TableEntry, way: str, **overrides: Any) -> Tensor:
    """The agents' models after some steps, as rows."""

    def agent() -> Tensor:
        model = initial()
        optimizer = wrapped(known, way, model, **overrides)
        for step in range(STEPS):
            gradients_through(model, optimizer, step)
        return flat(model)

    return torch.stack(shoal.Fleet(AGENTS, timeout=20.0).run(agent))


def gradients_through(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    gradients(model, shoal.rank(), step)
    optimizer.step()


def wrapped(known: TableEntry, way: str, model: nn.Module, **overrides: Any) -> Any:
    inner = known.make(model)
    if way == "gradients":
        return shoal.bluefog.DistributedGradientAllreduceOptimizer(inner, model, **overrides)
    how = {
        "adapt then combine": shoal.DecentralizedOptimizer,
        "adapt with combine": partial(
            shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)
        ),
    }[way]
    return how(inner, model, topology=UNEVEN, mix_state=known.mixed, **overrides)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


@torch.no_grad()
def average(tensors: list[list[Tensor]]) -> None:
    """Of each agent's tensors of one kind, with the weights of W."""
    for alike in zip(*tensors, strict=True):
        for one, mean in zip(alike, torch.tensordot(W, torch.stack(alike), 1), strict=True):
            one.copy_(mean)


def average_all(known: TableEntry, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    average([list(model.parameters()) for model in models])
    for key in known.mixed:
        kept = [[state[key] for state in optimizer.state.values() if key in state] for optimizer in optimizers]
        average(kept)


def by_hand(known: TableEntry, way: str) -> Tensor:
    models = [initial() for _ in range(AGENTS)]
    optimizers = [known.make(model) for model in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            gradients(model, rank, step)
        if way == "gradients":
            means = [torch.stack(alike).mean(0) for alike in zip(*map(grads, models), strict=True)]
            for model in models:
                for param, mean in zip(model.parameters(), means, strict=True):
                    param.grad = mean.clone()
        if way == "adapt with combine":
            average_all(known, models, optimizers)
        for optimizer in optimizers:
            optimizer.step()
        if way == "adapt then combine":
            average_all(known, models, optimizers)
    return torch.stack([flat(model) for model in models])


def grads(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


@each
@pytest.mark.parametrize("way", ["gradients", "adapt then combine", "adapt with combine"])
def test_an_optimizer_takes_its_own_steps_between_averages(known: TableEntry, way: str) -> None:
    expected, result = by_hand(known, way), trained(known, way)
    assert (expected - flat(initial())).abs().max() > 1e-3
    assert (result - expected).abs().max() < 2e-5
    if way == "gradients":
        assert torch.equal(result[0], result[1])


@each
def test_overlap_gives_the_same_result_or_is_refused(known: TableEntry) -> None:
    """An optimizer that counts steps in its groups would count each bucket as a step."""
    run = partial(trained, known, "adapt then combine")
    if known.overlaps:
        assert torch.equal(run(), run(overlap="backward", bucket_bytes=64))
    else:
        with pytest.raises(ValueError, match="counts its steps in its param_groups"):
            run(overlap="backward")


@pytest.mark.parametrize("known", [one for one in KNOWN if "z" in one.mixed], ids=lambda known: known.name)
def test_a_schedule_free_optimizer_whose_z_is_not_averaged_is_refused(known: TableEntry) -> None:
    def agent() -> None:
        model = initial()
        for how, output in (
            (shoal.DecentralizedOptimizer, r'give mix_state=\("z",\)'),
            (
                partial(shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)),
                r'give mix_state=\("z",\)',
            ),
            (partial(shoal.DecentralizedOptimizer, algorithm=ExactDiffusion(1.0, lazy=True)), "the parameters alone"),
            (shoal.optim.DistributedWinPutOptimizer, "the parameters alone"),
        ):
            with pytest.raises(ValueError, match=output):
                how(known.make(model), model)

    shoal.Fleet(AGENTS, timeout=20.0).run(agent)


@pytest.mark.parametrize("kind", [tuple, iter])
def test_schedule_free_agents_stay_together_on_different_data(kind: Any) -> None:
    """Each agent has its own quadratic. The mean of all is the common optimum."""
    centres = 3 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    schedulefree = pytest.importorskip("schedulefree")

    def agent() -> Tensor:
        model = nn.Linear(6, 1, bias=False)
        nn.init.zeros_(model.weight)
        sgd = schedulefree.SGDScheduleFree(model.parameters(), lr=0.1)
        sgd.train()
        ring = shoal.topology.RingGraph(4)
        optimizer = shoal.DecentralizedOptimizer(sgd, model, topology=ring, mix_state=kind(("z",)))
        for _ in range(100):
            optimizer.zero_grad()
            (model.weight[0] - centres[shoal.rank()]).square().sum().div(2).backward()
            optimizer.step()
        optimizer.optimizer.eval()  # type: ignore[attr-defined]
        return model.weight.detach()[0].clone()

    results = torch.stack(shoal.Fleet(4, timeout=20.0).run(agent))
    assert (results - centres.mean(0)).norm(dim=1).max() < 0.3  # 0.149; without z it is 10.7, and grows


@each
def test_a_resumed_run_equals_an_uninterrupted_one(known: TableEntry, tmp_path: Path) -> None:
    def agent() -> tuple[Tensor, Tensor]:
        model = initial()
        optimizer = wrapped(known, "adapt then combine", model)
        checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer)
        for step in range(STEPS):
            if step == 2:
                checkpoint.save(tmp_path, step)
            gradients_through(model, optimizer, step)
        other = initial()
        later = wrapped(known, "adapt then combine", other, name="later")
        shoal.Checkpoint(model=other, optimizer=later).load(tmp_path)
        for step in range(2, STEPS):
            gradients_through(other, later, step)
        return flat(model), flat(other)

    for full, resumed in shoal.Fleet(AGENTS, timeout=20.0).run(agent):
        assert torch.equal(full, resumed)
