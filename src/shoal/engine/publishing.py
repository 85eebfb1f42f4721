"""Puts tensors where other agents can read them: as copies, or without one where they lie in such memory already.

With ``SHOAL_CHECK_FINITE`` each is looked at first: NaN of one agent would be in everybody's parameters a step later.
"""

from __future__ import annotations

import torch

from ..errors import NotFinite
from ..kernels.elementwise import copy
from ..transport.link import Lease, Published
from ..transport.shared_regions import Arena
from ..transport.wire import DTYPES
from .devices import Devices
from .operation import Operation

PUBLISH_BYTES = 1 << 14
"""Tensors larger than this are published in shared memory; smaller ones travel inside the message."""


class Publisher:
    """Of one agent.

    Args:
        rank: Its rank.
        arena: The memory that others can read.
        devices: Those that its tensors are on.
    """

    def __init__(self, rank: int, arena: Arena, devices: Devices) -> None:
        self._rank = rank
        self._arena = arena
        self._devices = devices
        self.finite = False  # refuse tensors with NaN or infinity; a window may hold what its owner likes

    def publish(
        self,
        operation: Operation,
        tensor: torch.Tensor,
        *,
        zero_copy: bool = False,
        pieces: int = 1,
        on_device: bool = False,
    ) -> Published:
        """Copy a tensor to where other agents can read it, flat, until they all have and the operation has ended.

        Args:
            operation: What it is published for.
            tensor: Any strides, on any device.
            zero_copy: Let them read it where it lies, if it is large, contiguous and in memory of ``arena.empty``; any
                other is copied all the same. Nobody may change it meanwhile. The operation then ends only when all
                others have read it; one that fails may leave readers behind, and the tensor must not change any more.
            pieces: In how many messages it goes; small ones travel inside them.
            on_device: A tensor on a device may stay there: then it is a :class:`~.devices.PublishedOnDevice`, which has
                still to be written.
        """
        recovery = operation.recovery
        if recovery is None:
            return self._publish(operation, tensor, zero_copy, pieces, on_device)
        if recovery.input is not None and recovery.input[0] is tensor:
            return recovery.input[1]  # it begins anew, and the caller may have changed the tensor since
        published = self._publish(operation, tensor, zero_copy, pieces, on_device)
        if recovery.input is None:
            recovery.input = tensor, published
        return published

    def _publish(
        self, operation: Operation, tensor: torch.Tensor, zero_copy: bool, pieces: int, on_device: bool
    ) -> Published:
        spoiled = self.problem(operation, tensor)
        if spoiled is not None:
            raise spoiled
        place = self._devices.place_of(tensor) if on_device else None
        if place is not None:
            return place.publish(operation, tensor)
        if tensor.is_cpu and tensor.nbytes <= PUBLISH_BYTES * pieces:
            if tensor.dim() == 1 and tensor.is_contiguous() and not tensor.requires_grad:
                return Published(tensor.clone())
            return Published(tensor.detach().clone(memory_format=torch.contiguous_format).view(-1))
        region = self._arena.find(tensor) if zero_copy and tensor.is_cpu and tensor.is_contiguous() else None
        if region is not None:
            return Published(tensor.detach().view(-1), region, zero_copy=True)
        published = self._room(operation, tensor.numel(), tensor.dtype)
        copy(published.data.view(tensor.shape), tensor.detach())
        return published

    def keep(self, operation: Operation, tensor: torch.Tensor) -> Published:
        """A tensor that no other agent reads, where it lies, with the checks of one that is published."""
        spoiled = self.problem(operation, tensor)
        if spoiled is not None:
            raise spoiled
        return Published(tensor.detach().view(-1))

    def room(self, operation: Operation, numel: int, dtype: torch.dtype) -> Published:
        """Uninitialised numbers, flat, that others can read once they have been written."""
        if numel * dtype.itemsize <= PUBLISH_BYTES:
            return Published(torch.empty(numel, dtype=dtype))
        return self._room(operation, numel, dtype)

    def publish_joined(self, operation: Operation, parts: list[torch.Tensor]) -> Published:
        """Copy flat tensors of one dtype, one behind the other, to where other agents can read them."""
        dtype, total = parts[0].dtype, sum(part.numel() for part in parts)
        if total * dtype.itemsize <= PUBLISH_BYTES:
            return Published(torch.cat(parts))
        published = self._room(operation, total, dtype)
        torch.cat(parts, out=published.data)
        return published

    def problem(self, operation: Operation, tensor: torch.Tensor) -> NotFinite | None:
        """That there is NaN or infinity in a tensor, if it is to be looked at. One pass: such numbers stay in a sum."""
        if not self.finite or operation.one_sided or not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        with torch.no_grad():
            if tensor.dtype not in DTYPES:  # torch has no sum of it
                tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
            if bool(torch.isfinite(tensor.sum())):
                return None
            wrong = int(tensor.numel() - torch.isfinite(tensor).sum())
        if not wrong:  # their sum is too large, and they are not
            return None
        return NotFinite(
            f"{operation} on rank {self._rank}: {wrong} of the {tensor.numel()} numbers of its tensor are NaN or "
            "infinite (SHOAL_CHECK_FINITE is set); nothing of it was sent",
            (self._rank,),
        )

    def _room(self, operation: Operation, numel: int, dtype: torch.dtype) -> Published:
        region = self._arena.allocate(numel * dtype.itemsize)
        lease = Lease(self._arena, region)
        operation.leases.append(lease)
        return Published(region.as_tensor(dtype, numel), region, lease)
