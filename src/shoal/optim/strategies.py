"""The steps of a decentralized optimizer: the local step, and its order with the exchange.

:class:`InnerStep` is the local step of the wrapped optimizer, with a GradScaler's check whether the gradients are
finite. A :class:`StepStrategy` takes it before, after or during the exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch

from ..dtensors import local
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
        if scale is None or self.overflowed:
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
        self._backward = BucketGradients(self._leave)

    def begin_pass(self) -> None:
        self._bucket_exchange.prepare()
        self._backward.arm(self._bucket_exchange.buckets, self._bucket_exchange.active)

    def _leave(self, number: int) -> None:
        """Exchange a bucket, whose gradients are there."""
        self._bucket_exchange.start_bucket(number)

    def _arrive(self) -> None:
        """End the step: all buckets have left."""
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
        # Neighbours wait for each active bucket of the round, also for one of which this pass has not reached all
        # parameters.
        for number in self._backward.late():
            self._leave(number)
        self._arrive()

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

    def _leave(self, number: int) -> None:
        self._local(self._bucket_exchange.buckets[number].params)
        super()._leave(number)


class AverageGradientsDuringBackward(DuringBackward, AverageGradients):
    """The same equation, bucket by bucket, as data-parallel training does it."""

    _bucket_exchange: GradientExchange

    def _arrive(self) -> None:
        super()._arrive()
        self._local.with_mean_gradients()
