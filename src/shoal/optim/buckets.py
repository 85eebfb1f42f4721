"""Parameters in a few large pieces of memory, so that a model is a few messages and not one for each tensor.

Each parameter stays the tensor it was, with its shape and strides; its data lie in a bucket. The bucket lies in memory
that neighbours read, so what is exchanged is not copied first: while neighbours read the parameters here, the average
is written to a second bucket, to which the parameters then move.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..world.agent import current
from .params import is_dense

BUCKET_BYTES = 16 << 20
"""Large enough that a message costs little beside its bytes."""
OVERLAPPED_BUCKET_BYTES = 4 << 20
"""During the backward pass: small enough that the first leaves early, and that little is left when it ends."""


class Bucket:
    """Some parameters of one dtype on one device.

    Attributes:
        params: In the order in which they lie.
        of: The parameters that they belong to: themselves, but for state of the optimizer.
        kind: What they are of these; empty for the parameters themselves.
        flat: Their data, ``[numel]``.
    """

    kind = ""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = self.of = params
        self.numel = sum(param.numel() for param in params)
        # All agents', and for good: what lies where must not depend on what one of them does to a parameter later.
        self._places = [(param.shape, param.stride() if is_dense(param) else None) for param in params]
        self._spare: torch.Tensor | None = None
        self._versions: list[int] = []
        self.flat = self._room()
        self._settle(self.flat)

    def _room(self) -> torch.Tensor:
        like = self.params[0]
        if not like.is_cpu:
            return torch.empty(self.numel, dtype=like.dtype, device=like.device)
        return current("optim").engine.arena.empty((self.numel,), like.dtype)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a flat tensor, in the shape and strides that it had at first."""
        found, at = [], 0
        for shape, strides in self._places:
            part = flat[at : at + shape.numel()]
            found.append(
                part.view(shape) if strides is None else part.as_strided(shape, strides, part.storage_offset())
            )
            at += shape.numel()
        return found

    def room_for_result(self) -> torch.Tensor:
        """Memory of the bucket's size that nothing lies in."""
        if self._spare is None:
            self._spare = self._room()
        return self._spare

    def move_to(self, flat: torch.Tensor) -> None:
        """The parameters' data are now these; where they were is free for the next result."""
        self._spare, self.flat = self.flat, flat
        for param, view in zip(self.params, self.views(flat), strict=True):
            param.data = view

    def leave(self) -> None:
        """Move to other memory: somebody may still read where the parameters are, and they are about to change."""
        self._spare = None
        self.flat = self._room()
        self._settle(self.flat)

    def _settle(self, flat: torch.Tensor) -> None:
        for param, view in zip(self.params, self.views(flat), strict=True):
            view.copy_(param.detach())
            param.data = view

    @property
    def outgrown(self) -> bool:
        """A parameter has another shape, dtype or device than it had, so that it has no place here."""
        pairs = zip(self.params, self._places, strict=True)
        like = (self.flat.dtype, self.flat.device)
        return any(param.shape != shape or (param.dtype, param.device) != like for param, (shape, _) in pairs)

    def adopt(self) -> None:
        """Take in again what somebody has put elsewhere, as ``param.data = ...`` and ``module.to(...)`` do."""
        for param, view in zip(self.params, self.views(self.flat), strict=True):
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.detach())
                param.data = view

    def lend(self) -> None:
        """From here on the parameters must not change until :meth:`changed_while_lent` has been asked."""
        self._versions = [param._version for param in self.params]

    def changed_while_lent(self) -> list[int]:
        """Which parameters have changed all the same."""
        pairs = zip(self.params, self._versions, strict=True)
        return [number for number, (param, version) in enumerate(pairs) if param._version != version]

    def gather_gradients(self) -> torch.Tensor:
        """The gradients, flat, zeros where there is none."""
        flat = self.room_for_result()
        for param, view in zip(self.params, self.views(flat), strict=True):
            if param.grad is None:
                view.zero_()
            else:
                view.copy_(param.grad.to_dense() if param.grad.is_sparse else param.grad)
        return flat

    def spread_gradients(self, flat: torch.Tensor) -> None:
        """The gradients are these; a parameter that had none, and is learnt, has one now."""
        for param, view in zip(self.params, self.views(flat), strict=True):
            if param.grad is not None and not param.grad.is_sparse:
                param.grad.copy_(view)
            elif param.requires_grad:
                param.grad = view.clone()


def into_buckets(params: Iterable[torch.nn.Parameter], nbytes: float = BUCKET_BYTES) -> list[Bucket]:
    """Buckets of at most ``nbytes`` each (or of one larger parameter), in the order given."""
    open_: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    full: list[list[torch.nn.Parameter]] = []
    for param in params:
        group = open_.setdefault((param.dtype, param.device), [])
        held = sum(one.numel() * one.element_size() for one in group)
        if group and held + param.numel() * param.element_size() > nbytes:
            full.append(group)
            group = open_[param.dtype, param.device] = []
        group.append(param)
    return [Bucket(group) for group in [*full, *open_.values()] if group]
