"""What an operation is to the engine: a generator that yields exchanges, and the handle its caller holds.

An operation such as ``neighbor_allreduce`` is written as a generator. It yields an :class:`Exchange` (what to send to
whom, and from whom to receive), is resumed with the messages once all have come, computes, and yields the next exchange
or returns its result. So an operation of several stages, such as an all-reduce, still reads from top to bottom, blocks
nobody, and is matched, timed and failed by the engine like any other.

Where a payload comes in pieces, as on a network, the operation may compute on what is there and yield :data:`MORE`.
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
    """One message of an exchange: elements ``start`` to ``stop`` of what was published, as a tensor of ``shape``."""

    destination: int
    published: Published
    start: int
    stop: int
    shape: tuple[int, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """That the tensors of a stage may travel over an engine that needs one order of operations on all agents.

    Attributes:
        among: The ranks that take part, ascending, none for all that are there: each of them comes to this stage. None:
            nobody but those concerned does, and who that is only they know.
        collective: In the place of sends.
        what: What has to be the same on all, in words, where no messages say it.
        confirm: Each end of an edge knows of it by itself, so who receives has to confirm that it expects what is sent.
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
    """What every source must send; None: anything."""
    shape: tuple[int, ...] | None = None
    checked: bool = False
    """End the operation only when every destination has confirmed that it expected this."""
    digest: int = 0
    """Must be equal on both sides of an edge: the topology, the root, or whatever else has to agree."""
    digest_of: str = "topology"
    coordinates: bool = False
    """It moves no tensor: agents tell each other who sends to whom, or that they are there."""
    stage: int | None = None
    """Its number within the operation, where agents go through different numbers of stages; else they are counted."""
    early: int = 0
    """What is sent is for a stage so many before: its receivers go through more of them."""
    carried: BackendRequest | None = None
    """Its tensors may travel by other ways than Shoal's own; else they do not."""
    on_device: bool | None = None  # whether callers' tensors are on devices, where both sides of an edge must agree


Yields = Exchange | Future | str
Steps = Generator[Yields, Arrived, T]
"""An operation in the making: yields exchanges, or what it waits for; is sent what arrived; returns the result."""


@dataclass(slots=True)
class Stage:
    """An exchange in progress."""

    number: int
    exchange: Exchange
    missing: set[int]
    arrived: Arrived
    posted: bool = False
    to_move: bool = False  # its tensors have still to be moved by a carrier
    asked_for: bool = False  # which has been asked to
    unconfirmed: set[int] = field(default_factory=set)  # who has still to say that it expects what will be moved
    absent: set[int] = field(default_factory=set)  # of whom a carrier does not know that they have come
    transferred_with: set[int] = field(default_factory=set)  # who takes part in moving them, once they are moved
    started: float = field(default_factory=lambda: clock.monotonic())
    asked: float = 0.0
    """When those were asked last who are missing."""
    behind: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of those who are missing, whom they wait for themselves, as they have said."""

    @property
    def needs(self) -> set[int]:
        """The ranks that it has still to hear from, or to send to."""
        carried = self.exchange.carried if self.to_move else None
        others = carried.collective.members if carried is not None and carried.collective is not None else ()
        return self.missing | {send.destination for send in self.exchange.sends} | {*others}

    def expect_confirmation(self, rank: int) -> None:
        """A receiver has to say that it expects what will be moved."""
        self.unconfirmed.add(rank)

    def confirmed_by(self, rank: int) -> None:
        """An agent has come to it, or expects what is to be moved there."""
        self.unconfirmed.discard(rank)
        self.absent.discard(rank)

    def goes_by_links(self) -> None:
        """What was announced and has not been moved comes by links."""
        self.to_move = self.asked_for = False
        self.unconfirmed, self.absent, self.transferred_with = set(), set(), set()
        for source, message in list(self.arrived.items()):
            if message.where is Where.CARRIED:
                del self.arrived[source]
                self.missing.add(source)

    def sends_to(self, rank: int) -> bool:
        return any(send.destination == rank for send in self.exchange.sends)

    def will_send(self, rank: int, number: int) -> bool:
        """Whether a rank need not be told that nothing comes for its stage of a number."""
        return number == self.number - self.exchange.early and self.sends_to(rank)

    @property
    def complete(self) -> bool:
        return self.posted and not self.missing and not self.to_move

    def has_all_of(self, source: int) -> bool:
        """Nothing can still come from a source."""
        message = self.arrived.get(source)
        return message is not None and (message.payload is None or message.payload.complete)

    def take(self, source: int, message: Message) -> None:
        """Its message from a source has come, if not yet all of its payload."""
        self.missing.discard(source)
        self.arrived[source] = message


class Family(Protocol):
    """Operations that differ in nothing but their tensors. Those of equal families may go together."""

    def together(self, operation: Operation, parts: list[FusionSpec], /) -> Steps[list[torch.Tensor | Exception]]:
        """The steps of several as one. Their stages, whom they send to and what for have to be those of each by
        itself, over all tensors joined: so that one agent may do together what another does one by one."""
        ...


@dataclass(slots=True)
class FusionSpec:
    """What an operation that may be fused is about.

    Attributes:
        flat: A copy of the caller's tensor, ``[numel]``.
        shape: Of the tensor.
        out: Where its result goes.
        alone: Its steps, by itself.
        family: What it may go together with.
    """

    flat: torch.Tensor
    shape: tuple[int, ...]
    out: torch.Tensor | None
    alone: Callable[[Operation], Steps[torch.Tensor]]
    family: Family

    def may_go_with(self, other: FusionSpec) -> bool:
        """They may be joined to one tensor, and what is done with it is what is done with each."""
        return self.flat.dtype == other.flat.dtype and self.family == other.family


class Mover(Protocol):
    """What moves operations forward, as an operation knows it: its lifecycle."""

    def proceed(self, operation: Operation, item: Yields | None, result: Any, error: BaseException | None) -> None: ...

    def end(self, operation: Operation, error: BaseException) -> None: ...


class FailurePolicy(Enum):
    """What becomes of an operation that needs an agent which is lost, where the others go on."""

    FAIL = auto()
    SKIP_MISSING = (
        auto()
    )  # without what that agent has not sent, in the one exchange that it has: each edge counts for itself
    RETRY = auto()  # among those that are left: all must have the same result


@dataclass(slots=True)
class Recovery:
    """What an operation needs to outlive the loss of an agent.

    Attributes:
        steps: Makes its generator anew.
        on_loss: Whether it goes on or begins anew.
        plan: Whom it is planned without; the same on all agents.
        input: The tensor that it began with, and where that was published; it may be gone from where it was.
        result: Of one that restarts, once it is here and before all others have theirs.
        again: Its generator is to be made anew.
        take: Makes the result of it, from that of another agent on which it has ended.
        copy: Of the result, for others on which it may not have ended.
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
        """Stages of what began anew have other numbers, so that what was sent before is not taken for theirs."""
        return (self.plan.attempt & 0xFF) << 8 if self.on_loss is FailurePolicy.RETRY else 0


class Operation:
    """One call, from its submission to its result.

    Its fields are written by its lifecycle and, as to fusion, by fusion, under the engine's lock.
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
        self.outcome: tuple[Any] | None = None  # the result, while destinations have still to confirm
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
        """Do what its generator asked for when it stopped computing."""
        mover.proceed(self, item, result, error)

    def release(self) -> None:
        """Give back the memory that it published in; what others still read there has leases of its own."""
        for lease in self.leases:
            lease.release()
        self.leases = []
        self.recovery = None  # it holds what it began with, and perhaps the result

    def fail(self, mover: Mover, error: BaseException) -> None:
        """End it from outside."""
        mover.end(self, error)

    @property
    def parts(self) -> Sequence[Operation]:
        """The calls that it is about: itself, or those that are fused in it."""
        return (self,)

    def expect_confirmation(self, token: int, destination: int) -> None:
        """A destination has to confirm that it expected what is sent with a token."""
        self.unconfirmed[token] = destination

    def confirmed(self, token: int) -> None:
        """A destination has answered what was sent with a token."""
        self.unconfirmed.pop(token, None)

    @property
    def excluded_ranks(self) -> tuple[int, ...]:
        """The ranks that it is planned without, ascending; the same on all agents."""
        return self.plan.gone

    @property
    def plan(self) -> Plan:
        """Whom it is planned without; the same on all agents."""
        return self.recovery.plan if self.recovery is not None else WHOLE

    @property
    def restarts(self) -> bool:
        """A loss makes it begin anew among those that are left."""
        return self.recovery is not None and self.recovery.on_loss is FailurePolicy.RETRY

    def left_of(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those of some ranks that it is planned for, in their order."""
        gone = self.excluded_ranks
        return [rank for rank in ranks if rank not in gone] if gone else ranks

    def callers(self, size: int) -> Sequence[int]:
        """Who calls it, of those of ``size`` agents that it is planned for."""
        return self.left_of(range(size) if self.among is None else self.among)

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that keep it from going on."""
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
        """Those, and in the place of who has said that it waits itself, whom that one waits for."""
        part: Operation = self.fused or self
        behind = part.stage.behind if part.stage is not None else {}
        waiting = self.waiting_for
        return sorted({rank for one in waiting for rank in behind.get(one, (one,))}) if behind else waiting

    @property
    def moves(self) -> bool:
        """A carrier has been asked to move its tensors, and has not."""
        stage = (self.fused or self).stage
        return stage is not None and stage.to_move and stage.asked_for

    @property
    def has_entered(self) -> bool:
        """It has come to a stage, by itself or with others."""
        part: Operation = self.fused or self
        return part.next_stage > 0

    @property
    def is_started(self) -> bool:
        """It is on its way, by itself or with others."""
        return self.generator is not None or self.fused is not None

    @property
    def is_runnable(self) -> bool:
        """It has all messages of its stage and waits for nobody."""
        part: Operation = self.fused or self
        return part.stage is not None and part.stage.complete and not part.waiting_more


INTERNAL: Final = "~shoal "
"""Before the names of calls that Shoal makes for a caller."""


def needed_by(ranks: Sequence[int], moves: bool) -> str:
    """For whom a call waits, as it is said of it; ``moves``: :attr:`Operation.moves` of it."""
    return f" for ranks {list(ranks)}" if ranks else ", to which all have come, until its tensors are moved" * moves


def describe(op: str, name: str, round_: int) -> str:
    """How an operation is called in messages to people."""
    name = name.removeprefix("~window ").removeprefix(INTERNAL)
    if name.startswith("~"):
        return f"{op}{''.join(name.partition(' of ')[1:])} round {round_}"  # a group's ranks
    return f"{op} {name!r} round {round_}"


class HandleDriver(Protocol):
    """What a handle waits through: the engine of its agent."""

    lock: RLock

    def wait_for(self, handle: Handle[Any], timeout: float | None = None) -> bool: ...

    def give_up(self, handle: Handle[Any], error: BaseException) -> None: ...


class Handle(Generic[T]):
    """The promise of a result. Every ``_nonblocking`` operation returns one."""

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
        """Somebody is called when it ends."""
        return bool(self._callbacks)

    def end(self, result: T | None, error: BaseException | None) -> list[Callable[[Handle[T]], None]]:
        """Keep the promise. For the lifecycle, under the engine's lock; returns whom to call back."""
        self._result, self._error, self.done = result, error, True
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def __repr__(self) -> str:
        return f"<Handle of {self.operation}: {'done' if self.done else 'in flight'}>"
