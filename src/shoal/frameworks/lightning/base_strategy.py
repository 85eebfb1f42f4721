"""The common part of the two strategies, for Lightning's Trainer and for Fabric: device, collectives, and optimizers.

``ShoalEnvironment`` gives Lightning the rank and size of a process, instead of a launcher's variables. The functions
convert Lightning's optimizers to Shoal's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment

from ...ops.arguments import Internal
from ...ops.collective import barrier
from ...ops.objects import broadcast_parameters
from ...optim.bluefog import DistributedAdaptThenCombineOptimizer
from ...optim.optimizer import DecentralizedOptimizer
from ...runtime.queries import local_rank, machine_rank, rank, size
from . import collectives, validation

T = TypeVar("T")


class BaseStrategy:
    """The methods that are the same in both."""

    _devices: list[torch.device] | None

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        validation.check_devices(devices)
        self._devices = devices

    def barrier(self, name: str | None = None) -> None:
        """Return when all agents are here, or with an error after ``SHOAL_TIMEOUT`` seconds."""
        barrier(Internal("lightning.barrier"))

    def broadcast(self, obj: T, src: int = 0) -> T:
        """One agent's object on all: plain data, tensors and paths."""
        found: T = collectives.broadcast(obj, src)
        return found

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """``[agents, *shape]``, detached.

        Raises:
            ValueError: ``sync_grads=True``, or shapes that differ.
        """
        if sync_grads:
            raise ValueError(
                "all_gather(sync_grads=True): an agent's gradients are those of its own loss, and go through no other "
                "agent. Leave sync_grads out"
            )
        return collectives.stacked(tensor, group)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether the decision is True on all agents, or on any of them."""
        return bool(collectives.reduced(torch.tensor(int(decision)), "min" if all else "max"))


class ShoalEnvironment(ClusterEnvironment):
    """An agent of Shoal. Its ranks are kept, since the Trainer asks for them when the agent has left, too."""

    def __init__(self) -> None:
        super().__init__()
        self._size, self._rank, self._local_rank, self._machine = size(), rank(), local_rank(), machine_rank()

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """The address of a process group, of which there is none."""
        raise RuntimeError("ShoalStrategy opens no process group, so there is no main address")

    @property
    def main_port(self) -> int:
        """The port of a process group, of which there is none."""
        raise RuntimeError("ShoalStrategy opens no process group, so there is no main port")

    @staticmethod
    def detect() -> bool:
        """Lightning never chooses it by itself."""
        return False

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        """The launcher has set it."""

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has set it."""

    def local_rank(self) -> int:
        return self._local_rank

    def node_rank(self) -> int:
        return self._machine


Wrapper: TypeAlias = Callable[[torch.optim.Optimizer, torch.nn.Module], DecentralizedOptimizer]
"""Makes an optimizer decentralized: ``shoal.DecentralizedOptimizer``, or a function around it."""


def one_peer_at_a_time(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, dealt_out: bool
) -> DecentralizedOptimizer:
    """Adapt, then combine, on the default topology of Shoal's optimizers: one neighbour of the exponential graph at a
    time, or what ``shoal.set_topology`` has set.

    Args:
        optimizer: Lightning's.
        module: The module whose parameters it has.
        dealt_out: Lightning deals the samples out, so agents' data do not differ: Adam's moments need not be averaged,
            and nothing is to warn of that.
    """
    return DistributedAdaptThenCombineOptimizer(optimizer, module, mix_state=() if dealt_out else None)


def broadcast_weights(module: torch.nn.Module) -> None:
    """Give all agents rank 0's tensors of a module; other entries of its state are each agent's own."""
    state = module.state_dict()
    broadcast_parameters({name: value for name, value in state.items() if isinstance(value, torch.Tensor)}, 0)


def evaluate_first(optimizer: DecentralizedOptimizer) -> None:
    """Call the closure that Lightning passes to ``step()``, which contains the forward and backward pass, before the
    step: for optimizers that count backward passes, or exchange during them.
    """
    step = optimizer.step

    def stepped(closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step()
        return loss

    optimizer.step = stepped  # type: ignore[method-assign]
