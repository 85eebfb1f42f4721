"""Exchanges in step with the neighbours, bucket by bucket: of the parameters, and of the gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...algorithms.schedule_weights import AgentSchedule
from ...compression import Compressor
from ...errors import Mismatch
from ...execution.operation import Handle
from ...ops.collective import submit_allreduce
from ...ops.encoded import Rest, submit_encoded_mean
from ...runtime.agent import current
from ..settings import BY_HAND, CommunicationType, ExchangeRound, Settings
from ..sharding import check_robust
from .bucket_exchange import BucketExchange, Params
from .buckets import Bucket

_MARKER = -1
"""The number of the marker that replaces buckets if all parameters are frozen."""


class SyncExchange(BucketExchange):
    """Each bucket is an operation of its own. A subclass chooses the operation and uses its result."""

    def __init__(
        self, params: Params, name: str, bucket_bytes: float, settings: Settings, schedule: AgentSchedule | None
    ) -> None:
        super().__init__(params, name, bucket_bytes, settings, schedule)
        self._handles: dict[Bucket, Handle[torch.Tensor] | None] = {}
        self._marker: Bucket | None = None

    @property
    def under_way(self) -> bool:
        return bool(self._handles)

    def start(self) -> None:
        self.prepare()
        for number in self._numbers():
            self._begin(number)

    def start_bucket(self, number: int) -> None:
        """Start with one bucket; the caller starts the other buckets of the round later, each once."""
        # prepare() ran before the backward pass: the script may have moved a parameter since, and its old memory would
        # be sent.
        self.buckets[number].adopt()
        self._begin(number)

    @abstractmethod
    def _begin(self, number: int) -> None:
        """Begin the operation of a bucket."""

    def _numbers(self) -> list[int]:
        """The numbers of the buckets of a round. If all parameters are frozen it is one marker, so that agents on which
        they are not do not wait in vain.
        """
        return self.active or [_MARKER]

    def _bucket(self, number: int) -> Bucket:
        if number != _MARKER:
            return self.buckets[number]
        if self._marker is None:
            self._marker = Bucket([torch.nn.Parameter(torch.zeros(1, device="cpu"))])
        return self._marker

    def _position(self, number: int) -> int:
        """The index of a bucket in the round, by which its operations are named. The first one exists on all agents, so
        they detect in it that they exchange different parameters.
        """
        return 0 if number == _MARKER else self.active.index(number)

    def wait(self) -> None:
        for handle in self._handles.values():
            if handle is not None:
                handle.wait()

    def abandon(self) -> None:
        self._results()

    def _results(self) -> list[Bucket]:
        """Wait for the started operations. Returns the buckets with a result in their room for it."""
        # Taken out first: after an error the next round starts again, and must not find handles that have failed.
        handles, self._handles = self._handles, {}
        handle: Handle[torch.Tensor] | None = None
        try:
            for handle in handles.values():
                if handle is not None:
                    handle.wait()
        except BaseException as error:
            # The others may still read.
            for bucket in handles:
                bucket.leave()
            if type(error) is Mismatch and handle is not None:
                raise self.explained(error, handle.operation) from None
            raise
        return [bucket for bucket, handle in handles.items() if handle is not None]


class ParameterExchange(SyncExchange):
    """The parameters become their averages."""

    counts: ClassVar[frozenset[str]] = frozenset((*BY_HAND, "communication_type", "robust"))

    def __init__(
        self, params: Params, name: str, bucket_bytes: float, settings: Settings, schedule: AgentSchedule | None
    ) -> None:
        super().__init__(params, name, bucket_bytes, settings, schedule)
        self._round: ExchangeRound | None = None
        settings.check_neighbours(schedule)

    def exchange(self) -> None:
        self.prepare()
        # Unguarded: start and finish are one call, so no code of the script can change a parameter between them.
        for number in self._numbers():
            self._begin(number, guarded=False)  # no other thread intervenes
        self.finish()

    def _begin(self, number: int, *, guarded: bool = True) -> None:
        # Once for the first bucket: the settings are read when a round begins. Buckets of one round with different
        # weights would mix a model of two rounds.
        if self._round is None or not self._handles:
            if self.balance is not None:
                self.balance.look(self.settings)
            self._round = self.settings.next_round(self._schedule, self.rounds, self.default)
            if self._round.robust is not None:
                check_robust(self._params())
        called = f"{self._name}.{self._position(number)}"
        travelling: dict[str, Bucket] = {called: self._bucket(number)}
        if self.mixed is not None and number != _MARKER:
            # An average with negative weights can be negative, and optimizers take the root of a second moment.
            self._round.check_that_none_is_negative()
            for states in self._beside[number]:
                # The optimizer makes its state in the first step, after the buckets were laid out, and load_state_dict
                # replaces it.
                states.adopt()
                travelling[f"{called}.{states.kind}"] = states
        # Noted before the loop adds handles: a round counts once, however many buckets it has. Schedules draw the
        # round's edges from this number.
        first = not self._handles
        for name, bucket in travelling.items():
            bucket.guard(guarded)
            # Groups set by the caller are messages of their own. Fused with others they would not be what num_groups
            # promises.
            room, fusible = bucket.room_for_result(), not self.grouped
            self._handles[bucket] = self._round.start(bucket.flat, room, name, fusible, self.digest)
        # With communication_type=empty, skipped rounds of a schedule are used later.
        self.rounds += first and self._round.kind is not CommunicationType.empty

    def finish(self) -> None:
        buckets = self._results()
        # Before any bucket takes its result: the error leaves all parameters as they are.
        self._check_that_none_has_changed(buckets)
        for bucket in buckets:
            bucket.take_result()

    def _check_that_none_has_changed(self, buckets: list[Bucket]) -> None:
        changed = [(bucket, bucket.of[number]) for bucket in buckets for number in bucket.changed()]
        if changed:
            called = self._params()
            names = ", ".join(f"{called[param]!r}{bucket.kind and f' ({bucket.kind})'}" for bucket, param in changed)
            raise RuntimeError(
                f"{self._name}: the parameters {names} were changed while their average was under way, and that change "
                "would be lost. Adapt with combine exchanges from the forward pass to step(): change parameters after "
                "step(), or take adapt, then combine"
            )


class GradientExchange(SyncExchange):
    """Every gradient becomes the mean over all agents; a missing gradient counts as zero, even if all agents lack it.

    Attributes:
        whole: Later rounds are not compressed.
    """

    keeps_equal: ClassVar[bool] = True

    def __init__(
        self, params: Params, name: str, bucket_bytes: float, settings: Settings, schedule: AgentSchedule | None
    ) -> None:
        super().__init__(params, name, bucket_bytes, settings, schedule)
        self.whole = False
        self._compressor: Compressor | None = None
        self._feedback = False
        self._rests: dict[int, Rest] = {}
        self._loaded: dict[int, list[str]] = {}  # of loaded rests that are not used yet: the bucket's parameters
        self._means: dict[Bucket, torch.Tensor] = {}  # where they are to be, of this round

    def compress(self, compressor: Compressor, feedback: bool) -> None:
        """Send gradients as a compressor's messages; ``feedback``: the error of a message is added to the next."""
        self._compressor, self._feedback = compressor, feedback

    def exchange(self, *, zeros: bool = False) -> None:
        """Start and finish; ``zeros``: send zeros instead of this agent's gradients."""
        self.prepare()
        for number in self._numbers():
            self._begin(number, zeros=zeros)
        self.finish()

    def _begin(self, number: int, *, zeros: bool = False) -> None:
        bucket, first = self._bucket(number), not self._handles
        # An agent whose gradients have overflowed still sends: its zeros keep the other agents' mean finite, and no
        # agent waits for it.
        flat = bucket.room_for_result().zero_() if zeros else bucket.gather_gradients()
        name = f"{self._name}.gradients.{self._position(number)}"
        if self._compressor is None or self.whole:
            # zero_copy: neighbours read the gradients in the room until the operation ends, so the mean needs other
            # memory.
            self._means[bucket] = mean = bucket.room_for_mean()
            self._handles[bucket] = submit_allreduce(
                current("optim"), flat, "average", name, out=mean, zero_copy=True, layout=self.digest
            )
        else:
            rest = self._rest_of(number, bucket) if self._feedback else None
            self._means[bucket] = flat
            self._handles[bucket] = submit_encoded_mean(
                current("optim"), flat, self._compressor, name, rest, self.digest
            )
        self.rounds += first

    def finish(self) -> None:
        buckets = self._results()
        share = 1.0
        if self.present is not None:
            present, there = self.present.wait().tolist()
            # The mean is over all agents, and agents without batches sent zeros. Without this factor the step would
            # shrink as agents run out of batches.
            share = there / max(1.0, present)
        for bucket in buckets:
            mean = self._means[bucket]
            if share != 1.0:
                mean.mul_(share)
            bucket.spread_gradients(mean)

    def _rest_of(self, number: int, bucket: Bucket) -> Rest:
        """The errors of a bucket's messages, which begin anew if they were loaded for other parameters."""
        rest, names = self._rests.setdefault(number, Rest()), self._loaded.pop(number, None)
        moved = names and names != self._names_of(number)
        if moved or (rest.sent is not None and len(rest.sent) != bucket.numel):
            rest = self._rests[number] = Rest()
        return rest

    def _names_of(self, number: int) -> list[str]:
        return self.layout[number] if 0 <= number < len(self.buckets) else []

    def _replaced(self, number: int) -> None:
        # The error belongs to a message of the old length, which does not fit the new bucket.
        self._rests.pop(number, None)

    def _forget(self) -> None:
        super()._forget()
        self._rests = {}

    def state(self) -> dict[str, Any]:
        rests = {number: (rest.sent, rest.mean) for number, rest in self._rests.items()}
        of = {number: self._loaded.get(number) or self._names_of(number) for number in rests}
        return super().state() | ({"rests": rests, "rests_of": of} if rests else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._rests = {number: Rest(*rest) for number, rest in state.get("rests", {}).items()}
        self._loaded = dict(state.get("rests_of", {}))
