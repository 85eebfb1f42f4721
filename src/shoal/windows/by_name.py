"""BlueFog's functions on windows: each finds the window of a name and calls the corresponding method.

Their docstrings list only the differences from the method, which documents arguments and errors. All raise KeyError if
this agent has no window of the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager

import torch

from .._signals import deferred
from ..execution.operation import Handle, poll, wait
from ..runtime.agent import current
from .registry import windows_of
from .window import Weights, named, names, register, turn_off_associated_p, turn_on_associated_p
from .window_memory import SlotState


def win_create(tensor: torch.Tensor, name: str, zero_init: bool = False, *, timeout: float | None = None) -> bool:
    """:func:`shoal.windows.create`. False, instead of an error, if this agent has a window of that name; else True."""
    return register("win_create", tensor, name, zero_init, timeout) is not None


def win_free(name: str | None = None) -> bool:
    """:meth:`Window.free <shoal.windows.Window.free>` of one window, or of all of this agent's. True."""
    windows = windows_of(current("win_free"))
    if name is not None:
        windows.get("win_free", name)
    with deferred:
        return windows.free(name)


def win_put(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    require_mutex: bool = False,
    *,
    timeout: float | None = None,
) -> bool:
    """:meth:`Window.put <shoal.windows.Window.put>`. True, when all destinations have it.

    **With a ``self_weight`` the tensor that is passed is multiplied by it, in place, after it has been sent.**
    """
    named(name, op="win_put").put(
        tensor, self_weight=self_weight, dst_weights=dst_weights, require_mutex=require_mutex, timeout=timeout
    )
    return True


def win_put_nonblocking(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    require_mutex: bool = False,
    *,
    timeout: float | None = None,
) -> Handle[bool]:
    """:func:`win_put` without waiting. The tensor must not change until the handle is done."""
    return named(name, op="win_put").put_nonblocking(
        tensor, self_weight=self_weight, dst_weights=dst_weights, require_mutex=require_mutex, timeout=timeout
    )


def win_accumulate(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    require_mutex: bool = False,
    *,
    timeout: float | None = None,
) -> bool:
    """:meth:`Window.accumulate <shoal.windows.Window.accumulate>`. True, when all destinations have it.

    **With a ``self_weight`` the tensor that is passed is multiplied by it, in place, after it has been sent.**
    """
    named(name, op="win_accumulate").accumulate(
        tensor, self_weight=self_weight, dst_weights=dst_weights, require_mutex=require_mutex, timeout=timeout
    )
    return True


def win_accumulate_nonblocking(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    require_mutex: bool = False,
    *,
    timeout: float | None = None,
) -> Handle[bool]:
    """:func:`win_accumulate` without waiting. The tensor must not change until the handle is done.

    With a ``self_weight``, do not update or collect this window before that either.
    """
    return named(name, op="win_accumulate").accumulate_nonblocking(
        tensor, self_weight=self_weight, dst_weights=dst_weights, require_mutex=require_mutex, timeout=timeout
    )


def win_get(
    tensor: torch.Tensor | str | None = None,
    name: str | Weights | Iterable[int] | None = None,
    src_weights: Weights | Iterable[int] | None = None,
    require_mutex: bool = False,
    *,
    timeout: float | None = None,
) -> bool:
    """:meth:`Window.get <shoal.windows.Window.get>`. True, when all slots are filled.

    Args:
        tensor: May be left out, as in BlueFog: ``win_get("name")``. The paper writes ``win_get(tensor, "name")``; the
            tensor is then ignored.
    """
    name, src_weights, require_mutex = _of_a_get(tensor, name, src_weights, require_mutex)
    named(name, op="win_get").get(src_weights, require_mutex=require_mutex, timeout=timeout)
    return True


def win_get_nonblocking(
    tensor: torch.Tensor | str | None = None,
    name: str | Weights | Iterable[int] | None = None,
    src_weights: Weights | Iterable[int] | None = None,
    require_mutex: bool = False,
    *,
    timeout: float | None = None,
) -> Handle[bool]:
    """:func:`win_get` without waiting."""
    name, src_weights, require_mutex = _of_a_get(tensor, name, src_weights, require_mutex)
    return named(name, op="win_get").get_nonblocking(src_weights, require_mutex=require_mutex, timeout=timeout)


def _of_a_get(
    tensor: torch.Tensor | str | None,
    name: str | Weights | Iterable[int] | None,
    src_weights: Weights | Iterable[int] | None,
    require_mutex: bool,
) -> tuple[str, Weights | Iterable[int] | None, bool]:
    """Name, weights and mutex, with or without a tensor before them."""
    if isinstance(tensor, str):
        if isinstance(src_weights, bool):  # win_get(name, src_weights, require_mutex), as BlueFog has it
            require_mutex, src_weights = src_weights, None
        if isinstance(name, str):
            raise ValueError(f"win_get: the name is given twice, {tensor!r} and {name!r}")
        if name is not None:
            if src_weights is not None:
                raise ValueError("win_get: src_weights is given twice")
            src_weights = name
        name = tensor
    if not isinstance(name, str):
        raise ValueError(f"win_get: name={name!r}; give the name of a window")
    return name, src_weights, require_mutex


neighbor_win_put, neighbor_win_put_nonblocking = win_put, win_put_nonblocking
neighbor_win_accumulate, neighbor_win_accumulate_nonblocking = win_accumulate, win_accumulate_nonblocking
neighbor_win_get, neighbor_win_get_nonblocking = win_get, win_get_nonblocking


def win_update(
    name: str,
    self_weight: float | None = None,
    neighbor_weights: Mapping[int, float] | None = None,
    reset: bool = False,
    clone: bool = False,
    require_mutex: bool = False,
    *,
    src_weights: Mapping[int, float] | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """:meth:`Window.update <shoal.windows.Window.update>`. Its argument ``src_weights``, as in the paper, is
    ``neighbor_weights`` in BlueFog.
    """
    if src_weights is not None and neighbor_weights is not None:
        raise ValueError("win_update: neighbor_weights and src_weights are the same argument; give one of them")
    return named(name, op="win_update").update(
        self_weight,
        neighbor_weights if src_weights is None else src_weights,
        reset=reset,
        clone=clone,
        require_mutex=require_mutex,
        timeout=timeout,
    )


def win_update_then_collect(name: str, require_mutex: bool = True, *, timeout: float | None = None) -> torch.Tensor:
    """As :meth:`Window.collect <shoal.windows.Window.collect>`, but by default with this agent's own mutex."""
    return named(name, op="win_update_then_collect").collect(require_mutex=require_mutex, timeout=timeout)


def win_mutex(
    name: str, for_self: bool = False, ranks: Iterable[int] | None = None, *, timeout: float | None = None
) -> AbstractContextManager[None]:
    """:meth:`Window.mutex <shoal.windows.Window.mutex>`: a ``with`` block that holds mutexes of a window."""
    return named(name, op="win_mutex").mutex(ranks, for_self=for_self, timeout=timeout)


def win_poll(handle: Handle[bool]) -> bool:
    """Whether a nonblocking call on a window has ended. Never blocks."""
    return poll(handle)


def win_wait(handle: Handle[bool], timeout: float | None = None) -> bool:
    """Wait for a nonblocking call on a window. True, or what it raised."""
    return wait(handle, timeout)


def get_win_version(name: str) -> dict[int, int]:
    """:meth:`Window.version <shoal.windows.Window.version>`."""
    return named(name, op="get_win_version").version()


def win_slots(name: str) -> dict[int, SlotState]:
    """:meth:`Window.slots <shoal.windows.Window.slots>`."""
    return named(name, op="win_slots").slots()


def win_associated_p(name: str) -> float:
    """:attr:`Window.p <shoal.windows.Window.p>`."""
    return named(name, op="win_associated_p").p


def get_current_created_window_names() -> list[str]:
    """:func:`shoal.windows.names`."""
    return names()


def turn_on_win_ops_with_associated_p() -> None:
    """:func:`shoal.windows.turn_on_associated_p`."""
    turn_on_associated_p()


def turn_off_win_ops_with_associated_p() -> None:
    """:func:`shoal.windows.turn_off_associated_p`."""
    turn_off_associated_p()
