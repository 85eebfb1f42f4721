"""A window as its user holds it: register a tensor, and move tensors into and out of the neighbours' memory.

Each agent registers a tensor under a name. It then has, for each in-neighbour j, a *slot* of that shape, which j writes
(``put``, ``accumulate``) or which it fills itself from j's tensor (``get``); ``update`` averages its own tensor with
its slots. No call waits for another agent's call, so a slow agent does not slow the others down (Ying et al. 2021,
arXiv:2111.04287, sections III-C and IV-C)::

    with shoal.windows.create(x, "x") as window:
        window.put()  # x into this agent's slots at its out-neighbours
        window.update()  # x becomes its average with this agent's slots
        shoal.barrier()  # no agent writes to the window any more

Guarantees. A write to a slot is atomic, and so is the read of a slot in an update: no reader sees a partial write, even
if the writer is killed, and no two writes mix, with or without a mutex. Concurrent accumulates lose no update, and
``collect`` removes exactly the values that it adds. An update over several slots is not atomic: writes may arrive
between two slots. Writes of one agent to one slot take effect in the order of the calls. A call that ended in
:class:`~shoal.DeadlineExceeded` or :class:`~shoal.PeerLost` may have taken effect, and is never repeated.

Location of the registered tensor. Neighbours read a tensor made by :func:`shoal.windows.empty` in place: they see
changes at once, and may see partial ones while you write to it with your own operations. Of any other tensor the window
keeps a copy, which neighbours read. This agent's calls of ``create``, ``put``, ``accumulate`` and ``update`` renew the
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch

from .. import clock
from .._signals import deferred
from ..clock import parse_timeout
from ..errors import NotInitialized
from ..execution.operation import Handle
from ..ops.arguments import as_ranks, channel_name, check_own_elements, check_tensor, detached
from ..runtime.agent import current
from ..transport.messages import DTYPES
from .registry import Windows, windows_of
from .window_memory import SlotState, WriteKind
from .window_part import WindowPart
from .window_weights import update_weights, weight_of, weights_of

T = TypeVar("T")
Weights = Mapping[int, float]
_NUMBERS = tuple(dtype for dtype in DTYPES if dtype != torch.bool)
_GET = WriteKind.GET.value
"""The name of a get in errors and traces, and in requests to neighbours; those of other calls are equally values."""


def create(tensor: torch.Tensor, name: str, zero_init: bool = False, *, timeout: float | None = None) -> Window:
    """Register a tensor as a window. All neighbours call it together; it returns when they have.

    Args:
        tensor: Any dtype but bool, any shape; equal shape and dtype on all neighbours. The window keeps it, and
            ``update`` and ``collect`` write to it. The module's docstring describes its location.
        name: One window of a name at a time.
        zero_init: The slots begin as zeros; else each begins as a copy of this agent's own tensor.
        timeout: Seconds until :class:`~shoal.DeadlineExceeded`.

    Raises:
        TypeError, ValueError: The tensor or the name is not valid, or this agent has a window of that name.
        Mismatch: A neighbour registers another shape or dtype, or has another topology.

    The neighbours are those of the topology that is set now; :func:`~shoal.set_topology` does nothing while there is a
    window. Memory: two slots for each in-neighbour, and the tensor unless :func:`shoal.windows.empty` made it.
    """
    window = register("windows.create", tensor, name, zero_init, timeout)
    if window is None:
        raise ValueError(
            f"windows.create: rank {current('windows.create').rank} has a window {name!r} already; "
            f"shoal.windows.named({name!r}) is it, and free() makes room for another"
        )
    return window


def register(op: str, tensor: torch.Tensor, name: str, zero_init: bool, timeout: float | None) -> Window | None:
    """:func:`create`; None if this agent has a window of that name."""
    agent = current(op)
    check_tensor(op, detached(tensor), _NUMBERS)
    check_own_elements(op, tensor, "the tensor", "its clone()")
    if tensor.requires_grad and not tensor.is_leaf:
        raise ValueError(f"{op}: the tensor is the result of a computation with gradients; pass tensor.detach()")
    if name is None:
        raise ValueError(f"{op}: give the window a name")
    channel_name(op, name)
    windows = windows_of(agent)
    is_new = windows.call("win_create", name, lambda: windows.create(name, tensor, zero_init, timeout))
    return named(name, op=op) if is_new else None


def named(name: str, *, op: str = "windows.named") -> Window:
    """This agent's window of that name.

    Raises:
        KeyError: There is none; the error lists the existing names.
    """
    windows = windows_of(current(op))
    return Window(windows, windows.get(op, name))


def names() -> list[str]:
    """The names of this agent's windows, sorted."""
    return windows_of(current("windows.names")).names


def turn_on_associated_p() -> None:
    """Give each window of this agent a scalar p that moves as its tensor does, for push-sum.

    An agent's own p begins as 1 and those in its slots as 0. ``put`` and ``accumulate`` send ``w p`` beside
    ``w tensor`` and multiply p by ``self_weight``; ``update`` gives it the same weights. ``x / window.p`` is then the
    unbiased estimate (the BlueFog paper's equation 21). Call it on all agents.
    """
    windows_of(current("windows.turn_on_associated_p")).with_p = True


def turn_off_associated_p() -> None:
    """Stop changing associated weights; they keep their values."""
    windows_of(current("windows.turn_off_associated_p")).with_p = False


class Window:
    """A window of an agent, from :func:`create`, for any thread of that agent. A ``with`` block frees it at its end.

    Common arguments and behaviour of the calls:

    - ``dst_weights`` and ``src_weights`` are ``{rank: w}``, or ranks for weights of 1; all neighbours if not given.
      They must be neighbours in the topology of the window. Whole numbers for a window of whole numbers.
    - With ``on_loss="continue"`` "all neighbours" means the surviving ones, and :meth:`update` by the topology gives
      the weight of a lost neighbour to the agent's own tensor. A neighbour that is lost during a call is left out.
    - ``require_mutex``: hold the :meth:`mutex` of each agent whose memory is written or read, during that access.
    - ``timeout``: seconds until :class:`~shoal.DeadlineExceeded`; ``SHOAL_TIMEOUT`` if not given.
    - The forms called ``_nonblocking`` return a handle, and run one after the other in the order of the calls.

    Raises:
        ValueError: From every call: this agent has freed the window.
        TypeError, ValueError: The tensor or the weights do not fit; nothing has been sent.
        Mismatch: A neighbour has freed the window.
        PeerLost, DeadlineExceeded: A neighbour is gone, or its slot was locked for too long.
        NotInitialized: The agent has shut down.
    """

    __slots__ = ("_part", "_windows")

    def __init__(self, windows: Windows, part: WindowPart) -> None:
        self._windows = windows
        self._part = part

    @property
    def name(self) -> str:
        """The window's name, equal on all agents."""
        return self._part.name

    @property
    def tensor(self) -> torch.Tensor:
        """The registered tensor."""
        return self._part.tensor

    @property
    def sources(self) -> tuple[int, ...]:
        """The in-neighbours, which have a slot here; ascending."""
        return self._part.sources

    @property
    def destinations(self) -> tuple[int, ...]:
        """The out-neighbours, at which this agent has a slot; ascending."""
        return self._part.destinations

    @property
    def p(self) -> float:
        """This agent's own associated weight; 1 in the beginning. See :func:`turn_on_associated_p`."""
        return self._part.p

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Window) and other._part is self._part

    def __hash__(self) -> int:
        return hash(self._part)

    def __repr__(self) -> str:
        rank, dtype = self._windows.engine.rank, str(self.tensor.dtype).removeprefix("torch.")
        edges = f"from {list(self.sources)} to {list(self.destinations)}"
        return f"<Window {self.name!r} of rank {rank}: {dtype} {list(self.tensor.shape)}, {edges}>"

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def free(self) -> None:
        """Free it. Returns at once; again, it does nothing.

        Neighbours that still write to it, or read from it, get :class:`~shoal.Mismatch`.
        """
        with deferred:
            # Under deferred signals: interrupted halfway, the window would be out of the registry and not marked as
            # freed, and neighbours would continue to write.
            if not self._part.memory.freed:
                self._windows.free(self.name)

    # Moving tensors

    def put(
        self,
        tensor: torch.Tensor | None = None,
        *,
        self_weight: float | None = None,
        dst_weights: Weights | Iterable[int] | None = None,
        require_mutex: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Write ``w tensor`` into the slots that out-neighbours have for this agent, over what was there.

        **With a ``self_weight`` the tensor that is passed is multiplied by it, in place, after it has been sent**, as
        push-sum needs it (the BlueFog paper's listing 3). Without one it is not changed.

        Args:
            tensor: Shape and dtype of the window; the registered one if not given. It must not change during the call.
            self_weight: See above.
            dst_weights, require_mutex, timeout: See :class:`Window`.
        """
        how, deadline = WriteKind.PUT, self._deadline(timeout)
        move = self._sending(how, tensor, self_weight, dst_weights, require_mutex, deadline)
        self._windows.call(how.value, self._part.name, move)

    def put_nonblocking(
        self,
        tensor: torch.Tensor | None = None,
        *,
        self_weight: float | None = None,
        dst_weights: Weights | Iterable[int] | None = None,
        require_mutex: bool = False,
        timeout: float | None = None,
    ) -> Handle[bool]:
        """:meth:`put` without waiting. The tensor must not change until the handle is done."""
        # Now, and not in the worker: the time that the call waits for its turn counts as well.
        how, deadline = WriteKind.PUT, self._deadline(timeout)
        move = self._sending(how, tensor, self_weight, dst_weights, require_mutex, deadline)
        return self._later(how.value, move, deadline)

    def accumulate(
        self,
        tensor: torch.Tensor | None = None,
        *,
        self_weight: float | None = None,
        dst_weights: Weights | Iterable[int] | None = None,
        require_mutex: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Add ``w tensor`` to the slots that out-neighbours have for this agent. Each addition is one step: none is
        lost.

        **With a ``self_weight`` the tensor that is passed is multiplied by it, in place, after it has been sent.**
        Arguments as for :meth:`put`.
        """
        how, deadline = WriteKind.ACCUMULATE, self._deadline(timeout)
        move = self._sending(how, tensor, self_weight, dst_weights, require_mutex, deadline)
        self._windows.call(how.value, self._part.name, move)

    def accumulate_nonblocking(
        self,
        tensor: torch.Tensor | None = None,
        *,
        self_weight: float | None = None,
        dst_weights: Weights | Iterable[int] | None = None,
        require_mutex: bool = False,
        timeout: float | None = None,
    ) -> Handle[bool]:
        """:meth:`accumulate` without waiting. The tensor must not change until the handle is done.

        With a ``self_weight``, do not update or collect this window before that either.
        """
        how, deadline = WriteKind.ACCUMULATE, self._deadline(timeout)
        move = self._sending(how, tensor, self_weight, dst_weights, require_mutex, deadline)
        return self._later(how.value, move, deadline)

    def get(
        self,
        src_weights: Weights | Iterable[int] | None = None,
        *,
        require_mutex: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Fetch the registered tensors of in-neighbours, each times a weight, into this agent's slots for them.

        Associated weights are not moved. Arguments: see :class:`Window`.
        """
        move = self._getting(src_weights, require_mutex, self._deadline(timeout))
        self._windows.call(_GET, self._part.name, move)

    def get_nonblocking(
        self,
        src_weights: Weights | Iterable[int] | None = None,
        *,
        require_mutex: bool = False,
        timeout: float | None = None,
    ) -> Handle[bool]:
        """:meth:`get` without waiting."""
        deadline = self._deadline(timeout)
        return self._later(_GET, self._getting(src_weights, require_mutex, deadline), deadline)

    def update(
        self,
        self_weight: float | None = None,
        src_weights: Weights | None = None,
        *,
        reset: bool = False,
        clone: bool = False,
        require_mutex: bool = False,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """``self_weight x + sum of src_weights[j] slot_j``: the average of the tensor with the slots.

        Args:
            self_weight, src_weights: Both, or neither for the weights of the topology, or uniform ones. A subset of the
                in-neighbours leaves the others out. Whole numbers for a window of whole numbers.
            reset: Empty the slots that were summed (all, if no weights are given), in the same step that reads each.
            clone: Leave the registered tensor as it is and return a new one. The associated weight is still updated.
            require_mutex: Hold this agent's own mutex during the update.
            timeout: See :class:`Window`.

        Returns:
            The registered tensor, changed in place, or the clone. Versions count from zero again.
        """
        op, part = "win_update", self._open("win_update")
        own, weights = update_weights(op, part, self._windows, self_weight, src_weights)
        # Exactly the slots that are summed: emptying another slot would lose its values.
        emptied, deadline = sorted(weights) if reset else [], self._deadline(timeout)
        move = partial(part.update, own, weights, emptied, clone, require_mutex, deadline, op)
        return self._windows.call(op, part.name, move)

    def collect(self, *, require_mutex: bool = False, timeout: float | None = None) -> torch.Tensor:
        """Add all slots to the registered tensor, in place, and empty them; concurrent writes are not lost.

        Args:
            require_mutex: Hold this agent's own mutex during the call; the sum is correct without it.
            timeout: See :class:`Window`.
        """
        op, part = "win_update_then_collect", self._open("win_update_then_collect")
        # Also the slots of lost agents: what they sent before belongs to the sum, and push-sum would otherwise lose
        # that mass.
        ones, deadline = dict.fromkeys(part.sources, 1), self._deadline(timeout)
        move = partial(part.update, 1, ones, list(ones), False, require_mutex, deadline, op)
        return self._windows.call(op, part.name, move)

    @contextmanager
    def mutex(
        self, ranks: Iterable[int] | None = None, *, for_self: bool = False, timeout: float | None = None
    ) -> Iterator[None]:
        """Hold mutexes of the window; each agent has one, and only one thread of one agent can hold it.

        Args:
            ranks: Neighbours whose mutexes are wanted, or this agent itself; the out-neighbours if not given. They are
                taken in ascending order, so that agents that want several do not wait in a circle.
            for_self: Only this agent's own mutex; ``ranks`` is then ignored.
            timeout: See :class:`Window`.

        A thread that holds a mutex may take it again. A mutex is free as soon as its holder is killed. Take all mutexes
        that you need in one call: an agent that holds one and requests another, also by ``require_mutex=True``, may
        deadlock with others until the deadline.
        """
        op, part = "win_mutex", self._open("win_mutex")
        rank, size = self._windows.engine.rank, self._windows.engine.size
        if for_self:
            wanted = [rank]
        elif ranks is None:
            wanted = part.there(part.destinations)
        else:
            wanted = list(as_ranks(op, "ranks", ranks, rank, size, or_itself=True))
            not_neighbours = sorted(set(wanted) - {rank, *part.sources, *part.destinations})
            if not_neighbours:
                raise ValueError(
                    f"{op} {self.name!r} on rank {rank}: ranks {not_neighbours} are no neighbours in this window"
                )
            part.need(op, wanted)
        with ExitStack() as taken:
            # A signal between the lock of the last mutex and its entry in the stack would leave that mutex locked for
            # all neighbours.
            with deferred:
                taken.enter_context(part.mutex(wanted, self._deadline(timeout), op))
            try:
                yield
            finally:
                with deferred:
                    taken.close()

    # State of the slots

    def version(self) -> dict[int, int]:
        """For each in-neighbour, how often its slot has been put to or got since the last :meth:`update`."""
        part = self._open("get_win_version")
        return {source: part.version(source) for source in part.sources}

    def slots(self) -> dict[int, SlotState]:
        """For each in-neighbour, the counts of puts, gets and accumulates on its slot, and its age in seconds."""
        part = self._open("win_slots")
        return {source: part.memory.state(source) for source in part.sources}

    # Helpers of the calls

    def _open(self, op: str) -> WindowPart:
        """The window, if it has not been freed."""
        part = self._part
        if not part.memory.freed:
            return part
        rank = self._windows.engine.rank
        # Shutdown frees the windows too. Its cause tells the two apart, because the advice to the caller differs.
        if part.memory.cause == rank:
            raise NotInitialized(f"{op} {self.name!r}: the agent of this window, rank {rank}, has shut down")
        raise ValueError(f"{op} {self.name!r} on rank {rank}: this window has been freed; make another one")

    def _deadline(self, timeout: float | None) -> float:
        engine = self._windows.engine
        return clock.monotonic() + (engine.timeout if timeout is None else parse_timeout(timeout, engine.timeout))

    def _sending(
        self,
        how: WriteKind,
        tensor: torch.Tensor | None,
        self_weight: float | None,
        dst_weights: Weights | Iterable[int] | None,
        require_mutex: bool,
        deadline: float,
    ) -> Callable[[], bool]:
        """A put or an accumulate, checked."""
        op = how.value
        part = self._open(op)
        tensor = part.tensor if tensor is None else tensor
        check_tensor(op, detached(tensor), _NUMBERS)
        # A writer on this machine changes the owner's memory without asking it, so the check is made here, before
        # anything is sent.
        part.check_layout(op, tensor)
        if self_weight is not None:
            self_weight = weight_of(op, part, self_weight, "self_weight")
            check_own_elements(op, tensor, "the tensor", "its clone()")
            if tensor.requires_grad and not tensor.is_leaf:
                raise ValueError(
                    f"{op}: self_weight changes the tensor in place, and it has a gradient; pass its .detach()"
                )
        weights = weights_of(op, part, self._windows, dst_weights, part.destinations, "dst_weights")
        # Only ranks that the caller has named raise here: weights_of has left the lost ones out if none were given.
        part.need(op, weights)
        return partial(part.send, how, tensor, self_weight, weights, require_mutex, deadline)

    def _getting(
        self, src_weights: Weights | Iterable[int] | None, require_mutex: bool, deadline: float
    ) -> Callable[[], bool]:
        part = self._open(_GET)
        weights = weights_of(_GET, part, self._windows, src_weights, part.sources, "src_weights")
        part.need(_GET, weights)
        return partial(part.get, weights, require_mutex, deadline)

    def _later(self, op: str, move: Callable[[], bool], deadline: float) -> Handle[bool]:
        windows, name = self._windows, self._part.name
        with deferred:
            return windows.start(op, name, partial(windows.call, op, name, move), deadline)
