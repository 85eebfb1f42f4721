"""The reduction of an all-reduce, and the form in which a tensor is sent, from Horovod's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from ...errors import ShoalError
from ...ops.arguments import WEIGHABLE
from ...topology._validate import as_weight

HorovodInternalError = ShoalError
"""What Horovod raises of an operation that fails is the base class of Shoal's errors here."""


class InvalidArgument(HorovodInternalError, ValueError):
    """An argument that Horovod refuses only when the operation runs: there by one of these types, or by the other."""


class ReduceOp(IntEnum):
    """The reductions of the tensors of all agents."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


@dataclass(frozen=True)
class ScaledReduction:
    """The reduction of an all-reduce, with factors.

    Attributes:
        op: The reduction.
        before: The factor of each tensor before the reduction.
        after: The factor of the result.
    """

    op: ReduceOp
    before: float = 1.0
    after: float = 1.0

    @property
    def op_name(self) -> str:
        """Shoal's ``op``."""
        return self.op.name.lower()


def parse_reduction(
    called: str, average: bool | None, op: int | None, before: float = 1.0, after: float = 1.0
) -> ScaledReduction:
    """The reduction from the arguments of a call.

    Raises:
        ValueError: The arguments are contradictory or unknown.
    """
    given = op if op is not None else (Average if average is None or average else Sum)
    try:
        found = ReduceOp(given)
    except ValueError:
        raise ValueError(f"{called}: op={op!r}; it may be hvd.Average, Sum, Min, Max or Product") from None
    if average is not None and op is not None:
        raise ValueError(f"{called}: average={average!r} and op={found.name.title()} are both given; leave average out")
    if found is Adasum:
        raise ValueError(
            f"{called}: op=Adasum weighs gradients by the angles between them, pair by pair up a tree, and there is no "
            "such all-reduce here; take hvd.Average, with the learning rate scaled as for it"
        )
    return ScaledReduction(found, as_weight(before, "prescale_factor"), as_weight(after, "postscale_factor"))


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """A tensor times a factor; of integers what is left without the digits behind the point."""
    if factor == 1.0:
        return tensor
    return tensor * factor if tensor.dtype in WEIGHABLE else (tensor.double() * factor).to(tensor.dtype)


class Compressor:
    """The form in which a tensor is sent: :meth:`compress` gives it with what :meth:`decompress` has to know."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """No compression."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """In float16, if it is floating."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.half(), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The compressors there are. One of a script's own has the same two methods."""

    none = NoneCompressor
    fp16 = FP16Compressor


def listed(called: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a call of several."""
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{called}: a list of tensors is wanted, not one tensor")
    return list(tensors)


def compressed(compression: Any, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors in the form in which they are sent, with the data to undo it."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [message for message, _ in pairs], [ctx for _, ctx in pairs]
