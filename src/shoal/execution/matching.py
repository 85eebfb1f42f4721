"""Matches messages with operations, and checks that the agents agree.

A message names its operation by (name, round, stage). A round is the sender's count of calls under that name. So this
agent notices a peer that skips a call: the round of its next message does not match. Messages that arrive before this
agent makes the call are kept. A message for a call that has ended here without expecting it is refused.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

from .. import clock
from ..errors import NotFinite, NotInitialized, ShoalError
from ..transport.messages import HERE, ON_DEVICE, Message, Where, message_cost
from ..transport.quotas import Quota
from .operation import Operation, describe
from .stage import Stage

WINDOW, SMALL_WINDOW = 2, 256
"""Rounds of one name that a receiver may be behind: for large tensors, and for tensors sent inside the message.

Calls without a name share one name, and a caller may have many of them in flight. So of their rounds with large tensors
only those that have ended here count."""
LAST_STAGE = 1 << 32
"""A number above that of any stage."""
TOMBSTONES = 4096
MAX_REASON = 1000
"""Characters of a round's error that are sent to waiting agents."""

Key = tuple[str, int]
Ask = tuple[int, int, bool]
"""A probe: the stage, the probing rank, and whether to answer only if this agent has reached the stage."""


class RoundFailure(NamedTuple):
    """The reason why a round failed here.

    Attributes:
        reason: The error as text; empty if the round has not failed, or failed long ago.
        own: Whether only this agent has the error.
        about: The ranks that the error names.
        leaving: Whether this agent shuts down.
        has_result: Whether the round had ended here with a result, before another agent's message contradicted it.
    """

    reason: str = ""
    own: bool = False
    about: tuple[int, ...] = ()
    leaving: bool = False
    has_result: bool = False


NO_FAILURE = RoundFailure()
SUCCESS = RoundFailure(has_result=True)


class MatchResult(Enum):
    """How a message relates to the rounds of this agent."""

    NOW = auto()  # it is for the current stage of an operation in flight
    EARLY = auto()  # this agent has not reached the stage
    LATE = auto()  # the operation failed before the message arrived
    UNEXPECTED = auto()  # this agent has passed the stage without expecting it


class Channel:
    """The rounds of one name in progress on this agent: in flight, or not yet read by all receivers."""

    __slots__ = ("active", "deferred", "name", "unacknowledged", "unread")

    def __init__(self, name: str) -> None:
        self.name = name
        self.active: dict[int, Operation] = {}
        self.unacknowledged: dict[int, int] = {}
        self.unread: dict[int, int] = {}  # messages, by receiver
        self.deferred: deque[tuple[Operation, Stage]] = deque()

    def defer(self, operation: Operation, stage: Stage) -> None:
        """Keep a stage of an operation until its receivers have caught up."""
        self.deferred.append((operation, stage))

    def must_defer(self, operation: Operation, stage: Stage) -> bool:
        """Whether other stages precede it, or its receivers are too far behind."""
        return bool(self.deferred and not operation.one_sided) or not self.may_send(operation, stage)

    def sendable(self) -> Iterator[tuple[Operation, Stage]]:
        """Yield the stages that may be sent now.

        The caller has to send each one before it requests the next, which may then be one too many.
        """
        waiting, self.deferred = self.deferred, deque()
        while waiting:
            operation, stage = waiting.popleft()
            if operation.stage is not stage:  # the operation has left the stage since
                continue
            if self.may_send(operation, stage):
                yield operation, stage
                continue
            self.deferred.append((operation, stage))
            if not operation.one_sided:  # later stages wait for their turn
                self.deferred.extend(waiting)
                return

    def may_send(self, operation: Operation, stage: Stage) -> bool:
        """Whether the receivers have caught up enough for one more round."""
        if not self.unacknowledged or not stage.exchange.sends:
            return True
        large = any(send.published.region is not None for send in stage.exchange.sends)
        if operation.one_sided:  # it waits for its own receivers only
            return not large or all(self.unread.get(send.destination, 0) < WINDOW for send in stage.exchange.sends)
        if large and self.name[0] == "~":
            return sum(round_ not in self.active for round_ in self.unacknowledged) < WINDOW
        # The oldest unread round decides: a receiver that never reads costs this agent the memory of so many rounds and
        # no more.
        return min(self.unacknowledged) > operation.round - (WINDOW if large else SMALL_WINDOW)

    def defers(self, operation: Operation) -> bool:
        """Whether a stage of an operation waits for its turn to send."""
        return any(waiting is operation for waiting, _ in self.deferred)

    def sent(self, round_: int, receiver: int) -> None:
        self.unread[receiver] = self.unread.get(receiver, 0) + 1
        self.unacknowledged[round_] = self.unacknowledged.get(round_, 0) + 1

    def acknowledged(self, round_: int, receiver: int) -> None:
        self.unread[receiver] -= 1
        remaining = self.unacknowledged.get(round_, 1) - 1
        if remaining:
            self.unacknowledged[round_] = remaining
        else:
            self.unacknowledged.pop(round_, None)


class Matcher:
    """Matches messages with the rounds of one agent. Used under the engine's lock.

    An idle name costs only its round counter, which is kept for good. It distinguishes an agent that has skipped a call
    from one that has not made it yet.

    Attributes:
        early: The messages that have arrived before their stage began here, by name and round.
        asks: The probes of such stages.
        ended_last: The operation, name, round and time of the last operation that ended; ``("", "", 0, 0.0)`` if none
            has.
    """

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        self._channels: dict[str, Channel] = {}
        self.early: dict[Key, dict[tuple[int, int], Message]] = {}
        self.asks: dict[Key, set[Ask]] = {}
        self._kept: dict[int, Quota] = defaultdict(lambda: Quota("messages that came before this agent's call"))
        self._asked: dict[int, Quota] = defaultdict(lambda: Quota("questions for calls that this agent has not made"))
        self._tombstones: OrderedDict[Key, RoundFailure] = OrderedDict()
        self._first_stages: OrderedDict[Key, int] = OrderedDict()
        self.ended_last = "", "", 0, 0.0

    def begin(self, op: str, name: str, timeout: float, alone: bool) -> Operation:
        """Begin the next round of a name. ``alone``: ValueError while an operation of this kind is in flight."""
        round_ = self._begun.get(name, 0)
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = Channel(name)
        elif alone and any(other.op == op for other in channel.active.values()):
            raise ValueError(
                f"{describe(op, name, round_)}: another {op} named {name!r} is still in flight on this agent; wait for "
                "its handle first, or use another name"
            )
        operation = Operation(op, name, round_, timeout)
        operation.channel = channel
        # Counted even if the call fails at once, because the other agents count theirs: later rounds would pair
        # wrongly.
        self._begun[name] = round_ + 1
        channel.active[round_] = operation
        return operation

    def rounds_begun(self, name: str) -> int:
        """The number of rounds of a name that this agent has begun."""
        return self._begun.get(name, 0)

    @property
    def calls(self) -> int:
        """The number of rounds of all names that this agent has begun."""
        return sum(self._begun.values())

    def all_begun(self) -> dict[str, int]:
        """The number of rounds that this agent has begun, by name."""
        return dict(self._begun)

    def begin_at(self, begun: dict[str, int]) -> None:
        """Continue at the other agents' counts. Calls that this agent made in isolation are no rounds of the job."""
        self._begun = dict(begun)
        # The tombstone of a round in isolation would match a message for the job's round of the same number.
        self._tombstones.clear()
        self._first_stages.clear()

    def tidy(self, channel: Channel) -> None:
        """Drop the channel of a name that has nothing in progress."""
        # Fused operations and answers have channels outside the table. An idle one must not delete the name's own.
        is_idle = not (channel.active or channel.unacknowledged or channel.deferred)
        if is_idle and self._channels.get(channel.name) is channel:
            del self._channels[channel.name]

    def in_flight(self) -> list[Operation]:
        return [operation for channel in self._channels.values() for operation in channel.active.values()]

    def under(self, name: str) -> list[Operation]:
        """The operations in flight under a name."""
        channel = self._channels.get(name)
        return list(channel.active.values()) if channel else []

    def has_early(self, operation: Operation) -> bool:
        """Whether messages for an operation have arrived that it has not taken."""
        return bool(self.early.get((operation.name, operation.round)))

    def active_operation(self, name: str, round_: int) -> Operation | None:
        """The operation of a round; None if it is not in flight."""
        channel = self._channels.get(name)
        return channel.active.get(round_) if channel is not None else None

    def has_begun(self, name: str, round_: int) -> bool:
        """Whether this agent has reached a round."""
        if round_ >= self._begun.get(name, 0):
            return False
        operation = self.active_operation(name, round_)
        # An operation that waits to be fused has not begun: fusion can still take a message for several operations as a
        # whole.
        return operation is None or operation.is_started

    def match(self, message: Message) -> tuple[MatchResult, Operation | None]:
        """How a message or a probe relates to the rounds here, and its operation if that is in flight."""
        if message.round >= self._begun.get(message.name, 0):
            return MatchResult.EARLY, None
        channel = self._channels.get(message.name)
        operation = channel.active.get(message.round) if channel is not None else None
        if operation is None:
            # A message for a failed round is dropped. In a round that ended with a result it is a mismatch, and both
            # agents raise.
            late = not self._tombstones.get((message.name, message.round), SUCCESS).has_result
            return (MatchResult.LATE if late else MatchResult.UNEXPECTED), None
        if operation.outcome is not None:  # it has its result, and waits only for confirmations
            return MatchResult.UNEXPECTED, operation
        stage = operation.stage
        if stage is None or message.stage > stage.number:
            return MatchResult.EARLY, operation
        return (MatchResult.NOW if message.stage == stage.number else MatchResult.UNEXPECTED), operation

    def keep(self, source: int, message: Message) -> None:
        """Keep a message until its stage begins. ProtocolError if its sender exceeds its quota."""
        key, place = (message.name, message.round), (message.stage, source)
        self.charge(source, message)
        before = self.early.setdefault(key, {}).pop(place, None)
        # A repeated message replaces the first; without the release, its share of the quota would stay charged.
        if before is not None:
            self.release(source, before)
        self.early[key][place] = message

    def take_back(self, source: int, denial: Message) -> None:
        """Drop the announcement of a tensor that its sender has withdrawn, for a stage that has not begun here."""
        early = self.early.get((denial.name, denial.round), {})
        place = denial.stage, source
        # A tensor that a link has brought is here and stays valid. Only an announced one would never follow.
        if place in early and early[place].where is Where.CARRIED:
            self.release(source, early.pop(place))

    def charge(self, source: int, message: Message) -> None:
        """Charge a kept message to a peer's quota. ProtocolError if it exceeds the quota."""
        self._kept[source].acquire(message_cost(message))

    def release(self, source: int, message: Message) -> None:
        """Return a message's share of the quota."""
        self._kept[source].release(message_cost(message))

    def give_up_early(self) -> list[tuple[int, Message]]:
        """Take out the messages for calls that this agent has not made and will not make."""
        # Messages of rounds that have begun belong to their operations; end() returns them.
        keys = [key for key in self.early if key[1] >= self._begun.get(key[0], 0)]
        found = [self.early.pop(key) for key in keys]
        return [self._out(source, message) for early in found for (_, source), message in early.items()]

    def _out(self, source: int, message: Message) -> tuple[int, Message]:
        self.release(source, message)
        return source, message

    def forget(self, rank: int) -> None:
        """Drop the messages and the probes of a lost agent."""
        for key, early in list(self.early.items()):
            for place in [place for place in early if place[1] == rank]:
                del early[place]  # in place: early_messages() may be at it
            if not early:
                del self.early[key]
        for key, asks in list(self.asks.items()):
            self.asks[key] = {ask for ask in asks if ask[1] != rank}
            if not self.asks[key]:
                del self.asks[key]
        # The deleted messages were not released. A restarted agent of this rank would inherit a quota in use.
        self._kept.pop(rank, None)
        self._asked.pop(rank, None)

    def keep_ask(self, source: int, message: Message) -> None:
        """Keep a probe until its stage begins. ProtocolError if it exceeds the quota."""
        key, ask = (message.name, message.round), (message.stage, source, bool(message.flags & HERE))
        # A waiting agent repeats its probe. Charged each time, the repeats would exceed the quota of a correct agent.
        if ask not in self.asks.get(key, ()):
            self._asked[source].acquire(0)
            self.asks.setdefault(key, set()).add(ask)

    def is_waited_for(self) -> bool:
        """Whether another agent waits for a call that this agent has not made."""
        return any(round_ >= self._begun.get(name, 0) for name, round_ in self.asks)

    def early_messages(self, operation: Operation, stage: int) -> Iterator[tuple[int, Message]]:
        """Yield the early messages of a stage that begins. The caller's handling of one may remove others."""
        early = self.early.get((operation.name, operation.round))
        if early:
            for key in [key for key in early if key[0] == stage]:
                # The caller's handling of one message may end the operation, which takes out the others.
                if key in early:
                    yield self._out(key[1], early.pop(key))

    def begin_attempt(self, operation: Operation, stage: int) -> list[tuple[int, Message]]:
        """Record the first stage of an operation's new attempt, and take out the messages for earlier stages.

        Messages for those stages that arrive later are :meth:`of_earlier_attempt`.
        """
        key = operation.name, operation.round
        # A cut may delay a message of an attempt until after the agreement that ended it, or after the round itself.
        # Without this record it would be refused, and end a call on both agents that all have agreed on.
        if stage:
            self._first_stages[key] = stage
            if len(self._first_stages) > TOMBSTONES:
                self._first_stages.popitem(last=False)
        early = self.early.get(key, {})
        return [self._out(key[1], early.pop(key)) for key in [key for key in early if key[0] < stage]]

    def of_earlier_attempt(self, message: Message) -> bool:
        """Whether a message belongs to an attempt of a round that the survivors of a loss have restarted or ended."""
        return message.stage < self._first_stages.get((message.name, message.round), 0)

    def early_probes(self, operation: Operation, stage: Stage) -> Iterator[tuple[int, bool]]:
        """Take out the probes of a stage that begins: each rank, and whether to answer only if it is reached."""
        asks = self.asks.get((operation.name, operation.round))
        if asks:
            for ask in [ask for ask in asks if ask[0] == stage.number]:
                asks.discard(ask)
                self._asked[ask[1]].release(0)
                yield ask[1:]

    def failure_of(self, call: Operation | Message) -> RoundFailure:
        """The reason why a round failed here; empty if it is not known."""
        return self._tombstones.get((call.name, call.round), NO_FAILURE)

    def contradict(self, call: Operation | Message, error: ShoalError) -> bool:
        """Record that a round, which has ended here with a result, failed for another agent.

        Returns whether this is the round's first failure here.
        """
        key = call.name, call.round
        is_first = key not in self._tombstones
        if is_first:
            self._record_failure(key, error, has_result=True)
        return is_first

    def _record_failure(self, key: Key, error: BaseException, has_result: bool = False) -> None:
        reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
        # With agreements, waiting agents exclude the agent of such an error. Other errors of Shoal, such as a mismatch,
        # occur on several agents at once: correct ones would be excluded.
        own = isinstance(error, Exception) and (isinstance(error, NotFinite) or not isinstance(error, ShoalError))
        about = error.ranks if isinstance(error, ShoalError) else ()
        text = reason.encode(errors="replace").decode()  # encodable even with lone surrogates
        self._tombstones[key] = RoundFailure(text, own, about, isinstance(error, NotInitialized), has_result)
        if len(self._tombstones) > TOMBSTONES:
            # A message for a forgotten round is refused as unexpected, where a tombstone makes it late.
            self._tombstones.popitem(last=False)

    def end(self, operation: Operation, error: BaseException | None) -> tuple[list[tuple[int, Message]], list[Ask]]:
        """Close a round. Returns its messages and probes that no operation will take."""
        key = (operation.name, operation.round)
        self.ended_last = operation.op, operation.name, operation.round, clock.monotonic()
        operation.channel.active.pop(operation.round, None)
        if error is not None:
            self._record_failure(key, error)
        early = self.early.pop(key, None)
        asks = self.asks.pop(key, None)
        # Never released, the probes of many rounds would add up to the quota of a correct agent.
        for _, source, _ in asks or ():
            self._asked[source].release(0)
        late = [self._out(source, message) for (_, source), message in early.items()] if early else []
        if early:
            # Or early_messages(), if one of its messages has ended the operation, would yield the rest again.
            early.clear()
        return late, list(asks or ())


def unexpected(source: int, rank: int) -> str:
    return f"rank {rank} expects nothing from rank {source} in this round, but rank {source} sent to it"


def disagreement(operation: Operation, stage: Stage, source: int, message: Message, rank: int) -> str:
    """The reason why a message does not match its stage; empty if it does."""
    # From the general to the special: agents in different calls usually differ in dtype and shape as well. The error
    # has to name the first cause.
    exchange = stage.exchange
    if message.op != operation.op:
        return f"rank {source} called {message.op} and rank {rank} called {operation.op}"
    if message.digest != exchange.digest:
        return f"rank {source} and rank {rank} have a different {exchange.digest_of}"
    if source not in stage.missing:
        return unexpected(source, rank)
    if exchange.on_device is not None and exchange.on_device != bool(message.flags & ON_DEVICE):
        theirs, ours = ("the CPU", "a device") if exchange.on_device else ("a device", "the CPU")
        return f"rank {source} has its tensor on {theirs} and rank {rank} on {ours}; move one with tensor.to(device)"
    if exchange.dtype is not None and message.dtype != exchange.dtype:
        return f"rank {source} sent {message.dtype} and rank {rank} expected {exchange.dtype}"
    if exchange.shape is not None and message.shape != exchange.shape and not message.nothing:
        return (
            f"rank {source} sent a tensor of shape {list(message.shape)} and rank {rank} expected shape "
            f"{list(exchange.shape)}"
        )
    if exchange.rest is not None and (not message.shape or message.shape[1:] != exchange.rest):
        expected = ", ".join(map(str, ("*", *exchange.rest)))
        return (
            f"rank {source} sent a tensor of shape {list(message.shape)} and rank {rank} expected shape [{expected}]; "
            "only the first dimension may differ"
        )
    return ""
