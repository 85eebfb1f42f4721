"""Exchanges of an optimizer through one-sided windows, without waiting for other agents.

If losses are survived, each agent continues with the remaining neighbours. When agents are admitted, windows are
created again.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from ...algorithms.needs import DOUBLY_STOCHASTIC
from ...algorithms.schedule_weights import AgentSchedule
from ...algorithms.stability.growth import DIES_OUT
from ...errors import DeadlineExceeded, PeerLost, ShoalError
from ...execution.operation import Handle
from ...ops.collective import barrier
from ...runtime.agent import current
from ...topology._validate import as_weight
from ...windows import by_name as ops
from ...windows.registry import windows_of
from ..settings import Settings
from .bucket_exchange import BucketExchange, Params
from .buckets import Bucket
from .trainable_window import TrainableWindow


class WindowExchange(BucketExchange, ABC):
    """Each bucket is a window. A subclass defines the transfer at the start, and the use of the received data at the
    end.
    """

    splits: ClassVar[bool] = False  # windows are made by all neighbours together, and stay
    in_step: ClassVar[bool] = False

    def __init__(
        self, params: Params, name: str, bucket_bytes: float, settings: Settings, schedule: AgentSchedule | None
    ) -> None:
        if schedule is not None:
            raise ValueError(
                f"{name}: windows exchange with the neighbours of the topology that is set when they are made, and "
                "have no rounds: call shoal.set_topology(graph) instead of giving topology="
            )
        super().__init__(params, name, bucket_bytes, settings, schedule)
        self._moves: list[Handle[bool] | None] | None = None
        self._windows: list[str] = []
        self._declarations: TrainableWindow | None = None
        self._counted_from = 0  # the round since which all agents count alike

    @property
    def under_way(self) -> bool:
        return self._moves is not None

    def start(self) -> None:
        self.prepare()
        self._move_all()

    def finish(self) -> None:
        if self._moves is None:
            return
        self.abandon()
        # The window's memory is the bucket: a parameter that the script has moved would keep its old numbers, and the
        # average would be lost.
        self.prepare()  # the parameters may have been moved since
        self._take_all(self._active_windows())

    def exchange(self) -> None:
        self.prepare()
        self._move_all()
        self.abandon()
        self._take_all(self._active_windows())

    def _move_all(self) -> None:
        self._look()
        if self._declarations is not None:
            self._declarations.begin(self.rounds - self._counted_from, self._trainable)
        self._moves = []
        try:
            for bucket, name in self._active_windows():
                self._moves.append(self._move(bucket, name))
        except BaseException:
            self.abandon()  # the transfers that have begun
            raise
        self.rounds += 1

    def _take_all(self, windows: list[tuple[Bucket, str]]) -> None:
        for bucket, name in windows:
            self._take(bucket, name)
            bucket.written()

    def settle(self) -> None:
        """All agents have ended: add the data that is still in the windows. They call it together."""
        # Behind it no agent sends any more. What arrived after this agent's last update would otherwise be lost, and
        # the mean with it.
        barrier(f"{self._name}.settled")
        self.before_local_step()  # what the script has set since: the data that is taken in would overwrite it
        self.prepare()
        self._take_all(self._windows_of_buckets())
        self._restart_count()

    def _restart_count(self) -> None:
        """All agents are at the same place, whatever rounds they have made until then."""
        self._counted_from = self.rounds
        if self._declarations is not None:
            self._declarations.all_have_met()

    def _look(self) -> None:
        if self.balance is not None:
            self.balance.look_at_static(current("optim").topology)
            for setting in self.counts - {"self_weight"}:
                self.balance.look_at_scales(setting, getattr(self.settings, setting))

    def wait(self) -> None:
        failed: ShoalError | None = None
        for move in self._moves or ():
            # After a failed transfer the others are still on their way: one of push-sum multiplies u when it ends, and
            # would do so to the u of a later step.
            try:
                if move is not None:
                    move.wait()
            except ShoalError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def abandon(self) -> None:
        try:
            self.wait()
        # Also where the wait raises: with the failed handles left in place, each later step would count as being in the
        # middle of an exchange.
        finally:
            self._moves = None

    def prepare(self) -> None:
        """As in the base class. The first call creates windows with all neighbours, and later calls create them for
        parameters that have become trainable.
        """
        super().prepare()
        if self.under_way:
            return
        if self._declarations is None:
            names = list(self._params().values())
            self._counted_from = self.rounds
            self._declarations = TrainableWindow(f"{self._name}.trainable", self._name, names, self._trainable)
        # Neighbours have no common rounds, so one may be steps behind, or never make this change. The wait finds that
        # and names it; win_create would only time out.
        elif len(self.buckets) > len(self._windows):  # without all neighbours none can be made
            self._declarations.await_neighbours(self.rounds - self._counted_from, self._trainable)
        for number, bucket in enumerate(self.buckets[len(self._windows) :], len(self._windows)):
            name = f"{self._name}.{number}"
            self._register(bucket, name)
            self._windows.append(name)

    def met(self) -> None:
        """Agents have been admitted. All agents call it together, including the new ones: data in transit is added, and
        windows are created again with all neighbours before the next round.
        """
        self.abandon()
        # The old windows are freed below. A neighbour that still writes to one would get Mismatch from this agent.
        barrier(f"{self._name}.met")
        if self._windows:
            self.prepare()
            self._take_all(self._windows_of_buckets())
        # The joining agents have been given this layout. With the default one the windows of both would have other
        # sizes.
        self._layout = self.layout_to_keep  # which agents that entered have been given
        self.close()
        # The joining agents compare their models in the next prepare(), which all agents have to call with them.
        self.agreed = False

    def changed(self) -> None:
        """As in the base class. All agents call it together, because windows are created again with all neighbours."""
        if self._windows:
            self.abandon()
            barrier(f"{self._name}.changed")
        self.close()

    def close(self) -> None:
        """Free the windows."""
        windows, self._windows = self._windows, []
        declarations, self._declarations = self._declarations, None
        try:
            super().close()
        finally:
            if declarations is not None:
                declarations.free()
            for name in windows:
                # The agent's shutdown may have freed all windows already.
                if name in ops.get_current_created_window_names():
                    ops.win_free(name)

    def _windows_of_buckets(self) -> list[tuple[Bucket, str]]:
        return list(zip(self.buckets, self._windows, strict=True))

    def _active_windows(self) -> list[tuple[Bucket, str]]:
        """The windows without those of frozen parameters. Neighbours keep their last values of these."""
        return [(self.buckets[number], self._windows[number]) for number in self.active]

    def _register(self, bucket: Bucket, name: str) -> None:
        ops.win_create(bucket.flat, name)

    @abstractmethod
    def _move(self, bucket: Bucket, name: str) -> Handle[bool] | None:
        """Begin to put, get or accumulate a bucket; None if it is to wait for another round."""

    def _take(self, bucket: Bucket, name: str) -> None:
        ops.win_update(name)


def _to_members(name: str, weights: Any, move: Callable[[Any], Handle[bool]]) -> Handle[bool]:
    """Move something with those of the ranks in ``weights`` that are there; None: all neighbours that are."""
    window = windows_of(current("optim")).get("win_put", name)
    while True:
        there: Any = None if weights is None else window.there(weights)
        if isinstance(weights, Mapping):
            there = {rank: weights[rank] for rank in there}
        try:
            return move(there)
        except PeerLost:
            # Tried again only if fewer ranks are left than were named. Otherwise the loss is not survived, and a retry
            # would never end.
            if weights is None or len(window.there(weights)) == len(there or ()):
                raise


class PutExchange(WindowExchange):
    """Put the parameters into the neighbours' windows; average with the parameters that neighbours have put here."""

    counts = frozenset(("dst_weights",))

    def _move(self, bucket: Bucket, name: str) -> Handle[bool]:
        return _to_members(
            name,
            self.settings.dst_weights,
            lambda weights: ops.win_put_nonblocking(bucket.flat, name, dst_weights=weights),
        )


class GetExchange(WindowExchange):
    """Get the neighbours' parameters; average with them."""

    counts = frozenset(("src_weights",))

    def _move(self, bucket: Bucket, name: str) -> Handle[bool]:
        return _to_members(
            name, self.settings.src_weights, lambda weights: ops.win_get_nonblocking(name, src_weights=weights)
        )


FLOOR = 0.25
"""Below this associated weight an agent keeps its mass until more has arrived.

An agent that is faster than its neighbours would send share after share; a local step, divided by the small weight that
is left, would then move it far away.
"""


class PushSumExchange(WindowExchange):
    """Stochastic gradient push through windows (Assran et al. 2019, arXiv:1811.10792).

    Beside the parameters ``z`` each bucket has ``u`` and the associated weight ``p``: ``u`` takes the local step of
    ``z``, a share of ``u`` and ``p`` is sent to each neighbour, and received shares are added: ``z = u / p``. Changes
    by the user to ``z`` between steps are applied to ``u`` in the same proportion.
    """

    counts = frozenset(("self_weight", "dst_weights"))
    does_without = frozenset((DOUBLY_STOCHASTIC.name, DIES_OUT))

    def __init__(
        self, params: Params, name: str, bucket_bytes: float, settings: Settings, schedule: AgentSchedule | None
    ) -> None:
        super().__init__(params, name, bucket_bytes, settings, schedule)
        self._biased: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._saved: dict[str, Any] = {}  # until the windows are made for which it was loaded
        self._short_since: dict[str, float] = {}

    def _register(self, bucket: Bucket, name: str) -> None:
        # Not the bucket itself: the model reads z there, and neighbours get shares of u, which is z times p.
        u = bucket.room_for_result()
        u.copy_(bucket.flat)
        self._biased[name], self._before[name] = u, bucket.flat.clone()
        # Zeros: a slot that began as a copy of u would be collected as mass that no neighbour has sent.
        ops.win_create(u, name, zero_init=True)
        # Not by the agent's switch: a script that turns it off, for a window of its own, would bias every later z.
        windows_of(current("push-sum")).get("win_create", name).always_with_p = True
        saved = self._saved.pop(self._number(name), None)
        if saved is not None:
            # The window's p begins as 1 and is changed only by calls: this one multiplies it to the saved value, and u
            # is restored below.
            ops.win_update(name, self_weight=saved["p"], neighbor_weights={})
            u.copy_(saved["u"])

    def state(self) -> dict[str, Any]:
        """Each bucket's mass and its weight, with all data in the windows. All agents call it together: data in transit
        would otherwise be in no agent's state, or in two.
        """
        if not self._windows:
            return dict(self._saved)
        self.settle()
        found = {
            self._number(name): {"u": self._biased[name].clone(), "p": ops.win_associated_p(name)}
            for name in self._windows
        }
        # No agent may send before all have copied: the mass of a share would be in the sender's saved state and in the
        # receiver's.
        barrier(f"{self._name}.saved")
        return found

    def _number(self, window: str) -> str:
        """The number of a window's bucket, the key of its saved state: the optimizer that loads it may have another
        name.
        """
        return window.removeprefix(f"{self._name}.")

    def load_state(self, state: Mapping[str, Any]) -> None:
        # The windows hold mass of the run before. They are made again, with the saved u and p, by all neighbours
        # together.
        self.close()
        self._saved = dict(state)

    def before_local_step(self) -> None:
        self.prepare()
        for bucket, name in self._windows_of_buckets():
            before = self._before[name]
            if not torch.equal(bucket.flat, before):
                # The script has changed z; u is z times p. Without the factor the change would count 1 / p times.
                self._biased[name].add_(bucket.flat - before, alpha=ops.win_associated_p(name))
                before.copy_(bucket.flat)

    def after_local_step(self) -> None:
        self.prepare()
        for bucket, name in self._windows_of_buckets():
            before = self._before[name]
            # The local step is added to u without p, as stochastic gradient push defines it (algorithm 1 of the paper).
            self._biased[name].add_(bucket.flat).sub_(before)
            before.copy_(bucket.flat)

    def _move(self, bucket: Bucket, name: str) -> Handle[bool] | None:
        u = self._biased[name]
        # See FLOOR: below it a local step, divided by p, would throw the model far away. The agent keeps u and p until
        # shares arrive.
        if ops.win_associated_p(name) < FLOOR:
            self._wait_for_more(name)
            return None
        self._short_since.pop(name, None)
        settings, weights = self.settings, self.settings.dst_weights
        window = windows_of(current("push-sum")).get("win_accumulate", name)
        if weights is None:
            ranks = window.there(window.destinations)
            if not ranks:
                return None  # all neighbours are lost
            # From the neighbours that are left: shares for lost ones would leave the system, and the sum of all p would
            # shrink.
            weights = dict.fromkeys(ranks, 1 / (len(ranks) + 1))
        pairs = weights.items() if isinstance(weights, Mapping) else ()
        given = {rank: as_weight(weight, f"dst_weights[{rank}]") for rank, weight in pairs}
        own = (
            1 - sum(given.values()) if settings.self_weight is None else as_weight(settings.self_weight, "self_weight")
        )
        if not given or abs(own + sum(given.values()) - 1) > 1e-6:
            raise ValueError(
                f"push-sum: the shares of an agent must sum to 1 (column stochastic): self_weight={own:g} and "
                f"dst_weights={weights}; give {{destination: share}} and leave the rest as self_weight"
            )

        def accumulate(there: dict[int, float]) -> Handle[bool]:
            # The shares of lost neighbours stay here. They were taken from u's total, and would be missing in the mean.
            kept = own + sum(share for rank, share in given.items() if rank not in there)  # the shares of the lost
            return ops.win_accumulate_nonblocking(u, name, self_weight=kept, dst_weights=there)

        return _to_members(name, given, accumulate)

    def _wait_for_more(self, name: str) -> None:
        """Raise after the deadline: an agent that sends nothing would not notice that its neighbours have ended."""
        agent = current("push-sum")
        windows_of(agent).get("win_accumulate", name).check_neighbours("win_accumulate")
        now = time.monotonic()
        since = self._short_since.setdefault(name, now)
        if now - since < agent.engine.timeout:
            return
        ages = {rank: slot.age for rank, slot in ops.win_slots(name).items()}
        if not ages:
            return
        silent = max(ages, key=lambda rank: ages[rank])
        raise DeadlineExceeded(
            f"win_accumulate {name!r} on rank {agent.rank}: for {now - since:.3g} s too few shares have arrived to "
            f"send some on, and from rank {silent} nothing for {ages[silent]:.3g} s. Shares sent to an agent that has "
            "ended its loop do not return: put the loops of all agents into optimizer.join() if they have "
            "different numbers of batches; if agents are only slow, raise SHOAL_TIMEOUT",
            (silent,),
        )

    def _take(self, bucket: Bucket, name: str) -> None:
        u = ops.win_update_then_collect(name)
        torch.div(u, ops.win_associated_p(name), out=bucket.flat)
        self._before[name].copy_(bucket.flat)
