"""The exchanges of one optimizer: what lies where, what all agents agree on first, and what every kind of exchange has.

Of each optimizer one thing travels: its parameters, in step with the neighbours or through windows, or its gradients.
So it has one :class:`Flight`, and what a step is (``strategies.py``) says when the flight starts and finishes.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from ..algorithms.agent_schedule import AgentSchedule
from ..engine.operation import Handle
from ..world.agent import current
from .balance import Balance
from .buckets import Bucket, into_buckets
from .mixed_state import MixedState, StateBucket
from .params import check_that_models_agree, check_that_values_agree
from .settings import Settings

Params = Callable[[], Mapping[torch.nn.Parameter, str]]


class Flight(ABC):
    """Exchanges what an optimizer exchanges, round after round: a round starts with what there is, and finishes with
    what has come of it.

    Args:
        params: The parameters with their names, in the model's order; asked for anew after :meth:`changed`.
        name: What the exchanges are matched by.
        bucket_bytes: How much goes into one message.
        settings: How it exchanges, read when a round starts.
        schedule: Where the weights come from, if not from the settings.

    Attributes:
        rounds: Exchanges that have begun.
        in_step: A round of this agent is one of its neighbours', too.
        keeps_equal: Models that are equal stay so; it is checked that they are, before the first exchange.
        counts: The settings that say how it exchanges.
        grouped: The caller has said what goes together, and nothing else does.
        does_without: What an algorithm needs of W, by name, that this kind of exchange does not need.
        present: While agents are joined (``join.py``), how many have still batches, and how many are there: [2].
        balance: Looks at the weights of each round, where no schedule gives them.
        mixed: The optimizer's state that travels beside the parameters, if any does.
        buckets: The parameters, once :meth:`prepare` has been called: in the order in which their gradients come, the
            last layers' first; one vector of all in the model's order.
    """

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
        self.balance: Balance | None = None
        self.mixed: MixedState | None = None
        self.buckets: list[Bucket] = []
        self._layout: list[list[str]] = []
        self._params, self._name, self._bucket_bytes, self._schedule = params, name, bucket_bytes, schedule
        self._laid_out = False
        self.grouped = False
        self.agreed = False  # with all other agents on what is exchanged
        self._beside: list[list[StateBucket]] = []
        self._without_state: Mapping[str, Mapping[str, torch.Tensor]] = {}

    # An exchange

    @property
    @abstractmethod
    def under_way(self) -> bool:
        """An exchange has started that is not finished."""

    @abstractmethod
    def start(self) -> None:
        """Begin to exchange what there is now."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for what has been started, and take it in. Nothing happens if nothing is under way."""

    def exchange(self) -> None:
        """Start and finish."""
        self.start()
        self.finish()

    @abstractmethod
    def wait(self) -> None:
        """Wait for what is under way."""

    @abstractmethod
    def abandon(self) -> None:
        """Wait for what is under way, since the neighbours do, and leave everything as it is."""

    def settle(self) -> None:  # noqa: B027 - only some have something to do then
        """All agents have ended: take in what is still on its way, if exchanges are not in step."""

    def met(self) -> None:  # noqa: B027 - only some have something to do then
        """Agents have entered the run; all call it."""

    def before_local_step(self) -> None:  # noqa: B027 - only some have something to do then
        """The wrapped optimizer is about to change the parameters."""

    def after_local_step(self) -> None:  # noqa: B027 - only some have something to do then
        """The wrapped optimizer has changed the parameters."""

    # What lies where

    def prepare(self) -> None:
        """Have the parameters lie in the buckets, wherever they have been put since. Once before each round, and before
        the first one together with all agents: they compare their models."""
        if self.under_way:
            return
        moved = [bucket for bucket in self.buckets if not bucket.in_place]
        if any(bucket.outgrown for bucket in moved):
            self.changed()
        if self._laid_out:
            for bucket in moved:
                bucket.adopt()
            return
        if not self.agreed:
            self._agree()
            self.agreed = True
        params = list(self._params())
        order = params if self._bucket_bytes == float("inf") else params[::-1]
        first = self._as_laid_out()
        held = {param for bucket in first for param in bucket}
        others = into_buckets((param for param in order if param not in held), self._bucket_bytes)
        self.buckets, self._laid_out = [*map(Bucket, first), *others], True
        self._lay_out_states()

    @property
    def layout(self) -> list[list[str]]:
        """The names of the parameters in each bucket, once they are laid out."""
        called = self._params()
        return [[called[param] for param in bucket.params] for bucket in self.buckets]

    def lay_out_as(self, layout: list[list[str]]) -> None:
        """From now on these parameters lie together, since somebody remembers them so; others come behind."""
        if layout != self.layout:
            self._forget()
        self._layout = layout

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
        """Compare with all agents what is to be exchanged."""
        if current("optim").size == 1:
            return
        params, keys = dict(self._params()), self.mixed.keys if self.mixed else ()
        check_that_models_agree(params, self._name, f" with {', '.join(keys)}" if keys else "")
        if self.keeps_equal:
            check_that_values_agree(params, self._name)
        if self.balance is not None and self.in_step:
            self.balance.begin(self.settings, self._name)

    def changed(self) -> None:
        """The optimizer has got other parameters: they are laid out anew before the next round."""
        self.abandon()
        self._without_state = self._states_of_our_own()
        self.agreed = False
        self._forget()

    def close(self) -> None:
        """Give back windows and memory. The parameters stay where they are."""
        try:
            self.abandon()
        finally:
            self._forget()

    def _forget(self) -> None:
        self.buckets, self._beside, self._laid_out = [], [], False

    # State

    def state(self) -> dict[str, Any]:
        """What has to be saved beside the parameters and the optimizer's state."""
        found = self._states_of_our_own()
        return {"mixed": found} if any(found.values()) else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave; the parameters and the optimizer's state have been loaded."""
        self._without_state = dict(state.get("mixed", {}))
        self._lay_out_states()

    def _lay_out_states(self) -> None:
        """Beside the buckets of parameters: without a word to other agents, who need not load when this one does."""
        mixed, saved = self.mixed, self._without_state
        self._beside = [
            [StateBucket(bucket, mixed, key, self._params(), saved.get(key, {})) for key in mixed.keys]
            for bucket in self.buckets
            if mixed is not None
        ]

    def _states_of_our_own(self) -> dict[str, dict[str, torch.Tensor]]:
        """By key and parameter, the averages of what this agent's optimizer has no state of."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for states in itertools.chain.from_iterable(self._beside):
            found.setdefault(states.kind, {}).update(states.of_its_own())
        return found
