"""The ways to train that are compared: alone, with DistributedDataParallel, and with Shoal's optimizers.

All do the same around the exchange: SGD with momentum, the gradients freed after the step.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import shoal
from _models import Batch
from shoal.kernels.sums import weighted_sum
from shoal.topology.families.one_peer import OnePeerExponential
from shoal.topology.families.static import ring
from shoal.topology.schedule import Schedule

LOCAL, GRADIENTS = "alone", "gradient all-reduce"
LIMIT = "alone, and one pass of averaging"
GRADIENTS_OVERLAP = "gradient all-reduce overlapped"
ATC, AWC, OVERLAP = "ATC", "AWC", "ATC overlapped"
HIERARCHICAL_ATC, HIERARCHICAL_AWC = "hierarchical ATC", "hierarchical AWC"
PUT, GET, PUSH_SUM = "win-put", "pull-get", "push-sum"
DECENT_DP = "Decent-DP"
CALLS_TIMED = 3
"""Steps of the MLP that are timed together."""

WRAPPERS: dict[str, Callable[..., shoal.DecentralizedOptimizer]] = {
    ATC: shoal.DecentralizedOptimizer,
    AWC: partial(shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)),
    OVERLAP: shoal.DecentralizedOptimizer,
    HIERARCHICAL_ATC: shoal.DecentralizedOptimizer,
    HIERARCHICAL_AWC: partial(shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)),
    GRADIENTS: shoal.bluefog.DistributedGradientAllreduceOptimizer,
    GRADIENTS_OVERLAP: shoal.bluefog.DistributedGradientAllreduceOptimizer,
    PUT: shoal.optim.DistributedWinPutOptimizer,
    GET: shoal.optim.DistributedPullGetOptimizer,
    PUSH_SUM: shoal.optim.DistributedPushSumOptimizer,
}
TOPOLOGIES: dict[str, Callable[[int], Schedule]] = {"one-peer exponential": OnePeerExponential, "ring": ring}
ONE_PEER = "one-peer exponential"


def can_overlap() -> bool:
    """Whether this Shoal's adapt-then-combine can exchange during the backward pass."""
    return "overlap" in inspect.signature(shoal.DecentralizedOptimizer.__init__).parameters


def synchronous() -> list[str]:
    """Shoal's ways in step with the neighbours, of this Shoal."""
    return [ATC, AWC, *([OVERLAP] if can_overlap() else [])]


class Trainer:
    """A model with what trains it; all ways take their steps in the same words.

    Attributes:
        model: what is called, so with DistributedDataParallel around it where that trains it.
        optimizer: the one whose `step` the user calls.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._rounds: dict[str, Rounds] = {}

    def step(self, batch: Batch, topology: str = "", keep_gradients: bool = False) -> None:
        """One step.

        Args:
            topology: whom the agent averages with, one of ``TOPOLOGIES``; if empty, what the optimizer is set to.
            keep_gradients: they are not freed.
        """
        if topology:
            self.round(topology)
        inputs, labels = batch
        cross_entropy(self.model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if not keep_gradients:
            self.optimizer.zero_grad()

    def round(self, topology: str, between_machines: bool = False) -> None:
        """Set the optimizer to the next round."""
        if topology not in self._rounds:
            self._rounds[topology] = Rounds(TOPOLOGIES[topology], between_machines)
        self._rounds[topology].set(self.optimizer)

    def exchange(self, topology: str = "") -> None:
        """A step in which there are no gradients: the exchange, and nothing else."""
        if topology:
            self.round(topology)
        self.optimizer.step()

    def close(self) -> None:
        """Leave nothing behind in the model."""
        if isinstance(self.optimizer, shoal.DecentralizedOptimizer):
            self.optimizer.close()
        # Decent-DP's hooks hold its buffers, and are held by the parameters where no garbage collector looks.
        for hook in getattr(self.model, "_ddp_hooks", ()):
            hook.remove()


class Rounds:
    """Whom this agent averages with, round after round: what an optimizer's attributes are set to."""

    def __init__(self, topology: Callable[[int], Schedule], between_machines: bool) -> None:
        self._kind = "machine_weights" if between_machines else "weights"
        self._rank = shoal.bluefog.machine_rank() if between_machines else shoal.rank()
        self._schedule = topology(shoal.bluefog.machine_size() if between_machines else shoal.size())
        self._round = 0

    def set(self, optimizer: Any) -> None:
        mixing = self._schedule.mixing(self._round, self._rank)
        optimizer.self_weight = mixing.self_weight
        setattr(optimizer, f"src_{self._kind}", dict(mixing.sources))
        setattr(optimizer, f"dst_{self._kind}", dict(mixing.destinations))
        self._round += 1


def sgd(model: nn.Module, lr: float = 1e-3, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def alone(model: nn.Module, **settings: float) -> Trainer:
    """Without any communication."""
    return Trainer(model, sgd(model, **settings))


def alone_and_averaged(model: nn.Module) -> Trainer:
    """The memory traffic of a step and an average with one other model, without waiting for any agent.

    The other model is a private copy of the first weights. Each number of both models is read once, and each number of
    the average is written once. An exchange after the local step cannot read or write less.
    """
    optimizer, parameters = sgd(model), [one.data.view(-1) for one in model.parameters()]
    others = [one.clone() for one in parameters]

    def average(*_: Any) -> None:
        for own, other in zip(parameters, others, strict=True):
            weighted_sum(own, own, 0.5, [other], [0.5])

    optimizer.register_step_post_hook(average)
    return Trainer(model, optimizer)


@dataclass(frozen=True)
class DataParallel:
    """Settings of DistributedDataParallel over Gloo; gradients lie in its buckets (``gradient_as_bucket_view``).

    Attributes:
        bucket_mb: mebibytes of a bucket, ``bucket_cap_mb``.
        static_graph: every step uses the same parameters.
        batched_copies: gradients are copied a bucket at a time (``batched_grad_copy``, where this torch has it).
    """

    bucket_mb: float = 25
    static_graph: bool = False
    batched_copies: bool = False

    @property
    def name(self) -> str:
        words = ["static graph"] * self.static_graph + ["batched copies"] * self.batched_copies
        return ", ".join(["DDP", f"{self.bucket_mb:g} MB buckets", *words])

    def __call__(self, model: nn.Module, **settings: float) -> Trainer:
        """The running statistics of batch norms stay each agent's own, as with Shoal, and cost nothing."""
        options: dict[str, Any] = {"static_graph": self.static_graph, _buffers_option(): False}
        if self.batched_copies:
            options["batched_grad_copy"] = True
        wrapped = DistributedDataParallel(model, bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True, **options)
        return Trainer(wrapped, sgd(wrapped, **settings))


def data_parallels(bucket_mbs: Iterable[float], variants: bool = True) -> list[DataParallel]:
    """Settings to choose from: these bucket sizes; and the variants of each, which this torch has."""
    options = [(False, False)]
    if variants:
        options += [(True, False), *([(True, True)] if "batched_grad_copy" in _ddp_options() else [])]
    return [DataParallel(mb, *option) for mb in bucket_mbs for option in options]


class Peer(Protocol):
    """What is tried out with several settings: DistributedDataParallel, or Decent-DP."""

    @property
    def name(self) -> str: ...
    def __call__(self, model: nn.Module, **settings: float) -> Trainer: ...


class _UpdatedInBackward(torch.optim.SGD):
    """Decent-DP's hooks update a bucket during the backward pass, so no step is left.

    Its exchange runs beside the next step. Every ``CALLS_TIMED`` steps it is awaited here: else it would run beside the
    way that is timed next, and be counted there.
    """

    def __init__(self, model: Any, lr: float) -> None:
        super().__init__(model.parameters(), lr=lr)
        self._model, self._steps = model, 0

    def step(self, closure: Any = None) -> None:
        self._steps += 1
        if self._steps % CALLS_TIMED == 0:
            for work in self._model._comm_ops:
                work.wait()


@dataclass(frozen=True)
class DecentDP:
    """Decent-DP (``pip install decent-dp``): an averaged exchange with a peer beside the next backward pass, over Gloo.

    Attributes:
        topology: its name in Decent-DP.
        bucket_mb: mebibytes of a bucket.
    """

    topology: str
    bucket_mb: int = 25

    @property
    def name(self) -> str:
        return f"{DECENT_DP}, {self.topology}, {self.bucket_mb} MB buckets"

    def __call__(self, model: nn.Module, lr: float = 1e-3, momentum: float = 0.9) -> Trainer:
        from decent_dp.ddp import DecentralizedDataParallel

        wrapped = DecentralizedDataParallel(
            model,
            lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=lr, momentum=momentum),
            topology=self.topology,
            bucket_size_in_mb=self.bucket_mb,
            _local_world_size=dist.get_world_size(),
        )
        return Trainer(wrapped, _UpdatedInBackward(wrapped, lr))


def decent_dps(bucket_mbs: Iterable[float]) -> list[DecentDP]:
    """Settings to choose from; none where Decent-DP is not installed."""
    if importlib.util.find_spec("decent_dp") is None:
        return []
    return [DecentDP(topology, int(mb)) for topology in ("one-peer-exp", "ring") for mb in bucket_mbs]


def _ddp_options() -> Container[str]:
    return inspect.signature(DistributedDataParallel.__init__).parameters


def _buffers_option() -> str:
    """The name has changed from one torch to the next."""
    return "forward_sync_buffers" if "forward_sync_buffers" in _ddp_options() else "broadcast_buffers"


def decentralized(way: str, model: nn.Module, **settings: float) -> Trainer:
    """One of Shoal's optimizers."""
    options: dict[str, Any] = {"name": way}
    if way not in (PUT, GET, PUSH_SUM):
        options["enable_topo_check"] = False
    if way in (OVERLAP, GRADIENTS_OVERLAP):
        options["overlap"] = "backward"
    if way in (HIERARCHICAL_ATC, HIERARCHICAL_AWC):
        options["communication_type"] = shoal.optim.CommunicationType.hierarchical_neighbor_allreduce
    return Trainer(model, WRAPPERS[way](sgd(model, **settings), model, **options))


def check_agreement(trainers: dict[str, Trainer]) -> None:
    """That each way has done what it is for: the agents' last parameters are equal where all
    gradients are averaged, and else closer than alone.

    Raises:
        AssertionError: They are not, or a number is not finite.
    """
    apart = {name: _apart(trainer.model) for name, trainer in trainers.items()}
    for name, distance in apart.items():
        limit = 0.0 if name.startswith(("DDP", GRADIENTS)) else 0.9 * apart[LOCAL]
        if name != LOCAL and not distance <= limit:
            raise AssertionError(f"{name}: agents' models are {distance:g} apart, trained alone {apart[LOCAL]:g}")


def _apart(model: nn.Module) -> float:
    """The largest difference between two agents in the last layer's bias."""
    last = list(model.parameters())[-1].detach().clone()
    most, least = last, last.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return (most - least).max().item()
