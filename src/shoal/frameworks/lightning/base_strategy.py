"""The common part of the two strategies, for Lightning's Trainer and for Fabric: device, collectives, and optimizers.

``ShoalEnvironment`` gives Lightning the rank and size of a process, instead of a launcher's variables. The functions
convert Lightning's optimizers to Shoal's. The metrics of torchmetrics query torch.distributed, which reports a single
process; ``synchronise`` makes them use the collectives of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch.utils.data import DistributedSampler
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from ...data import AgentSampler
from ...ops.arguments import Group, Internal, as_bits
from ...ops.collective import allreduce, barrier, gather_by_rank
from ...ops.objects import broadcast_object, broadcast_parameters
from ...optim.optimizer import DecentralizedOptimizer
from ...runtime.queries import local_rank, machine_rank, rank, size

T = TypeVar("T")
_OF_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "average": lambda every: every.sum(0) / len(every),
    "sum": lambda every: every.sum(0),
    "max": lambda every: every.amax(0),
    "min": lambda every: every.amin(0),
    "product": lambda every: every.prod(0),
}
_OPERATIONS = {"mean": "average", "avg": "average", "sum": "sum", "max": "max", "min": "min", "product": "product"}


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
        check_devices(devices)
        self._devices = devices

    def process_dataloader(self, dataloader: T) -> T:
        """The loader. Where agents take parts of one order, it is rank 0's, whatever they were seeded with."""
        batches = getattr(dataloader, "batch_sampler", None)
        sampler = getattr(dataloader if batches is None else batches, "sampler", None)
        if (
            isinstance(sampler, DistributedSampler)
            and not isinstance(sampler, AgentSampler)
            and sampler.num_replicas == size()
        ):
            sampler.seed = broadcast_object(sampler.seed, 0, Internal("lightning.seed"))
        return dataloader

    def barrier(self, name: str | None = None) -> None:
        """Return when all agents are here, or with an error after ``SHOAL_TIMEOUT`` seconds."""
        barrier(Internal("lightning.barrier"))

    def broadcast(self, obj: T, src: int = 0) -> T:
        """One agent's object on all: plain data, tensors and paths.

        Raises:
            TypeError: At the source: another object, which receivers would not unpickle.
        """
        path = isinstance(obj, Path)
        content: list[Any] = [path, str(obj) if path else obj]
        is_path, value = broadcast_object(content, src, Internal("lightning.broadcast"))
        found: T = Path(value) if is_path else value  # type: ignore[assignment]
        return found

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """``[agents, *shape]``, detached; without the first dimension where there is one agent, as Lightning has it.

        Raises:
            ValueError: ``sync_grads=True``, or the agents' shapes differ.
        """
        if sync_grads:
            raise ValueError(
                "all_gather(sync_grads=True): an agent's gradients are those of its own loss, and go through no other "
                "agent. Leave sync_grads out"
            )
        found = gather_all(tensor, group)
        if len(found) == 1:
            return tensor
        shapes = dict.fromkeys(tuple(part.shape) for part in found)
        if len(shapes) > 1:
            raise ValueError(
                f"all_gather: the agents' tensors have the shapes {', '.join(map(str, shapes))}, and are to be one "
                "tensor. Pad them, or take shoal.allgather, which joins them along dimension 0"
            )
        return torch.stack(found)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether the decision is True on all agents, or on any of them."""
        return bool(reduced(torch.tensor(int(decision), device="cpu"), "min" if all else "max"))


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


Wrapper: TypeAlias = Callable[[torch.optim.Optimizer, Any], DecentralizedOptimizer]
"""Makes an optimizer decentralized: ``shoal.DecentralizedOptimizer``, or a function around it."""


def one_peer_at_a_time(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | list[torch.nn.Module], dealt_out: bool
) -> DecentralizedOptimizer:
    """Adapt, then combine, on the default topology of Shoal's optimizers: one neighbour of the exponential graph at a
    time, or what ``shoal.set_topology`` has set.

    Args:
        optimizer: Lightning's.
        module: The module, or modules, whose parameters it has.
        dealt_out: Lightning deals the samples out, so agents' data do not differ: Adam's moments need not be averaged,
            and nothing is to warn of that.
    """
    return DecentralizedOptimizer(optimizer, module, mix_state=() if dealt_out else None)


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


def gather_all(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of all agents, by rank; their shapes may differ. As torchmetrics' ``dist_sync_fn``."""
    tensor = tensor.detach()
    rows = tensor[None] if tensor.ndim == 0 else tensor
    found = gather_by_rank(as_bits(rows), Internal("lightning.gather"), group=_value_of(group)).values()
    return [part.view(tensor.dtype)[0] if tensor.ndim == 0 else part.view(tensor.dtype) for part in found]


def reduced(value: Any, how: Any, group: Any = None) -> Any:
    """The mean, sum, maximum, minimum or product over the agents, of a tensor or a number; the same bits on all.

    A mean of whole numbers has a fraction. A single number is sent as bits, and may be NaN.

    Raises:
        ValueError: Another operation.
    """
    name = str(getattr(how, "name", how) or "mean").rpartition(".")[2].lower()
    if name not in _OPERATIONS:
        raise ValueError(f"reduce_op={how!r}: it may be {', '.join(_OPERATIONS)}")
    if not isinstance(value, torch.Tensor):
        return (
            reduced(torch.tensor(value, device="cpu"), how, group).item() if isinstance(value, int | float) else value
        )
    tensor, operation = value.detach(), _OPERATIONS[name]
    if operation == "average" and not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.get_default_dtype())
    if tensor.numel() > 1:
        return allreduce(tensor, op=operation, name=Internal("lightning.reduce"), group=_value_of(group))
    return _OF_ONE[operation](torch.stack(gather_all(tensor, group)))


def _value_of(group: Any) -> Group | None:
    """A group of some agents, if not all: ranks, or a process group that the script has opened."""
    everybody = group is None or group is torch.distributed.group.WORLD
    found: Group | None = None if everybody else group
    return found


def several() -> bool:
    """Reports several processes to a metric before it synchronises."""
    return True


def synchronise(module: torch.nn.Module) -> None:
    """Make the metrics of a module compute over all agents, unless they have a synchronisation of their own."""
    for part in module.modules():
        if isinstance(part, Metric) and part.dist_sync_fn is None:
            part.dist_sync_fn = gather_all
            if part.distributed_available_fn is jit_distributed_available:
                part.distributed_available_fn = several


def release(module: torch.nn.Module) -> None:
    """Make them ask torch.distributed again."""
    for part in module.modules():
        if isinstance(part, Metric) and part.dist_sync_fn is gather_all:
            part.dist_sync_fn = None
            if part.distributed_available_fn is several:
                part.distributed_available_fn = jit_distributed_available


def check_devices(devices: list[Any] | None) -> None:
    """Raise ValueError unless it is one, the CPU."""
    if devices is not None and len(devices) > 1:
        raise ValueError(
            f"devices={len(devices)}: with Shoal's strategies each process is one agent with one device, and the "
            f"launcher sets their number. Take devices=1, and shoal run -n {len(devices)}"
        )
    elsewhere = [device for device in devices or () if getattr(device, "type", None) != "cpu"]
    if elsewhere:
        raise ValueError(
            f"Shoal trains on the CPU here for now, and Lightning has taken {elsewhere[0]}. Set accelerator='cpu'"
        )
