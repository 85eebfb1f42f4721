"""One-sided windows: move tensors into and out of neighbours' memory without their taking part.

Each agent registers a tensor under a name. It then has, for each in-neighbour j, a *slot* of that shape, which j writes
(``win_put``, ``win_accumulate``) or which it fills itself from j's tensor (``win_get``); ``win_update`` averages its
own tensor with its slots. Nothing waits for anybody, so a slow agent slows nobody down (Ying et al. 2021,
arXiv:2111.04287, sections III-C and IV-C).

What is promised. A write to a slot, and each slot's reading in an update, is one step: no reader sees half of one, also
when its writer is killed, and no two mix, with or without a mutex. An accumulate loses nothing to another one, and
``win_update_then_collect`` takes out exactly what it adds. An update over several slots is not one step: between two
slots something may arrive. Writes of one agent to one slot take effect in the order of the calls. A call that ended in
:class:`~shoal.DeadlineExceeded` or :class:`~shoal.PeerLost` may have taken effect, and is never repeated.

Where the registered tensor lives. A tensor made by :func:`shoal.empty` is itself what neighbours get: they see what is
written to it at once (and, while you write to it with your own operations, half of it). Of any other tensor the window
keeps a copy, which this agent's calls of ``win_create``, ``win_put``, ``win_accumulate`` and ``win_update`` on that
window renew: neighbours see what was in it then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic
from typing import TypeVar

import torch

from ..engine.operation import Handle
from ..engine.seconds import as_seconds
from ..interrupts import held
from ..transport.wire import DTYPES
from ..windows.memory import How
from ..windows.memory import SlotState as SlotState
from ..windows.registry import Windows, windows_of
from ..windows.window import channel_of
from ..world.agent import current
from .arguments import as_ranks, channel_name, check_tensor
from .handles import poll, wait
from .window_weights import window_weight, window_weights

T = TypeVar("T")
_NUMBERS = tuple(dtype for dtype in DTYPES if dtype != torch.bool)
_calls = count()
"""Tells the calls of this process apart for who listens to their events."""


def win_create(tensor: torch.Tensor, name: str, zero_init: bool = False, *, timeout: float | None = None) -> bool:
    """Register a tensor as a window. All neighbours call it together; it returns when they have.

    Args:
        tensor: Any dtype but bool, any shape; equal shape and dtype on all neighbours. The window keeps it, and
            ``win_update`` writes to it. See the module for where it lives.
        name: One window of a name at a time.
        zero_init: The slots begin as zeros; else each begins as a copy of this agent's own tensor.
        timeout: Seconds until :class:`~shoal.DeadlineExceeded`.

    Returns:
        True; False if this agent has a window of that name.

    Raises:
        Mismatch: A neighbour registers another shape or dtype, or has another topology.

    The neighbours are those of the topology that is set now; :func:`~shoal.set_topology` does nothing while there is a
    window. Memory: two slots for each in-neighbour, and the tensor unless :func:`shoal.empty` made it.
    """
    agent = current("win_create")
    check_tensor("win_create", tensor, _NUMBERS)
    if tensor.requires_grad and not tensor.is_leaf:
        raise ValueError("win_create: the tensor is the result of a computation with gradients; pass tensor.detach()")
    if name is None:
        raise ValueError("win_create: give the window a name")
    channel_name("win_create", name)
    windows = windows_of(agent)
    return _shown(windows, "win_create", name, lambda: windows.create(name, tensor, zero_init, timeout))


def win_free(name: str | None = None) -> bool:
    """Free a window, or all of this agent's. Returns at once, True.

    Neighbours that still write to it, or read from it, get :class:`~shoal.Mismatch`.

    Raises:
        KeyError: This agent has no window of that name.
    """
    windows = windows_of(current("win_free"))
    if name is not None:
        windows.get("win_free", name)
    with held:
        return windows.free(name)


def win_put(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
    *,
    timeout: float | None = None,
) -> bool:
    """Write ``w tensor`` into the slots that out-neighbours have for this agent, over what was there.

    **With a ``self_weight`` the tensor that is passed is multiplied by it, in place, after it has been sent**, as
    push-sum needs it (the BlueFog paper's listing 3). Without one it is not changed.

    Args:
        tensor: Shape and dtype of the window; it need not be the registered one. It must not change during the call.
        name: The window.
        self_weight: See above.
        dst_weights: ``{destination: w}``, or destinations for weights of 1; all out-neighbours if not given. They must
            be out-neighbours in the topology of the window. Whole numbers for a window of whole numbers.
        require_mutex: Hold each destination's mutex (:func:`win_mutex`) while writing to it.
        timeout: Seconds until :class:`~shoal.DeadlineExceeded`.

    Returns:
        True, when all destinations have it.

    Raises:
        KeyError: There is no such window here.
        TypeError, ValueError: The tensor or the weights do not fit; nothing has been sent.
        Mismatch: A destination has freed the window.
        PeerLost, DeadlineExceeded: A destination is gone, or its slot was locked for too long.
    """
    return _send(How.PUT, tensor, name, self_weight, dst_weights, require_mutex, timeout).now()


def win_put_nonblocking(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
    *,
    timeout: float | None = None,
) -> Handle[bool]:
    """:func:`win_put` without waiting. The tensor must not change until the handle is done."""
    return _send(How.PUT, tensor, name, self_weight, dst_weights, require_mutex, timeout).later()


def win_accumulate(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
    *,
    timeout: float | None = None,
) -> bool:
    """Add ``w tensor`` to the slots that out-neighbours have for this agent. Each addition is one step: none is lost.

    **With a ``self_weight`` the tensor that is passed is multiplied by it, in place, after it has been sent.**
    Arguments and errors as for :func:`win_put`.
    """
    return _send(How.ACCUMULATE, tensor, name, self_weight, dst_weights, require_mutex, timeout).now()


def win_accumulate_nonblocking(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
    *,
    timeout: float | None = None,
) -> Handle[bool]:
    """:func:`win_accumulate` without waiting. The tensor must not change until the handle is done.

    With a ``self_weight``, do not update or collect this window before that either.
    """
    return _send(How.ACCUMULATE, tensor, name, self_weight, dst_weights, require_mutex, timeout).later()


def win_get(
    tensor: torch.Tensor | str | None = None,
    name: str | Mapping[int, float] | Iterable[int] | None = None,
    src_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
    *,
    timeout: float | None = None,
) -> bool:
    """Fetch the registered tensors of in-neighbours, each times a weight, into this agent's slots for them.

    Args:
        tensor: May be left out (``win_get("name")``, as BlueFog has it); the paper writes ``win_get(tensor, "name")``,
            and the tensor then says nothing.
        name: The window.
        src_weights: ``{source: w}``, or sources for weights of 1; all in-neighbours if not given.
        require_mutex: Hold each source's mutex while reading from it.
        timeout: Seconds until :class:`~shoal.DeadlineExceeded`.

    Returns:
        True, when all slots are filled. Associated weights are not moved.
    """
    return _get(tensor, name, src_weights, require_mutex, timeout).now()


def win_get_nonblocking(
    tensor: torch.Tensor | str | None = None,
    name: str | Mapping[int, float] | Iterable[int] | None = None,
    src_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
    *,
    timeout: float | None = None,
) -> Handle[bool]:
    """:func:`win_get` without waiting."""
    return _get(tensor, name, src_weights, require_mutex, timeout).later()


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
    """``self_weight x + sum of neighbor_weights[j] slot_j``: this agent's tensor averaged with what its slots hold.

    Args:
        name: The window.
        self_weight, neighbor_weights: Both, or neither for the weights of the topology, or uniform ones. A subset of
            the in-neighbours leaves the others out. Whole numbers for a window of whole numbers.
        reset: Empty the slots that were summed (all, if no weights are given), in the same step that reads each.
        clone: Leave the registered tensor as it is and return a new one. The associated weight is updated all the same.
        require_mutex: Hold this agent's own mutex meanwhile.
        src_weights: The paper's word for ``neighbor_weights``.
        timeout: Seconds until :class:`~shoal.DeadlineExceeded`.

    Returns:
        The registered tensor, changed in place, or the clone. Versions count from zero again.
    """
    op = "win_update"
    windows = windows_of(current(op))
    window = windows.get(op, name)
    if src_weights is not None:
        if neighbor_weights is not None:
            raise ValueError(f"{op}: neighbor_weights and src_weights are two words for one thing; give one")
        neighbor_weights = src_weights
    if (self_weight is None) != (neighbor_weights is None):
        raise ValueError(f"{op}: give both self_weight and neighbor_weights, or neither (the topology's weights)")
    if neighbor_weights is None or self_weight is None:
        self_weight, weights = window.mixing.self_weight, dict(window.mixing.sources)
        if not window.tensor.dtype.is_floating_point and not window.tensor.dtype.is_complex:
            raise TypeError(
                f"{op} {name!r}: the topology's weights are fractions and the window holds {window.tensor.dtype}; give "
                "whole numbers as self_weight and neighbor_weights"
            )
    else:
        weights = window_weights(op, window, neighbor_weights, window.sources, "neighbor_weights")
        self_weight = window_weight(op, window, self_weight, "self_weight")
    own, emptied, deadline = self_weight, sorted(weights) if reset else [], _deadline(windows, timeout)
    return _shown(windows, op, name, lambda: window.update(own, weights, emptied, clone, require_mutex, deadline, op))


def win_update_then_collect(name: str, require_mutex: bool = True, *, timeout: float | None = None) -> torch.Tensor:
    """Add all slots to the registered tensor, in place, and empty them; nothing that arrives meanwhile is lost.

    Args:
        name: The window.
        require_mutex: Hold this agent's own mutex meanwhile, as BlueFog does; not needed for the sum to be right.
        timeout: Seconds until :class:`~shoal.DeadlineExceeded`.
    """
    op = "win_update_then_collect"
    windows = windows_of(current(op))
    window = windows.get(op, name)
    ones = dict.fromkeys(window.sources, 1)
    deadline = _deadline(windows, timeout)
    return _shown(windows, op, name, lambda: window.update(1, ones, list(ones), False, require_mutex, deadline, op))


@contextmanager
def win_mutex(
    name: str, for_self: bool = False, ranks: Iterable[int] | None = None, *, timeout: float | None = None
) -> Iterator[None]:
    """Hold mutexes of a window; each agent has one, and it excludes everybody.

    Args:
        name: The window.
        for_self: This agent's own mutex; else those of ``ranks``.
        ranks: Neighbours whose mutexes are wanted; the out-neighbours if not given. They are taken in ascending order,
            so that agents that want several do not wait in a circle. With ``for_self`` they say nothing.
        timeout: Seconds until :class:`~shoal.DeadlineExceeded`.

    A thread that holds a mutex may take it again. One whose holder is killed is free at once. Take all that you need in
    one call: who holds one and asks for another, also through ``require_mutex=True``, may wait in a circle with others
    until the deadline.
    """
    op = "win_mutex"
    agent = current(op)
    windows = windows_of(agent)
    window = windows.get(op, name)
    if for_self:
        wanted = [agent.rank]
    elif ranks is None:
        wanted = list(window.destinations)
    else:
        others = [rank for rank in ranks if rank != agent.rank]
        wanted = list(as_ranks(op, "ranks", others, agent.rank, agent.size))
        strangers = sorted(set(wanted) - {*window.sources, *window.destinations})
        if strangers:
            raise ValueError(f"{op} {name!r} on rank {agent.rank}: ranks {strangers} are no neighbours in this window")
    with ExitStack() as taken:
        with held:
            taken.enter_context(window.mutex(wanted, _deadline(windows, timeout), op))
        try:
            yield
        finally:
            with held:
                taken.close()


def win_poll(handle: Handle[bool]) -> bool:
    """Whether a nonblocking call on a window has ended. Never blocks."""
    return poll(handle)


def win_wait(handle: Handle[bool], timeout: float | None = None) -> bool:
    """Wait for a nonblocking call on a window. True, or what it raised."""
    return wait(handle, timeout)


def get_win_version(name: str) -> dict[int, int]:
    """For each in-neighbour, how often its slot has been put to or got since the last :func:`win_update`."""
    window = windows_of(current("get_win_version")).get("get_win_version", name)
    return {source: window.version(source) for source in window.sources}


def win_slots(name: str) -> dict[int, SlotState]:
    """For each in-neighbour, what has happened to its slot: puts, gets and accumulates, and its age in seconds."""
    window = windows_of(current("win_slots")).get("win_slots", name)
    return {source: window.memory.state(source) for source in window.sources}


def get_current_created_window_names() -> list[str]:
    """The names of this agent's windows, sorted."""
    return windows_of(current("get_current_created_window_names")).names


def turn_on_win_ops_with_associated_p() -> None:
    """From now on each window of this agent carries a scalar p that moves as its tensor does, for push-sum.

    An agent's own p begins as 1 and those in its slots as 0. ``win_put`` and ``win_accumulate`` send ``w p`` beside
    ``w tensor`` and multiply p by ``self_weight``; ``win_update`` gives it the same weights. x / p is then the unbiased
    estimate (the BlueFog paper's equation 21). Call it on all agents.
    """
    windows_of(current("turn_on_win_ops_with_associated_p")).with_p = True


def turn_off_win_ops_with_associated_p() -> None:
    """Leave associated weights as they are from now on."""
    windows_of(current("turn_off_win_ops_with_associated_p")).with_p = False


def win_associated_p(name: str) -> float:
    """This agent's own associated weight in a window; 1 in the beginning."""
    return windows_of(current("win_associated_p")).get("win_associated_p", name).p


# What the calls share


def _shown(windows: Windows, op: str, name: str, function: Callable[[], T]) -> T:
    """Call the function, and tell whoever listens to the agent's events when it began and how it ended."""
    with held:
        events = windows.engine.events
        if not events.active:
            return function()
        channel = channel_of(name)
        number = -1 - next(_calls)  # below zero: its exchanges between machines have this name, and rounds of 0 on
        events.emit("submitted", op, channel, number)
        try:
            result = function()
        except BaseException as error:
            events.emit("failed", op, channel, number, detail=f"{type(error).__name__}: {error}")
            raise
        events.emit("finished", op, channel, number)
        return result


def _deadline(windows: Windows, timeout: float | None) -> float:
    return monotonic() + as_seconds(timeout, windows.engine.timeout)


@dataclass(frozen=True)
class _Call:
    """A checked call that moves tensors, with its deadline, which counts from here also if it waits for its turn."""

    windows: Windows
    op: str
    name: str
    deadline: float
    move: Callable[[float], bool]

    def now(self) -> bool:
        return _shown(self.windows, self.op, self.name, lambda: self.move(self.deadline))

    def later(self) -> Handle[bool]:
        with held:
            return self.windows.start(self.op, self.name, self.now, self.deadline)


def _send(
    how: How,
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None,
    dst_weights: Mapping[int, float] | Iterable[int] | None,
    require_mutex: bool,
    timeout: float | None,
) -> _Call:
    op = how.value
    windows = windows_of(current(op))
    window = windows.get(op, name)
    check_tensor(op, tensor, _NUMBERS)
    layout = window.memory.layout
    if (tuple(tensor.shape), tensor.dtype) != (layout.shape, layout.dtype):
        raise ValueError(
            f"{op}: the window {name!r} holds a tensor of shape {list(layout.shape)} and {layout.dtype}, not one of "
            f"shape {list(tensor.shape)} and {tensor.dtype}"
        )
    if self_weight is not None:
        self_weight = window_weight(op, window, self_weight, "self_weight")
        if tensor.requires_grad and not tensor.is_leaf:
            raise ValueError(
                f"{op}: self_weight changes the tensor in place, and it has a gradient; pass its .detach()"
            )
    weights = window_weights(op, window, dst_weights, window.destinations, "dst_weights")
    deadline = _deadline(windows, timeout)
    return _Call(windows, op, name, deadline, partial(window.send, how, tensor, self_weight, weights, require_mutex))


def _get(
    tensor: torch.Tensor | str | None,
    name: str | Mapping[int, float] | Iterable[int] | None,
    src_weights: Mapping[int, float] | Iterable[int] | None,
    require_mutex: bool,
    timeout: float | None,
) -> _Call:
    op = How.GET.value
    if isinstance(tensor, str):
        if isinstance(src_weights, bool):  # win_get(name, src_weights, require_mutex), as BlueFog has it
            require_mutex, src_weights = src_weights, None
        if isinstance(name, str):
            raise ValueError(f"{op}: the name is given twice, {tensor!r} and {name!r}")
        if name is not None:
            if src_weights is not None:
                raise ValueError(f"{op}: src_weights is given twice")
            src_weights = name
        name = tensor
    if not isinstance(name, str):
        raise ValueError(f"{op}: name={name!r}; give the name of a window")
    windows = windows_of(current(op))
    window = windows.get(op, name)
    weights = window_weights(op, window, src_weights, window.sources, "src_weights")
    deadline = _deadline(windows, timeout)
    return _Call(windows, op, name, deadline, partial(window.get, weights, require_mutex))
