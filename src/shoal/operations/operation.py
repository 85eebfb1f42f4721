"""The operation as the engine sees it: a generator that yields exchanges, and the handle its caller holds.

An operation such as ``neighbor_allreduce`` is a generator. It yields an :class:`Exchange`: what to send to which ranks,
and from which ranks to receive. It is resumed with the messages once all have arrived, computes, and yields the next
exchange or returns its result. So an operation of several stages, such as an all-reduce, reads from top to bottom and
blocks no other operation. The engine matches, times and fails all operations alike.

If a payload arrives in pieces, as on a network, the operation may compute on the pieces so far and yield :data:`MORE`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from threading import RLock
from typing import Any, Final, Generic, Protocol, TypeVar

import torch

from .. import clock
from .._signals import deferred
from ..errors import DeadlineExceeded, NotInitialized
from ..transport.collective_plan import Collective
from ..transport.link import Lease, Published
from ..transport.wire import Message, Where
from .future import Future
from .membership import WHOLE, Plan
from .timeouts import parse_timeout

T = TypeVar("T")

MORE: Final = "more"
"""Yielded by an operation that waits for more of the payloads it was given."""

NOTHING: Final = float("nan")
"""The scale of a message that says "nothing this round" to a neighbour that expects a word."""

Arrived = dict[int, Message]
"""The messages of one exchange, by source."""


@dataclass(slots=True)
class Send:
    """One message of an exchange: elements ``start`` to ``stop`` of the published tensor, as a tensor of ``shape``."""

    destination: int
    published: Published
    start: int
    stop: int
    shape: tuple[int, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """States that the tensors of a stage may travel over a backend that needs one order of operations on all agents.

    Attributes:
        among: The ranks that take part, ascending; empty for all members. Each of them reaches this stage. None: only
            the ends of the edges do, and only they know which ranks these are.
        collective: A collective operation of the backend that replaces the sends.
        what: The value that must be equal on all ranks, in words, if no message carries it.
        confirm: Both ends know of the edge independently, so the receiver confirms that it expects the message.
    """

    among: tuple[int, ...] | None = ()
    collective: Collective | None = None
    what: str = ""
    confirm: bool = False


@dataclass(slots=True)
class Exchange:
    """One stage of an operation on this agent."""

    sends: Sequence[Send]
    sources: Sequence[int]
    dtype: torch.dtype | None = None
    """The dtype that every source must send; None: any."""
    shape: tuple[int, ...] | None = None
    checked: bool = False
    """End the operation only when every destination has confirmed that it expected the message."""
    digest: int = 0
    """Must be equal on both sides of an edge: a hash of the topology, the root, or other arguments that must agree."""
    digest_of: str = "topology"
    coordinates: bool = False
    """It moves no tensor: agents exchange who sends to whom, or synchronize."""
    stage: int | None = None
    """Its number within the operation, if agents pass different numbers of stages; else stages are counted."""
    early: int = 0
    """Messages are for a stage this many before: the receivers pass more stages."""
    carried: BackendRequest | None = None
    """Allows a backend to move its tensors; None: only Shoal's links do."""
    on_device: bool | None = None  # whether callers' tensors are on a device, if both sides must agree


Yields = Exchange | Future | str
Steps = Generator[Yields, Arrived, T]
"""The generator of an operation: yields exchanges or futures, is sent the messages, returns the result."""


@dataclass(slots=True)
class Stage:
    """An exchange in progress."""

    number: int
    exchange: Exchange
    missing: set[int]
    arrived: Arrived
    posted: bool = False
    to_move: bool = False  # a backend still has to move its tensors
    asked_for: bool = False  # the backend has been asked to
    unconfirmed: set[int] = field(default_factory=set)  # receivers that have not confirmed
    absent: set[int] = field(default_factory=set)  # members that the backend does not know to have reached it
    transferred_with: set[int] = field(default_factory=set)  # members of the transfer, once it has begun
    started: float = field(default_factory=lambda: clock.monotonic())
    asked: float = 0.0
    """When the missing agents were last probed."""
    behind: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """For missing agents: the ranks that they reported to wait for."""

    @property
    def needs(self) -> set[int]:
        """The ranks that it still has to receive from or send to."""
        carried = self.exchange.carried if self.to_move else None
        others = carried.collective.members if carried is not None and carried.collective is not None else ()
        return self.missing | {send.destination for send in self.exchange.sends} | {*others}

    def expect_confirmation(self, rank: int) -> None:
        """A receiver has to confirm that it expects the tensor that the backend will move."""
        self.unconfirmed.add(rank)

    def confirmed_by(self, rank: int) -> None:
        """An agent has reached this stage, or expects the tensor that the backend will move."""
        self.unconfirmed.discard(rank)
        self.absent.discard(rank)

    def goes_by_links(self) -> None:
        """Announced tensors that the backend has not moved arrive over links instead."""
        self.to_move = self.asked_for = False
        self.unconfirmed, self.absent, self.transferred_with = set(), set(), set()
        for source, message in list(self.arrived.items()):
            if message.where is Where.CARRIED:
                del self.arrived[source]
                self.missing.add(source)

    def sends_to(self, rank: int) -> bool:
        return any(send.destination == rank for send in self.exchange.sends)

    def will_send(self, rank: int, number: int) -> bool:
        """Whether this stage sends to the rank, which then needs no notice that nothing comes for stage ``number``."""
        return number == self.number - self.exchange.early and self.sends_to(rank)

    @property
    def complete(self) -> bool:
        return self.posted and not self.missing and not self.to_move

    def has_all_of(self, source: int) -> bool:
        """Nothing more can arrive from a source."""
        message = self.arrived.get(source)
        return message is not None and (message.payload is None or message.payload.complete)

    def take(self, source: int, message: Message) -> None:
        """Record that the message of a source has arrived, although parts of its payload may be missing."""
        self.missing.discard(source)
        self.arrived[source] = message


class Family(Protocol):
    """Operations that differ only in their tensors. Operations of equal families may be fused."""

    def together(self, operation: Operation, parts: list[FusionSpec], /) -> Steps[list[torch.Tensor | Exception]]:
        """The steps of several operations as one, over all tensors joined.

        Stages, destinations and purposes must be those of each by itself: one agent may fuse what another runs singly.
        """
        ...


@dataclass(slots=True)
class FusionSpec:
    """The description of an operation that may be fused.

    Attributes:
        flat: A copy of the caller's tensor, ``[numel]``.
        shape: The shape of the tensor.
        out: The tensor that takes the result.
        alone: The steps of the operation if it is not fused.
        family: The operations that it may be fused with.
    """

    flat: torch.Tensor
    shape: tuple[int, ...]
    out: torch.Tensor | None
    alone: Callable[[Operation], Steps[torch.Tensor]]
    family: Family

    def may_go_with(self, other: FusionSpec) -> bool:
        """Whether both tensors may be joined and processed as one."""
        return self.flat.dtype == other.flat.dtype and self.family == other.family


class Mover(Protocol):
    """The interface by which an operation reaches its lifecycle."""

    def proceed(self, operation: Operation, item: Yields | None, result: Any, error: BaseException | None) -> None: ...

    def end(self, operation: Operation, error: BaseException) -> None: ...


class FailurePolicy(Enum):
    """The fate of an operation that needs a lost agent, in a job whose survivors continue."""

    FAIL = auto()
    SKIP_MISSING = auto()  # continues without the missing messages; it has one exchange, whose edges are independent
    RETRY = auto()  # restarts among the survivors, because all must have the same result


@dataclass(slots=True)
class Recovery:
    """The state that an operation needs to survive the loss of an agent.

    Attributes:
        steps: Creates its generator again.
        on_loss: Whether it continues without the lost agent or restarts.
        plan: The ranks that it excludes; equal on all agents.
        input: The tensor that it began with and its published copy; the caller may have changed the tensor since.
        result: The result of a restarting operation, from its arrival until all other agents have theirs.
        again: Its generator has to be created again.
        take: Computes its result from the result of another agent on which it has ended.
        copy: A copy of the result, for agents on which it may not have ended.
    """

    steps: Callable[[Operation], Steps[Any]]
    on_loss: FailurePolicy
    plan: Plan
    input: tuple[torch.Tensor, Published] | None = None
    result: tuple[Any] | None = None
    again: bool = False
    take: Callable[[torch.Tensor], Any] | None = None
    copy: torch.Tensor | None = None

    @property
    def first_stage(self) -> int:
        """Stages after a restart have other numbers, so that old messages are not mistaken for theirs."""
        return (self.plan.attempt & 0xFF) << 8 if self.on_loss is FailurePolicy.RETRY else 0


class Operation:
    """One call, from its submission to its result.

    Only its lifecycle writes its fields, and fusion those about fusion, under the engine's lock.
    """

    __slots__ = (
        "among",
        "background",
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
        "recovery",
        "round",
        "sent",
        "stage",
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
        self.stage: Stage | None = None
        self.next_stage = 0
        self.leases: list[Lease] = []
        self.unconfirmed: dict[int, int] = {}  # token: destination
        self.outcome: tuple[Any] | None = None  # the result, until all destinations have confirmed
        self.waiting_more = False
        self.stalled = False
        self.error: BaseException | None = None
        self.fusible: FusionSpec | None = None  # what it is about, where it may go together with others
        self.fused: Any = None  # the FusedOperation that it is a part of; only fusion makes one
        self.recovery: Recovery | None = None  # None: a loss ends it
        self.background = False  # it is nobody's call, and waits until somebody needs it
        self.one_sided = False  # the others need not call anything for it
        self.among: Sequence[int] | None = None  # who calls it, if not all
        self.on_end: Callable[[Any], None] | None = None  # takes the result, before anything else happens
        self.on_outcome: Callable[[Any, BaseException | None], None] | None = None  # is told how it ended
        self.sent: frozenset[int] = frozenset()  # stages that have been sent, as a part of a fused operation

    def __str__(self) -> str:
        return describe(self.op, self.name, self.round)

    def proceed(self, mover: Mover, item: Yields | None, result: Any, error: BaseException | None) -> None:
        """Do what its generator asked for when it yielded."""
        mover.proceed(self, item, result, error)

    def release(self) -> None:
        """Free the memory that it published in; memory that other agents still read has leases of its own."""
        for lease in self.leases:
            lease.release()
        self.leases = []
        self.recovery = None  # it holds what it began with, and perhaps the result

    def fail(self, mover: Mover, error: BaseException) -> None:
        """End the operation from outside."""
        mover.end(self, error)

    @property
    def parts(self) -> Sequence[Operation]:
        """The calls that it consists of: itself, or those that are fused in it."""
        return (self,)

    def expect_confirmation(self, token: int, destination: int) -> None:
        """A destination has to confirm that it expected the message with this token."""
        self.unconfirmed[token] = destination

    def confirmed(self, token: int) -> None:
        """A destination has answered the message with this token."""
        self.unconfirmed.pop(token, None)

    @property
    def excluded_ranks(self) -> tuple[int, ...]:
        """The ranks that its plan excludes, ascending; equal on all agents."""
        return self.plan.gone

    @property
    def plan(self) -> Plan:
        """The plan that it follows: which ranks it excludes; equal on all agents."""
        return self.recovery.plan if self.recovery is not None else WHOLE

    @property
    def restarts(self) -> bool:
        """Whether it restarts among the survivors after a loss."""
        return self.recovery is not None and self.recovery.on_loss is FailurePolicy.RETRY

    def left_of(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those of ``ranks`` that its plan includes, in their order."""
        gone = self.excluded_ranks
        return [rank for rank in ranks if rank not in gone] if gone else ranks

    def callers(self, size: int) -> Sequence[int]:
        """The ranks that call it, of ``size`` agents, without those that its plan excludes."""
        return self.left_of(range(size) if self.among is None else self.among)

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that block it."""
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
        """The ranks that block it; a rank that reported to be waiting is replaced by those it waits for."""
        part: Operation = self.fused or self
        behind = part.stage.behind if part.stage is not None else {}
        waiting = self.waiting_for
        return sorted({rank for one in waiting for rank in behind.get(one, (one,))}) if behind else waiting

    @property
    def moves(self) -> bool:
        """A backend has been asked to move its tensors and has not finished."""
        stage = (self.fused or self).stage
        return stage is not None and stage.to_move and stage.asked_for

    @property
    def has_entered(self) -> bool:
        """It has reached a stage, by itself or fused with others."""
        part: Operation = self.fused or self
        return part.next_stage > 0

    @property
    def is_started(self) -> bool:
        """It has begun, by itself or fused with others."""
        return self.generator is not None or self.fused is not None or self.outcome is not None

    @property
    def is_runnable(self) -> bool:
        """It has all messages of its stage and waits for no agent."""
        part: Operation = self.fused or self
        return part.stage is not None and part.stage.complete and not part.waiting_more


INTERNAL: Final = "~shoal "
"""Prefix of the names of calls that Shoal makes for a caller."""


def needed_by(ranks: Sequence[int], moves: bool) -> str:
    """The ranks that a call waits for, as text for messages; ``moves`` is its :attr:`Operation.moves`."""
    return f" for ranks {list(ranks)}" if ranks else ", to which all have come, until its tensors are moved" * moves


def describe(op: str, name: str, round_: int) -> str:
    """The name of an operation in messages to users."""
    name = name.removeprefix("~window ").removeprefix(INTERNAL)
    if name.startswith("~"):
        return f"{op}{''.join(name.partition(' of ')[1:])} round {round_}"  # a group's ranks
    return f"{op} {name!r} round {round_}"


class HandleDriver(Protocol):
    """The interface through which a handle waits: the engine of its agent."""

    lock: RLock

    def wait_for(self, handle: Handle[Any], timeout: float | None = None) -> bool: ...

    def give_up(self, handle: Handle[Any], error: BaseException) -> None: ...


class Handle(Generic[T]):
    """The future of a result. Every ``_nonblocking`` operation returns one."""

    __slots__ = ("_callbacks", "_driver", "_error", "_result", "done", "operation")

    def __init__(self, driver: HandleDriver, operation: Operation) -> None:
        self._driver = driver
        self.operation = operation
        self.done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Handle[T]], None]] = []

    def poll(self) -> bool:
        """True once the result, or an error, is there. Never blocks."""
        return self.done

    def wait(self, timeout: float | None = None) -> T:
        """The result; blocks until it is there.

        Args:
            timeout: Seconds to wait at most; 0 only looks. The operation's own deadline holds in any case; reaching
                this one raises :class:`~shoal.DeadlineExceeded` here and leaves the operation in flight.
        """
        timeout = None if timeout is None else parse_timeout(timeout, 0.0, zero=True)
        if not self.done and not self._driver.wait_for(self, timeout):
            if timeout is None:
                raise NotInitialized(f"{self.operation}: this agent has shut down while it was in flight")
            missing = self.operation.blocked_on
            whom, after = needed_by(missing, self.operation.moves), f"after {timeout:g} s"
            raise DeadlineExceeded(f"{self.operation} is not done {after}; it waits{whom} and goes on", missing)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def add_done_callback(self, callback: Callable[[Handle[T]], None]) -> None:
        """Call ``callback(handle)`` when the operation ends, or now if it has.

        It runs in the thread that drives the exchange, for the agent that added it, and must be quick; what it raises
        is logged.
        """
        context = contextvars.copy_context()
        with deferred, self._driver.lock:
            if not self.done:
                self._callbacks.append(lambda handle: context.run(callback, handle))
                return
        callback(self)

    @property
    def has_callbacks(self) -> bool:
        """Whether callbacks will run when it ends."""
        return bool(self._callbacks)

    def end(self, result: T | None, error: BaseException | None) -> list[Callable[[Handle[T]], None]]:
        """Set the result or the error. For the lifecycle, under the engine's lock; returns the callbacks to run."""
        self._result, self._error, self.done = result, error, True
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def __repr__(self) -> str:
        return f"<Handle of {self.operation}: {'done' if self.done else 'in flight'}>"
