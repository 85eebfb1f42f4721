"""Puts tensors where other agents can read them: copies, or where they lie, if their owner lends them.

With ``SHOAL_CHECK_FINITE`` each is looked at first: NaN of one agent would be in everybody's parameters a step later.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import NotFinite
from ..transport.link import Lease, Published
from ..transport.memory import Arena
from .operation import Operation

PUBLISH_BYTES = 1 << 14
"""Tensors larger than this are published in shared memory; smaller ones travel inside the message."""


class Publisher:
    """Of one agent.

    Args:
        rank: Its rank.
        arena: The memory that others can read.
    """

    def __init__(self, rank: int, arena: Arena) -> None:
        self._rank = rank
        self._arena = arena
        self.finite = False  # refuse tensors with NaN or infinity; a window may hold what its owner likes
        self._lent = threading.local()

    def publish(self, operation: Operation, tensor: torch.Tensor) -> Published:
        """Copy a tensor to where other agents can read it, flat, until they all have and the operation has ended.

        One that the caller's thread is :meth:`lending` is not copied.
        """
        spoiled = self.problem(operation, tensor)
        if spoiled is not None:
            raise spoiled
        if tensor is getattr(self._lent, "tensor", None):
            return Published(tensor.view(-1), self._arena.find(tensor), lent=True)
        if tensor.is_cpu and tensor.nbytes <= PUBLISH_BYTES:
            return Published(tensor.detach().clone(memory_format=torch.contiguous_format).view(-1))
        published = self._room(operation, tensor.numel(), tensor.dtype)
        published.data.view(tensor.shape).copy_(tensor.detach())
        return published

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

    @contextmanager
    def lending(self, tensor: torch.Tensor) -> Iterator[None]:
        """What this thread submits here reads ``tensor`` where it lies, and ends only when all others have read it.

        For a contiguous tensor that ``arena.empty`` made and that nobody changes meanwhile; any other is copied. An
        operation that fails may leave readers behind: the tensor must then not change any more.
        """
        if not tensor.is_cpu or tensor.nbytes <= PUBLISH_BYTES or self._arena.find(tensor) is None:
            yield
            return
        self._lent.tensor = tensor
        try:
            yield
        finally:
            self._lent.tensor = None

    def _room(self, operation: Operation, numel: int, dtype: torch.dtype) -> Published:
        region = self._arena.allocate(numel * dtype.itemsize)
        lease = Lease(self._arena, region)
        operation.leases.append(lease)
        return Published(region.as_tensor(dtype, numel), region, lease)
