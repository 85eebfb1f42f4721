"""Averages of two agents at a time, at any pace: AD-PSGD through windows, in full precision or compressed."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ...algorithms.needs import DOUBLY_STOCHASTIC
from ...algorithms.schedule_weights import AgentSchedule
from ...algorithms.stability.growth import DIES_OUT
from ...compression import Compressor
from ...compression.random_numbers import Redrawn
from ...errors import DeadlineExceeded, PeerLost
from ...execution.operation import Handle
from ...runtime.agent import bind, current
from ...windows import by_name as ops
from ...windows.registry import windows_of
from ...windows.window import named
from ..factory import share_kept
from ..settings import Settings
from .bucket_exchange import Params
from .buckets import Bucket
from .window_exchange import WindowExchange

_LOOK_AGAIN, _LONGEST_PAUSE = 0.0005, 0.004
"""Seconds. A slot sends no notification when data arrives in it, so a waiting thread polls it."""
LEAST = 0.9
"""The share of normally distributed numbers that a message must keep."""
_MANY = 1 << 16


@dataclass
class _PendingAverage:
    """An average that this agent has begun.

    Attributes:
        peer: The other agent.
        decoded: This agent's parameters as that agent decodes them, ``[numel]``.
        answers: The number of its earlier replies.
    """

    peer: int
    decoded: torch.Tensor
    answers: int


class _Slots(NamedTuple):
    requests: str
    replies: str


class _PairAverage(NamedTuple):
    """The averages that one of two agents begins: each is over before the next."""

    peer: int
    begun_here: bool


class _PairwiseBucket:
    """A bucket's parameters for averaging, beside the model's parameters.

    Attributes:
        u: The parameters, ``[numel]``: with all local steps, and all averages so far.
        before: The model's parameters at the last transfer to or from ``u``.
        common: By neighbour and initiator, the mean of the last values of both: differences from it are sent
            compressed.
    """

    def __init__(self, bucket: Bucket, name: str, compressor: Compressor | None) -> None:
        self.bucket, self.compressor, self.slots = bucket, compressor, _Slots(f"{name}.asks", f"{name}.answers")
        self.u, self.before = bucket.flat.clone(), bucket.flat.clone()
        self.common: dict[_PairAverage, torch.Tensor] = {}
        self.answered: dict[int, int] = {}
        self.asked: _PendingAverage | None = None
        numel, dtype = bucket.numel, bucket.flat.dtype
        length, of = (numel, dtype) if compressor is None else (compressor.nbytes(numel, dtype), torch.uint8)
        # One element more than the message: the last one tells whether the average was made, so that both agents move
        # or neither.
        nothing = current("AD-PSGD").engine.shared_memory((length + 1,), of).zero_()  # in memory that both can read
        for slot in self.slots:
            ops.win_create(nothing, slot, zero_init=True)

    def encode(self, pair: _PairAverage, draws: Redrawn) -> tuple[torch.Tensor, torch.Tensor]:
        """The message for a neighbour, with a one appended, and its decoded values."""
        message = self.u if self.compressor is None else self.compressor.encode(self.u - self._common(pair), draws)
        message = torch.cat([message, message.new_ones(1)])
        return message, self.decode(pair, message, draws)

    def decode(self, pair: _PairAverage, message: torch.Tensor, draws: Redrawn) -> torch.Tensor:
        """The decoded message of a neighbour, or of this agent to it."""
        if self.compressor is None:
            return message[:-1]
        return self._common(pair) + self.compressor.decode(message[:-1], self.bucket.numel, self.u.dtype, draws)

    def average(self, pair: _PairAverage, own: torch.Tensor, theirs: torch.Tensor) -> None:
        """Move half of the way to each other, by the decoded values of both: the two moves are opposite, bit for
        bit.
        """
        # A difference is added, and not the mean assigned: u may have taken local steps and other averages since the
        # message left.
        self.u += (theirs - own) / 2
        if self.compressor is not None:
            # Both agents compute it from the same decoded values, so their copies stay equal bit for bit; later
            # messages are differences from it.
            self.common[pair] = (own + theirs) / 2

    def _common(self, pair: _PairAverage) -> torch.Tensor:
        return self.common.setdefault(pair, torch.zeros_like(self.u))

    def take_from_model(self) -> None:
        """Add the change of the model's parameters: a local step, or a change by the user."""
        flat = self.bucket.flat
        if not torch.equal(flat, self.before):
            self.u += flat - self.before
            # The change is taken over once; without this it would be added again at the next transfer.
            self.before.copy_(flat)

    def give_to_model(self) -> None:
        self.bucket.put(self.u)
        self.before.copy_(self.u)


class PairwiseExchange(WindowExchange):
    """Each round an agent averages with one of its neighbours, drawn at random (Lian et al. 2018, arXiv:1710.06952).

    It sends its parameters to the neighbour when the forward pass begins. A thread of the neighbour replies with that
    agent's parameters, and moves half of the way to the received ones. When the reply arrives, this agent moves half of
    the way to it. So both move by the same amount, and the mean of all is kept. Differences are added, so parameters
    may change during an average: the graph may be any undirected one, while AD-PSGD as published needs a bipartite one.

    With a compressor, messages are differences from the mean of the last values that the two exchanged. Each keeps a
    copy of that mean for each neighbour. The differences shrink as agents converge.

    Attributes:
        compressor: The compressor of the messages, or None.
        staleness: How many averages others may begin with this agent between the forward pass of its gradient and the
            next one. It refuses more, because agents that wait could deadlock. None: any number.
        seed: The seed of the choice of neighbours.
    """

    counts: ClassVar[frozenset[str]] = frozenset()
    does_without = frozenset((DOUBLY_STOCHASTIC.name, DIES_OUT))
    compressor: ClassVar[Compressor | None] = None
    staleness: ClassVar[int | None] = None
    seed: ClassVar[int] = 0

    @classmethod
    def of(cls, compressor: Compressor | None, staleness: int | None, seed: int) -> type[PairwiseExchange]:
        """With other attributes.

        Raises:
            TypeError: This is no compressor, or has no wire format.
            ValueError: The compressor leaves too much out, or ``staleness`` is no count.
        """
        if compressor is not None and not (isinstance(compressor, Compressor) and compressor.encodes):
            raise TypeError(f"compression={compressor!r} is no compressor with a wire format; take MinMaxUInt8()")
        if compressor is not None and compressor.varies:
            raise ValueError(
                f"compression={compressor!r}: a window has room for messages of one length; take the compressor in it"
            )
        if compressor is not None and share_kept(compressor, _MANY) < LEAST:
            raise ValueError(
                f"compression={compressor!r}: two agents go half of the way to each other, and a message that leaves "
                "out so much would send them past each other. Take MinMaxUInt8(), QSGD(7, chunk=64) or "
                "Cast(torch.bfloat16)"
            )
        if staleness is not None and (not isinstance(staleness, int) or staleness < 0):
            raise ValueError(f"staleness={staleness!r}: give a whole number of averages, or None for any")
        return type(cls.__name__, (cls,), {"compressor": compressor, "staleness": staleness, "seed": seed})

    def __init__(
        self, params: Params, name: str, bucket_bytes: float, settings: Settings, schedule: AgentSchedule | None
    ) -> None:
        super().__init__(params, name, bucket_bytes, settings, schedule)
        self._pairs: dict[str, _PairwiseBucket] = {}
        # The answering thread and the script's thread both change u. Without the lock one of two changes could be lost.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._answering: threading.Thread | None = None
        self._error: BaseException | None = None
        self._answered = 0
        self._silent: set[int] = set()

    def _register(self, bucket: Bucket, name: str) -> None:
        mixing = current("AD-PSGD").topology.mixing
        # A reply goes back over the same edge. Without it the asking agent would wait until its deadline.
        if set(mixing.source_ranks) != set(mixing.destination_ranks):
            raise ValueError(
                f"{self._name}: two agents average with each other, and the topology has one-way edges: rank "
                f"{mixing.rank} receives from {list(mixing.source_ranks)} and sends to "
                f"{list(mixing.destination_ranks)}. Set an undirected one, such as RingGraph, or take "
                "shoal.optim.DistributedPushSumOptimizer"
            )
        self._pairs[name] = _PairwiseBucket(bucket, name, self.compressor)
        if self._answering is None:
            # The event is still set from an earlier close(): the new thread would end at once, and no request would be
            # answered.
            self._stop.clear()
            rank = current("AD-PSGD").rank
            self._answering = threading.Thread(target=bind(self._answer_all), name=f"shoal-pairs-{rank}", daemon=True)
            self._answering.start()

    # Averages that this agent begins

    def _move(self, bucket: Bucket, name: str) -> Handle[bool] | None:
        pairs = self._pairs[name]
        with self._lock:
            pairs.take_from_model()
            pairs.give_to_model()
            self._answered = 0
            peer = self._drawn(name)
            if peer is None:
                return None
            # Read before the request leaves: the reply may arrive before the next line of this thread runs.
            answers = named(pairs.slots.replies).slots()[peer].puts
            message, decoded = pairs.encode(
                _PairAverage(peer, True), self._draws(current("AD-PSGD").rank, peer, answers)
            )
            pairs.asked = _PendingAverage(peer, decoded, answers)
        try:
            return ops.win_put_nonblocking(message, pairs.slots.requests, dst_weights=[peer])
        except BaseException as error:
            pairs.asked = None  # nothing was sent, so no reply is awaited
            # The peer was lost after it was drawn.
            if isinstance(error, PeerLost) and current("AD-PSGD").engine.survives_losses:
                return None
            raise

    def _drawn(self, name: str) -> int | None:
        """The neighbour of a round: the same for all buckets; None if no neighbour is left."""
        agent = current("AD-PSGD")
        window = windows_of(agent).get("win_put", self._pairs[name].slots.requests)
        there = [rank for rank in window.there(window.destinations) if rank not in self._silent]
        return random.Random(f"{self.seed} {agent.rank} {self.rounds}").choice(there) if there else None

    def wait(self) -> None:
        """Wait for all replies."""
        # One deadline for all buckets: each with its own would multiply the wait.
        deadline = time.monotonic() + current("AD-PSGD").engine.timeout
        try:
            super().wait()
        except BaseException as error:
            if not (isinstance(error, PeerLost) and current("AD-PSGD").engine.survives_losses):
                self._forget_asked()
                raise
        for pairs in self._pairs.values():
            if pairs.asked is not None:
                try:
                    self._await(pairs, pairs.asked, deadline)
                except BaseException:
                    self._forget_asked()
                    raise
                pairs.asked = None

    def _forget_asked(self) -> None:
        """Send no more requests to agents that have not replied: a late reply would be taken for another."""
        for pairs in self._pairs.values():
            if pairs.asked is not None:
                self._silent.add(pairs.asked.peer)
            pairs.asked = None

    def _await(self, pairs: _PairwiseBucket, asked: _PendingAverage, deadline: float) -> None:
        agent, answers = current("AD-PSGD"), named(pairs.slots.replies)
        window = windows_of(agent).get("win_update", pairs.slots.replies)
        looks = 0
        # The count, and not the content: a reply may equal the one before.
        while answers.slots()[asked.peer].puts == asked.answers:
            if asked.peer not in window.there([asked.peer]):
                return  # the peer is lost, and its half of the average with it
            # If the answering thread has failed, the neighbours that ask this agent wait in vain. Its error is raised
            # here, where the script's thread waits.
            self._raise_of_answering()
            looks += 1
            if looks % 64 == 0:
                window.check_neighbours("AD-PSGD")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{self._name} on rank {agent.rank}: rank {asked.peer}, with which it averages, has not answered "
                    f"within {agent.engine.timeout:g} s. Is it stopped, or has it closed its optimizer? Put the loops "
                    "of all agents into optimizer.join() if they have different numbers of batches",
                    (asked.peer,),
                )
            time.sleep(_LOOK_AGAIN)
        with self._lock:
            # Weight 0 for the registered tensor and 1 for the slot: the numbers as the peer has put them, read
            # atomically.
            message = answers.update(0, {asked.peer: 1}, clone=True)
            # The peer has refused, and has moved nothing. A move here alone would change the mean of all.
            if not message[-1]:
                return
            pair = _PairAverage(asked.peer, True)
            theirs = pairs.decode(pair, message, self._draws(asked.peer, agent.rank, asked.answers))
            pairs.average(pair, asked.decoded, theirs)

    def _take(self, bucket: Bucket, name: str) -> None:
        with self._lock:
            self._pairs[name].give_to_model()

    def before_local_step(self) -> None:
        self.prepare()
        with self._lock:
            for pairs in self._pairs.values():
                pairs.take_from_model()

    def after_local_step(self) -> None:
        self.before_local_step()

    # Averages that others begin

    def _answer_all(self) -> None:
        """Reply to requests until stopped."""
        try:
            pause = _LOOK_AGAIN
            while not self._stop.wait(pause):
                answered = [self._answer(pairs) for pairs in list(self._pairs.values())]
                pause = _LOOK_AGAIN if any(answered) else min(2 * pause, _LONGEST_PAUSE)
        except BaseException as error:
            self._error = error

    def _answer(self, pairs: _PairwiseBucket) -> bool:
        """Reply to pending requests. Returns whether there were any."""
        found = False
        asks, rank = named(pairs.slots.requests), current("AD-PSGD").rank
        for peer, slot in asks.slots().items():
            done = pairs.answered.get(peer, 0)
            if slot.puts == done:
                continue
            found = True
            with self._lock:
                pairs.answered[peer] = slot.puts
                message = asks.update(0, {peer: 1}, clone=True)
                pair = _PairAverage(peer, False)
                theirs = pairs.decode(pair, message, self._draws(peer, rank, done))
                answer, decoded = pairs.encode(pair, self._draws(rank, peer, done))
                if self.staleness is not None and self._answered >= self.staleness * len(self._pairs):
                    answer[-1] = 0
                else:
                    pairs.average(pair, decoded, theirs)
                    self._answered += 1
            try:
                ops.win_put(answer, pairs.slots.replies, dst_weights=[peer])
            except (PeerLost, DeadlineExceeded) as error:
                # The script's thread raises it. This thread goes on: without it no other agent would get a reply.
                if isinstance(error, DeadlineExceeded) or not current("AD-PSGD").engine.survives_losses:
                    self._error = error
        return found

    def _draws(self, sender: int, receiver: int, number: int) -> Redrawn:
        """The draws for the n-th message of one agent to another, as both count them."""
        return Redrawn(self.seed * 1_000_003 + receiver, number, sender)

    def _raise_of_answering(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    # Layout

    def _forget_pairs(self) -> None:
        # The thread ends before the windows are freed: it would find its window gone and report that as an error of the
        # training.
        self._stop.set()
        answering, self._answering = self._answering, None
        if answering is not None:
            answering.join()
        pairs, self._pairs, self._silent = self._pairs, {}, set()
        for pair in pairs.values():
            with self._lock:
                pair.take_from_model()  # what the script has set since the last step
                pair.give_to_model()
            for slot in pair.slots:
                if slot in ops.get_current_created_window_names():
                    ops.win_free(slot)

    def close(self) -> None:
        """Free the windows."""
        try:
            super().close()
        finally:
            self._forget_pairs()
