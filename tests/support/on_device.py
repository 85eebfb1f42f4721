"""Let a test of CPU tensors call Shoal with tensors of a device: arguments move there before each call, and results
return to the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import shoal
from shoal.execution import devices

OPERATIONS = (
    "allgather",
    "allreduce",
    "allreduce_",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_broadcast",
    "grouped_neighbor_allreduce",
    "hierarchical_neighbor_allreduce",
    "neighbor_allgather",
    "neighbor_allreduce",
    "neighbor_alltoall",
    "pair_gossip",
)
Moves = Callable[[torch.Tensor], torch.Tensor]


class HandleOfDevice:
    """Of a call with tensors there; what it gives is on the CPU."""

    def __init__(self, handle: shoal.Handle[Any], back: Callable[[Any], Any]) -> None:
        self.handle, self._back = handle, back
        self._result: Any = None

    def wait(self, timeout: float | None = None) -> Any:
        result = self.handle.wait(timeout)
        if self._result is None:
            self._result = self._back(result)
        return self._result

    def __repr__(self) -> str:
        return repr(self.handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)


class _Call:
    """The tensors of one call, here and there."""

    def __init__(self, moves: Moves, in_place: bool) -> None:
        self._moves, self._in_place = moves, in_place
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of what is there: here, there

    def to_device(self, one: Any) -> Any:
        if isinstance(one, list):
            return [self.to_device(item) for item in one]
        if type(one) is not torch.Tensor or one.layout is not torch.strided or one.is_nested or not one.is_cpu:
            return one
        if one.requires_grad:
            return one
        for on_cpu, there in self._copies.values():  # a tensor that is both input and out stays one
            if on_cpu is one:
                return there
        moved = self._moves(one)
        self._copies[id(moved)] = one, moved
        return moved

    def to_cpu(self, result: Any) -> Any:
        if self._in_place:
            with torch.no_grad():
                for on_cpu, there in self._copies.values():
                    on_cpu.copy_(there.cpu())
            if isinstance(result, torch.Tensor):
                return on_cpu
        if isinstance(result, list):
            return [self.to_cpu(item) for item in result]
        if not isinstance(result, torch.Tensor):
            return result
        known = self._copies.get(id(result))
        if known is None:
            assert not result.is_cpu or not self._copies, "the result is on the CPU, and the tensors were not"
            return result.cpu()
        on_cpu, there = known
        with torch.no_grad():
            on_cpu.copy_(there.cpu())
        return on_cpu


def _wrapped(call: Callable[..., Any], moves: Moves, in_place: bool) -> Callable[..., Any]:
    @functools.wraps(call)
    def on_device(*args: Any, **kwargs: Any) -> Any:
        one = _Call(moves, in_place)
        given = [one.to_device(item) for item in args]
        named = {name: one.to_device(item) for name, item in kwargs.items()}
        result = call(*given, **named)
        return HandleOfDevice(result, one.to_cpu) if isinstance(result, shoal.Handle) else one.to_cpu(result)

    return on_device


@contextmanager
def all_on_device(moves: Moves) -> Iterator[None]:
    """Let public operations called in the block have their tensors on a device, small ones as well.

    Args:
        moves: Makes a copy of a tensor there, with its strides.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "FEWEST_BYTES", 0)
        patch.setenv("SHOAL_DEVICE_MEMORY", "1")
        for name in OPERATIONS:
            variants = [name, f"{name}_nonblocking", f"{name[:-1]}_nonblocking_"]
            places = [(home, variant) for home in (shoal, shoal.nonblocking, shoal.bluefog) for variant in variants]
            found = [(home, variant) for home, variant in places if hasattr(home, variant)]
            assert found, f"there is no operation {name}"
            for home, variant in found:
                patch.setattr(home, variant, _wrapped(getattr(home, variant), moves, name.endswith("_")))
        for name in ("wait", "synchronize", "poll"):
            call = getattr(shoal.bluefog, name)

            def unwrapped(handle: Any, *args: Any, _call: Callable[..., Any] = call, **kwargs: Any) -> Any:
                if not isinstance(handle, HandleOfDevice):
                    return _call(handle, *args, **kwargs)
                result = _call(handle.handle, *args, **kwargs)
                return handle.wait() if isinstance(result, (torch.Tensor, list)) else result

            patch.setattr(shoal.bluefog, name, unwrapped)
        yield
