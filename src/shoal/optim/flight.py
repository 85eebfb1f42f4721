"""The exchange of one optimizer's parameters: buckets, and what is under way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from ..algorithms.view import View
from ..ops.collective import allreduce_nonblocking
from ..runtime.agent import current
from ..runtime.operation import Handle
from .balance import Balance
from .buckets import Bucket, into_buckets
from .mixed_state import MixedState, StateBucket
from .params import check_that_models_agree, check_that_values_agree
from .rounds import BY_HAND, Round, Settings

Params = Callable[[], Mapping[torch.nn.Parameter, str]]


class Flight:
    """Takes off with the parameters as they are, and lands with their averages.

    Args:
        params: The parameters with their names, in the model's order; asked for anew after :meth:`changed`.
        name: What the exchanges are matched by.
        bucket_bytes: How much goes into one message.
        settings: How it exchanges, read at take-off.
        view: Where the weights come from, if not from the settings.

    Attributes:
        rounds: Exchanges that have begun.
        in_step: A round of this agent is one of its neighbours', too.
        present: While agents are joined (``join.py``), how many have still batches.
        keeps_equal: Models that are equal stay so; it is checked that they are, before the first exchange.
        balance: Looks at the weights of each round, where no schedule gives them.
        mixed: The optimizer's state that travels beside the parameters, if any does.
    """

    in_step: ClassVar[bool] = True
    counts: ClassVar[frozenset[str]] = frozenset((*BY_HAND, "communication_type"))
    """The settings that say how it exchanges."""
    does_without: ClassVar[frozenset[str]] = frozenset()
    """What an algorithm needs of W, by name, that this way to average does not need."""

    def __init__(self, params: Params, name: str, bucket_bytes: float, settings: Settings, view: View | None) -> None:
        self.settings = settings
        self.rounds = 0
        self.present: Handle[torch.Tensor] | None = None
        self.keeps_equal = False
        self.balance: Balance | None = None
        self.mixed: MixedState | None = None
        self._params, self._name, self._bucket_bytes, self._view = params, name, bucket_bytes, view
        self._round: Round | None = None
        self._buckets: list[Bucket] | None = None
        self._beside: list[list[StateBucket]] = []
        self._without_state: Mapping[str, Mapping[str, torch.Tensor]] = {}
        self._handles: dict[Bucket, Handle[torch.Tensor] | None] = {}

    @property
    def under_way(self) -> bool:
        return bool(self._handles)

    def take_off(self) -> None:
        """Begin to exchange the parameters as they are now."""
        for number in range(len(self.buckets())):
            self.take_off_with(number)

    def take_off_with(self, number: int) -> None:
        """The same with one bucket; the others of the round follow, each once."""
        bucket, under_way = self.buckets()[number], bool(self._handles)
        if not under_way or self._round is None:
            self._look()
            self._round = self.settings.next_round(self._view, self.rounds)
        travelling: dict[str, Bucket] = {f"{self._name}.{number}": bucket}
        if self.mixed is not None:
            self._round.check_that_none_is_negative()
            for key, states in zip(self.mixed.keys, self._beside[number], strict=True):
                states.adopt()
                travelling[f"{self._name}.{number}.{key}"] = states
        for name, one in travelling.items():
            one.lend()
            self._handles[one] = self._round.start(one.flat, one.room_for_result(), name)
        self.rounds += not under_way

    def _look(self) -> None:
        """At the weights of the round that begins."""
        if self.balance is not None:
            self.balance.look(self.settings)

    def land(self) -> None:
        """Wait for the averages; they are the parameters from here on. Nothing happens if nothing is under way."""
        results = self._results()
        changed = [(bucket, bucket.of[number]) for bucket in results for number in bucket.changed_while_lent()]
        if changed:
            called = self._params()
            names = ", ".join(f"{called[param]!r}{bucket.kind and f' ({bucket.kind})'}" for bucket, param in changed)
            raise RuntimeError(
                f"{self._name}: the parameters {names} were changed while their average was under way, and that change "
                "would be lost. Adapt with combine exchanges from the forward pass to step(): change parameters after "
                "step(), or take adapt, then combine"
            )
        for bucket, result in results.items():
            bucket.move_to(result)

    def exchange(self) -> None:
        """Take off and land."""
        self.take_off()
        self.land()

    def settle(self) -> None:
        """All agents have ended: take in what is still on its way, if exchanges are not in step."""

    def before_local_step(self) -> None:
        """The parameters are about to be changed by the wrapped optimizer."""

    def after_local_step(self) -> None:
        """They have been."""

    def close(self) -> None:
        """Give back what it holds. The parameters stay where they are."""
        try:
            self.abandon()
        finally:
            self._buckets, self._beside = None, []

    def wait(self) -> None:
        """Wait for what is under way."""
        for handle in self._handles.values():
            if handle is not None:
                handle.wait()

    def abandon(self) -> None:
        """Wait for what is under way, since the neighbours do, and leave the parameters as they are."""
        self._results()

    def _results(self) -> dict[Bucket, torch.Tensor]:
        """What has been under way, by bucket."""
        handles, self._handles = self._handles, {}
        try:
            return {bucket: handle.wait() for bucket, handle in handles.items() if handle is not None}
        except BaseException:
            # The others may still read.
            for bucket in handles:
                bucket.leave()
            raise

    # Gradients

    def average_gradients(self, *, zeros: bool = False) -> None:
        """Every gradient becomes the mean over all agents; one that an agent lacks counts as zero, as all may."""
        for number in range(len(self.buckets())):
            self.take_off_with_gradients(number, zeros=zeros)
        self.land_gradients()

    def take_off_with_gradients(self, number: int, *, zeros: bool = False) -> None:
        """Begin to average the gradients of one bucket."""
        bucket, under_way = self.buckets()[number], bool(self._handles)
        flat = bucket.room_for_result().zero_() if zeros else bucket.gather_gradients()
        self._handles[bucket] = allreduce_nonblocking(flat, name=f"{self._name}.gradients.{number}", out=flat)
        self.rounds += not under_way

    def land_gradients(self) -> None:
        """Wait for the mean gradients; they are the gradients from here on."""
        means = self._results()
        share = 1.0
        if self.present is not None:
            share = current("optim").size / max(1.0, self.present.wait().item())
        for bucket, mean in means.items():
            bucket.spread_gradients(mean if share == 1.0 else mean.mul_(share))

    # Buckets

    def prepare(self) -> None:
        """Do what all agents do together before the first exchange."""
        self.buckets()

    def changed(self) -> None:
        """The optimizer has other parameters now."""
        self.abandon()
        self._without_state = self._states_of_our_own()
        self._buckets, self._beside = None, []

    def buckets(self) -> list[Bucket]:
        """The parameters: in the order in which their gradients come, the last layers' first; one vector of all in the
        model's order."""
        if self._buckets and not self.under_way and any(bucket.outgrown for bucket in self._buckets):
            self.changed()
        if self._buckets is None:
            params, keys = dict(self._params()), self.mixed.keys if self.mixed else ()
            if current("optim").size > 1:
                check_that_models_agree(params, self._name, f" with {', '.join(keys)}" if keys else "")
                if self.keeps_equal:
                    check_that_values_agree(params, self._name)
                if self.balance is not None and self.in_step:
                    self.balance.begin(self.settings, self._name)
            order = list(params) if self._bucket_bytes == float("inf") else reversed(list(params))
            self._buckets = into_buckets(order, self._bucket_bytes)
            self._lay_out_states()
        if not self._handles:
            for bucket in self._buckets:
                bucket.adopt()
        return self._buckets

    # State

    def state(self) -> dict[str, Any]:
        """What has to be saved beside the parameters and the optimizer's state."""
        found = self._states_of_our_own()
        return {"mixed": found} if any(found.values()) else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the parameters and the optimizer's state have been loaded."""
        self._without_state = dict(state.get("mixed", {}))
        self._lay_out_states()

    def _lay_out_states(self) -> None:
        """Beside the buckets of parameters: without a word to other agents, who need not load when this one does."""
        mixed, saved = self.mixed, self._without_state
        self._beside = [
            [StateBucket(bucket, mixed, key, self._params(), saved.get(key, {})) for key in mixed.keys]
            for bucket in self._buckets or ()
            if mixed is not None
        ]

    def _states_of_our_own(self) -> dict[str, dict[str, torch.Tensor]]:
        """By key and parameter, the averages of what this agent's optimizer has no state of."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for states in itertools.chain.from_iterable(self._beside):
            found.setdefault(states.kind, {}).update(states.of_its_own())
        return found
