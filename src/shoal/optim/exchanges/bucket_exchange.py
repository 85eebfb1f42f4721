"""The exchanges of one optimizer: the layout of its parameters, the initial agreement, and the base of all exchanges.

Each optimizer exchanges one kind of data: its parameters, in step with the neighbours or through windows, or its
gradients. So it has one :class:`BucketExchange`; its strategy (``steps.py``) starts and finishes the exchange.
"""

from __future__ import annotations

import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import compress
from operator import is_
from typing import Any, ClassVar

import torch

from ...algorithms.schedule_weights import AgentSchedule
from ...errors import Mismatch
from ...execution.operation import Handle, Operation
from ...runtime.agent import current
from ..params import check_that_models_agree, check_that_values_agree, digest_of, equalize_frozen, explained
from ..settings import Settings
from ..topologies import WeightChecks
from .buckets import Bucket, into_buckets
from .mixed_state import MixedState, StateBucket

Params = Callable[[], Mapping[torch.nn.Parameter, str]]
_MOST_SEEN = 64
"""Sets of trainable parameters of which it is kept which buckets are active."""


class BucketExchange(ABC):
    """Exchanges the parameters or gradients of an optimizer in rounds: a round starts with the present values, and its
    end stores the result.

    Args:
        params: The parameters with their names, in the model's order; requested again after :meth:`changed`.
        name: Matches the exchanges of different agents.
        bucket_bytes: The size of one message.
        settings: The kind of exchange, read when a round starts.
        schedule: The source of the weights, if not the settings.

    Attributes:
        rounds: Exchanges that have begun.
        in_step: Rounds are synchronous with the neighbours' rounds.
        keeps_equal: Equal models stay equal; before the first exchange it is checked that they are equal.
        counts: The settings that affect the exchange.
        grouped: The caller has fixed the groups, and other parameters are not joined with them.
        does_without: The names of conditions on W that this kind of exchange does not need.
        present: While agents are joined (``Join``), the numbers of agents with batches and of present agents: [2].
        balance: Checks the weights of each round, if no schedule gives them.
        default: The schedule of averages with neighbours, if neither the caller nor the script gives weights.
        mixed: The optimizer's state that is averaged beside the parameters, if any.
        buckets: The parameters, once :meth:`prepare` has been called: in the order in which their gradients are
            computed, the last layers first; a single vector of all is in the model's order. Parameters frozen from the
            beginning are in no bucket.
        active: The numbers of the buckets that are exchanged in this round: buckets with trainable parameters.
        digest: The digest of the parameters in the active buckets, and with ``remembers`` also of the trainable flags;
            0 if all have been trainable from the beginning.
        trainable: A byte for each parameter, 1 where it requires gradients in this round.
        sharing: The parameters that share memory.
        remembers: An algorithm keeps a vector for each bucket: buckets stay as they are, and all are active.
    """

    splits: ClassVar[bool] = True
    """A bucket with newly frozen parameters continues without these."""
    in_step: ClassVar[bool] = True
    keeps_equal: ClassVar[bool] = False
    counts: ClassVar[frozenset[str]] = frozenset()
    does_without: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, params: Params, name: str, bucket_bytes: float, settings: Settings, schedule: AgentSchedule | None
    ) -> None:
        self.settings = settings
        self.rounds = 0
        self.present: Handle[torch.Tensor] | None = None
        self.balance: WeightChecks | None = None
        self.default: AgentSchedule | None = None
        self.mixed: MixedState | None = None
        self.buckets: list[Bucket] = []
        self.active: list[int] = []
        self.digest = 0
        self.remembers = False
        self.trainable: Callable[[], bytes] = lambda: b"\1" * len(params())
        self.sharing: Callable[[], list[list[torch.nn.Parameter]]] = list
        self._shared: list[list[torch.nn.Parameter]] = []
        self._layout: list[list[str]] = []
        self._groups: list[list[str]] = []
        self._trainable = b""
        self._seen: dict[bytes, tuple[list[int], int]] = {}  # the active buckets and their digest, by trainable flags
        self._has_changed = self._may_differ = False
        self._params, self._name, self._bucket_bytes, self._schedule = params, name, bucket_bytes, schedule
        self._laid_out = False
        self.grouped = False
        self.agreed = False  # with all other agents on the exchanged data
        self._beside: list[list[StateBucket]] = []
        self._without_state: Mapping[str, Mapping[str, torch.Tensor]] = {}

    # An exchange

    @property
    @abstractmethod
    def under_way(self) -> bool:
        """An exchange has started that is not finished."""

    @abstractmethod
    def start(self) -> None:
        """Begin to exchange the present values."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the started exchange and store its result. Without one it does nothing."""

    def exchange(self) -> None:
        """Start and finish."""
        self.start()
        self.finish()

    @abstractmethod
    def wait(self) -> None:
        """Wait for the started exchange."""

    @abstractmethod
    def abandon(self) -> None:
        """Wait for the started exchange, because the neighbours do, and leave everything as it is."""

    def settle(self) -> None:  # noqa: B027 - only some have something to do then
        """All agents have ended: add the messages in transit, if exchanges are not in step."""

    def met(self) -> None:  # noqa: B027 - only some have something to do then
        """Agents have entered the run; all call it."""

    def before_local_step(self) -> None:  # noqa: B027 - only some have something to do then
        """The wrapped optimizer is about to change the parameters."""

    def after_local_step(self) -> None:  # noqa: B027 - only some have something to do then
        """The wrapped optimizer has changed the parameters."""

    # Layout

    def prepare(self) -> None:
        """Move the parameters into the buckets, if they have been moved since, and find the active buckets. Once before
        each round, and before the first one together with all agents: they compare their models.
        """
        # Neighbours read the buckets of an exchange that is under way. Parameters that moved now would be missing in
        # its result.
        if self.under_way:
            return
        now = self.trainable()
        changes = now != self._trainable
        # Frozen buckets are not looked at in each step, for its cost. When flags change, one of them may become active,
        # and its parameters may have moved meanwhile.
        looked_at = self.buckets if changes else [self.buckets[number] for number in self.active]
        moved = [bucket for bucket in looked_at if not bucket.in_place]
        # A parameter of another shape or dtype has no place in its bucket: a copy into it would fail, or convert the
        # numbers.
        if any(bucket.outgrown for bucket in moved):
            self.changed()
        if self._laid_out:
            if not all(bucket.stays for bucket in moved):
                # Before adopt(): to move a parameter whose memory another tensor shares would separate the two, and the
                # model would lose its tie.
                self._look_for_sharing(moved)
            for bucket in moved:
                bucket.adopt()
            if changes:
                self._follow(now)
            return
        # Before the buckets are made, because parameters that share memory must come into one bucket; and before the
        # models are compared, as agents may differ in it.
        self._shared = self.sharing()
        if not self.agreed:
            # Before anything is laid out: agents whose models differ must find out here, and not by messages of other
            # sizes.
            self._agree()
            self.agreed = True
        self.buckets, self._laid_out = [*map(self._bucket_of, self._as_laid_out())], True
        # State may have been loaded before there were buckets: it is in _without_state until now.
        self._lay_out_states()
        self._arrange(now)
        # What _arrange has done until here is the common beginning of all agents. Only later changes have to be given
        # to an agent that rejoins.
        self._has_changed = False
        self._follow(now)

    def explained(self, error: Mismatch, operation: Operation | None) -> Mismatch:
        """The error of an exchange, with the parameter that is trainable on only some agents, if that is why."""
        return error if operation is None else explained(error, operation, self._params(), self._trainable)

    def _bucket_of(self, params: list[torch.nn.Parameter]) -> Bucket:
        return Bucket(params, any(not set(group).isdisjoint(params) for group in self._shared))

    def _look_for_sharing(self, moved: list[Bucket]) -> None:
        """Parameters have been moved: leave them in place if other tensors share their memory."""
        shared = {param for group in self.sharing() for param in group}
        for bucket in moved:
            if not shared.isdisjoint(bucket.of):
                bucket.stay()

    def _follow(self, now: bytes) -> None:
        """Other parameters are trainable than before: ``now``, as :attr:`trainable` gave it."""
        self._trainable = now
        if now not in self._seen:
            self._arrange(now)
            on = set(compress(self._params(), now))
            active = [
                number
                for number, bucket in enumerate(self.buckets)
                if self.remembers or not on.isdisjoint(bucket.params)
            ]
            layout = self.layout
            # An agent that rejoined was given the layout that others still have from the beginning. Where vectors are
            # remembered the layout never changes, so it does not distinguish the two.
            whole = all(now) and (self.remembers or not (self._has_changed or self._layout))
            # Vectors that are remembered are exchanged whole: only the flags show that parameters of them are frozen.
            flags = zlib.crc32(now) if self.remembers else 0
            # A script that draws the layers to train would otherwise add an entry in each step.
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[now] = active, 0 if whole else digest_of(layout[number] for number in active) ^ flags
        self.active, self.digest = self._seen[now]

    def _arrange(self, now: bytes) -> None:
        """Give trainable parameters that are in no bucket one, and take frozen ones out of buckets with trainable ones.

        A bucket whose parameters are all frozen stays, so that where layers take turns nothing is ever moved again.
        """
        params = list(self._params())
        on = set(compress(params, now))
        buckets = list(self.buckets)
        # Windows and an algorithm's vectors keep the size with which all neighbours have made them.
        if self.splits and not self.remembers:
            for number, bucket in enumerate(buckets):
                kept = [param for param in bucket.params if param in on]
                if 0 < len(kept) < len(bucket.params):
                    buckets[number] = self._bucket_of(kept)
                    self._replaced(number)
        held = {param for bucket in buckets for param in bucket.params}
        new = on - held
        called = {name: param for param, name in self._params().items()}
        for names in self._groups:
            group = [called[name] for name in names if called.get(name) in new]
            buckets += into_buckets(group, float("inf"), self._shared)
            new.difference_update(group)
        # The last layers first: their gradients come first, so their bucket can leave while the others are computed.
        # All agents take the same order.
        order = params if self._bucket_bytes == float("inf") else params[::-1]
        buckets += into_buckets((param for param in order if param in new), self._bucket_bytes, self._shared)
        # Nothing has changed. Without this test the digests and state buckets would be made again with each new set of
        # flags.
        if len(buckets) == len(self.buckets) and all(map(is_, buckets, self.buckets)):
            return
        # Taken from the old buckets before they go: neighbours' averages of state that this optimizer does not have yet
        # are in no other place.
        self._without_state = self._states_of_our_own()
        self.buckets = buckets
        # Its entries are positions in the former list of buckets.
        self._seen.clear()
        self._has_changed = True
        self._lay_out_states()

    def _replaced(self, number: int) -> None:  # noqa: B027 - only some keep something for a bucket
        """A bucket has fewer parameters now."""

    @property
    def layout(self) -> list[list[str]]:
        """The names of the parameters in each bucket, once they are laid out."""
        called = self._params()
        return [[called[param] for param in bucket.params] for bucket in self.buckets]

    def lay_out_as(self, layout: list[list[str]]) -> None:
        """Put these parameters together in buckets, because other agents remember them so; other parameters come
        behind.
        """
        if layout != self.layout:
            self._forget()
        self._layout = layout

    def group_as(self, groups: list[list[str]]) -> None:
        """Parameters of one of these groups lie in one bucket, once they are trainable; the others come behind."""
        self.grouped, self._groups = True, groups

    @property
    def layout_to_keep(self) -> list[list[str]]:
        """The buckets, for :meth:`lay_out_as` of another exchange. Empty if the default layout is the same, or if an
        algorithm remembers the buckets.
        """
        if self.remembers:
            return []
        held = sum(len(bucket.params) for bucket in self.buckets)
        return self.layout if self._laid_out and (self._has_changed or held < len(self._params())) else self._layout

    def go_on_with(self, layout: list[list[str]]) -> None:
        """Use the buckets of a loaded state, as :attr:`layout_to_keep` gave them."""
        if layout != self.layout_to_keep:
            self.lay_out_as(layout)

    def _as_laid_out(self) -> list[list[torch.nn.Parameter]]:
        called = {name: param for param, name in self._params().items()}
        unknown = [name for names in self._layout for name in names if name not in called]
        if unknown:
            raise ValueError(f"{self._name}: the state is of a model that has the parameter {unknown[0]!r}, too")
        found = [[called[name] for name in names] for names in self._layout]
        for names, group in zip(self._layout, found, strict=True):
            if len({(param.dtype, param.device) for param in group}) > 1:
                raise ValueError(
                    f"{self._name}: the parameters from {names[0]!r} to {names[-1]!r} were of one dtype on one device "
                    "when training began, and now they are not. Convert a model before the first step"
                )
        return found

    def _agree(self) -> None:
        """Compare with all agents the data to be exchanged."""
        agent = current("optim")
        if agent.size == 1:
            return
        params, keys = dict(self._params()), self.mixed.keys if self.mixed else ()
        beside = f" with {', '.join(keys)}" if keys else ""
        if self.default is not None:
            beside += "" if agent.topology_is_default else ", averaged on the topology that was set,"
        check_that_models_agree(params, self._name, beside, shared=self._shared)
        if self.keeps_equal:
            check_that_values_agree(params, self._name)
        # Where models must be equal the comparison has covered the frozen parameters, too. Else they are averaged once,
        # since no exchange includes them.
        self._may_differ = not self.keeps_equal
        if self.balance is not None and self.in_step:
            self.balance.begin(self.settings, self._name)

    def equalize(self) -> None:
        """Average the frozen parameters that differ between agents: once, behind the first round, whenever in a step
        that begins. All agents call it after a step."""
        if self._may_differ:
            # Before the call: an agent on which it fails must not begin it again at its next step, when the others do
            # not.
            self._may_differ = False
            equalize_frozen(self._params(), self._name)

    def changed(self) -> None:
        """The optimizer has other parameters: they are laid out again before the next round."""
        # First: neighbours may still read the present buckets, and their exchange waits for this agent's part.
        self.abandon()
        self._without_state = self._states_of_our_own()
        self.agreed = False
        if self._laid_out and not self.remembers:
            self._layout = []  # all agents start again, also agents that continued with a layout
        self._forget()

    def close(self) -> None:
        """Give back windows and memory. The parameters stay where they are."""
        try:
            self.abandon()
        finally:
            self._forget()

    def _forget(self) -> None:
        self.buckets, self.active, self._beside, self._laid_out = [], [], [], False
        self._trainable, self._seen = b"", {}

    # State

    def state(self) -> dict[str, Any]:
        """The data to be saved beside the parameters and the optimizer's state."""
        found = self._states_of_our_own()
        return {"mixed": found} if any(found.values()) else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the data of :meth:`state`; the parameters and the optimizer's state have been loaded."""
        self._without_state = dict(state.get("mixed", {}))
        self._lay_out_states()

    def _lay_out_states(self) -> None:
        """Lay out the mixed state beside the buckets of parameters. Without messages: other agents may not load at the
        same time.
        """
        mixed, saved = self.mixed, self._without_state
        self._beside = [
            [StateBucket(bucket, mixed, key, self._params(), saved.get(key, {})) for key in mixed.keys]
            for bucket in self.buckets
            if mixed is not None
        ]
        held = {name for names in self.layout for name in names}
        self._without_state = {
            key: {name: value for name, value in states.items() if name not in held} for key, states in saved.items()
        }

    def _states_of_our_own(self) -> dict[str, dict[str, torch.Tensor]]:
        """By key and parameter, the averages of state that this agent's optimizer does not have."""
        found = {key: dict(states) for key, states in self._without_state.items()}  # of parameters in no bucket
        for states in itertools.chain.from_iterable(self._beside):
            found.setdefault(states.kind, {}).update(states.of_its_own())
        return found
