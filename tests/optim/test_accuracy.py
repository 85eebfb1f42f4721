"""Averaging with one neighbour at a time learns as well as averaging the gradients of all: uneven real data.

An agent alone, with the few labels that it has, reads 12 to 23 points less. Adam needs its second moments averaged for
it; benchmarks/adam.py measures how much, at each learning rate's best.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.topology import OnePeerExponential

SIZE, EPOCHS, BATCH, SEEDS = 4, 10, 16, 2


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits  # it takes a second, which tests that do not use it need not pay

    result = load_digits()
    order = torch.randperm(len(result.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(result.images, dtype=torch.float32).flatten(1)[order] / 16
    labels = torch.tensor(result.target)[order]
    return TensorDataset(images[449:], labels[449:]), TensorDataset(images[:449], labels[:449])


def make_model(seed: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    generator = torch.Generator().manual_seed(seed)
    for layer in (model[0], model[2]):
        nn.init.kaiming_normal_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
    return model


def train(decentralized: bool, seed: int) -> float:
    """This agent's accuracy on the 449 images that nobody trains on."""
    train_set, test_set = digits(seed)
    model = make_model(seed)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer: Any = (
        shoal.DecentralizedOptimizer(sgd, model, topology=OnePeerExponential(SIZE))
        if decentralized
        else shoal.bluefog.DistributedGradientAllreduceOptimizer(sgd, model)
    )
    shards = shoal.data.dirichlet_shards(train_set.tensors[1], alpha=0.5, seed=seed)
    sampler = shoal.data.AgentSampler(train_set, shards[shoal.rank()], seed=seed)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            (sampler.weight * cross_entropy(model(images), labels)).backward()
            optimizer.step()
            schedule.step()
    optimizer.close()
    images, labels = test_set.tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).double().mean().item()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_accuracy_is_within_half_a_point_of_all_reduce_on_digits() -> None:
    accuracies = {
        decentralized: [sum(shoal.Fleet(SIZE).run(train, decentralized, seed)) / SIZE for seed in range(SEEDS)]
        for decentralized in (True, False)
    }
    atc, allreduce = (sum(accuracies[kind]) / SEEDS for kind in (True, False))
    assert allreduce > 0.95, accuracies
    assert atc > allreduce - 0.005, accuracies


ADAM_AGENTS, ADAM_STEPS = 8, 80


def train_with_adam(mix_state: tuple[str, ...]) -> float:
    """The same with labels dealt out as unevenly as it goes, and batches drawn from them."""
    train_set, test_set = digits(0)
    shard = shoal.data.dirichlet_shards(train_set.tensors[1], alpha=0.1, seed=0)[shoal.rank()]
    images, labels = (tensor[shard] for tensor in train_set.tensors)
    weight = len(shard) * ADAM_AGENTS / len(train_set)
    model, chance = make_model(0), torch.Generator().manual_seed(shoal.rank())
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = OnePeerExponential(ADAM_AGENTS)
    optimizer = shoal.DecentralizedOptimizer(adam, model, topology=schedule, mix_state=mix_state)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ADAM_STEPS)
    for _ in range(ADAM_STEPS):
        chosen = torch.randint(len(shard), (BATCH,), generator=chance)
        optimizer.zero_grad()
        (weight * cross_entropy(model(images[chosen]), labels[chosen])).backward()
        optimizer.step()
        rates.step()
    optimizer.close()
    images, labels = test_set.tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).double().mean().item()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_averaged_second_moments_keep_adam_accurate_with_heterogeneous_labels() -> None:
    mixed, alone = (
        sum(shoal.Fleet(ADAM_AGENTS).run(train_with_adam, keys)) / ADAM_AGENTS for keys in (("exp_avg_sq",), ())
    )
    assert mixed > 0.86, (mixed, alone)
    assert mixed > alone + 0.08, (mixed, alone)
