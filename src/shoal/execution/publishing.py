"""Makes tensors readable for other agents: as copies, or in place if they are in the arena already.

With ``SHOAL_CHECK_FINITE`` each tensor is checked first: a NaN of one agent would be in all parameters a step later.
"""

from __future__ import annotations

import torch

from ..errors import NotFinite
from ..kernels.sums import copy
from ..transport.link import Lease, Published
from ..transport.messages import DTYPES
from ..transport.shared_regions import Arena
from .devices import Devices
from .operation import Operation

PUBLISH_BYTES = 1 << 14
"""Bytes of a tensor up to which it is sent inside the message; larger tensors are published in shared memory."""


class Publisher:
    """The publisher of one agent.

    Args:
        rank: The agent's rank.
        arena: The memory that others can read.
        devices: The devices of the agent's tensors.
    """

    def __init__(self, rank: int, arena: Arena, devices: Devices) -> None:
        self._rank = rank
        self._arena = arena
        self._devices = devices
        self.finite = False  # refuse tensors with NaN or infinity; one-sided operations, as on windows, are exempt

    def require_finite(self, required: bool) -> None:
        """Refuse tensors with NaN or infinity, if ``required``."""
        self.finite = required

    def publish(
        self,
        operation: Operation,
        tensor: torch.Tensor,
        *,
        zero_copy: bool = False,
        pieces: int = 1,
        on_device: bool = False,
    ) -> Published:
        """Copy a tensor to memory that other agents can read, flat, until all have read it and the operation has ended.

        Args:
            operation: The operation that publishes it.
            tensor: Any strides, on any device.
            zero_copy: Publish the tensor in place if it is large, contiguous and in memory of ``arena.empty``; other
                tensors are still copied. The tensor must not change until the operation ends, which happens only when
                all other agents have read it. A failed operation may leave readers behind; then the tensor must not
                change any more.
            pieces: The number of messages that it is split into; small ones carry it inline.
            on_device: Whether a device tensor may stay there, as a :class:`~.devices.PublishedOnDevice` that is not
                written yet.
        """
        recovery = operation.recovery
        if recovery is not None and recovery.input is not None and recovery.input[0] is tensor:
            return recovery.input[1]  # it restarts, and the caller may have changed the tensor since
        if self.finite:
            self._check_finite(operation, tensor)
        on_cpu = tensor.is_cpu
        place = self._devices.place_of(tensor) if on_device and not on_cpu else None
        if place is not None:
            published: Published = place.publish(operation, tensor)
        # A small tensor is copied too: its stage may be deferred, and the caller may change the tensor meanwhile.
        elif on_cpu and tensor.nbytes <= PUBLISH_BYTES * pieces:
            if tensor.dim() == 1 and tensor.is_contiguous() and not tensor.requires_grad:
                published = Published(tensor.clone())
            else:
                published = Published(tensor.detach().clone(memory_format=torch.contiguous_format).view(-1))
        else:
            published = self._in_shared_memory(operation, tensor, zero_copy and on_cpu and tensor.is_contiguous())
        # Only the first tensor is the caller's. A restart computes and publishes any later ones again.
        if recovery is not None and recovery.input is None:
            recovery.input = tensor, published
        return published

    def _in_shared_memory(self, operation: Operation, tensor: torch.Tensor, zero_copy: bool) -> Published:
        # Other agents can map memory of the arena only, so a tensor elsewhere is copied into it.
        region = self._arena.find(tensor) if zero_copy else None
        if region is not None:
            return Published(tensor.detach().view(-1), region, zero_copy=True)
        published = self._reserve(operation, tensor.numel(), tensor.dtype)
        copy(published.data.view(tensor.shape), tensor.detach())
        return published

    def keep_unpublished(self, operation: Operation, tensor: torch.Tensor) -> Published:
        """Publish in place a tensor that no other agent reads, with the checks of a published one."""
        self._check_finite(operation, tensor)
        return Published(tensor.detach().view(-1))

    def reserve(self, operation: Operation, numel: int, dtype: torch.dtype) -> Published:
        """Uninitialized memory, flat, that others can read once it has been written."""
        if numel * dtype.itemsize <= PUBLISH_BYTES:
            return Published(torch.empty(numel, dtype=dtype, device="cpu"))
        return self._reserve(operation, numel, dtype)

    def publish_joined(self, operation: Operation, parts: list[torch.Tensor]) -> Published:
        """Copy flat tensors of one dtype, concatenated, to memory that other agents can read."""
        dtype, total = parts[0].dtype, sum(part.numel() for part in parts)
        if total * dtype.itemsize <= PUBLISH_BYTES:
            return Published(torch.cat(parts))
        published = self._reserve(operation, total, dtype)
        torch.cat(parts, out=published.data)
        return published

    def _check_finite(self, operation: Operation, tensor: torch.Tensor) -> None:
        spoiled = self.problem(operation, tensor)
        if spoiled is not None:
            raise spoiled

    def problem(self, operation: Operation, tensor: torch.Tensor) -> NotFinite | None:
        """The error of a tensor with NaN or infinity, if tensors are checked; otherwise None. One sum finds both."""
        if not self.finite or operation.one_sided or not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        with torch.no_grad():
            if tensor.dtype not in DTYPES:  # torch has no sum for other dtypes
                tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
            if bool(torch.isfinite(tensor.sum())):
                return None
            wrong = int(tensor.numel() - torch.isfinite(tensor).sum())
        if not wrong:  # only the sum has overflowed
            return None
        return NotFinite(
            f"{operation} on rank {self._rank}: {wrong} of the {tensor.numel()} numbers of its tensor are NaN or "
            "infinite (SHOAL_CHECK_FINITE is set); nothing of it was sent",
            (self._rank,),
        )

    def _reserve(self, operation: Operation, numel: int, dtype: torch.dtype) -> Published:
        region = self._arena.allocate(numel * dtype.itemsize)
        lease = Lease(self._arena, region)
        # Before the memory is written: if the copy raises, the failed operation releases the region.
        operation.leases.append(lease)
        return Published(region.as_tensor(dtype, numel), region, lease)
