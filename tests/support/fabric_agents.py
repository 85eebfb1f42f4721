"""The agents' functions in the tests of Lightning's Fabric, with their own loops. Only agents import Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import shoal
from support.lightning_agents import TRAIN, VALID, Params, network, params_of


def fabric(wrapper: Any = None) -> Any:
    from lightning.fabric import Fabric

    from shoal.frameworks.lightning import ShoalFabricStrategy

    torch.set_num_threads(1)
    made = Fabric(strategy=ShoalFabricStrategy(wrapper), accelerator="cpu", devices=1)
    made.launch()
    torch.manual_seed(100 + made.global_rank)  # agents that begin with weights of their own
    return made


class Training:
    """A model, its optimizer and its samples, as Fabric sets them up."""

    def __init__(self, wrapper: Any = None, dropout: float = 0.0) -> None:
        self.fabric = fabric(wrapper)
        net = network(dropout)
        sgd = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
        self.net, self.optimizer = self.fabric.setup(net, sgd)
        loader = torch.utils.data.DataLoader(TRAIN, batch_size=2, shuffle=True)
        self.loader = self.fabric.setup_dataloaders(loader)
        self.first = params_of(net)
        self.seen: list[list[int]] = []
        self.state = {"net": self.net, "optimizer": self.optimizer, "epoch": 0}

    def epoch(self, accumulate: int = 1) -> None:
        self.loader._num_iter_calls = self.state["epoch"]  # Fabric counts from 0 in each process
        for number, (inputs, labels, indices) in enumerate(self.loader):
            steps = (number + 1) % accumulate == 0
            with self.fabric.no_backward_sync(self.net, enabled=not steps):
                self.fabric.backward(cross_entropy(self.net(inputs), labels) / accumulate)
            if steps:
                self.fabric.clip_gradients(self.net, self.optimizer, max_norm=100.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.seen.append(indices.tolist())
        self.state["epoch"] += 1

    @property
    def params(self) -> Params:
        return params_of(self.net.module)

    @property
    def momenta(self) -> list[np.ndarray[Any, Any]]:
        return [value["momentum_buffer"].numpy().copy() for value in self.optimizer.optimizer.state.values()]


def train(gradients: bool = False, accumulate: int = 1) -> dict[str, Any]:
    """An epoch; what was set up, and what came of it."""
    run = Training(shoal.bluefog.DistributedGradientAllreduceOptimizer if gradients else None)
    run.epoch(accumulate)
    loader = run.fabric.setup_dataloaders(torch.utils.data.DataLoader(VALID, batch_size=3))
    with torch.no_grad(), shoal.consensus(run.net.module):
        losses = torch.stack([cross_entropy(run.net(inputs), labels) for inputs, labels, _ in loader])
    return {
        "place": (run.fabric.global_rank, run.fabric.world_size, run.fabric.is_global_zero),
        "kinds": (type(run.optimizer.optimizer).__name__, dist.is_initialized()),
        "first": run.first,
        "seen": run.seen,
        "params": run.params,
        "rounds": run.optimizer.optimizer.rounds,
        "loss": run.fabric.all_reduce(losses.mean()).item(),
        "gathered": run.fabric.all_gather(torch.tensor([run.fabric.global_rank])).tolist(),
        "said": run.fabric.broadcast({"rank": run.fabric.global_rank}, src=2),
    }


class Part(torch.utils.data.IterableDataset[Any]):
    """This agent's samples, without a length."""

    def __iter__(self) -> Any:
        return (TRAIN[number] for number in range(shoal.rank(), len(TRAIN), shoal.size()))


def seen_of(sampler: str) -> list[int]:
    """The samples of an epoch, with a sampler, where each agent has a seed of its own."""
    made = fabric()
    made.seed_everything(7 + made.global_rank, verbose=False)
    given = shoal.data.AgentSampler(TRAIN) if sampler == "agents" else None
    loader = torch.utils.data.DataLoader(TRAIN, batch_size=2, sampler=given, shuffle=given is None)
    if sampler == "stream":
        loader = torch.utils.data.DataLoader(Part())
    return [index for _, _, indices in made.setup_dataloaders(loader) for index in indices.tolist()]


def one_by_one() -> int:
    """An optimizer over two modules that are set up one after the other; its rounds after a step."""
    made = fabric()
    nets = [network(), torch.nn.Linear(3, 1)]
    sgd = torch.optim.SGD([param for net in nets for param in net.parameters()], lr=0.1)
    first, last = [made.setup_module(net) for net in nets]
    optimizer = made.setup_optimizers(sgd)
    made.backward(last(first(TRAIN.inputs)).mean())
    optimizer.step()
    rounds: int = optimizer.optimizer.rounds
    return rounds


def save_and_resume(folder: str) -> dict[str, Any]:
    """Two epochs, saved between them; and the second again, from there."""
    path = Path(folder) / "saved.ckpt"
    run = Training(dropout=0.2)
    run.epoch()
    run.fabric.save(path, run.state)
    own = run.params
    run.epoch()
    again = Training(dropout=0.2)
    left = again.fabric.load(path, again.state)
    started = again.params
    again.epoch()
    return {
        "own": own,
        "begun": started,
        "whole": (run.params, run.momenta, run.seen[7:], run.optimizer.optimizer.rounds, run.state["epoch"]),
        "again": (again.params, again.momenta, again.seen, again.optimizer.optimizer.rounds, again.state["epoch"]),
        "left": left,
    }


def resume(folder: str) -> dict[str, Any]:
    """What another number of agents begins with."""
    run = Training()
    run.fabric.load(Path(folder) / "saved.ckpt", run.state)
    return {"params": run.params, "epoch": run.state["epoch"]}


def anywhere(folder: str) -> Params:
    """The model in the file, as plain torch reads it."""
    saved = torch.load(Path(folder) / "saved.ckpt", weights_only=True)
    torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.5).load_state_dict(saved["optimizer"])
    return {name: value.numpy().copy() for name, value in saved["net"].items()}


def refused() -> dict[str, str]:
    """With which error something is refused."""
    from lightning.fabric import Fabric

    from shoal.frameworks.lightning import ShoalFabricStrategy

    cases = {
        "devices": lambda: Fabric(strategy=ShoalFabricStrategy(), accelerator="cpu", devices=2),
        "optimizer first": lambda: fabric().setup_optimizers(torch.optim.SGD(network().parameters(), lr=0.1)),
        "entry": lambda: fabric().save("/nowhere", {"shoal": {"mine": 1}}),
        "sync_grads": lambda: fabric().all_gather(torch.ones(1), sync_grads=True),
    }
    result = {}
    for case, call in cases.items():
        try:
            call()
            result[case] = "accepted"
        except Exception as error:
            result[case] = f"{type(error).__name__}: {error}"
    return result
