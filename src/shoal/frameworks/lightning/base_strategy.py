"""The common part of the two strategies, for Lightning's Trainer and for Fabric: the device, and the collectives."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ...ops.arguments import Internal
from ...ops.collective import barrier
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
