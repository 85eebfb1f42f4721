"""The steps of a decentralized optimizer: the local step, its order with the exchange, and steps without a batch.

:class:`InnerStep` is the local step of the wrapped optimizer, with a GradScaler's check whether the gradients are
finite. A :class:`StepStrategy` takes it before, after or during the exchange.

:class:`Join` takes the steps of an agent without batches, until no agent has one. In a round such an agent exchanges
its unchanged parameters, so its neighbours' averages keep their weights, and its own model moves towards theirs. If
gradients are averaged it does not count: the mean is over the agents that have batches, and all take the step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch

from ..dtensors import local
from ..execution.operation import Handle
from ..ops.collective import allreduce_nonblocking
from ..runtime.agent import current
from .adam import OneBitAdam
from .exchanges.bucket_exchange import BucketExchange
from .exchanges.hooks import BucketGradients
from .exchanges.sync_exchange import GradientExchange, SyncExchange
from .params import only


class InnerStep:
    """Steps the wrapped optimizer.

    Args:
        optimizer: The wrapped one.

    Attributes:
        optimizer: The wrapped one.
        scaled: The gradients are a GradScaler's.
        overflowed: The GradScaler has found that this agent's gradients are not all finite.
        closure: Evaluates the loss and the gradients at the model's parameters, if the user has given one.
        loss: The last result of the closure.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.scaled = self.overflowed = False
        self.closure: Callable[[], Any] | None = None
        self.loss: Any = None

    def evaluate(self) -> None:
        """Call the closure, if there is one."""
        if self.closure is not None:
            with torch.enable_grad():
                self.loss = self.closure()

    def unscale(self, params: Iterable[torch.nn.Parameter], found_inf: Any, scale: torch.Tensor | None) -> None:
        """Use a GradScaler's result, and divide the gradients by its scale, unless the user has done so."""
        self.scaled = found_inf is not None
        self.overflowed = found_inf is not None and bool(found_inf.item())
        if scale is None or not self.scaled or self.overflowed:
            return
        for param in params:
            if param.grad is not None:
                local(param.grad).div_(scale.to(param.grad.device))

    def __call__(self, params: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Step with some parameters, or all; not at all if the gradients have overflowed."""
        if self.overflowed:
            return
        if params is None:
            self.optimizer.step()
            return
        before = self._kept_in_groups()
        with only(self.optimizer, params):
            self.optimizer.step()
        if self._kept_in_groups() != before:
            raise ValueError(
                f'overlap="backward": {type(self.optimizer).__name__} counts its steps in its param_groups, and would '
                "count each bucket as one. Leave overlap out"
            )

    def _kept_in_groups(self) -> list[dict[str, Any]]:
        """The numbers in the groups, which a step leaves as they are if all its state is the parameters' own."""
        numbers = (bool, int, float, str, tuple)
        groups = self.optimizer.param_groups
        return [{key: value for key, value in group.items() if isinstance(value, numbers)} for group in groups]

    def with_mean_gradients(self) -> None:
        """Step with gradients that have been averaged: those of an agent where they overflowed were left out."""
        self.optimizer.step()


class StepStrategy(ABC):
    """A step of the optimizer.

    Args:
        bucket_exchange: The exchange of the parameters or gradients.
        local: The local step.
    """

    equation: ClassVar[str]
    at_every_step: ClassVar[bool] = False
    """There is an exchange at every step, whatever ``num_steps_per_communication`` is."""
    begins_early: ClassVar[bool] = False
    """What is exchanged is settled at the forward pass, where there is one."""

    def __init__(self, bucket_exchange: BucketExchange, local: InnerStep) -> None:
        self._bucket_exchange, self._local = bucket_exchange, local

    def begin_pass(self) -> None:  # noqa: B027 - only some have something to do then
        """A forward pass begins, after which there will be an exchange."""

    @abstractmethod
    def step(self, due: bool) -> None:
        """Take a step; ``due``: with an exchange."""

    def _step_alone(self) -> None:
        """Take a step without an exchange."""
        self._local.evaluate()
        self._step_locally()

    def _step_locally(self) -> None:
        """Take the local step, between two calls to the exchange: some exchanges store more than the parameters."""
        self._bucket_exchange.before_local_step()
        self._local()
        self._bucket_exchange.after_local_step()

    def check_that_it_can_follow(self) -> None:  # noqa: B027 - most can
        """Raise ValueError if an agent without batches cannot take part in the others' rounds."""

    def follow(self) -> None:
        """Take part in a round as an agent that has no batch left: with its parameters as they are."""
        self._bucket_exchange.exchange()

    def changed(self) -> None:
        """The optimizer has got other parameters."""
        self._bucket_exchange.changed()

    def close(self) -> None:
        """Give back windows, memory and hooks."""
        self._bucket_exchange.close()

    def state(self) -> dict[str, Any]:
        """The data to be saved beside the parameters."""
        return self._bucket_exchange.state()

    def check_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - only some remember anything
        """Raise ValueError if :meth:`load_state` cannot go on from this state."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave; the parameters have been loaded."""
        self._bucket_exchange.load_state(state)


class AdaptThenCombine(StepStrategy):
    """The local step, and then the average of the parameters after it."""

    equation = "x+ = W (x - lr g(x))"

    def step(self, due: bool) -> None:
        self._step_alone()
        if due:
            self._bucket_exchange.exchange()


class AdaptWithCombine(StepStrategy):
    """The average of the parameters at the begin of the forward pass, which runs until the step, and then the local
    step.

    The gradient is at x, and the wrapped optimizer steps from W x: so weight decay and other terms in the parameters
    use W x, where :class:`~shoal.algorithms.GradientDescent` as an equation has x.
    """

    equation = "x+ = W x - lr g(x)"
    begins_early = True

    def begin_pass(self) -> None:
        # A model may run several forward passes before a step. The round begins with the first; a second start would
        # wait for parts that no neighbour sends.
        if not self._bucket_exchange.under_way:
            self._bucket_exchange.start()

    def step(self, due: bool) -> None:
        if due:
            self.begin_pass()
        self._local.evaluate()
        self._bucket_exchange.finish()
        self._step_locally()


class AverageGradients(StepStrategy):
    """The mean of all agents' gradients, and then the local step. Gradients that overflowed on an agent count as zero.

    No step uses an agent's own gradients alone, because its model would differ from the others' for ever.
    """

    equation = "x+ = x - lr mean(g)"
    at_every_step = True
    _bucket_exchange: GradientExchange

    def step(self, due: bool) -> None:
        if not due:
            self._step_alone()
            return
        self._local.evaluate()
        self._bucket_exchange.exchange(zeros=self._local.overflowed)
        self._local.with_mean_gradients()

    def follow(self) -> None:
        """Exchange zeros, and step with the others' mean, so that all models stay equal."""
        self._bucket_exchange.exchange(zeros=True)
        self._local.with_mean_gradients()


class AverageMomenta(AverageGradients):
    """The same with :class:`~shoal.optim.adam.OneBitAdam`: once its second moment is fixed, its momentum is
    averaged instead of the gradient; before that, gradients are not compressed.
    """

    equation = "x+ = x - lr mean(m) / sqrt(v)"

    def __init__(self, bucket_exchange: GradientExchange, local: InnerStep, adam: OneBitAdam) -> None:
        super().__init__(bucket_exchange, local)
        self._adam = adam

    def step(self, due: bool) -> None:
        if not due:
            self._step_alone()
            return
        self._local.evaluate()
        self._bucket_exchange.whole = not self._adam.second_moment_stays
        if self._bucket_exchange.whole:
            self._bucket_exchange.exchange(zeros=self._local.overflowed)
        else:
            self._adam.momenta_for_gradients(overflowed=self._local.overflowed)
            self._bucket_exchange.exchange()
        self._local.with_mean_gradients()

    def follow(self) -> None:
        self._bucket_exchange.whole = not self._adam.second_moment_stays
        if not self._bucket_exchange.whole:
            self._adam.expect_momenta()
        super().follow()


class DuringBackward(StepStrategy):
    """Buckets leave as soon as their gradients are there."""

    begins_early = True
    _bucket_exchange: SyncExchange

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._backward = BucketGradients(self._start_bucket)

    def begin_pass(self) -> None:
        self._bucket_exchange.prepare()
        try:
            self._backward.arm(self._bucket_exchange.buckets, self._bucket_exchange.active)
        except RuntimeError:
            # The round has begun, and the next one must begin clean: else each later step would raise this error again.
            if self._backward.armed:
                self._finish_round()
            raise

    def _start_bucket(self, number: int) -> None:
        """Start the exchange of a bucket whose gradients are complete."""
        self._bucket_exchange.start_bucket(number)

    def _finish_exchange(self) -> None:
        """Finish the exchange; all buckets have been started."""
        if not self._bucket_exchange.under_way:  # there was none
            self._bucket_exchange.start()
        self._bucket_exchange.finish()

    def step(self, due: bool) -> None:
        if not due:
            self._step_alone()
            return
        if self._local.closure is not None:
            raise ValueError('overlap="backward" steps during the backward pass; call step() without a closure')
        if self._local.scaled:
            raise ValueError('overlap="backward" is too early for a GradScaler, which looks at all gradients first')
        self.begin_pass()
        self._finish_round()

    def _finish_round(self) -> None:
        # Neighbours wait for each active bucket of the round, also for one of which this pass has not reached all
        # parameters.
        for number in self._backward.late():
            self._start_bucket(number)
        self._finish_exchange()

    def changed(self) -> None:
        self._backward.close()
        super().changed()

    def close(self) -> None:
        self._backward.close()
        super().close()


class AdaptThenCombineDuringBackward(DuringBackward, AdaptThenCombine):
    """The same equation, bucket by bucket: a bucket steps and is sent while the gradients of earlier layers are
    computed.
    """

    def _start_bucket(self, number: int) -> None:
        self._local(self._bucket_exchange.buckets[number].params)
        super()._start_bucket(number)


class AverageGradientsDuringBackward(DuringBackward, AverageGradients):
    """The same equation, bucket by bucket, as data-parallel training does it."""

    _bucket_exchange: GradientExchange

    def _finish_exchange(self) -> None:
        super()._finish_exchange()
        self._local.with_mean_gradients()


_PAUSE_SECONDS = 0.002
"""Seconds between two rounds of an agent that only forwards received data."""
_in_loop: ContextVar[bool] = ContextVar("in_loop", default=False)
"""An optimizer of this thread has joined its loop."""


class Join:
    """Counts the remaining agents, by one small all-reduce that overlaps each round.

    Args:
        bucket_exchange: The parameters.
        strategy: The steps of a round.
        name: Matches the counts of different agents.

    Attributes:
        active: This agent is inside :meth:`loop`, and there are others.
    """

    def __init__(self, bucket_exchange: BucketExchange, strategy: StepStrategy, name: str) -> None:
        self._bucket_exchange, self._strategy, self._name = bucket_exchange, strategy, name
        self.active = False

    @contextmanager
    def loop(self) -> Iterator[None]:
        """The context of a loop over this agent's batches. At its end the agent continues until no agent has batches.

        Raises:
            ValueError: Another optimizer has joined the loop, or agents without batches could not take part.
            RuntimeError: The loop was left between a forward pass and its step.
        """
        if _in_loop.get():
            raise ValueError(
                "join() inside another optimizer's join(): agents without batches would wait in one while the others "
                "wait in the other. Deal out equally many batches (shoal.data.AgentSampler), or let one optimizer have "
                "all models"
            )
        alone = current("optimizer.join").size == 1
        if not alone:
            self._strategy.check_that_it_can_follow()
            with torch.no_grad():
                self._bucket_exchange.prepare()
        self.active = not alone
        token = _in_loop.set(True)
        try:
            yield
            if not alone:
                with torch.no_grad():
                    self._follow()
        finally:
            _in_loop.reset(token)
            self.active = False

    @contextmanager
    def round(self, due: bool) -> Iterator[None]:
        """The context of one round of an agent that has batches; ``due``: the round has an exchange."""
        if not self.active or not due or not self._bucket_exchange.in_step:
            yield
            return
        by_hand = self._bucket_exchange.settings.by_hand
        if by_hand:
            raise ValueError(
                f"{self._name}: join() cannot go on with weights that are set for each round ({', '.join(by_hand)}) "
                "when the batches have ended; give the schedule as topology="
            )
        present = self._bucket_exchange.present = self._count(1.0)
        try:
            yield
            present.wait()
        finally:
            self._bucket_exchange.present = None

    def _follow(self) -> None:
        """Take part without batches until no agent has any."""
        if self._bucket_exchange.under_way:
            raise RuntimeError(
                f"{self._name}: the batches ended between a forward pass and step(), with an exchange under way; leave "
                "the loop after step()"
            )
        if not self._bucket_exchange.in_step:
            self._follow_through_windows()
            return
        while True:
            present = self._bucket_exchange.present = self._count(0.0)
            if present.wait()[0] == 0:
                break
            self._strategy.follow()
            self._bucket_exchange.equalize()
        self._bucket_exchange.present = None

    def _follow_through_windows(self) -> None:
        ended = self._count(1.0)
        while not ended.poll():
            self._strategy.follow()
            self._bucket_exchange.equalize()
            time.sleep(_PAUSE_SECONDS)
        ended.wait()
        self._bucket_exchange.settle()

    def _count(self, present: float) -> Handle[torch.Tensor]:
        # Present agents are counted too, or agents that learn of a loss at different moments would not stay equal.
        return allreduce_nonblocking(
            torch.tensor([present, 1.0], device="cpu"), average=False, name=f"{self._name}.present"
        )
