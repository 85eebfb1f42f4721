"""The engine's view of an operation: a generator that yields exchanges, and the handle that its caller holds.

An operation such as ``neighbor_allreduce`` is a generator. It yields an ``Exchange`` (``stage.py``): the messages to
send, and the ranks to receive from. It is resumed with the messages once all have arrived, computes, and yields the
next exchange or returns its result. So an operation of several stages, such as an all-reduce, reads from top to bottom
and blocks no other operation. The engine matches, times and fails all operations alike.

If a payload arrives in pieces, as on a network, the operation may compute on the first pieces and yield ``MORE``.

:func:`poll`, :func:`wait` and :func:`synchronize` are BlueFog's functions of a handle.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from inspect import GEN_SUSPENDED, getgeneratorstate
from threading import RLock
from typing import Any, Final, Generic, Protocol, TypeVar

import torch

from .. import clock
from .._signals import deferred
from ..clock import parse_timeout
from ..errors import DeadlineExceeded, Mismatch, NotInitialized
from ..transport.link import Lease, Published
from .membership import WHOLE, Plan
from .stage import Stage, Steps

log = logging.getLogger("shoal")
T = TypeVar("T")


class Family(Protocol):
    """A family of operations that differ only in their tensors. Operations of equal families may be fused."""

    def fused_steps(self, operation: Operation, parts: list[FusionSpec], /) -> Steps[list[torch.Tensor | Exception]]:
        """The steps of several operations as one, over all tensors joined.

        Stages, destinations and purposes must equal those of each operation by itself, because another agent may not
        fuse them.
        """
        ...


@dataclass(slots=True)
class FusionSpec:
    """The description of an operation that may be fused.

    Attributes:
        flat: A copy of the caller's tensor, ``[numel]``.
        shape: The shape of the tensor.
        out: The tensor that receives the result.
        alone: Creates the steps of the operation if it is not fused.
        family: The family of operations that it may be fused with.
    """

    flat: torch.Tensor
    shape: tuple[int, ...]
    out: torch.Tensor | None
    alone: Callable[[Operation], Steps[torch.Tensor]]
    family: Family

    def can_fuse_with(self, other: FusionSpec) -> bool:
        """Whether both tensors may be joined and processed as one."""
        return self.flat.dtype == other.flat.dtype and self.family == other.family


class FailurePolicy(Enum):
    """How an operation reacts to the loss of an agent that it needs, in a job whose survivors continue."""

    FAIL = auto()
    SKIP_MISSING = auto()  # continues without the missing messages; it has one exchange, whose edges are independent
    RETRY = auto()  # restarts among the survivors, because all must have the same result


@dataclass(slots=True)
class Recovery:
    """The state that an operation needs to survive the loss of an agent.

    Attributes:
        steps: Creates the generator of the operation again.
        on_loss: Whether the operation continues without the lost agent or restarts.
        plan: The ranks that it excludes; equal on all agents.
        lost: The ranks lost since an agent began the round. Agents admitted in their place take no part in it.
        input: The tensor that it began with and its published copy; the caller may have changed the tensor since.
        result: The result of a restarting operation, from its arrival until all other agents have theirs.
        again: Whether its generator has to be created again.
        take: Computes its result from the result of another agent on which it has ended.
        copy: A copy of the result, for agents on which it may not have ended.
    """

    steps: Callable[[Operation], Steps[Any]]
    on_loss: FailurePolicy
    plan: Plan
    lost: frozenset[int] = frozenset()
    input: tuple[torch.Tensor, Published] | None = None
    result: tuple[Any] | None = None
    again: bool = False
    take: Callable[[torch.Tensor], Any] | None = None
    copy: torch.Tensor | None = None

    @property
    def first_stage(self) -> int:
        """The number of the first stage. It grows with every restart, so that old messages do not match."""
        # A stage has 32 bits in a message's header: 24 for the attempt, and 8 for the stages of an attempt. The last of
        # these begin at 128 (``engine/discovery.py``), one for each bit of a rank.
        return (self.plan.losses & 0xFFFFFF) << 8 if self.on_loss is FailurePolicy.RETRY else 0


class Operation:
    """One call, from its submission to its result.

    Only the lifecycle writes its fields, and fusion those about fusion, under the engine's lock.
    """

    __slots__ = (
        "among",
        "background",
        "channel",
        "deadline",
        "error",
        "fused",
        "fusible",
        "generator",
        "handle",
        "leases",
        "name",
        "next_stage",
        "on_end",
        "on_outcome",
        "one_sided",
        "op",
        "outcome",
        "owner",
        "recovery",
        "round",
        "stage",
        "stages_sent",
        "stalled",
        "started",
        "timeout",
        "unconfirmed",
        "waiting_more",
    )

    def __init__(self, op: str, name: str, round_: int, timeout: float) -> None:
        self.op = op
        self.name = name
        self.round = round_
        self.timeout = timeout
        self.started = clock.monotonic()
        self.deadline = self.started + timeout
        self.generator: Steps[Any] | None = None
        self.handle: Handle[Any] | None = None
        self.channel: Any = None  # the Channel of its name (``matching.py``)
        self.owner: Any = None  # the part that proceeds and fails it, if not the lifecycle: fusion, for a fused one
        self.stage: Stage | None = None
        self.next_stage = 0
        self.leases: list[Lease] = []
        self.unconfirmed: dict[int, int] = {}  # token: destination
        self.outcome: tuple[Any] | None = None  # the result, until all destinations have confirmed
        self.waiting_more = False
        self.stalled = False
        self.error: BaseException | None = None
        self.fusible: FusionSpec | None = None  # set if it may be fused with others
        self.fused: Any = None  # the FusedOperation of which it is a member; only fusion creates one
        self.recovery: Recovery | None = None  # None: a loss ends it
        self.background = False  # internal to Shoal: no caller waits for it
        self.one_sided = False  # the other agents make no matching call
        self.among: Sequence[int] | None = None  # the ranks that call it, if not all
        self.on_end: Callable[[Any], None] | None = None  # takes the result, before messages or callbacks
        self.on_outcome: Callable[[Any, BaseException | None], None] | None = None  # takes the result or the error
        self.stages_sent: frozenset[int] = frozenset()  # stages that a fused operation has sent for it

    def __str__(self) -> str:
        return describe(self.op, self.name, self.round)

    def release(self) -> None:
        """Free the memory of its published tensors. Memory that other agents still read has leases of its own."""
        for lease in self.leases:
            lease.release()
        self.leases = []
        self.recovery = None  # it holds the input, and perhaps the result

    @property
    def is_suspended(self) -> bool:
        """Whether its generator has begun and has not ended."""
        return self.generator is not None and getgeneratorstate(self.generator) == GEN_SUSPENDED

    def drop_generator(self) -> None:
        """Drop its generator. This closes it, unless a thread runs it; that thread closes it afterwards.

        Never call ``generator.close()`` here: another thread may run the generator, or begin to, and Python 3.11 has
        crashed in this case. The thread that runs a generator holds a reference, so only an idle generator ends here.
        """
        self.generator = None

    @property
    def parts(self) -> Sequence[Operation]:
        """The calls of the operation: itself, or the members of a fused one."""
        return (self,)

    def expect_confirmation(self, token: int, destination: int) -> None:
        """Wait for a destination's confirmation that it expected the message with this token."""
        self.unconfirmed[token] = destination

    def confirmed(self, token: int) -> None:
        """Record that a destination has answered the message with this token."""
        self.unconfirmed.pop(token, None)

    @property
    def excluded_ranks(self) -> tuple[int, ...]:
        """The ranks that its plan excludes, ascending; equal on all agents."""
        return self.recovery.plan.gone if self.recovery is not None else ()

    @property
    def lost_ranks(self) -> Collection[int]:
        """The ranks that it continues without, also after other agents have been admitted in their place."""
        return self.recovery.lost if self.recovery is not None else ()

    @property
    def plan(self) -> Plan:
        """The plan that it follows: which ranks it excludes; equal on all agents."""
        return self.recovery.plan if self.recovery is not None else WHOLE

    @property
    def restarts(self) -> bool:
        """Whether it restarts among the survivors after a loss."""
        return self.recovery is not None and self.recovery.on_loss is FailurePolicy.RETRY

    def left_of(self, ranks: Sequence[int]) -> Sequence[int]:
        """The ranks of ``ranks`` that its plan includes, in their order."""
        gone = self.excluded_ranks
        return [rank for rank in ranks if rank not in gone] if gone else ranks

    def callers(self, size: int) -> Sequence[int]:
        """The ranks that call it, of ``size`` agents. Ranks that its plan excludes are left out."""
        return self.left_of(range(size) if self.among is None else self.among)

    @property
    def waiting_for(self) -> list[int]:
        """The ranks of which it still needs a message, a payload, a confirmation or a transfer, ascending."""
        fused: Operation | None = self.fused
        if fused is not None:
            return fused.waiting_for
        waiting = set(self.unconfirmed.values())
        if self.stage is not None:
            stage = self.stage
            waiting |= stage.missing | stage.unconfirmed or stage.absent or stage.transferred_with
            for source, message in stage.arrived.items():
                if message.payload is not None and not message.payload.complete and not stage.to_move:
                    waiting.add(source)
        return sorted(waiting)

    @property
    def blocked_on(self) -> list[int]:
        """The ranks that block it. A rank that reported to be waiting is replaced by the ranks that it waits for."""
        stage = self.current_stage
        behind = stage.reported_waits if stage is not None else {}
        waiting = self.waiting_for
        return sorted({rank for awaited in waiting for rank in behind.get(awaited, (awaited,))}) if behind else waiting

    @property
    def current_stage(self) -> Stage | None:
        """The stage in which it is, by itself or fused with others; None before the first one and after the last."""
        part: Operation = self.fused or self
        return part.stage

    @property
    def in_transfer(self) -> bool:
        """Whether a backend has been requested to move its tensors and has not finished."""
        stage = self.current_stage
        return stage is not None and stage.to_move and stage.transfer_requested

    @property
    def has_entered(self) -> bool:
        """Whether it has reached a stage, by itself or fused with others."""
        part: Operation = self.fused or self
        return part.next_stage > 0

    @property
    def stages_passed(self) -> int:
        """The number of the next stage within this attempt, as :attr:`Exchange.stage` counts."""
        return self.next_stage - (self.recovery.first_stage if self.recovery is not None else 0)

    @property
    def is_started(self) -> bool:
        """Whether it has begun, by itself or fused with others."""
        return self.generator is not None or self.fused is not None or self.outcome is not None

    @property
    def is_runnable(self) -> bool:
        """Whether it has all messages of its stage and waits for no agent."""
        part: Operation = self.fused or self
        return part.stage is not None and part.stage.complete and not part.waiting_more


INTERNAL: Final = "~shoal "
"""The prefix of the names of calls that Shoal makes for a caller."""


def needed_by(ranks: Sequence[int], in_transfer: bool) -> str:
    """The ranks that a call waits for, as text for messages; ``in_transfer`` as in :class:`Operation`."""
    return (
        f" for ranks {list(ranks)}" if ranks else ", to which all have come, until its tensors are moved" * in_transfer
    )


SAME_CALLS = (
    "Make the same calls on all agents: none inside `if shoal.rank() == 0`; with equal numbers of batches "
    "(shoal.data.AgentSampler), or else inside `with optimizer.join():`; and with equal counters behind calls in every "
    'k-th step, also after a restart (shoal.Checkpoint(state={"step": 0}) gives them to restarted agents)'
)
"""The remedy if agents wait in different calls."""


def describe(op: str, name: str, round_: int) -> str:
    """The name of an operation in messages to users."""
    name = name.removeprefix("~window ").removeprefix(INTERNAL)
    if name.startswith("~"):
        return f"{op}{''.join(name.partition(' of ')[1:])} round {round_}"  # a group's ranks
    return f"{op} {name!r} round {round_}"


class HandleDriver(Protocol):
    """The interface by which a handle waits: the engine of its agent."""

    lock: RLock

    def wait_for(self, handle: Handle[Any], timeout: float | None = None) -> bool: ...


class Handle(Generic[T]):
    """The future of a result, which the functions of :mod:`shoal.nonblocking` return."""

    __slots__ = ("_callbacks", "_driver", "_error", "_result", "done", "operation")

    def __init__(self, driver: HandleDriver, operation: Operation) -> None:
        self._driver = driver
        self.operation = operation
        self.done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Handle[T]], None]] = []

    def poll(self) -> bool:
        """Whether the result, or an error, is available. Never blocks."""
        return self.done

    def wait(self, timeout: float | None = None) -> T:
        """Block until the operation ends, and return its result.

        Args:
            timeout: Seconds to wait at most; 0 does not block. After them, :class:`~shoal.DeadlineExceeded` is raised
                here and the operation stays in flight. The operation's own deadline holds in any case.
        """
        timeout = None if timeout is None else parse_timeout(timeout, 0.0, zero=True)
        if not self.done and not self._driver.wait_for(self, timeout):
            if timeout is None:
                raise NotInitialized(f"{self.operation}: this agent has shut down while it was in flight")
            with deferred, self._driver.lock:  # the driving thread changes what it waits for, and may end it now
                missing, in_transfer = self.operation.blocked_on, self.operation.in_transfer
            if not self.done:
                for_ranks = needed_by(missing, in_transfer)
                raise DeadlineExceeded(
                    f"{self.operation} is not done after {timeout:g} s; it waits{for_ranks} and goes on", missing
                )
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def add_done_callback(self, callback: Callable[[Handle[T]], None]) -> None:
        """Call ``callback(handle)`` when the operation ends, or now if it has ended.

        The thread that drives the exchange runs the callback, for the agent that added it. The callback must be quick.
        Its exceptions are logged.
        """
        context = contextvars.copy_context()
        with deferred, self._driver.lock:
            if not self.done:
                self._callbacks.append(lambda handle: context.run(callback, handle))
                return
        try:
            callback(self)
        except (Exception, SystemExit):
            log.exception("a callback of %s failed", self.operation)

    @property
    def has_callbacks(self) -> bool:
        """Whether callbacks will run when the operation ends."""
        return bool(self._callbacks)

    def end(self, result: T | None, error: BaseException | None) -> list[Callable[[Handle[T]], None]]:
        """Set the result or the error. For the lifecycle, under the engine's lock. Returns the callbacks to run."""
        self._result, self._error, self.done = result, error, True
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def __repr__(self) -> str:
        return f"<Handle of {self.operation}: {'done' if self.done else 'in flight'}>"


class DerivedHandle(Handle[T]):
    """The future result of a function of an operation's result.

    Args:
        handle: The operation's.
        finish: Computes the result from the operation's; called once, by the first caller that needs it.
        explain: More text for the error if agents disagree.
    """

    __slots__ = ("_explain", "_finish", "_handle", "_is_finished", "_lock")

    def __init__(
        self,
        handle: Handle[Any],
        finish: Callable[[Any], T],
        explain: Callable[[Mismatch], str] | None = None,
    ) -> None:
        super().__init__(handle._driver, handle.operation)
        self._handle, self._finish, self._explain = handle, finish, explain
        self._lock, self._is_finished = threading.Lock(), False

    def poll(self) -> bool:
        return self._handle.poll()

    def wait(self, timeout: float | None = None) -> T:
        try:
            found = self._handle.wait(timeout)
        except Mismatch as error:
            if type(error) is Mismatch and self._explain is not None:
                raise Mismatch(f"{error}. {self._explain(error)}", error.ranks) from None
            raise
        with self._lock:
            if not self._is_finished:
                self._result, self._is_finished = self._finish(found), True
        return self._result  # type: ignore[return-value]

    def add_done_callback(self, callback: Callable[[Handle[T]], None]) -> None:
        self._handle.add_done_callback(lambda _: callback(self))

    def __repr__(self) -> str:
        return f"<Handle of {self.operation}: {'done' if self.poll() else 'in flight'}>"


def _check_handle(handle: object) -> None:
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r} is no handle; the nonblocking operations return handles")


def poll(handle: Handle[T]) -> bool:
    """Whether the operation has ended. Never blocks."""
    _check_handle(handle)
    return handle.poll()


def wait(handle: Handle[T], timeout: float | None = None) -> T:
    """The result of a nonblocking operation; blocks until it is there. See :meth:`Handle.wait`."""
    _check_handle(handle)
    return handle.wait(timeout)


synchronize = wait
